"""`Replica`: one of several as the first process sees it; and which of them a request goes to. A request goes to the
replica that knows most of its prompt's beginning among those that are about as busy as the least busy one. What
replicas know is guessed from the prompts and outputs that they had."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from fengine.config import EngineConfig
from fengine.core.plain import to_plain
from fengine.core.request import Request
from fengine.engine.parallel.child import NOTHING, Child
from fengine.engine.request_state import RequestState
from fengine.errors import FengineError
from fengine.worker.process_group import device_of_rank

BLOCK = 64  # tokens by which prompts are compared
AWAY = "has ended, or is being started again"
STARTS = 3  # in a row, from which a replica may come to nothing before it is left as it is
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

    def send(self, value: Any) -> None:
        """To its process, if there is one."""
        if self.child is not None:
            self.child.send(value)

    def end(self, error: FengineError) -> list[RequestState]:
        """Forgets what its process was and knew. Returns the requests that have failed by it; so do calls."""
        self.failures, self.facts = 0 if self.facts else self.failures + 1, None
        failed, self.open = list(self.open.values()), {}
        for state in failed:
            state.fail(error)
        calls, self.calls = self.calls, {}
        for answer in calls.values():
            answer.set_exception(error)
        self.known.clear()
        return failed

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
