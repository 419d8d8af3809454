"""Two engines on two GPUs of one process: each stays on its own, and both write the bits of one alone."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fengine.api.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
PROMPTS = ["Once upon a time", "2 + 3 =", "The capital of France is", "Sort: 3 1 2 ->"] * 4
PLAIN = {"max_new_tokens": 24, "sampling_seed": 3}
ASKED: list[dict[str, Any]] = [
    PLAIN, PLAIN | {"temperature": 0}, PLAIN | {"frequency_penalty": 0.5, "logit_bias": {"5": 1.0}},
    PLAIN | {"regex": "[a-z ]+"},
]  # fmt: skip


def answers(engine: Engine) -> list[Any]:
    """Tokens and logprobs of everything that is asked."""
    found: list[Any] = []
    for asked in ASKED:
        outputs: Any = engine.generate(PROMPTS, asked, return_logprob=True, top_logprobs_num=2, logprob_start_len=0)
        for output in outputs:
            meta = output["meta_info"]
            found.append((output["output_ids"], meta["output_token_logprobs"], meta["input_top_logprobs"]))
    return found


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    settings: dict[str, Any] = {"model_path": "box", "max_running_requests": 16, "max_total_tokens": 16384}
    with Engine(**settings, device="cuda:0") as first, Engine(**settings, base_gpu_id=1) as second:
        yield [first, second]


def devices(engine: Engine) -> set[int]:
    """The GPUs that hold its weights and its KV pages."""
    parts = engine._parts
    leaves = [place.leaf for place in parts.weights.places.values()]
    return {leaf.device.index for leaf in leaves} | {parts.core.stepper.runner.kv[0].k_PSGK[0].device.index}  # type: ignore[attr-defined]


def test_each_engine_lies_on_its_own_gpu(engines: list[Engine]) -> None:
    assert [devices(engine) for engine in engines] == [{0}, {1}]
    assert torch.cuda.current_device() == 0  # the caller's is left alone


def test_both_write_the_same_bits_alone_and_beside_each_other(engines: list[Engine]) -> None:
    alone = [answers(engine) for engine in engines]
    assert alone[0] == alone[1]
    before = torch.cuda.memory_allocated(0)
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i, engine=engine: found.update({i: answers(engine)}))
        for i, engine in enumerate(engines)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict(enumerate(alone))
    assert torch.cuda.memory_allocated(0) == before


def test_weights_and_memory_of_one_leave_the_other_alone(engines: list[Engine]) -> None:
    """Commands that launch work in the loop's thread, from a caller whose current device is another one."""
    first, second = engines
    wanted = answers(first)
    norm = torch.tensor(second.get_weights_by_name("model.norm.weight", truncate_size=1 << 20), device="cuda:0")
    assert second.update_weights_from_tensor([("model.norm.weight", norm.flip(0))]).success
    assert answers(second) != wanted and answers(first) == wanted
    assert second.update_weights_from_tensor([("model.norm.weight", norm)]).success
    second.release_memory_occupation()
    assert answers(first) == wanted
    second.resume_memory_occupation()
    assert second.update_weights_from_disk("box").success  # values that came as tensors are not kept
    assert devices(second) == {1} and answers(second) == wanted


def test_a_processor_that_changes_its_threads_device_hurts_only_itself(engines: list[Engine]) -> None:
    def stray(logits: torch.Tensor, params: Any) -> torch.Tensor:
        torch.cuda.set_device(0)
        return logits

    with Engine(model_path="box", base_gpu_id=1, enable_custom_logit_processor=True) as engine:
        wanted = engine.generate("Once", PLAIN)["output_ids"]
        engine.generate("Once", PLAIN | {"max_new_tokens": 1}, custom_logit_processor=stray)
        assert engine.generate("Once", PLAIN)["output_ids"] == wanted
