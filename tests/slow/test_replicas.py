"""Engines of several replicas: one's bits, results in order, prompts where they are known, and what a death does."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from test_ranks import PARAMS, PROMPTS, SETTINGS, results

from fengine import Engine
from fengine.engine.parallel.replicas import Replicas
from fengine.engine.parallel.routing import Replica
from fengine.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    UnsupportedFeatureError,
)

LONG = "Sort these numbers, smallest first, and say nothing else: " * 6


@pytest.fixture(scope="module")
def one() -> Iterator[Engine]:
    with Engine(**SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    with Engine(**SETTINGS, dp_size=2, enable_custom_logit_processor=True) as engine:
        yield engine


def replicas(engine: Engine) -> list[Replica]:
    core: Any = engine._parts.core
    assert isinstance(core, Replicas)
    return core.replicas


def test_replicas_give_the_bits_of_one(one: Engine, two: Engine) -> None:
    assert results(one) == results(two)
    assert one.generate(PROMPTS, {"n": 3, "max_new_tokens": 5}) != []
    both = [engine.generate(PROMPTS, {"n": 2, "max_new_tokens": 5, "sampling_seed": 3}) for engine in (one, two)]
    assert [[out["text"] for out in each] for each in both][0] == [out["text"] for out in both[1]]


def test_streams_and_event_loops(one: Engine, two: Engine) -> None:
    params: Any = {"max_new_tokens": 12, "temperature": 0}

    def streamed(engine: Engine) -> Any:
        return [(out["text"], out["output_ids"]) for out in engine.generate(PROMPTS[0], params, stream=True)][-1]

    async def awaited(engine: Engine) -> Any:
        outputs = await asyncio.gather(*(engine.async_generate(prompt, params) for prompt in PROMPTS))
        return [out["text"] for out in outputs]

    assert streamed(one) == streamed(two)
    assert asyncio.run(awaited(one)) == asyncio.run(awaited(two))


def test_embeddings() -> None:
    found = []
    for size in (1, 2):
        with Engine(model_path="box", is_embedding=True, max_total_tokens=600, dp_size=size) as engine:
            found.append([out["embedding"] for out in engine.encode(PROMPTS)])
    assert found[0] == found[1]


def test_a_prompt_goes_where_its_beginning_is_known(two: Engine) -> None:
    for rank in (1, 0):
        two.flush_cache()
        two.generate(LONG, {"max_new_tokens": 1}, routed_dp_rank=rank)
        for _ in range(2):  # alone, replica 0 would be the first choice
            assert two.generate(LONG + "9 8", {"max_new_tokens": 1})["meta_info"]["cached_tokens"] >= 64
        assert replicas(two)[rank].hit(list(replicas(two)[rank].known)) and not replicas(two)[1 - rank].known


def test_a_batch_is_shared(two: Engine) -> None:
    """Equal prompts that nobody knows, too; a prompt that one replica knows moves it by a few."""
    two.flush_cache()
    for prompts in ([f"{i} and some more" for i in range(40)], [LONG] * 40):
        before = [each.finished for each in replicas(two)]
        two.generate(prompts, {"max_new_tokens": 1})
        counts = [each.finished - had for each, had in zip(replicas(two), before, strict=True)]
        assert sum(counts) == 40 and min(counts) >= 14, counts


def test_pinned_requests(two: Engine) -> None:
    for bad in (2, -1, "x"):
        with pytest.raises(InvalidRequestError, match=r"out of range \[0, 2\)"):
            two.generate("a", routed_dp_rank=bad)


def test_what_is_asked_of_all(two: Engine) -> None:
    before = two.stats()
    two.generate(PROMPTS * 2, {"max_new_tokens": 2})
    assert two.stats()["finished"] == before["finished"] + 2 * len(PROMPTS)
    assert two.flush_cache().success
    two.pause_generation("in_place")
    collector: Any = two.generate("a", {"max_new_tokens": 2}, stream=True)
    stream = two.generate("a", {"max_new_tokens": 400}, rid="x", stream=True)
    with pytest.raises(InvalidRequestError, match="'x' is in use"):
        two.generate("b", rid="x")
    two.abort("x")
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    two.continue_generation()
    assert list(collector)[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert two.update_weights_from_disk("box", weight_version="second").success
    assert two.generate("a", {"max_new_tokens": 2})["meta_info"]["weight_version"] == "second"
    assert not two.update_weights_from_disk("/nowhere").success
    two.release_memory_occupation(["kv_cache"])
    two.resume_memory_occupation()
    assert two.get_model_info()["num_parameters"] > 0 and two.get_server_info()["internal_states"]
    assert two.get_weights_by_name("model.norm.weight")


def test_errors_are_those_of_one(one: Engine, two: Engine) -> None:
    with pytest.raises(ContextLengthError):
        two.generate(input_ids=[5] * 100000)
    with pytest.raises(UnsupportedFeatureError, match="processor"):
        two.register_logit_processor("same", lambda logits, params: logits)
        two.generate("a", custom_logit_processor="same")
    with pytest.raises(UnsupportedFeatureError, match="dp_size=2"):
        two.update_weights_from_tensor([])
    with pytest.raises(UnsupportedFeatureError, match="LoRA"):
        Engine(model_path="box", dp_size=2, enable_lora=True)


def killed(engine: Engine) -> list[Any]:
    """The outcomes of calls to both replicas, of which replica 1 dies before their first step."""
    engine.pause_generation("in_place")
    params: Any = {"max_new_tokens": 40, "ignore_eos": True}
    streams = [engine.generate("One two", params, routed_dp_rank=rank, stream=True) for rank in range(2)]
    child = replicas(engine)[1].child
    assert child is not None
    child.process.kill()
    with pytest.raises(EngineDeadError) as error:
        list(streams[1])
    engine.continue_generation()
    return [list(streams[0])[-1]["meta_info"]["completion_tokens"], str(error.value)]


def test_a_death_fails_its_requests_by_name_and_the_others_go_on() -> None:
    engine = Engine(**SETTINGS, dp_size=2)
    first, second = killed(engine)
    assert first == 40 and "replica 1 of 2 was ended by SIGKILL; its requests have ended" in second
    assert len(engine.generate(PROMPTS, PARAMS[0])) == len(PROMPTS)
    with pytest.raises(EngineDeadError, match="replica 1 of 2 has ended"):
        engine.generate("a", routed_dp_rank=1)
    children = [each.child for each in replicas(engine)]
    assert children[0] is not None
    children[0].process.kill()
    with pytest.raises(EngineDeadError):
        for _ in range(1000):
            engine.generate("a", {"max_new_tokens": 2})
    engine.shutdown()
    assert all(child is not None and child.process.poll() is not None for child in children)


def test_one_that_is_started_again_computes_the_same() -> None:
    with Engine(**SETTINGS, dp_size=2, dp_restart=True) as engine:
        want = engine.generate(PROMPTS, PARAMS[0])
        assert "replica 1 of 2" in killed(engine)[1]
        ready, core = replicas(engine)[1], engine._parts.core
        with core._lock:  # type: ignore[attr-defined]
            assert core._lock.wait_for(lambda: ready.facts is not None, 60)  # type: ignore[attr-defined]
        again = [engine.generate(prompt, PARAMS[0], routed_dp_rank=1) for prompt in PROMPTS]
        assert [out["text"] for out in again] == [out["text"] for out in want]


def test_an_end_ends_what_is_open() -> None:
    engine = Engine(**SETTINGS, dp_size=2)
    engine.pause_generation("in_place")
    stream = engine.generate("One two", {"max_new_tokens": 4}, stream=True)
    threading.Thread(target=engine.shutdown).start()
    with pytest.raises(EngineClosedError):
        list(stream)
    with pytest.raises(EngineClosedError):
        engine.generate("a")
