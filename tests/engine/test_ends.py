"""Whatever ends an engine's thread, everybody who waits is answered; its own callbacks cannot hang it."""

import asyncio
import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from checksum import checksum_engine

from fengine.api.engine import Engine
from fengine.core.scheduler_output import StepOutput
from fengine.engine import watchdog
from fengine.engine.inbox import Inbox
from fengine.engine.threads import REAL
from fengine.errors import EngineBusyError, EngineClosedError, EngineDeadError, FengineError

LONG = {"max_new_tokens": 200, "ignore_eos": True}
SOON = 20  # seconds: an answer is due within one; this is how long a test waits before it calls it none


class Gone(BaseException):
    """No Exception: nothing that handles errors catches it."""


def throw_into(thread: threading.Thread, error: type[BaseException]) -> None:
    """As an asynchronous exception, wherever the thread is."""
    assert thread.ident is not None
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error)) == 1


def all_waiting(engine: Engine, kill: Callable[[], None]) -> list[BaseException | None]:
    """What callers of every kind get when the engine is killed while they wait: a call, a stream, an async one."""
    engine.pause_generation("in_place")

    async def ask() -> None:
        await engine.async_generate(input_ids=[3], sampling_params=LONG)

    waits = [
        lambda: engine.generate(input_ids=[1], sampling_params=LONG),
        lambda: next(iter(engine.generate(input_ids=[2], sampling_params=LONG, stream=True))),
        lambda: asyncio.run(ask()),
    ]
    with ThreadPoolExecutor(len(waits)) as pool:
        futures = [pool.submit(wait) for wait in waits]
        while len(engine._parts.core.requests.states) < len(waits):
            threading.Event().wait(0.01)
        kill()
        return [future.exception(SOON) for future in futures]


def finish(engine: Engine) -> None:
    """The books are not balanced any more."""
    engine._parts.core.call = lambda name, attached=None, **arguments: None


@pytest.mark.parametrize("which", [0, 1], ids=["loop", "text"])
@pytest.mark.parametrize("error", [Gone, MemoryError, SystemExit])
def test_an_exception_thrown_into_a_thread_answers_everybody(which: int, error: type[BaseException]) -> None:
    with checksum_engine() as engine:
        core = engine._parts.core

        def kill() -> None:
            throw_into(core.threads[which], error)
            core.inbox.ring() if which == 0 else core.requests.steps.put(([], []))

        assert all(isinstance(found, EngineDeadError) for found in all_waiting(engine, kill))
        for call in (lambda: engine.generate(input_ids=[1]), engine.flush_cache):
            with pytest.raises(EngineDeadError) as told:
                call()
            assert isinstance(told.value.__cause__, error)
        finish(engine)


