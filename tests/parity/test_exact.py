"""The promise: a request's tokens and logprobs are the same bits alone, in any batch, chunk, page size, under pressure.

Random weights of realistic variance, so that logits react to the input; logprob bits are compared, not only tokens. The
negative control replaces the linear op by one whose order of summation depends on the batch, and must be caught.
"""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_checkpoints
import torch

from fengine import Engine

BASE = tiny_checkpoints.LLAMA
SEVEN_HEADS = {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112}
SHAPES = {
    "llama": BASE,
    "qwen2": BASE | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True} | SEVEN_HEADS,
    "qwen3": BASE | {"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 3, "num_key_value_heads": 3},
    "qwen2_moe": BASE
    | {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 48},
}
FEW: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
Result = list[tuple[list[int], list[float]]]


class Checkpoint(NamedTuple):
    path: str
    device: str


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=sorted(SHAPES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(SHAPES[request.param]))
    return Checkpoint(str(folder), device)


def engine(checkpoint: Checkpoint, **options: Any) -> Engine:
    args = {"page_size": 4, "max_total_tokens": 4096, "chunked_prefill_size": 64, "max_running_requests": 16}
    where = {"model_path": checkpoint.path, "device": checkpoint.device, "load_format": "dummy"}
    return Engine(skip_tokenizer_init=True, **(args | where | options))


