"""`Request`: what the scheduler moves along, from its arrival to its end; derived seeds. No torch."""

import hashlib
import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fengine.core.images import ImageSpan, Placed, RopePositions, page_salts
from fengine.core.sampling_params import SamplingParams

__all__ = ["Adapter", "Request", "SamplingParams", "Status", "derive_seed", "new_id"]


_ids: list[str] = []  # that nobody has got yet
os.register_at_fork(after_in_child=_ids.clear)


def new_id() -> str:
    """128 random bits of the system's in hex, drawn for many ids at a time: nobody can guess the next one."""
    try:
        return _ids.pop()
    except IndexError:
        drawn = os.urandom(16 * 256).hex()
        _ids.extend(drawn[i : i + 32] for i in range(32, len(drawn), 32))
        return drawn[:32]


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from (engine seed, request index, ...): SHA-256, so that neighbours are unrelated. Pure."""
    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Status(Enum):
    WAITING = "waiting"  # in the queue: new, or preempted
    RUNNING = "running"  # owns pages and a row slot
    FINISHED = "finished"


# Why a request ended, as callers read it: {"type": "stop", "matched": token id, stop string or pattern},
# {"type": "length", "length"} or {"type": "abort", "message"}; with `status_code` and `err_type` if by its own fault.
FinishReason = dict[str, Any]
ABORTED = "Aborted"  # the message where somebody has aborted it


@dataclass(slots=True)
class Drafting:
    """How a request's drafts fared so far. Modifies: itself, by the loop alone."""

    in_flight: int = 0  # drafts of the step that is not read yet
    last: tuple[int, int] | None = None  # drafts of the last try, and how many were drawn; None: they are learnt from
    proposed: int = 0  # drafts of all tries
    correct: int = 0
    histogram: list[int] = field(default_factory=list)  # tries by how many of their drafts were drawn
    rest_until: int = 0  # set by the proposer: it need not be asked before so many tokens are computed
    try_from: int = 0  # set by a model that proposes: it rests before
    gain: float = 0.0  # of a try of it, in tokens
    hope_from: int = 1 << 40  # if nobody has tried it until so many tokens are computed, it is as a new request again
    memo: Any = None  # the proposer's own: what it knows of the tokens, and what it has learnt


@dataclass(slots=True, eq=False, weakref_slot=True)
class Adapter:
    """One load of a LoRA adapter, which requests refer to; loaded again it is another one."""

    name: str
    number: int  # of the load: what was computed under one is not reused under another
    image: Any  # its bytes in pieces; for the worker's eyes
    pinned: bool = False  # its slot is not given to another


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Only the scheduler changes it after `Scheduler.add`. `token_ids` = prompt + drawn tokens that the
    host knows. With overlapped scheduling one more drawn token may be in flight on the device (`num_pending`);
    `num_computed` counts tokens whose KV is written, or scheduled to be."""

    rid: str
    prompt_len: int
    token_ids: list[int]
    params: SamplingParams
    seed: int  # the resolved sampling seed: the caller's, or derived from (engine seed, request index)
    max_new_tokens: int  # after clamping to context and pool
    stop_ids: frozenset[int]  # eos ids and stop_token_ids that end it; with ignore_eos none, unless it has a grammar
    arrival: int = 0  # set by Scheduler.add; the order of service in FCFS and of preemption
    full: int = 0  # set by Scheduler.add: its tokens when all that were asked for are drawn
    logprobs: list[float] = field(default_factory=list)
    status: Status = Status.WAITING
    finish: FinishReason | None = None
    row: int | None = None  # row slot in the batch's tables while running
    pages: list[int] = field(default_factory=list)
    window_start: int = 0  # of these, the first that windows of its later tokens can reach
    reached: Any = None  # how far they are in the prefix cache, in the cache's own terms
    num_computed: int = 0
    num_pending: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preempted: int = 0
    versions: tuple[tuple[str, int], ...] = ()  # (weight version, number of output tokens where it began to draw)
    cache_salt: str | None = None
    salts: Mapping[int, Hashable] | None = None  # set by Scheduler.add: of pages in the prefix cache
    images: tuple[ImageSpan, ...] = ()  # in the prompt, from its start on
    placed: tuple[Placed, ...] = ()  # while it runs: where their embeddings lie
    rope: RopePositions | None = None  # None: every token stands at its index
    adapter: Adapter | None = None
    adapter_slot: int | None = None  # where the adapter lies while the request runs
    priority: int = 0  # the higher, the earlier it is admitted
    early_ids: frozenset[int] = frozenset()  # banned beside stop_ids until min_new_tokens
    num_scored: int = 0  # input logprobs that have been read
    num_seen: int = 0  # prompt tokens up to here have given their hidden state
    unasked: tuple[float, int] | None = None  # max_new_tokens 0: logprob and id of the token drawn all the same
    dp_rank: int | None = None  # the replica that it must go to, where there are several
    call_rid: str | None = None  # what its caller calls it, where it is one of several results that need rids
    drafting: Drafting | None = None  # set by Scheduler.add where drafts may be computed for it

    def salted(self, page_size: int) -> Mapping[int, Hashable] | None:
        """Requests with another salt at a page never share that page, nor those behind it, with this one. Pure."""
        own = self.cache_salt if self.adapter is None else (self.adapter.number, self.cache_salt)
        if not self.images:
            return None if own is None else {0: (own,)}
        return page_salts(own, self.images, page_size)

    def as_told(self) -> "Request":
        """What a worker learns of a request that has just got its row: a copy, which no scheduler changes. Its tokens
        are empty where params are bare."""
        return Request(
            self.rid, self.prompt_len, [] if self.params.bare else list(self.token_ids), self.params, self.seed,
            self.max_new_tokens, self.stop_ids, row=self.row, placed=self.placed, rope=self.rope,
            num_seen=self.num_seen, num_scored=self.num_scored, early_ids=self.early_ids,
            adapter_slot=self.adapter_slot,
        )  # fmt: skip

    @property
    def slot(self) -> int:
        """The row slot of a request that runs."""
        assert self.row is not None
        return self.row

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def first_scored(self) -> int:
        """The prompt position whose hidden state gives the next input logprob; prompt_len if none is lacking. The first
        one, of the token at `logprob_start`, is None: it needs no hidden state, and lands with the next."""
        start = self.params.logprob_start
        if start is None or self.num_scored >= self.prompt_len - start:
            return self.prompt_len
        return start + max(self.num_scored - 1, 0)

    @property
    def first_needed(self) -> int:
        """The first prompt position whose hidden state is still lacking; prompt_len if none is. So far at most may a
        prefix be taken from the cache. Hidden states are asked of tokens that were computed only."""
        params, due = self.params, self.prompt_len
        if self.first_scored + 1 < self.prompt_len:
            due = self.first_scored
        if params.pool not in (None, "cls", "last") or (params.hidden == "full" and self.num_preempted):
            due = min(due, max(self.num_seen, self.num_cached if self.num_preempted else 0))
        if params.pool == "cls" and not self.num_seen:
            due = 0
        return due
