"""How engines end: interpreter exit, Ctrl-C, use after a fork, many in one process."""

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from checksum import checksum_engine, expected
from extended_cases import Ask
from loops import in_loop

from fengine.core.request import Request
from fengine.engine.request_state import RequestState
from fengine.errors import EngineClosedError, EngineDeadError

TESTS = str(Path(__file__).parents[1])


def test_two_engines_in_one_process_are_independent() -> None:
    with checksum_engine() as one, checksum_engine(page_size=1) as two:
        answers: list[object] = [None, None]

        def ask(i: int) -> None:
            outputs = (one, two)[i].generate(
                input_ids=[[i, j] for j in range(8)], sampling_params={"temperature": 0, "max_new_tokens": 9}
            )
            answers[i] = [o["output_ids"] for o in outputs]  # type: ignore[index]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [[expected([i, j], 9) for j in range(8)] for i in range(2)]
        one.shutdown()
        assert two.generate(input_ids=[5], sampling_params={"temperature": 0, "max_new_tokens": 3})["output_ids"] == (
            expected([5], 3)
        )
        one._parts.core.call = lambda name, attached=None, **arguments: attached()


def test_engines_come_and_go_without_leaving_threads() -> None:
    before = threading.active_count()
    for _ in range(10):
        with checksum_engine() as engine:
            engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
        with pytest.raises(EngineClosedError, match="shut down"):
            engine.generate(input_ids=[1])
    assert threading.active_count() == before


@pytest.mark.parametrize("thread", [0, 1])
def test_the_engines_own_threads_may_shut_it_down(thread: int) -> None:
    """As happens when the garbage collector runs a finalizer there."""
    with checksum_engine() as engine:
        core, stream = engine._parts.core, cast(Any, engine.generate(input_ids=[1], stream=True))
        if thread == 0:
            core.handlers["ping"] = engine.shutdown
            core.inbox.put("ping", {})
        else:
            state = RequestState(stream._collector.states[0].request, None, True, lambda _: engine.shutdown())
            core.requests.untold[state] = None
            core.requests.steps.put(([], [state]))
        with pytest.raises(EngineClosedError):
            list(stream)
        for own in core.threads:
            own.join(60)
            assert not own.is_alive()
        core.call = lambda name, attached=None, **arguments: attached()


def test_when_the_loop_dies_every_request_is_told() -> None:
    """Also those that came with the one that it died of, and had not been queued yet."""
    with checksum_engine() as engine:
        core = engine._parts.core
        add, seen = core.stepper.scheduler.add, []

        def adding(request: Request) -> None:
            seen.append(1)
            if len(seen) == 2:
                raise MemoryError("none left")
            add(request)

        core.stepper.scheduler.add = adding  # type: ignore[method-assign]
        told = threading.Semaphore(0)
        asks = [Ask([5, i], new=50).request(str(i)) for i in range(4)]
        states = [RequestState(request, None, False, lambda _: told.release()) for request in asks]
        core.submit(states)
        for _ in states:
            assert told.acquire(timeout=30)
        assert all(isinstance(state.error, EngineDeadError) for state in states)
        with pytest.raises(EngineDeadError, match="none left"):
            engine.generate(input_ids=[1])
        core.call = lambda name, attached=None, **arguments: attached()


def test_an_event_loop_that_was_closed_ends_its_requests() -> None:
    with checksum_engine(pool=512) as engine:
        loop = asyncio.new_event_loop()
        params = {"max_new_tokens": 250, "ignore_eos": True}
        stream: Any = loop.run_until_complete(engine.async_generate(input_ids=[1], sampling_params=params, stream=True))
        state = stream._collector.states[0]
        stream._collector.dirty[0] = True  # news that the loop has not delivered
        loop.close()
        stream._collector._notifier(0)(state)
        in_loop(engine._parts.core)
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0
        assert state.request.num_output < 250
