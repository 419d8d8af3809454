"""Replicas: several engines behind one face, each in a process of its own with its own devices (data parallelism).

    this process     prompts -> ids -> which replica                      tokens -> text -> caller
    a replica        ids -> scheduler -> steps -> tokens, logprobs        (`api/replica.py`: an engine of one)

A request's seed is resolved before it is routed (`routing.py`), so where it goes changes no bit. A replica that dies
fails its requests by name; the others go on.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, cast

import torch

from fengine.config import EngineConfig
from fengine.core.plain import to_plain
from fengine.engine.load import Loaded
from fengine.engine.output_processor import OutputProcessor
from fengine.engine.parallel.child import NOTHING, Child
from fengine.engine.parallel.progress import error_of, take
from fengine.engine.parallel.remote import Remote, joined
from fengine.engine.parallel.routing import BLOCK, Replica, chosen, prefix_keys
from fengine.engine.parts import Parts
from fengine.engine.request_state import RequestState
from fengine.engine.threads import REAL
from fengine.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    FengineError,
    UnsupportedFeatureError,
)
from fengine.worker.process_group import device_of_rank

KEPT = (
    "pause",
    "label_weights",
    "keep_weights",
    "update_from_disk",
    "use_whitespace",
)  # what a restarted replica is told again


class Replicas:
    """The face of an `EngineCore` over all replicas. Thread-safe."""

    def __init__(self, config: EngineConfig, blocks: int) -> None:
        """Starts the processes. Errors: ConfigError, EngineDeadError and what a replica raises."""
        parallel = config.parallel
        self.system, self.config, self.size = REAL, config, parallel.dp_size
        self._pid, self._lock, self._ready = os.getpid(), threading.RLock(), threading.Condition()
        self.requests = OutputProcessor(cast(Any, self), self.abort)
        self.end: FengineError | None = None
        self._answers: dict[int, tuple[Replica, Any]] = {}  # by call, until it comes: where it goes
        self._numbers, self._kept = count(), dict[str, tuple[Any, ...]]()
        self.replicas = [Replica(rank, blocks) for rank in range(self.size)]
        self._text = threading.Thread(target=self.requests.run, name="fengine-text", daemon=True)
        self._text.start()
        for each in self.replicas:
            self._start(each)
        with self._ready:
            self._ready.wait_for(lambda: self.end or all(each.facts for each in self.replicas))
        if self.end is not None:
            self.close()
            raise self.end

    def _start(self, replica: Replica) -> None:
        config, parallel = self.config, self.config.parallel
        device = device_of_rank(config.model.device or "cpu", replica.rank * parallel.tp_size,
                                self.size * parallel.tp_size)  # fmt: skip
        own = replace(config, model=replace(config.model, device=device), parallel=replace(parallel, dp_size=1))
        start = {"replica": replica.rank, "config": to_plain(own, NOTHING)}

        hear, ended = partial(self._hear, replica), partial(self._died, replica)
        replica.child = Child(start, torch.get_num_threads() // self.size, hear, ended)

    # -- what replicas say ---------------------------------------------------------------------------------------------

    def _hear(self, replica: Replica, told: dict[str, Any]) -> None:
        if "progress" in told:
            self._progress(replica, told["progress"])
        if "answer" in told:
            _, take_answer = self._answers.pop(told["answer"], (None, None))
            if take_answer is not None:
                take_answer(told.get("value"), told.get("failed") and error_of(told["failed"]))
        if "failed_start" in told:
            with self._ready:
                self.end = self.end or error_of(told["failed_start"])
                self._ready.notify_all()
        if "ready" in told:
            for part, name, given, arguments in list(self._kept.values()):
                self._ask(replica, part, name, given, arguments, lambda value, error: None)
            with self._ready:
                replica.facts = told["ready"]
                self._ready.notify_all()

    def _progress(self, replica: Replica, told: Sequence[Any]) -> None:
        finished = []
        with self._lock:
            for each in told:
                state = replica.open.get(each[0])
                if state is None:
                    continue
                take(state, each)
                if state.request.finish is None and state.error is None:
                    continue
                del replica.open[each[0]]
                replica.finished += 1
                replica.learn(prefix_keys(state.request))
                if state.error is None:
                    finished.append(state.request)
                elif self.requests.states.get(each[0]) is state:
                    self.requests.steps.put(([], [self.requests.forget(state.request)]))
            self.requests.landed(finished)

    def _died(self, replica: Replica, how: str) -> None:
        """Its requests and calls end; with `dp_restart` it comes back."""
        error = EngineDeadError(f"replica {replica.rank} of {self.size} {how}; its requests have ended")
        with self._lock:
            was_ready, replica.facts = replica.facts is not None, None
            replica.known.clear()
            failed, replica.open = list(replica.open.values()), {}
            for state in failed:
                state.fail(error)
                self.requests.steps.put(([], [self.requests.forget(state.request)]))
            for number, (asked, answer) in list(self._answers.items()):
                if asked is replica and self._answers.pop(number, None):
                    answer(None, error)
            again = was_ready and self.config.parallel.dp_restart and self.end is None
            if not again and not any(each.facts for each in self.replicas):
                self.end = self.end or EngineDeadError(f"{error}; no replica is left, create a new engine")
        if again:
            self._start(replica)
        with self._ready:
            self._ready.notify_all()

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, states: Sequence[RequestState]) -> None:
        """As `EngineCore.submit`. Errors: UnsupportedFeatureError too, for what cannot go to another process."""
        self.check_process()
        plain = [[to_plain(state.request, NOTHING), state.live] for state in states]
        sent: dict[int, list[Any]] = {}
        with self._lock:
            self._check()
            able = {rank: self._able(rank) for rank in {state.request.dp_rank for state in states}}
            self.requests.enter(states)
            for state, told in zip(states, plain, strict=True):
                keys = prefix_keys(state.request) if self.config.cache.prefix_cache else []
                replica = chosen(able[state.request.dp_rank], keys)
                replica.learn(keys)
                replica.open[state.request.rid] = state
                if state.live:
                    self.requests.live[state.request.rid] = state
                sent.setdefault(replica.rank, []).append(told)
            for rank, requests in sent.items():
                self._send(self.replicas[rank], {"add": requests})

    def _able(self, pinned: int | None) -> list[Replica]:
        """Those that can take a request. Errors: EngineDeadError if there are none."""
        able = [each for each in self.replicas if each.facts is not None and pinned in (None, each.rank)]
        if not able:
            which = f"replica {pinned}" if pinned is not None else "every replica"
            raise EngineDeadError(f"{which} of {self.size} has ended, or is being started again")
        return able

    def _send(self, replica: Replica, value: Any) -> None:
        if replica.child is not None:
            replica.child.send(value)

    def abort(self, states: Sequence[RequestState]) -> None:
        """As `EngineCore.abort`."""
        with self._lock:
            for each in self.replicas:
                if rids := [s.request.rid for s in states if each.open.get(s.request.rid) is s]:
                    self._send(each, {"abort": rids})

    def abort_rids(self, rids: set[str] | None) -> None:
        """As `EngineCore.abort_rids`."""
        with self._lock:
            self._check()
            for each in self.replicas:
                self._send(each, {"abort": None if rids is None else sorted(rids & each.open.keys())})

    # -- commands ------------------------------------------------------------------------------------------------------

    def call(self, name: str, attached: Any = None, **arguments: Any) -> Any:
        """Asks every replica; answers are joined. Errors: what the first raises that does; UnsupportedFeatureError."""
        if attached is not None:
            raise UnsupportedFeatureError(f"{name} with parallel.dp_size={self.size} is not built; use dp_size=1")
        if name == "resume":
            self._kept.pop("pause", None)
        if name == "flush_cache":
            for each in self.replicas:
                each.known.clear()
        return self.ask("core", name, (), arguments)

    def ask(self, part: str, name: str, given: Sequence[Any], arguments: dict[str, Any]) -> Any:
        """As `call`, of a method of a part of their engines."""
        self.check_process()
        self._check()
        if name in KEPT:
            self._kept[name] = (part, name, list(given), arguments)
        waiting: list[tuple[threading.Event, list[Any]]] = []
        for each in [each for each in self.replicas if each.facts is not None]:
            came, found = threading.Event(), list[Any]()

            def answer(value: Any, error: Any, came: Any = came, found: Any = found) -> None:
                found.extend((value, error))
                came.set()

            self._ask(each, part, name, list(given), arguments, answer)
            waiting.append((came, found))
        for came, _ in waiting:
            while not came.wait(1.0):
                self._check()
        for _, (_, error) in waiting:
            if error is not None:
                raise error
        return joined([found[0] for _, found in waiting])

    def _ask(
        self, replica: Replica, part: str, name: str, given: Any, arguments: Any, answer: Callable[[Any, Any], None]
    ) -> None:  # fmt: skip
        number = next(self._numbers)
        self._answers[number] = (replica, answer)
        self._send(replica, {"ask": [number, part, name, given, arguments]})

    def stats(self) -> dict[str, Any]:
        """As `EngineCore.stats`, of all together."""
        return self.call("get_stats")

    def _check(self) -> None:
        if self.end is not None:
            raise type(self.end)(str(self.end))

    @property
    def pids(self) -> list[int]:
        """Of the replicas."""
        return [each.child.process.pid for each in self.replicas if each.child is not None]

    def check_process(self) -> None:
        """Errors: EngineClosedError in a forked child."""
        if os.getpid() != self._pid:
            raise EngineClosedError("this engine belongs to the parent process; create a new Engine after a fork")

    def check_threads(self) -> None:
        """Errors: EngineDeadError if the engine has ended; EngineClosedError."""
        self._check()

    def owns_thread(self) -> bool:
        """Whether the calling thread is one of the engine's own."""
        return threading.current_thread() is self._text

    def close(self) -> None:
        """Ends every replica; what is open ends with EngineClosedError. Idempotent."""
        with self._lock:
            self.end = self.end or EngineClosedError("the engine was shut down; create a new Engine")
        children = [each.child for each in self.replicas if each.child is not None]
        for child in children:
            child.kill()
        for child in children:
            child.close()
        self.requests.steps.put(None)
        if not self.owns_thread():
            self._text.join()
        dead = isinstance(self.end, EngineDeadError)
        self.requests.fail(
            self.end if dead else EngineClosedError("the engine was shut down while the request was running")
        )