@pytest.mark.parametrize("which", [0, 1], ids=["loop", "text"])
def test_a_thread_that_cannot_even_tell_of_its_end(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its guard fails, too: what watches the threads answers."""
    monkeypatch.setattr(watchdog.Watchdog, "_guard", lambda watchdog, body: body())
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with checksum_engine() as engine:
        core = engine._parts.core

        def kill() -> None:
            throw_into(core.threads[which], Gone)
            core.inbox.ring() if which == 0 else core.requests.steps.put(([], []))

        assert all(isinstance(found, EngineDeadError) for found in all_waiting(engine, kill))
        finish(engine)


def test_a_call_that_waits_for_a_loop_that_dies_is_answered() -> None:
    with checksum_engine() as engine:
        core = engine._parts.core

        def die() -> None:
            raise Gone

        core.handlers["flush_cache"] = die
        with ThreadPoolExecutor(1) as pool, pytest.raises(EngineDeadError):
            pool.submit(engine.flush_cache).result(SOON)
        finish(engine)


def test_a_step_that_cannot_be_read_before_a_command_ends_the_engine() -> None:
    """What failed is the step of others, not the command: its requests would wait for ever."""
    with checksum_engine(overlap=True) as engine:
        core = engine._parts.core
        stream = iter(engine.generate(input_ids=[1], sampling_params=LONG, stream=True))
        next(stream)

        def fail() -> None:
            while core.stepper.pending is None:
                core.stepper.step()
            output, _ = core.stepper.pending

            def unreadable() -> StepOutput:
                raise RuntimeError("the device is gone")

            core.stepper.pending = output, unreadable

        core.handlers["flush_cache"] = lambda: (fail(), core.stepper.drain())
        with pytest.raises(EngineDeadError, match="the device is gone"):
            engine.flush_cache()
        with pytest.raises(EngineDeadError, match="the device is gone"):
            list(stream)
        finish(engine)


# -- a logit processor that asks its own engine ------------------------------------------------------------------------


def during_a_step(engine: Engine, ask: Callable[[], Any]) -> Any:
    """What a logit processor gets when it does this: the answer, or the error."""
    found: list[Any] = []

    def processor(logits: Any, params: Any) -> Any:
        try:
            found.append(ask())
        except FengineError as error:
            found.append(error)
        return logits

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(
            engine.generate, input_ids=[1], sampling_params={"max_new_tokens": 2}, custom_logit_processor=processor
        )
        call.exception(SOON)
    return found[0]


def test_a_processor_that_asks_its_engine_is_answered_or_refused() -> None:
    with checksum_engine() as engine:
        assert during_a_step(engine, engine.get_load)[0]["num_reqs"] == 1
        assert during_a_step(engine, engine.get_server_info)["status"] == "ready"
        assert during_a_step(engine, engine.stats)["running"] == 1
        assert during_a_step(engine, engine.ping) is None
        refused = (
            engine.flush_cache, engine.pause_generation, engine.release_memory_occupation, engine.start_profile,
            lambda: engine.update_weights_from_tensor([]),
        )  # fmt: skip
        for ask in refused:
            assert isinstance(during_a_step(engine, ask), EngineBusyError), ask
        assert engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 2})["meta_info"]


def declare_dead(engine: Engine) -> None:
    """As when a rank has died for whose words the loop waits."""
    engine._parts.core.inbox.close(EngineDeadError("rank 1 of 2 has ended"))


@pytest.mark.parametrize(
    "end, error, words",
    [(Engine.shutdown, EngineClosedError, "shut down"), (declare_dead, EngineDeadError, "rank 1 of 2")],
)
def test_a_processor_that_never_returns_does_not_hold_up_the_end(
    end: Callable[[Engine], None], error: type[FengineError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "GRACE", 0.5)
    with checksum_engine() as engine:
        inside, leave = threading.Event(), threading.Event()

        def processor(logits: Any, params: Any) -> Any:
            inside.set()
            leave.wait(60)
            return logits

        with ThreadPoolExecutor(2) as pool:
            call = pool.submit(engine.generate, input_ids=[1], custom_logit_processor=processor)
            assert inside.wait(SOON)
            pool.submit(end, engine).result(SOON)
            found = call.exception(SOON)
            leave.set()
        assert isinstance(found, error) and words in str(found)
        for thread in engine._parts.core.threads:
            thread.join(SOON)
            assert not thread.is_alive()
        finish(engine)


# -- engines that nobody holds -----------------------------------------------------------------------------------------


def test_an_engine_that_is_dropped_is_collected_with_its_threads() -> None:
    with checksum_engine() as other:
        engine = Engine.from_parts(other._parts, owned=True)
        core, gone = other._parts.core, weakref.ref(engine)
        engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 3})
        del engine
        gc.collect()
        assert gone() is None
        for thread in core.threads:
            thread.join(SOON)
            assert not thread.is_alive()
        finish(other)


def test_a_call_that_waits_is_told_why_its_loop_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fengine.engine.inbox.PATIENCE", 0.001)
    for end in (EngineDeadError("the engine's loop failed: as planned"), None):
        inbox = Inbox(REAL)

        def alive(inbox: Inbox = inbox, end: EngineDeadError | None = end) -> bool:
            return bool(end and inbox.close(end)) and False

        with pytest.raises(EngineDeadError if end else EngineClosedError, match="as planned" if end else "shut down"):
            inbox.call("ping", {}, None, alive)
