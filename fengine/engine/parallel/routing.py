"""`Replica`: one of several as the first process sees it; and which of them a request goes to. A request goes to the
replica that knows most of its prompt's beginning among those that are about as busy as the least busy one. What
replicas know is guessed from the prompts and outputs that they had."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from fengine.config import EngineConfig
from fengine.core.plain import to_plain
from fengine.core.request import ABORTED, Request
from fengine.engine.engine_core import BUSY
from fengine.engine.output_processor import OutputProcessor
from fengine.engine.parallel.child import NOTHING, Child
from fengine.engine.parallel.progress import forget, take, told_of
from fengine.engine.request_state import RequestState
from fengine.errors import EngineBusyError, EngineDeadError, FengineError
from fengine.worker.process_group import device_of_rank

BLOCK = 64  # tokens by which prompts are compared
AWAY = "has ended, or is being started again"
STARTS = 3  # in a row, from which a replica may come to nothing before it is left as it is; processes for a request
CHANGED = "its replica ended, and computed again it is not what was told of it: weights have changed; send it again"
COUNTERS = frozenset(
    "computed_tokens correct_drafts drafts finished hit_tokens output_tokens preemptions steps".split()
)
SLACK = 4  # open requests, and a quarter of those of the least busy replica, that a known prompt may cost


def refusal(answer: Future[Any]) -> str | None:
    """Why a command that has an answer was not carried out; None: it was."""
    if error := answer.exception():
        return str(error)
    value = answer.result()
    return str(value[1]) if isinstance(value, list) and value and value[0] is False else None


class Replica:
    """One of them, as this process sees it. Modifies: itself."""

    def __init__(self, rank: int, blocks: int) -> None:
        """`blocks`: of prompts that it is taken to know."""
        self.rank, self.blocks = rank, blocks
        self.child: Child | None = None
        self.over = False  # its process has ended, and is not started again
        self.facts: dict[str, Any] | None = None  # what it told when it was ready; None: it is not
        self.catching_up: list[Future[Any]] = []  # its answers to what it was told then
        self.read: dict[str, Any] = {}  # what it told last of the files that it has read
        self.strange: str | None = None  # what others have and it has not
        self.error: str | None = None  # why it will end, in its own words
        self.open: dict[str, RequestState] = {}
        self.finished = 0  # requests
        self.told: dict[str, Any] = {}  # its process's stats, as it told them last
        self.past = Counter[str]()  # what the processes before it had counted
        self.calls: dict[int, Future[Any]] = {}  # that have no answer yet
        self.asked = 0
        self.failures = 0  # starts in a row that came to nothing
        self.known: OrderedDict[Hashable, None] = OrderedDict()

    def start(self, config: EngineConfig, folder: str, hear: Callable[..., None], ended: Callable[..., None]) -> Child:
        """Its process. `config`: of all replicas. Errors: ConfigError, OSError."""
        model, parallel, gpus = config.model, config.parallel, config.parallel.tp_size
        device = device_of_rank(model.device or "cpu", self.rank * gpus, parallel.dp_size * gpus)
        own = replace(config, model=replace(model, device=device), parallel=replace(parallel, dp_size=1))
        told = {"replica": self.rank, "config": to_plain(own, NOTHING), "folder": folder}
        self.child = Child(told, torch.get_num_threads() // parallel.dp_size, hear, ended)
        return self.child

    @property
    def caught_up(self) -> bool:
        return all(answer.done() for answer in self.catching_up)

    @property
    def fault(self) -> str | None:
        """Why it takes no requests."""
        if self.facts is None or not self.caught_up:
            return AWAY
        faults = filter(None, map(refusal, self.catching_up))
        why = next((f"was started again, but not with all that the others have: {why}" for why in faults), None)
        return why or self.strange

    def hear_stats(self, answer: Future[Any]) -> None:
        if answer.exception() is None:
            self.told = answer.result()

    @property
    def stats(self) -> dict[str, Any]:
        """Of all its processes: counters never fall."""
        return {name: value + self.past[name] if name in COUNTERS else value for name, value in self.told.items()}

    def send(self, value: Any) -> None:
        """To its process, if there is one."""
        if self.child is not None:
            self.child.send(value)

    def end(self, error: FengineError) -> list[RequestState]:
        """Forgets what its process was and knew. Returns its requests; calls fail."""
        self.failures, self.facts = 0 if self.facts else self.failures + 1, None
        lost, self.open = list(self.open.values()), {}
        calls, self.calls = self.calls, {}
        for answer in calls.values():
            answer.set_exception(error)
        self.known.clear()
        self.past.update({name: value for name, value in self.told.items() if name in COUNTERS})
        self.told = {name: value if isinstance(value, str) else type(value)() for name, value in self.told.items()}
        return lost

    def hit(self, keys: Iterable[Hashable]) -> int:
        """How many blocks of a prompt it knows."""
        found = 0
        for key in keys:
            if key not in self.known:
                break
            found += 1
        return found

    def learn(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self.known[key] = None
            self.known.move_to_end(key)
        while len(self.known) > self.blocks:
            self.known.popitem(last=False)


def prefix_keys(request: Request) -> list[Hashable]:
    """One for each whole block, of all tokens up to its end. Pure."""
    key, ids, found, salts = 0, request.token_ids, list[Hashable](), request.salted(BLOCK) or {}
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        key = hash((key, salts.get(end // BLOCK - 1), *ids[end - BLOCK : end]))
        found.append(key)
    return found


def chosen(replicas: Sequence[Replica], keys: Sequence[Hashable]) -> Replica:
    """Of those that can take a request, the one for a prompt of such blocks. Pure."""
    least = min(len(each.open) for each in replicas)
    near = [each for each in replicas if len(each.open) <= least + SLACK + least // 4]
    return max(near, key=lambda each: (each.hit(keys), -len(each.open), -each.rank))


class Routes:
    """The requests that are open: each is at a replica, or waits for one. In the lock of `Replicas`. Modifies: itself,
    the replicas, the requests."""

    def __init__(self, replicas: Sequence[Replica], requests: OutputProcessor, by_prefix: bool) -> None:
        """`by_prefix`: whether replicas keep what they know of prompts."""
        self.replicas, self.requests, self.by_prefix = replicas, requests, by_prefix
        self.waiting: dict[str, tuple[RequestState, list[Any]]] = {}  # for a replica that takes requests
        self.held = 0  # calls during which none is sent
        self._tries: dict[RequestState, int] = {}  # processes that one has lost; STARTS: it is being aborted

    def able(self, pinned: int | None) -> list[Replica]:
        """Those that can take a request; none if one will be. Errors: EngineDeadError if there will be none."""
        found = [each for each in self.replicas if pinned in (None, each.rank)]
        able = [each for each in found if each.fault is None]
        if not able and not any(each.fault == AWAY and not each.over for each in found):
            which = f"replica {pinned}" if pinned is not None else "every replica"
            raise EngineDeadError(f"{which} of {len(self.replicas)} {found[0].fault}")
        return [] if self.held else able

    def hold(self, idle: bool) -> None:
        """None is sent from here on, or one replica would give its memory back and another refuse. Errors:
        EngineBusyError, with `idle`, if some are open."""
        if idle and self.requests.states:
            raise EngineBusyError(BUSY)
        self.held += 1

    def send(self, given: Iterable[tuple[RequestState, list[Any]]]) -> None:
        """Each to a replica that takes requests; it waits where there is none yet, and fails where none will be."""
        sent: dict[int, list[Any]] = {}
        for state, told in given:
            try:
                able = self.able(state.request.dp_rank)
            except EngineDeadError as error:
                self._fail(state, error)
                continue
            if not able:
                self.waiting[state.request.rid] = state, told
                continue
            keys = prefix_keys(state.request) if self.by_prefix else []
            replica = chosen(able, keys)
            replica.learn(keys)
            replica.open[state.request.rid] = state
            sent.setdefault(replica.rank, []).append(told)
        for rank, requests in sent.items():
            self.replicas[rank].send({"add": requests})

    def send_waiting(self) -> None:
        waiting, self.waiting = self.waiting, {}
        self.send(waiting.values())

    def lose(self, states: Sequence[RequestState], error: EngineDeadError, again: bool) -> None:
        """Their process has ended: they are computed `again`, with the same bits, or fail."""
        for state in states:
            tries = self._tries.pop(state, 0) + 1
            if tries > STARTS:
                self._abort(state)
            elif again and tries < STARTS:
                self._tries[state] = tries
                if not state.live:
                    forget(state)
                self.waiting[state.request.rid] = state, told_of(state)
            else:
                self._fail(state, error)
        self.send_waiting()

    def _fail(self, state: RequestState, error: FengineError) -> None:
        self._tries.pop(state, None)
        state.fail(error)
        self.requests.steps.put(([], [self.requests.forget(state.request)]))

    def _abort(self, state: RequestState) -> None:
        """One that no process has."""
        self._tries.pop(state, None)
        request, version = state.request, self.replicas[0].told.get("weight_version", "default")
        request.versions = request.versions or ((version, 0),)
        request.finish = {"type": "abort", "message": ABORTED}
        self.requests.landed([request])

    def end(self, meant: Mapping[str, RequestState]) -> None:
        """Those that are meant."""
        for rid in [rid for rid, (state, _) in self.waiting.items() if meant.get(rid) is state]:
            self._abort(self.waiting.pop(rid)[0])
        for each in self.replicas:
            if found := {rid: state for rid, state in each.open.items() if meant.get(rid) is state}:
                self._tries |= dict.fromkeys(found.values(), STARTS)  # should the process end before they have
                each.send({"abort": [*found]})

    def progress(self, replica: Replica, told: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Takes what is new of the requests at a replica."""
        finished = []
        for rid, news in told:
            state = replica.open.get(rid)
            if state is None:
                continue
            if not take(state, news):
                replica.send({"abort": [rid]})
                state.fail(EngineDeadError(f"request {rid!r}: {CHANGED}"))
            if state.request.finish is None and state.error is None:
                continue
            del replica.open[rid]
            self._tries.pop(state, None)
            replica.finished += 1
            replica.learn(prefix_keys(state.request))
            if state.error is None:
                finished.append(state.request)
            elif self.requests.states.get(rid) is state:
                self.requests.steps.put(([], [self.requests.forget(state.request)]))
        self.requests.landed(finished)
