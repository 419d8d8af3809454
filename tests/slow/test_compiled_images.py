"""Models that take images under torch.compile: the bits are those of the eager step."""

from pathlib import Path
from typing import Any

import pytest
import tiny_vision
from tiny_vision import TOKEN, picture

from fengine import Engine


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])  # a field of layers; embeddings added behind layers
def test_bits_are_those_of_the_eager_step(family: str, tmp_path: Path) -> None:
    directory = tiny_vision.write(tmp_path, family)

    def bits(**options: Any) -> list[Any]:
        with Engine(model_path=str(directory), device="cpu", skip_tokenizer_init=True, **options) as engine:
            pictures = [picture(1, 48, 48), picture(2)]
            spans = [[7] + [TOKEN] * one.pieces[0].tokens for one in engine._parts.images.read(pictures)]
            prompts = [[5, 122, *spans[0], 9], [*spans[0], 8, *spans[1], 6], [5, 6, 7]]
            sampling = {"max_new_tokens": 12, "temperature": 0.8, "sampling_seed": 3, "ignore_eos": True}
            found = engine.generate(
                None, sampling, prompts, image_data=[pictures[0], pictures, None], return_logprob=True
            )  # fmt: skip
            assert engine.stats()["compiles"] > 0 or not options
            return [(one["output_ids"], one["meta_info"]["output_token_logprobs"]) for one in found]

    eager = bits()
    assert bits(enable_torch_compile=True) == eager
    assert bits(enable_torch_compile=True, chunked_prefill_size=7, max_running_requests=3) == eager
