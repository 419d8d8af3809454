"""Mixtures of experts in the engine: adapters, and a token whose router sees NaN."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_adapters
import tiny_checkpoints
import torch
from loops import in_loop
from safetensors.torch import load_file, save_file

from fengine.api.engine import Engine
from fengine.errors import AdapterError, NumericsError

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": 5},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
}
SHARED = {"glm4_moe": 3, "qwen2_moe": 6}  # modules of the expert that every token uses; GLM's first layer is dense
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10], [11, 60], [12, 13, 14]]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def write(directory: Path, family: str) -> Path:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} if family == "gpt_oss" else {}
    return tiny_checkpoints.write(directory, family, num_experts_per_tok=2, **rope, **FAMILIES[family])


def start(directory: Path, **options: Any) -> Engine:
    fixed = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 512, "enable_torch_compile": False}
    return Engine(model_path=str(directory), **fixed | options)


def ask(llm: Engine, prompts: list[list[int]], **options: Any) -> list[tuple[list[int], list[float]]]:
    outputs: Any = llm.generate(input_ids=prompts, sampling_params=GREEDY, return_logprob=True, **options)
    return [(o["output_ids"], [entry[0] for entry in o["meta_info"]["output_token_logprobs"]]) for o in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_what_its_merged_weights_are(family: str, tmp_path: Path) -> None:
    model = write(tmp_path / "model", family)
    values = tiny_adapters.tensors(model, 4, gain=0.5)
    assert sum(".shared_expert" in name for name in values) == 2 * SHARED.get(family, 0)
    adapter = tiny_adapters.write(tmp_path / "adapter", values, 4, lora_alpha=8)
    weights = load_file(model / "model.safetensors")
    for name, a in values.items():
        if ".lora_A." in name:
            key = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[key] = weights[key] + 2.0 * values[name.replace("lora_A", "lora_B")] @ a
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_text((model / "config.json").read_text())
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    with start(model, lora_paths={"x": str(adapter)}) as llm:
        together = ask(llm, PROMPTS, lora_path=["x", None, "x"])
        got, base = ask(llm, PROMPTS, lora_path="x"), ask(llm, PROMPTS)
        assert together == [got[0], base[1], got[2]]  # bit for bit
    with start(merged) as llm:
        want = ask(llm, PROMPTS)
    for (ids, logprobs), (want_ids, want_logprobs) in zip(got, want, strict=True):
        assert ids == want_ids
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(want_logprobs), rtol=1e-3, atol=1e-3)
    assert got != base


def test_an_adapter_on_experts_is_refused_by_name(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "qwen3_moe")
    name = "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_{}.weight"
    values = {name.format("A"): torch.ones(4, 64), name.format("B"): torch.ones(32, 4)}
    adapter = tiny_adapters.write(tmp_path / "adapter", values, 4)
    with pytest.raises(AdapterError, match=r"mlp\.experts\.1\.up_proj"):
        start(model, lora_paths={"x": str(adapter)})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_that_sees_nan_costs_its_own_row_only(family: str, tmp_path: Path) -> None:
    model = write(tmp_path / "model", family)
    with start(model) as llm:
        want = ask(llm, [PROMPTS[0], PROMPTS[2]])
    tensors = load_file(model / "model.safetensors")
    unseen = min(set(range(20, 131)) - {token for ids, _ in want for token in ids})
    tensors["model.embed_tokens.weight"][unseen] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert not json.loads((model / "config.json").read_text()).get("tie_word_embeddings")
    with start(model) as llm:
        first, bad, last = asyncio.run(together(llm, [PROMPTS[0], [11, unseen], PROMPTS[2]]))
    assert isinstance(bad, NumericsError) and "non-finite logits at position 2" in str(bad)
    got = [(o["output_ids"], [e[0] for e in o["meta_info"]["output_token_logprobs"]]) for o in (first, last)]
    assert got == want


async def together(llm: Engine, prompts: list[list[int]]) -> list[Any]:
    """The outputs of requests in one batch, or their errors."""
    calls = [llm.async_generate(input_ids=ids, sampling_params=GREEDY, return_logprob=True) for ids in prompts]
    return await asyncio.gather(*calls, return_exceptions=True)


def windowed(directory: Path) -> Path:
    """Token 77 is NaN, which windows leave behind."""
    model = tiny_checkpoints.write(
        directory, "mixtral", num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2, sliding_window=5
    )
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][77] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


def test_nothing_is_drawn_behind_a_prompt_that_is_preempted_when_all_of_it_was_scored(tmp_path: Path) -> None:
    options = {"chunked_prefill_size": 32, "page_size": 4}
    with start(windowed(tmp_path), **options) as llm:
        stepper = llm._parts.core.stepper

        def one_chunk() -> None:
            stepper.paused = False
            stepper.step()
            stepper.drain()
            assert stepper.scheduler.retract() == 1

        llm.pause_generation("in_place")
        chunks: Any = llm.generate(
            input_ids=[5, 77, *range(8, 39)], sampling_params=GREEDY, return_logprob=True, logprob_start_len=0,
            stream=True,
        )  # fmt: skip
        in_loop(llm._parts.core, one_chunk)
        (last,) = chunks
    reason = last["meta_info"]["finish_reason"]
    assert last["output_ids"] == [] and "non-finite logits at position 2" in reason["message"]


@pytest.mark.parametrize("chunk", [16, 64])
def test_what_is_asked_of_a_prompt_is_finite_or_an_error_however_it_is_cut(chunk: int, tmp_path: Path) -> None:
    """The last token, and an answer, may be finite."""
    model = windowed(tmp_path)
    bad, options = [5, 6, 7, 77, *range(8, 37)], {"chunked_prefill_size": chunk, "page_size": 4}
    with start(model, **options) as llm:
        want = ask(llm, [[1, *bad[4:]]])  # which sees as much of the rest
        assert ask(llm, [bad])[0][0] and ask(llm, [[1, *bad[4:]]], logprob_start_len=0) == want
        with pytest.raises(NumericsError, match="non-finite logits at position 4"):
            ask(llm, [bad], logprob_start_len=0)
        chunks: Any = llm.generate(
            input_ids=bad, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0, stream=True
        )
        assert [chunk["output_ids"] for chunk in chunks] == [[]]  # nothing is drawn behind it
    modules = [{"type": f"x.{kind}", "path": kind * n} for n, kind in enumerate(("Transformer", "Pooling"))]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "Pooling").mkdir()
    (model / "Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    with (
        start(model, is_embedding=True, **options) as llm,
        pytest.raises(NumericsError, match="hidden states at position 3"),
    ):
        llm.encode(bad)
