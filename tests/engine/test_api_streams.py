"""Streams, loops and threads: intervals, deltas, readers that are slow, gone or elsewhere; abort, pause, continue."""

import asyncio
import copy
import gc
import pickle
import threading
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import checksum
import pytest
from checksum import checksum_engine, expected
from loops import in_loop

from fengine import models
from fengine.api.engine import Engine
from fengine.api.streams import OutputCollector
from fengine.core.request import Request, SamplingParams
from fengine.engine.output_processor import OutputProcessor
from fengine.engine.request_state import RequestOutput, RequestState
from fengine.errors import EngineClosedError, FengineError, InvalidRequestError, NumericsError


def greedy(count: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": count, **more}


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with checksum_engine(context=256, pool=1024) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The one engine of these tests, idle before and behind each of them."""
    before = asdict(shared.server_args)
    yield shared
    vars(shared.server_args).update(before)
    assert quiet(shared)


def quiet(engine: Engine) -> bool:
    """Nothing runs or waits, behind everything that was sent to the loop so far."""
    stats = in_loop(engine._parts.core, engine.stats)
    return stats["running"] == stats["waiting"] == stats["pages_used"] == 0


# -- chunks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize(("interval", "per_request"), [(1, None), (4, None), (1, 4), (7, 3), (50, None)])
def test_stream_interval(interval: int, per_request: int | None, incremental: bool, engine: Engine) -> None:
    engine.server_args.stream_interval = interval
    engine.server_args.incremental_streaming_output = incremental
    sampling = greedy(20, stream_interval=per_request)
    every, had, ids = per_request or interval, 0, []
    for chunk in engine.generate(input_ids=[5, 6], sampling_params=sampling, stream=True, return_logprob=True):
        meta, done = chunk["meta_info"], chunk["meta_info"]["finish_reason"] is not None
        count = meta["completion_tokens"]
        new = count - had
        assert new >= every or had == 0 or done
        assert len(chunk["output_ids"]) == (new if incremental else count)
        assert [t for _, t, _ in meta["output_token_logprobs"]] == chunk["output_ids"]
        ids = ids + chunk["output_ids"] if incremental else chunk["output_ids"]
        had = count
    assert done and ids == expected([5, 6], 20)


def test_samples_stream_with_their_index(engine: Engine) -> None:
    for prompts in ([5, 6], [[5, 6], [7]]):
        last: dict[int, dict[str, Any]] = {}
        for chunk in engine.generate(input_ids=prompts, sampling_params=greedy(5, n=3), stream=True):
            last[chunk["index"]] = chunk
        several = prompts if isinstance(prompts[0], list) else [prompts]
        assert [last[i]["output_ids"] for i in range(len(last))] == [expected(p, 5) for p in several for _ in range(3)]
        assert len({chunk["meta_info"]["id"] for chunk in last.values()}) == 3 * len(several)
    outputs = engine.generate(input_ids=[[5, 6], [7]], sampling_params=greedy(5, n=2))
    assert [o["output_ids"] for o in outputs] == [expected([5, 6], 5)] * 2 + [expected([7], 5)] * 2
    assert isinstance(engine.generate(input_ids=[5], sampling_params=greedy(2, n=2)), list)
    assert isinstance(engine.generate(input_ids=[5], sampling_params=greedy(2, n=1)), dict)
    draws = engine.generate(input_ids=[5], sampling_params={"temperature": 50.0, "max_new_tokens": 8, "n": 6})
    assert len({tuple(o["output_ids"]) for o in draws}) == 6


def test_a_slow_reader_gets_the_latest_state_and_every_delta() -> None:
    """The reader looks only after everything has happened: one chunk, or one delta, holds it all."""
    for incremental in (False, True):
        with checksum_engine() as engine:
            engine.server_args.incremental_streaming_output = incremental
            stream: Any = engine.generate(input_ids=[5], sampling_params=greedy(30), stream=True)
            while not stream._collector.states[0].done:
                engine.generate(input_ids=[9], sampling_params=greedy(1))
            assert stream._collector.ready.qsize() == 1  # news is not piled up
            chunks = list(stream)
            assert len(chunks) == 1 and chunks[0]["output_ids"] == expected([5], 30)


def test_a_row_that_fails_ends_its_stream_with_an_abort_and_its_neighbours_go_on() -> None:
    poison = [11, 12, 13]
    target = checksum.digest([checksum.mark(t, p) for p, t in enumerate(poison)])

    def unembed(params: Any, spec: Any, hidden_RD: Any) -> Any:
        logits = checksum.unembed(params, spec, hidden_RD)
        logits[hidden_RD[:, 0].long() == target] = float("nan")
        return logits

    with checksum_engine():  # puts the registry back
        models.MODELS = {
            checksum.SPEC.architecture: models.Model(lambda _: checksum.SPEC, checksum.forward, unembed, lambda _: [])
        }
        with Engine.from_parts(checksum.checksum_parts()) as failing:
            last: dict[int, Any] = {}
            for chunk in failing.generate(input_ids=[[1, 2], poison, [3]], sampling_params=greedy(6), stream=True):
                last[chunk["index"]] = chunk
            reason = last[1]["meta_info"]["finish_reason"]
            assert reason["type"] == "abort" and "non-finite" in reason["message"]
            assert (reason["status_code"], reason["err_type"]) == (500, "InternalServerError")
            assert last[0]["output_ids"] == expected([1, 2], 6) and last[2]["output_ids"] == expected([3], 6)
            with pytest.raises(NumericsError):
                failing.generate(input_ids=[[1, 2], poison], sampling_params=greedy(6))
            assert quiet(failing)


# -- abort -------------------------------------------------------------------------------------------------------------


def test_abort_matches_exactly_and_returns_what_there_is(engine: Engine) -> None:
    streams = {
        rid: engine.generate(input_ids=[1], sampling_params=greedy(200), stream=True, rid=rid)
        for rid in ("a_1", "a_10")
    }
    for stream in streams.values():
        next(stream)  # type: ignore[call-overload]
    engine.abort("a_1")
    engine.abort("a_")  # unknown
    chunk = list(streams["a_1"])[-1]
    assert chunk["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted"}
    assert chunk["output_ids"] == expected([1], 200)[: len(chunk["output_ids"])]
    assert list(streams["a_10"])[-1]["output_ids"] == expected([1], 200)
    engine.abort("a_1")  # has finished
    assert quiet(engine)


def test_abort_all_ends_running_and_waiting_calls_in_other_threads() -> None:
    with checksum_engine(rows=2, context=256, pool=1024) as engine:
        engine.pause_generation("in_place")
        results: list[Any] = []
        ask = lambda: results.append(engine.generate(input_ids=[[1], [2], [3]], sampling_params=greedy(200)))  # noqa: E731
        thread = threading.Thread(target=ask)
        thread.start()
        while engine.stats()["waiting"] < 3:
            in_loop(engine._parts.core)
        engine.abort(abort_all=True)
        thread.join()
        assert [o["meta_info"]["finish_reason"]["type"] for o in results[0]] == ["abort"] * 3
        engine.continue_generation()
        assert engine.generate(input_ids=[4], sampling_params=greedy(3))["output_ids"] == expected([4], 3)
        assert quiet(engine)
        for bad in ({}, {"rid": 5}, {"rid": None}):
            with pytest.raises(InvalidRequestError, match="abort needs a rid"):
                engine.abort(**bad)


# -- pause and continue ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_paused_requests_go_on_as_if_nothing_had_been(mode: str, overlap: bool) -> None:
    prompts = [[1], [2, 3], [4] * 9]
    with checksum_engine(rows=2, context=256, pool=1024, overlap=overlap) as engine:
        stream: Any = engine.generate(input_ids=prompts, sampling_params=greedy(60), stream=True)
        next(stream)
        engine.pause_generation(mode)
        steps, stats = engine.stats()["steps"], engine.stats()
        assert (stats["running"], stats["waiting"]) == ((2, 1) if mode == "in_place" else (0, 3))
        late = engine.generate(input_ids=[8], sampling_params=greedy(4), stream=True)
        for _ in range(3):
            in_loop(engine._parts.core)
        assert engine.stats()["steps"] == steps and engine.stats()["waiting"] == stats["waiting"] + 1
        flushed = engine.flush_cache()
        assert flushed.success == (mode == "retract"), flushed
        engine.pause_generation(mode)  # again
        engine.continue_generation()
        last = {chunk["index"]: chunk for chunk in stream}
        assert [last[i]["output_ids"] for i in range(3)] == [expected(p, 60) for p in prompts]
        assert list(late)[-1]["output_ids"] == expected([8], 4)  # type: ignore[arg-type]
        assert (last[0]["meta_info"]["num_retractions"] > 0) == (mode == "retract")
        assert quiet(engine)


def test_pause_with_abort_ends_what_runs_and_holds_what_comes(engine: Engine) -> None:
    stream: Any = engine.generate(
        input_ids=[1], sampling_params=greedy(200), stream=True, return_logprob=True, top_logprobs_num=1
    )
    next(stream)
    engine.pause_generation()
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert not engine._parts.core.stepper.input_batch.asking  # nothing is kept of what has ended
    late: Any = engine.generate(input_ids=[2], sampling_params=greedy(3), stream=True)
    assert in_loop(engine._parts.core, engine.stats)["waiting"] == 1
    engine.continue_generation()
    assert list(late)[-1]["output_ids"] == expected([2], 3)
    with pytest.raises(InvalidRequestError, match=r"Invalid mode: 'stop'. Expected one of \['abort', 'retract', 'in"):
        engine.pause_generation("stop")


def test_a_paused_engine_shuts_down() -> None:
    with checksum_engine() as engine:
        engine.pause_generation("in_place")
        stream: Any = engine.generate(input_ids=[1], sampling_params=greedy(5), stream=True)
        engine.shutdown()
        with pytest.raises(EngineClosedError):
            list(stream)
        for call in (engine.pause_generation, engine.continue_generation, lambda: engine.abort("x")):
            with pytest.raises(EngineClosedError):
                call()
        engine._parts.core.call = lambda command, attached=None: attached()


# -- readers -----------------------------------------------------------------------------------------------------------


def test_sixty_four_threads_each_with_sync_async_and_stream() -> None:
    answers: dict[int, list[Any]] = {}
    with checksum_engine(rows=8, pool=2048) as engine:

        async def both(i: int) -> list[Any]:
            one = await engine.async_generate(input_ids=[i], sampling_params=greedy(4))
            stream: Any = await engine.async_generate(input_ids=[i, i], sampling_params=greedy(4), stream=True)
            chunks = [chunk["output_ids"] async for chunk in stream]
            return [one["output_ids"], chunks[-1]]

        def work(i: int) -> None:
            sync = engine.generate(input_ids=[i, 1], sampling_params=greedy(4))["output_ids"]
            answers[i] = [sync, *asyncio.run(both(i))]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert quiet(engine)
    assert answers == {i: [expected([i, 1], 4), expected([i], 4), expected([i, i], 4)] for i in range(64)}


def test_a_loop_that_closes_under_a_stream_aborts_it_and_another_loop_is_told(engine: Engine) -> None:

    async def begin() -> Any:
        stream: Any = await engine.async_generate(input_ids=[1], sampling_params=greedy(200), stream=True)
        await anext(stream)
        return stream

    stream = asyncio.run(begin())  # its loop is closed now

    async def go_on() -> None:
        with pytest.raises(InvalidRequestError, match="another event loop"):
            await anext(stream)

    asyncio.run(go_on())
    assert engine.generate(input_ids=[2], sampling_params=greedy(3))["output_ids"] == expected([2], 3)
    assert quiet(engine)


def test_two_readers_of_one_stream_share_its_chunks_and_both_end(engine: Engine) -> None:
    stream: Any = engine.generate(input_ids=[1, 2], sampling_params=greedy(30), stream=True)
    got: list[Any] = []
    readers = [threading.Thread(target=lambda: got.extend(stream), daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(timeout=60)
    assert not any(reader.is_alive() for reader in readers)
    assert max((chunk["output_ids"] for chunk in got), key=len) == expected([1, 2], 30)

    async def read_all(stream: Any) -> list[Any]:
        return [chunk async for chunk in stream]

    async def main() -> None:
        stream = await engine.async_generate(input_ids=[1, 2], sampling_params=greedy(30), stream=True)
        parts = await asyncio.wait_for(asyncio.gather(read_all(stream), read_all(stream)), timeout=60)
        assert max((c["output_ids"] for part in parts for c in part), key=len) == expected([1, 2], 30)

    asyncio.run(main())


def test_closing_and_breaking_out_of_streams_frees_their_rows() -> None:
    with checksum_engine(rows=2, context=256, pool=512) as engine:
        for _ in range(3):
            for _chunk in engine.generate(input_ids=[[1], [2]], sampling_params=greedy(200), stream=True):
                break

        async def leave() -> None:
            async for _chunk in await engine.async_generate(input_ids=[3], sampling_params=greedy(200), stream=True):
                break
            stream: Any = await engine.async_generate(input_ids=[3], sampling_params=greedy(200), stream=True)
            await stream.aclose()

        asyncio.run(leave())
        assert engine.generate(input_ids=[4], sampling_params=greedy(5))["output_ids"] == expected([4], 5)
        assert quiet(engine)


def test_what_a_call_held_goes_when_it_ends_and_needs_no_garbage_collector() -> None:
    def requests() -> int:
        return sum(type(each) is Request for each in gc.get_objects())

    async def in_a_loop(engine: Engine) -> None:
        await engine.async_generate(input_ids=[5], sampling_params=greedy(3))
        async for _ in await engine.async_generate(input_ids=[6], sampling_params=greedy(3), stream=True):
            pass

    gc.collect()
    before = requests()
    gc.disable()
    try:
        with checksum_engine(context=256, pool=1024) as engine:
            engine.generate(input_ids=[[5, 6], [7]], sampling_params=greedy(4, n=2))
            list(engine.generate(input_ids=[5, 6], sampling_params=greedy(4), stream=True))
            left = engine.generate(input_ids=[8], sampling_params=greedy(100), stream=True)
            next(left)
            left.close()
            del left
            asyncio.run(in_a_loop(engine))
            engine.generate(input_ids=[9], sampling_params=greedy(1))
            assert quiet(engine)
            assert requests() <= before + 1  # the threads may still hold the last one
    finally:
        gc.enable()


def test_a_chunk_is_due_at_once_and_then_with_every_third_token() -> None:
    collector, request = (
        OutputCollector.__new__(OutputCollector),
        Request("r", 1, [1], SamplingParams(), 0, 9, frozenset()),
    )
    collector.context, collector.pace = cast(Any, SimpleNamespace(args=SimpleNamespace(stream_interval=3))), None
    state = RequestState(request, None, True, lambda state: None)
    for had, due in ((0, [1, 2, 3, 4, 5]), (1, [4, 5])):
        collector.sent, found = [RequestOutput("", had)], []
        for count in range(1, 6):
            state.output = RequestOutput("", count)
            found += [count] * collector._due(0, state)
        assert found == due


def test_a_request_whose_reader_has_seen_its_end_is_not_kept() -> None:
    """Its text failed, and so did its processor: a stream tells of that in a last chunk, before the loop knows."""
    text, told = OutputProcessor(cast(Any, None), lambda states: None), []
    request = Request("r", 1, [1, 2], SamplingParams(), seed=0, max_new_tokens=5, stop_ids=frozenset())
    state = RequestState(request, None, True, told.append)
    text.enter([state])
    state.error, state.output = FengineError("as planned"), RequestOutput("", 1, {"type": "abort", "message": ""})
    text.steps.put(([], [state]))
    text.steps.put(None)
    text.run()
    assert told == [state] and not text.untold


def test_the_tokens_of_a_requests_last_step_come_with_its_end() -> None:
    text, told = OutputProcessor(cast(Any, None), lambda states: None), list[RequestOutput]()
    request = Request("r", 1, [1, 2, 3], SamplingParams(), seed=0, max_new_tokens=2, stop_ids=frozenset())
    state = RequestState(request, None, True, lambda state: told.append(state.output))
    text.enter([state])
    request.finish = {"type": "length", "length": 2}
    text.steps.put(([(state, 2)], [state]))
    text.steps.put(None)
    text.run()
    assert told == [RequestOutput("", 2, request.finish)]


def test_whatever_fails_in_a_notification_ends_one_request_only() -> None:
    """The thread that makes text survives any reader: one that raises, and one whose event loop is gone."""
    aborted: list[RequestState] = []
    text, told = OutputProcessor(cast(Any, None), aborted.extend), []

    def state(name: str, notify: Any) -> RequestState:
        params = SamplingParams()
        request = Request(name, 1, [1, 2, 3], params, seed=0, max_new_tokens=5, stop_ids=frozenset())
        return RequestState(request, None, True, notify)

    def broken(_: RequestState) -> None:
        raise RuntimeError("Event loop is closed")

    bad, good = state("bad", broken), state("good", lambda t: told.append(t.output.num_tokens))
    text.enter([bad, good])
    text.steps.put(([(bad, 1), (good, 1)], []))
    text.steps.put(([(good, 2)], [bad]))
    text.steps.put(None)
    text.run()
    assert told == [1, 2] and aborted[0] is bad


def test_a_reader_that_raises_leaves_its_neighbours_alone(engine: Engine) -> None:
    stream: Any = engine.generate(input_ids=[1], sampling_params=greedy(200), stream=True)
    stream._collector.ready = None  # the text thread cannot deliver any more
    output = engine.generate(input_ids=[2], sampling_params=greedy(30))
    assert output["output_ids"] == expected([2], 30)
    stream.close()
    assert quiet(engine)


def test_an_engine_is_not_pickled_or_copied(engine: Engine) -> None:
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(FengineError, match="cannot be pickled"):
            take(engine)


def test_a_processor_that_asks_its_own_engine_is_told_instead_of_waiting_for_itself(engine: Engine) -> None:

    def asking(logits: Any, params: Any) -> Any:
        engine.generate(input_ids=[1])

    with pytest.raises(FengineError, match="cannot ask its engine for text"):
        engine.generate(input_ids=[2], sampling_params=greedy(3), custom_logit_processor=asking)
    assert engine.generate(input_ids=[2], sampling_params=greedy(3))["output_ids"] == expected([2], 3)


def test_a_call_has_a_limit_of_results(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="at most 1048576 results, got 257 prompts × n=4096"):
        engine.generate(input_ids=[[1]] * 257, sampling_params={"n": 4096})