def work(seed: int = 0) -> list[tuple[list[int], dict[str, Any]]]:
    """Ragged prompts, half of them on a shared head; greedy and seeded rows side by side; lengths at page edges."""
    draw = random.Random(seed)
    head = [draw.randrange(211) for _ in range(37)]
    requests = []
    for i, length in enumerate((1, 3, 4, 5, 8, 15, 16, 17, 33, 63, 64, 65, 100, 130)):
        prompt = [draw.randrange(211) for _ in range(length)]
        params = {"max_new_tokens": draw.randint(10, 70), "ignore_eos": True, "sampling_seed": i}
        params |= ({"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.3, "top_p": 0.9, "top_k": 50})[i % 3]
        requests.append((head + prompt if i % 2 else prompt, params))
    return requests


def results(outputs: list[dict[str, Any]]) -> Result:
    return [(o["output_ids"], [lp for lp, _, _ in o["meta_info"]["output_token_logprobs"]]) for o in outputs]


def batch(llm: Engine, requests: list[tuple[list[int], dict[str, Any]]]) -> Result:
    prompts, params = zip(*requests, strict=True)
    return results(llm.generate(input_ids=list(prompts), sampling_params=list(params), return_logprob=True))  # type: ignore[arg-type]


def alone(llm: Engine, requests: list[tuple[list[int], dict[str, Any]]]) -> Result:
    return [batch(llm, [request])[0] for request in requests]


def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch.compile, for the many engines of this file; one test compiles."""
    monkeypatch.setattr("fengine.engine.workers.make_forward", _uncompiled)


def _uncompiled(spec: Any, *, compiled: bool = False) -> Any:
    from fengine.worker.step import make_forward

    return make_forward(spec)


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        eager(patch)
        with engine(checkpoint, disable_radix_cache=True) as llm:
            return alone(llm, work())


@pytest.fixture(scope="module")
def seven_heads(tmp_path_factory: pytest.TempPathFactory, device: str) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("seven_heads")
    (folder / "config.json").write_text(json.dumps(SHAPES["qwen2"]))
    return Checkpoint(str(folder), device)


LAYOUTS = {
    "in a batch": {},
    "chunks of 7": {"chunked_prefill_size": 7, "max_running_requests": 5},
    "whole prompts": {"chunked_prefill_size": 2048},
    "page size 1": {"page_size": 1},
    "page size 16": {"page_size": 16},
    "overlapped steps": {"disable_overlap_schedule": False},
    "two rows": {"max_running_requests": 2},
    "longest prefix first": {"schedule_policy": "lpm"},
    "without graphs": {"disable_cuda_graph": True},
    "preempted": {"max_total_tokens": 260, "disable_radix_cache": True},
    "preempted, cached": {"max_total_tokens": 260},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_do_not_depend_on_the_layout(
    checkpoint: Checkpoint, reference: Result, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager(monkeypatch)
    requests = work()
    order = list(range(len(requests)))
    random.Random(len(layout)).shuffle(order)
    with engine(checkpoint, **LAYOUTS[layout]) as llm:
        for _ in range(2):  # the second time the prefix cache is warm
            got = batch(llm, [requests[i] for i in order])
            assert got == [reference[i] for i in order]
        if layout.startswith("preempted"):
            assert llm.stats()["preemptions"] > 0


def test_bits_of_many_decoding_rows_beside_a_chunk(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap, more rows than the smaller of a device's row buckets, and fewer tokens than the larger has rows."""
    eager(monkeypatch)
    draw = random.Random(5)
    requests = [
        (
            [draw.randrange(211) for _ in range(length)],
            {"temperature": 0, "ignore_eos": True, "max_new_tokens": 3 + i % 9},
        )
        for i, length in enumerate([3] * 42 + [12])
    ]
    options = {"max_running_requests": 128, "chunked_prefill_size": 128, "disable_overlap_schedule": False}
    with engine(checkpoint, **options) as llm:
        assert batch(llm, requests) == alone(llm, requests)


def test_logits_react_to_the_input(reference: Result) -> None:
    assert len({tuple(ids) for ids, _ in reference}) == len(reference)
    spread = [lp for _, logprobs in reference for lp in logprobs]
    assert len(set(spread)) > 0.9 * len(spread)


def test_threads_do_not_change_bits(checkpoint: Checkpoint, reference: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    eager(monkeypatch)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with engine(checkpoint) as llm:
                assert batch(llm, work()) == reference
    finally:
        torch.set_num_threads(before)


def test_compiled_and_eager_steps_give_the_same_bits_and_compile_once(
    checkpoint: Checkpoint, reference: Result
) -> None:
    with engine(checkpoint, enable_torch_compile=True) as llm:
        compiles = llm.stats()["compiles"]
        assert batch(llm, work()) == reference
        assert alone(llm, work()) == reference
        assert llm.stats()["compiles"] == compiles == 1


def test_a_linear_op_that_depends_on_the_batch_is_caught(
    checkpoint: Checkpoint, reference: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager(monkeypatch)

    def careless(x, packed, n, bias, out_dtype):  # noqa: ANN001, ANN202
        """Splits K by the number of rows: what a library may do."""
        w_NK = packed.movedim(1, 2).flatten(0, 1)[:n].float() if packed.ndim == 3 else packed.float()
        pieces = 1 + x.shape[0] % 3
        y = sum(x[:, i::pieces].float() @ w_NK[:, i::pieces].T for i in range(pieces))
        return (y if bias is None else y + bias).to(out_dtype or x.dtype)

    with torch.library._scoped_library("fengine", "IMPL") as library:
        library.impl("linear", careless, checkpoint.device.upper(), allow_override=True)
        with engine(checkpoint) as llm:
            assert batch(llm, work()) != alone(llm, work())


@pytest.mark.parametrize("few", [FEW, {"quantization": "w8a8_fp8"}], ids=["fp8 kv", "w8a8"])
def test_bits_of_few_bits(seven_heads: Checkpoint, few: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    eager(monkeypatch)
    requests = work()[:8]
    with engine(seven_heads, disable_radix_cache=True) as llm:
        whole = alone(llm, requests[:1])
    with engine(seven_heads, disable_radix_cache=True, **few) as llm:
        want = alone(llm, requests)
    assert want[:1] != whole
    for options in (*LAYOUTS.values(), {"speculative_algorithm": "NGRAM"}):
        with engine(seven_heads, **(options | few)) as llm:
            assert batch(llm, requests) == want == batch(llm, requests), options  # then the prefix cache is warm


def test_snapshots_and_sessions_hold_what_is_stored(seven_heads: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    eager(monkeypatch)
    prompt, more = list(range(3, 40)), list(range(7, 20))
    params = {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True}
    with engine(seven_heads, **FEW) as llm:
        session = llm.open_session(200)
        first = llm.generate(input_ids=prompt, sampling_params=params, session_params={"id": session})
        told = {"id": session, "rid": first["meta_info"]["id"]}
        got = llm.generate(input_ids=more, sampling_params=params, session_params=told)
        llm.flush_cache()
        want = llm.generate(input_ids=prompt + first["output_ids"] + more, sampling_params=params)
        assert got["output_ids"] == want["output_ids"]
        llm.release_memory_occupation(tags=["kv_cache"])
        llm.resume_memory_occupation(tags=["kv_cache"])
        assert llm.generate(input_ids=prompt, sampling_params=params)["output_ids"] == first["output_ids"]