def open_replicas(config: EngineConfig, loaded: Loaded, started: float) -> Parts:
    """An engine of replicas. `loaded`: their model without weights. Errors: as `build`; UnsupportedFeatureError."""
    for what, on in {"LoRA adapters": config.lora.on, "images": loaded.spec.vision is not None}.items():
        if on:
            raise UnsupportedFeatureError(
                f"parallel.dp_size={config.parallel.dp_size} with {what} is not built; use dp_size=1"
            )
    if config.scheduler.record is not None:
        raise ConfigError("scheduler.record is of one engine's steps; use parallel.dp_size=1")
    core = Replicas(config, 1 << 16)
    facts = [each.facts or {} for each in core.replicas]
    remote = {part: cast(Any, Remote(core, part, facts[0])) for part in ("weights", "updates", "memory", "profile")}
    for each in core.replicas:
        each.blocks = facts[0]["pool_tokens"] // BLOCK + 1
    return Parts(
        config=config, spec=loaded.spec, tokenizer=loaded.tokenizer, context_length=loaded.context_length,
        pool_tokens=min(each["pool_tokens"] for each in facts), eos_ids=loaded.eos_ids, core=cast(Any, core),
        model_dir=loaded.model_dir, start_seconds=time.perf_counter() - started,
        compile_seconds=max(each["compile_seconds"] for each in facts), compiles_at_start=0, **remote,
        kv_dtype=getattr(torch, facts[0]["kv_dtype"]), kv_bytes=facts[0]["kv_bytes"], pooling=loaded.pooling,
        ranks=core,
    )  # fmt: skip
