"""What a request asks for reaches the row that draws its tokens."""

from typing import Any

import pytest
from checksum import checksum_engine, expected

from fengine import Engine
from fengine.config import CompileConfig, EngineConfig, ModelConfig
from fengine.tokenizer.tokenizer import Tokenizer
from fengine.worker.hub import BOX

WARM = {"temperature": 50.0, "max_new_tokens": 12, "sampling_seed": 3}  # hot: nearly uniform over the vocabulary


@pytest.mark.parametrize("narrow", [{"temperature": 1e-3}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_each_filter_narrows_its_own_row_only(narrow: dict[str, Any]) -> None:
    """Narrowed to the likeliest token, a row draws what the oracle says; its neighbours go on drawing at random."""
    prompts = [[1, 2], [3, 4], [5, 6]]
    with checksum_engine() as engine:
        outputs = engine.generate(input_ids=prompts, sampling_params=[WARM, WARM | narrow, WARM])
        drawn = [o["output_ids"] for o in outputs]
    assert drawn[1] == expected(prompts[1], 12)
    assert drawn[0] != expected(prompts[0], 12) and drawn[2] != expected(prompts[2], 12)


def test_seeds_are_the_rows_own() -> None:
    with checksum_engine() as engine:
        params = [WARM | {"sampling_seed": seed} for seed in (3, 4, 3)]
        first, second, third = [o["output_ids"] for o in engine.generate(input_ids=[[1]] * 3, sampling_params=params)]
    assert first == third != second


def test_end_of_text_is_known_without_a_tokenizer() -> None:
    """From generation_config.json; the model in the box ends a document with 1 and a chat turn with 5."""
    model = ModelConfig(path="box", skip_tokenizer_init=True)
    with Engine.from_config(EngineConfig(model=model, compile=CompileConfig(enabled=False))) as engine:
        prompt = Tokenizer.from_directory(BOX).encode("The capital of France is")
        output = engine.generate(input_ids=prompt, sampling_params={"temperature": 0})
    assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
