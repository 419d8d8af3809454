"""Replicas: several engines behind one face, each in a process of its own with its own devices (data parallelism).

    this process     prompts -> ids -> which replica                      tokens -> text -> caller
    a replica        ids -> scheduler -> steps -> tokens, logprobs        (`api/replica.py`: an engine of one)

A request's seed is resolved before it is routed (`routing.py`), so where it goes changes no bit. A replica that dies
fails its requests by name; the others go on. With `dp_restart` they are computed again, by whoever takes requests."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, cast

from fengine.config import EngineConfig
from fengine.core.owned import Folder
from fengine.engine.inbox import Inbox
from fengine.engine.output_processor import OutputProcessor
from fengine.engine.parallel.kept import CHANGES, Kept
from fengine.engine.parallel.progress import error_of, told_of
from fengine.engine.parallel.remote import joined, not_built, plain_command
from fengine.engine.parallel.routing import AWAY, STARTS, Replica, Routes
from fengine.engine.request_state import RequestState
from fengine.engine.threads import REAL
from fengine.errors import EngineClosedError, EngineDeadError, ModelLoadError

logger = logging.getLogger("fengine")


class Replicas:
    """The face of an `EngineCore` over all replicas. Thread-safe."""

    def __init__(self, config: EngineConfig, blocks: int, own: dict[str, Any]) -> None:
        """Starts the processes. `own`: as of `Kept`. Errors: ConfigError, EngineDeadError and what a replica raises."""
        self.system, self.config, self.size = REAL, config, config.parallel.dp_size
        self.inbox = Inbox(REAL)  # says whether requests and commands are taken
        self._lock = threading.Condition(cast(Any, self.inbox.lock))
        self._changes, self._began = threading.Lock(), False
        self.requests = OutputProcessor(cast(Any, self), self.abort)
        self.folder = Folder("fengine-replicas-")
        self.replicas = [Replica(rank, blocks) for rank in range(self.size)]
        self._routes = Routes(self.replicas, self.requests, config.cache.prefix_cache)
        self._kept = Kept(self.replicas, [name for name, _ in config.lora.named()], own)
        self._text = threading.Thread(target=self.requests.run, name="fengine-text", daemon=True)
        self._text.start()
        with ExitStack() as broken:
            broken.callback(self.close)  # also where whoever waits is interrupted
            for each in self.replicas:
                self._start(each)
            self.folder.make()
            with self._lock:
                self._lock.wait_for(lambda: self.inbox.end or all(each.facts for each in self.replicas))
                if faults := [f"replica {each.rank} {each.fault}" for each in self.replicas if each.strange]:
                    self.inbox.close(cast(Any, ModelLoadError(faults[0])))
            self.inbox.check()
            broken.pop_all()
        self._began = True

    def _start(self, replica: Replica) -> None:
        child = replica.start(self.config, self.folder.name, partial(self._hear, replica), partial(self._died, replica))
        if self.inbox.end is not None:  # `close` may have come before it
            child.close()

    def _hear(self, replica: Replica, told: dict[str, Any]) -> None:
        with self._lock:
            replica.read = told.get("read", replica.read)
            if "progress" in told:
                self._routes.progress(replica, told["progress"])
            if "answer" in told and (answer := replica.calls.pop(told["answer"], None)):
                if told.get("failed"):
                    answer.set_exception(error_of(told["failed"]))
                else:
                    answer.set_result(told["value"])
                if answer in replica.catching_up:
                    self._compare()
            replica.error = told.get("error", replica.error)
            if "failed_start" in told:
                error, replica.failures = error_of(told["failed_start"]), STARTS
                replica.error = str(error)
                if not self._began:
                    self.inbox.close(cast(Any, error))
            if "ready" in told:
                replica.facts, replica.strange = told["ready"], AWAY
                replica.told = told["ready"].get("stats", replica.told)
                replica.catching_up = self._ask(replica, *self._kept.commands)
                self._compare()
            self._lock.notify_all()

    def _compare(self) -> None:
        """One that was started again may take requests."""
        self._kept.compare()
        self._routes.send_waiting()
        self._lock.notify_all()

    def _died(self, replica: Replica, how: str) -> None:
        """Its requests and calls end; with `dp_restart` it comes back."""
        with self._lock:
            how, replica.error = f"failed: {replica.error}" if replica.error else how, None
            told = f"replica {replica.rank} of {self.size} {how}"
            error = EngineDeadError(f"{told}; its requests have ended")
            begun = self._began or replica.facts is not None
            lost = replica.end(error)
            again = begun and self.config.parallel.dp_restart and replica.failures < STARTS and self.inbox.end is None
            if self._began:
                logger.warning("%s; it is%s started again", told, "" if again else " not")
            replica.over = not again
            if not again and not (self._began and any(not each.over for each in self.replicas)):
                self.inbox.close(EngineDeadError(f"{error}; no replica is left, create a new engine"))
            self._routes.lose(lost, error, self.config.parallel.dp_restart and self.inbox.end is None)
            self._lock.notify_all()
        if again:
            try:
                self._start(replica)
            except OSError as fault:
                self._died(replica, f"cannot be started: {fault}")

    def submit(self, states: Sequence[RequestState]) -> None:
        """As `EngineCore.submit`. Errors: UnsupportedFeatureError too, for what cannot go to another process."""
        self.check_process()
        given = [(state, told_of(state)) for state in states]
        with self._lock:
            self.inbox.check()
            for pinned in {state.request.dp_rank for state in states}:
                self._routes.able(pinned)
            self.requests.enter(states)
            self.requests.live.update((state.request.rid, state) for state in states if state.live)
            self._routes.send(given)

    def abort(self, states: Sequence[RequestState]) -> None:
        """As `EngineCore.abort`."""
        if self.inbox.here:
            with self._lock:
                self._routes.end({state.request.rid: state for state in states})

    def abort_rids(self, rids: set[str] | None) -> None:
        """As `EngineCore.abort_rids`."""
        with self._lock:
            self.inbox.check()
            known = self.requests.states
            self._routes.end(dict(known) if rids is None else {rid: known[rid] for rid in rids & known.keys()})

    def call(self, name: str, attached: Any = None, **arguments: Any) -> Any:
        """Asks every replica; answers are joined. Errors: what the first raises that does; UnsupportedFeatureError."""
        if attached is not None:
            raise not_built(f"core.{name}", self.size)
        if name == "get_stats":
            return self.stats()
        if arguments.get("mode") == "abort":  # of a pause
            self.abort_rids(set(self._routes.waiting))
        if name == "flush_cache":
            with self._lock:  # others learn
                for each in self.replicas:
                    each.known.clear()
        return self.ask("core", name, **arguments)

    def ask(self, part: str, name: str, *given: Any, **arguments: Any) -> Any:
        """As `call`, of a method of a part of their engines."""
        self.check_process()
        command = plain_command([part, name, given, arguments])
        with ExitStack() as held:
            held.enter_context(self._changes if part in CHANGES else nullcontext())
            with self._lock:
                self._lock.wait_for(self._all_caught_up)
                self.inbox.check()
                if part == "memory":
                    self._routes.hold(idle=name == "release")
                trial = self._kept.begin(command)
                there = {each: each.child for each in self.replicas if each.facts}
                asked = [(each, self._ask(each, command)[0]) for each in there]

            @held.callback
            def finish() -> None:
                wait([answer for _, answer in asked])
                with self._lock:
                    self._kept.end(trial, command, asked)
                    self._routes.held -= part == "memory"
                    self._compare()

            try:
                wait([answer for _, answer in asked])
            except BaseException:  # whoever asked is interrupted: they are told all the same, before another change is
                threading.Thread(target=held.pop_all().close, name="fengine-answers", daemon=True).start()
                raise
        left = [answer for each, answer in asked if each.facts and each.child is there[each]]
        if not left or not self.config.parallel.dp_restart:  # which tells one that has died meanwhile when it is back
            left = [answer for _, answer in asked]
        return joined([answer.result() for answer in left])

    def _all_caught_up(self) -> bool:
        """Nobody is told what holds any more, but if all have ended: what is asked comes behind that."""
        there = any(each.facts for each in self.replicas) and all(each.caught_up for each in self.replicas)
        return there or self.inbox.end is not None

    def ask_one(self, part: str, name: str, *given: Any) -> Any:
        """As `ask`, of one that takes requests, while none changes. Errors: also EngineDeadError if there is none."""
        self.check_process()
        with self._changes:
            with self._lock:
                self._lock.wait_for(lambda: self.inbox.end or self._routes.able(None))
                self.inbox.check()
                answer = self._ask(self._routes.able(None)[0], plain_command([part, name, given, {}]))[0]
            return answer.result()

    def _ask(self, replica: Replica, *commands: list[Any]) -> list[Future[Any]]:
        """Has them carried out one after another. Errors, of answers: also EngineDeadError, EngineClosedError."""
        first, answers = replica.asked + 1, [Future[Any]() for _ in commands]
        replica.asked += len(commands)
        replica.calls |= enumerate(answers, first)
        replica.send({"ask": [[number, *command] for number, command in enumerate(commands, first)]})
        return answers

    def stats(self) -> dict[str, Any]:
        """As `EngineCore.stats`, of all together; also of processes that have ended, and behind the end of all."""
        with suppress(EngineDeadError):
            self.each_stats()
        with self._lock:
            return joined([each.stats for each in self.replicas if each.told])

    def each_stats(self) -> dict[int, dict[str, Any]]:
        """As `EngineCore.each_stats`, of those that are there."""
        self.check_process()
        with self._lock:
            self.inbox.check()
            asked = {each: self._ask(each, ["core", "get_stats", (), {}])[0] for each in self.replicas if each.facts}
            for each, answer in asked.items():
                answer.add_done_callback(each.hear_stats)
        wait(asked.values())
        with self._lock:
            self.inbox.check()
            return {each.rank: each.stats for each, answer in asked.items() if answer.exception() is None}

    def check_process(self) -> None:
        """Errors: EngineClosedError in a forked child."""
        self.inbox.check_process()

    def check_threads(self) -> None:
        """Errors: EngineDeadError if the engine has ended; EngineClosedError."""
        self.inbox.check()

    @property
    def pids(self) -> list[int]:
        return [each.child.process.pid for each in self.replicas if each.child is not None]

    def owns_thread(self) -> bool:
        return threading.current_thread() is self._text

    def close(self) -> None:
        """Ends every replica; what is open ends with EngineClosedError. Idempotent."""
        self.inbox.close(EngineClosedError("the engine was shut down; create a new Engine"))
        children = [each.child for each in self.replicas if each.child is not None]
        for child in children:
            child.kill()
        for child in children:
            child.close()
        self.folder.cleanup()
        self.requests.steps.put(None)
        if not self.owns_thread():
            self._text.join()
        dead, closed = self.inbox.end, EngineClosedError("the engine was shut down while the request was running")
        error = dead if isinstance(dead, EngineDeadError) else closed
        self.requests.fail(error)
        with self._lock:
            for each in self.replicas:
                each.end(error)
            self._lock.notify_all()
