"""A device made of hashes, and a loop around the real scheduler: the oracle of the host column.

Each slot of each page holds H(the prefix of tokens up to its position) instead of KV. A step writes the slots of all
its rows first, as a layer does, and then checks that every slot that a row can see, through a page table kept up from
`SchedulerOutput` alone, holds the hash of that request's own prefix. The next token is H(seed, all tokens before). So
any wrong page, slot, length, stale hit, eviction, preemption or feed fails in the step where it happens.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate

from books import check_scheduler

from fengine.config import Policy
from fengine.core.kv_pages import PagePool
from fengine.core.prefix_cache import PrefixCache
from fengine.core.request import Request, SamplingParams, Status
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput
from fengine.core.speculation import Ask, Proposer, Speculation
from fengine.core.window_pages import WindowPages, Windows
from fengine.errors import CapacityError
from fengine.speculative.ngram import ngram_proposer

Result = tuple[list[int], list[float]]


@dataclass
class Job:
    """A request to come: when it arrives, when it is aborted, and at which output its logits are NaN."""

    prompt: list[int]
    max_new_tokens: int
    arrival: int = 0
    abort: int | None = None
    nan_at: int | None = None
    stop_ids: frozenset[int] = frozenset()
    lockstep: bool = False


@dataclass
class Case:
    jobs: list[Job]
    page_size: int = 4
    num_pages: int = 32
    rows: int = 4
    budget: int = 16
    policy: Policy = Policy.fcfs
    cached: bool = True
    lag: int = 0  # steps scheduled before the update of an earlier one
    vocab: int = 5
    guess: str | None = None  # how well drafts are guessed, see `guesser`; None: no speculation
    draft_room: int = 32  # tokens of a step up to which drafts fill it
    windows: Windows | None = None


def chain(before: int, token: int) -> int:
    return hash((before, token))  # ints only, so the same in every process


def chained(tokens: list[int], before: int = 0) -> list[int]:
    """The `chain` up to each of the tokens."""
    return list(accumulate(tokens, chain, initial=before))[1:]


def draw(seed: int, prefix: int, vocab: int) -> tuple[int, float]:
    value = hash((seed, prefix))
    return value % vocab, -(value % 1009) / 1009


def solo(job: Job, seed: int, vocab: int) -> tuple[list[int], list[float], str]:
    """Output tokens, logprobs and kind of finish of a request that runs alone, without pages."""
    prefix, tokens, logprobs = 0, [], []
    for token in job.prompt:
        prefix = chain(prefix, token)
    while len(tokens) < job.max_new_tokens:
        if job.nan_at == len(tokens):
            return tokens, logprobs, "abort"
        token, logprob = draw(seed, prefix, vocab)
        tokens.append(token)
        logprobs.append(logprob)
        if token in job.stop_ids:
            return tokens, logprobs, "stop"
        prefix = chain(prefix, token)
    return tokens, logprobs, "abort" if job.nan_at == 0 and not tokens else "length"


class HashDevice:
    """Executes steps in the order in which it gets them, from what they tell alone. Fails on the first wrong slot."""

    def __init__(self, case: Case, jobs: dict[str, Job]) -> None:
        self.case, self.jobs = case, jobs
        starts: list[Callable[[int], int]] = [] if case.windows and case.windows.alone else [lambda position: 0]
        counts = [case.num_pages] * len(starts)
        if case.windows:
            starts.append(case.windows.window_start)
            counts.append(case.windows.num_pages)
        self.starts = starts  # of each group of layers: the first page that a token reads
        self.slots: list[list[int | None]] = [[None] * (count * case.page_size) for count in counts]
        self.tables: dict[int, list[list[int]]] = {}  # page tables by row slot
        self.new: dict[int, Request] = {}  # what runs in a row slot
        self.ids: dict[int, list[int]] = {}  # tokens by row slot, as far as they are known; a hit's come from its job
        self.prefixes: dict[int, list[int]] = {}  # the `chain` up to each of them
        self.drafts = 0
        self.drawn: dict[int, int] = {}  # token by row slot, of the step before

    def execute(self, step: SchedulerOutput) -> Result:
        """Drawn tokens and logprobs of every row, and behind every draft; rows that do not sample get rubbish."""
        self._tables_from(step)
        drafts = dict(step.drafts)
        rows = self._tokens(step, drafts)
        self._write(step, rows)
        draws: list[tuple[int, float]] = []
        for i, ids in enumerate(rows):
            token, logprob = self._draw(step.rows[i], step.starts[i], len(ids) - len(drafts.get(i, [])))
            draws.append((token if step.samples[i] else 999, logprob))
        self.drawn = {row: t for row, (t, _), s in zip(step.rows, draws, step.samples, strict=False) if s}
        for i, draft in step.drafts:
            ends = range(len(rows[i]) - len(draft) + 1, len(rows[i]) + 1)
            draws += [self._draw(step.rows[i], step.starts[i], end) for end in ends]
        self.drafts += len(draws) - len(rows)
        assert step.num_draws == len(draws)
        return [token for token, _ in draws], [logprob for _, logprob in draws]

    def _draw(self, row: int, start: int, end: int) -> tuple[int, float]:
        new = self.new[row]
        token, logprob = draw(new.seed, self._attend(row, start, end), self.case.vocab)
        return token, math.nan if self.jobs[new.rid].nan_at == end - new.prompt_len else logprob

    def _tables_from(self, step: SchedulerOutput) -> None:
        assert len(set(step.rows)) == len(step.rows) <= self.case.rows
        assert sum(step.counts) <= self.case.budget and min(step.counts) > 0
        for row in step.released:
            self.new.pop(row, None)  # in one step it may have been given out and back
        for new in step.new_rows:
            assert new.slot not in self.new, "a slot is given to a second request"
            self.new[new.slot], self.tables[new.slot] = new, [[] for _ in self.slots]
            self.ids[new.slot], self.prefixes[new.slot] = [], []
            self.drawn.pop(new.slot, None)
        for row, first, pages, windows in step.new_pages:
            assert row in step.rows and pages and (self.case.windows or 0 not in pages)
            for table, told in zip(self.tables[row], (pages, windows)[: len(self.slots)], strict=True):
                assert first <= len(table) and len(told) == len(pages)
                table[first:] = list(told)
        for i, (row, start, count) in enumerate(zip(step.rows, step.starts, step.counts, strict=True)):
            guessed, job = len(dict(step.drafts).get(i, [])), self.jobs[self.new[row].rid]
            held = len(self.tables[row][0])  # pages of drafts that were wrong may stand behind
            assert held >= -(-(start + count) // self.case.page_size), "new_pages does not tell the whole page table"
            assert start + count <= len(job.prompt) + max(job.max_new_tokens - bool(guessed), 0)

    def _tokens(self, step: SchedulerOutput, drafts: dict[int, list[int]]) -> list[list[int]]:
        """All tokens of each row up to the end of its chunk, drafts included.

        One that the host does not know is fed from the step before, or what is in front of a chunk from the row's own
        past: its earlier steps, or its prompt and draws where the prefix cache had them.
        """
        rows, at = [], 0
        for i, (row, start, count) in enumerate(zip(step.rows, step.starts, step.counts, strict=True)):
            job, ids = self.jobs[self.new[row].rid], step.token_ids[at : at + count]
            if fed := [k - at for k in step.fed if at <= k < at + count]:
                assert fed == [count - 1 - len(drafts.get(i, []))] and ids[fed[0]] == 0
                assert not job.lockstep, "a lockstep row is fed a token that the host does not know"
                ids[fed[0]] = self.drawn[row]
            known, prefixes = self.ids[row][:start], self.prefixes[row][:start]
            if len(known) < start:  # a prefix hit
                known = (job.prompt + solo(job, self.new[row].seed, self.case.vocab)[0])[:start]
                prefixes = chained(known)
            self.ids[row] = known + ids
            self.prefixes[row] = prefixes + chained(ids, prefixes[-1] if prefixes else 0)
            assert self.ids[row][: len(job.prompt)] == job.prompt[: start + count]
            assert ids[count - len(drafts.get(i, [])) :] == drafts.get(i, [])
            assert step.samples[i] or start + count < len(job.prompt) + job.max_new_tokens
            rows.append(self.ids[row])
            at += count
        assert at == len(step.token_ids)
        return rows

    def _slot(self, pages: list[int], position: int) -> int:
        return pages[position // self.case.page_size] * self.case.page_size + position % self.case.page_size

    def _write(self, step: SchedulerOutput, rows: list[list[int]]) -> None:
        written: set[tuple[int, int]] = set()
        for row, start, ids in zip(step.rows, step.starts, rows, strict=True):
            for position in range(start, len(ids)):
                for group, table in enumerate(self.tables[row]):
                    slot = self._slot(table, position)
                    assert slot >= self.case.page_size, "a row writes to the null page"
                    assert (group, slot) not in written, "two rows write one slot"
                    written.add((group, slot))
                    self.slots[group][slot] = self.prefixes[row][position]

    def _attend(self, row: int, start: int, end: int) -> int:
        """Reads what all tokens from `start` to `end` see, and what their kernels read besides."""
        size, prefixes = self.case.page_size, self.prefixes[row][:end]
        for slots, table, first in zip(self.slots, self.tables[row], self.starts, strict=True):
            read = [slot for page in table[first(start) :] for slot in slots[page * size : (page + 1) * size]]
            seen = prefixes[first(start) * size :]
            assert read[: len(seen)] == seen, f"{self.new[row].rid} reads a wrong slot before {end}"
        return prefixes[-1]


@dataclass
class Run:
    """A case that has run to its end."""

    case: Case
    scheduler: Scheduler
    requests: list[Request]
    log: list[tuple] = field(default_factory=list)
    discarded: int = 0  # tokens of requests that had ended when they arrived
    refused: int = 0
    shared_in_step: int = 0  # prefix hits on pages that were computed in the same step
    late: int = 0  # tokens that arrived for a preempted request
    most_rows: int = 0


def guesser(case: Case) -> Proposer | None:
    """Proposers that know what will be drawn, and use it well or badly. Two of them also when they should not know."""
    solos = {f"r{i}": job.prompt + solo(job, 1000 + i, case.vocab)[0] for i, job in enumerate(case.jobs)}

    def right(ask: Ask) -> list[int]:
        return solos[ask.request.rid][len(ask.request.token_ids) + ask.skip :]

    def wrong(ask: Ask) -> list[int]:
        return [(token + 1) % case.vocab for token in right(ask)]

    def mixed(ask: Ask) -> list[int]:
        good = len(ask.request.token_ids) * 7 % 5
        return right(ask)[:good] + wrong(ask)[good:]

    def foreign(ask: Ask) -> list[int]:
        return [*right(ask)[:2], (-1, case.vocab, 10**30)[len(ask.request.token_ids) % 3], *right(ask)[2:]]

    def long(ask: Ask) -> list[int]:
        return right(ask) + [0] * 1000

    kinds: dict[str, Callable[[Ask], list[int]]] = {
        "right": right, "wrong": wrong, "mixed": mixed, "foreign": foreign, "long": long,
    }  # fmt: skip
    if case.guess == "ngram":
        return ngram_proposer(1, 4)
    return None if case.guess is None else lambda asks: [kinds[case.guess or ""](ask) for ask in asks]


def make_scheduler(case: Case) -> Scheduler:
    pool, propose = PagePool(case.num_pages), guesser(case)
    if case.windows:
        pool = WindowPages(case.num_pages, case.windows)
    room = min(case.draft_room, case.budget)
    speculation = None if propose is None else Speculation(propose, 6, room, case.vocab)
    return Scheduler(pool, PrefixCache(pool, case.page_size) if case.cached else None, page_size=case.page_size,
                     max_running_requests=case.rows, max_step_tokens=case.budget, policy=case.policy,
                     speculation=speculation)  # fmt: skip


def make_request(case: Case, index: int) -> Request:
    job = case.jobs[index]
    params = SamplingParams(processor=len) if job.lockstep else SamplingParams()
    return Request(f"r{index}", len(job.prompt), list(job.prompt), params, 1000 + index, job.max_new_tokens,
                   job.stop_ids)  # fmt: skip


def entry(scheduler: Scheduler, step: SchedulerOutput) -> tuple:
    """A step that is in flight as a value."""
    rids = [request.rid for request in step.requests]
    rows = zip(rids, step.rows, step.starts, step.counts, step.samples, strict=True)
    rid_of = dict(zip(step.rows, rids, strict=True))
    pages = [(rid_of[row], first, tuple(pages)) for row, first, pages, _ in step.new_pages]
    return step.step, tuple(rows), tuple(pages), tuple(step.preempted)


def simulate(case: Case) -> Run:
    """Runs a case as the loop does, checks every step and every result, and returns what happened."""
    requests = [make_request(case, i) for i in range(len(case.jobs))]
    run = Run(case, make_scheduler(case), requests)
    device = HashDevice(case, {r.rid: job for r, job in zip(requests, case.jobs, strict=True)})
    pending: list[tuple[SchedulerOutput, Result]] = []
    clock, last = 0, max([0, *(job.arrival for job in case.jobs), *(job.abort or 0 for job in case.jobs)])
    patience = 200 + 20 * sum(len(job.prompt) + job.max_new_tokens for job in case.jobs)
    while clock <= last or run.scheduler.has_work or pending:
        _events(run, clock)
        step = run.scheduler.schedule()
        check_scheduler(run.scheduler)
        if step is not None:
            _note(run, step)
            pending.append((step, device.execute(step)))
        if len(pending) > case.lag or (step is None and pending):
            _land(run, *pending.pop(0))
        elif step is None:
            assert not run.scheduler.has_work, "nothing is planned, nothing is in flight, and requests wait: a deadlock"
        clock += 1
        assert clock < last + patience, "a request starves"
    _settle(run)
    return run


def _events(run: Run, clock: int) -> None:
    case, scheduler = run.case, run.scheduler
    for i, job in enumerate(case.jobs):
        if job.arrival == clock:
            need = -(-(len(job.prompt) + job.max_new_tokens) // case.page_size)
            try:
                scheduler.add(run.requests[i])
                assert need < case.num_pages
            except CapacityError:
                assert need >= case.num_pages
                run.refused += 1
        if job.abort == clock:
            request = scheduler.abort(f"r{i}")
            if request is not None:
                assert request is run.requests[i] and request.finish is not None and request.finish["type"] == "abort"
                assert not request.pages and request.row is None and scheduler.abort(f"r{i}") is None
            check_scheduler(scheduler)


def _note(run: Run, step: SchedulerOutput) -> None:
    run.log.append(entry(run.scheduler, step))
    run.most_rows = max(run.most_rows, len(step.rows))
    for request, start, count in zip(step.requests, step.starts, step.counts, strict=True):
        guessed = 0 if request.drafting is None else request.drafting.in_flight
        assert request.num_computed + guessed == start + count
        assert len(request.pages) == -(-(start + count) // run.case.page_size)
    fresh = {page for _, first, pages, _ in step.new_pages if first for page in pages}
    size = run.case.page_size
    for row, first, pages, _ in step.new_pages:
        if first == 0:
            hit = step.starts[step.rows.index(row)] // size
            run.shared_in_step += len(fresh & set(pages[:hit]))
            fresh |= set(pages[hit:])


def _land(run: Run, step: SchedulerOutput, result: Result) -> None:
    requests = step.requests
    ended = [request.finish is not None for request in requests]
    before = [len(request.token_ids) for request in requests]
    run.discarded += sum(ended)
    run.late += sum(request.status is Status.WAITING for request in requests)
    finished = run.scheduler.update(step, *result)
    check_scheduler(run.scheduler)
    for request, was_ended, length, sampled in zip(requests, ended, before, step.samples, strict=True):
        now = request.finish is not None and not was_ended
        assert (request in finished) == now
        if was_ended or not sampled:
            assert len(request.token_ids) == length


def _settle(run: Run) -> None:
    """Every request has ended as its solo oracle says, and every page has come back."""
    scheduler, case = run.scheduler, run.case
    for request, job in zip(run.requests, case.jobs, strict=True):
        if request.finish is None:
            need = -(-(len(job.prompt) + job.max_new_tokens) // case.page_size)
            aborted_before_arrival = job.abort is not None and job.abort < job.arrival
            assert need >= case.num_pages or aborted_before_arrival, f"{request.rid} was lost"
            continue
        tokens, logprobs, kind = solo(job, request.seed, case.vocab)
        count = request.num_output
        assert request.token_ids[: request.prompt_len] == job.prompt
        assert (request.token_ids[request.prompt_len :], request.logprobs) == (tokens[:count], logprobs[:count])
        if not (request.finish["type"] == "abort" and request.finish["message"] == "Aborted"):
            assert request.finish["type"] == kind and count == len(tokens)
            assert kind != "length" or request.finish["length"] == count == job.max_new_tokens
            assert kind != "stop" or request.finish["matched"] == tokens[-1]
        else:
            assert job.abort is not None
        assert request.num_pending == 0 and request.row is None and not request.pages
        assert request.num_cached % case.page_size == 0 and request.num_cached < request.prompt_len
    pool = scheduler.pool
    assert pool.num_available == pool.capacity and scheduler.counters()["used_pages"] == 0
    if scheduler.cache is not None:
        assert pool.num_idle == scheduler.cache.num_pages
        scheduler.cache.flush()
    assert pool.num_free == pool.capacity
    check_scheduler(scheduler)
    if isinstance(pool, WindowPages):
        assert pool.num_windows == len(pool._unused) == pool.windows.num_pages - 1


def random_windows(rng: random.Random, case: Case) -> Case:
    """The same with windowed layers, and often too few pages for them."""
    window, grain = rng.choice([1, 3, 8, 20]), rng.choice([1, 4, 8])
    windows = Windows(window, grain, case.page_size, 0, case.budget, rng.random() < 0.5)
    least = min(case.num_pages - 1, windows.least)
    count = 1 + least + rng.choice([0, 1, 3, least, 3 * least])
    return replace(case, windows=windows._replace(num_pages=min(count, case.num_pages)))


def random_case(rng: random.Random, page_size: int | None = None, **fixed: object) -> Case:
    """A case with shared prefixes, aborts, NaN rows, stop tokens, and often too few pages."""
    vocab = rng.choice([3, 5, 50])
    size = page_size or rng.choice([1, 4, 16])
    stems = [[rng.randrange(vocab) for _ in range(rng.randrange(1, 40))] for _ in range(3)]
    jobs = []
    for _ in range(rng.randrange(1, 14)):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)] + [rng.randrange(vocab) for _ in range(rng.randrange(0, 8))]
        arrival = rng.choice([0, 0, rng.randrange(40)])
        jobs.append(Job(
            prompt, rng.choice([0, 1, rng.randrange(60)]), arrival,
            abort=rng.randrange(80) if rng.random() < 0.15 else None,
            nan_at=rng.randrange(6) if rng.random() < 0.08 else None,
            stop_ids=frozenset({rng.randrange(vocab)}) if rng.random() < 0.2 else frozenset(),
            lockstep=rng.random() < 0.2,
        ))  # fmt: skip
    longest = max(-(-(len(job.prompt) + job.max_new_tokens) // size) for job in jobs)
    pages = max(2, 1 + longest + rng.choice([-1, 0, 1, 2, longest, 3 * longest, 20 * longest]))
    rows, budget, policy = rng.choice([1, 3, 6, 12]), rng.choice([1, 3, 8, 64]), rng.choice([Policy.fcfs, Policy.lpm])
    case = Case(jobs, size, pages, rows, budget, policy,
                rng.random() < 0.8, rng.choice([0, 1]), vocab)  # fmt: skip
    for name, value in fixed.items():
        setattr(case, name, value)
    return case
