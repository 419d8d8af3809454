"""What must hold of every step that a scheduler plans, seen from outside: order, budgets, pages, progress."""

from collections.abc import Collection, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from simulated_references import checked

from fengine.config import Policy
from fengine.core.request import Request
from fengine.core.running import is_lockstep, prefix_limit
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput
from fengine.core.speculation import FEW, Ask, Late
from fengine.core.window_pages import WindowPages
from fengine.errors import CapacityError, InvariantError, QueueFullError


class Asked(NamedTuple):
    """What a request's record of drafts said before a step."""

    rest_until: int
    try_from: int
    gain: float
    hope_from: int


NOBODY: frozenset[Request] = frozenset()


class Checks:
    """Looks at a scheduler before and after each step that it plans. Modifies: itself."""

    def __init__(self, scheduler: Scheduler, most_drafts: int, step_tokens: int) -> None:
        """`most_drafts` of a row, which fill a step up to `step_tokens`."""
        self.scheduler, self.most_drafts, self.step_tokens = scheduler, most_drafts, step_tokens
        self.queue = checked(scheduler, len(scheduler._rows.adapters._slots))
        self.rows, self.admission, self.waiting = scheduler._rows, scheduler._admission, scheduler._waiting
        self._schedule, self._add, self.computed, self.hits = scheduler.schedule, scheduler.add, 0, 0
        self.asks: list[Ask] = []
        self.proposals: list[list[int]] = []
        self.late = False  # whether the host does not know them yet
        self.records: dict[Request, Asked] = {}
        if scheduler.speculation is not None:
            self._propose = scheduler.speculation.propose
            scheduler.speculation = replace(scheduler.speculation, propose=self.propose)
        self.seen: list[Request] = []  # who waited when the last step was planned
        self.cached: dict[Request, int] = {}  # prompt tokens found in the prefix cache at the first admission

    def add(self, request: Request) -> None:
        """In place of the scheduler's: refuses what it must, and nothing else. Errors: as those, InvariantError."""
        rows, most, images = self.rows, self.waiting.most, self.scheduler.images
        full = most is not None and len(self.waiting.requests()) >= most + rows.num_free
        tokens = request.prompt_len + request.max_new_tokens
        large = -(-tokens // rows.page_size) > rows.pool.capacity
        large = large or (images is not None and images.need(request.images) > images.capacity)
        together = [span.image.tokens for span in request.images if span.image.bidirectional]
        large = large or max(together, default=0) > self.scheduler.max_step_tokens
        refused: type | None = None
        try:
            self._add(request)
        except (QueueFullError, CapacityError) as error:
            refused = type(error)
            raise
        finally:
            if refused is not (QueueFullError if full else CapacityError if large else None):
                raise InvariantError(f"{request.rid!r} is answered with {refused}; full {full}, too large {large}")

    def propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        """In place of the proposer: remembers."""
        found = self._propose(asks)
        self.asks, self.proposals = list(asks), [list(proposal) for proposal in found]
        self.late = any(isinstance(proposal, Late) for proposal in found)
        return found

    def schedule(self) -> SchedulerOutput | None:
        """In place of the scheduler's. Errors: InvariantError."""
        self.asks, self.proposals, self.late = [], [], False
        rows, waiting = self.rows, self.waiting.requests()
        ran, prompting = [*rows.prompting, *rows.decoding], rows.prompting.copy()
        if self.scheduler.speculation:  # those of newcomers stay as they are
            self.records = {r: Asked(d.rest_until, d.try_from, d.gain, d.hope_from)
                            for r in ran if (d := r.drafting) is not None}  # fmt: skip
        guessed = any([before.guessed for before in self.scheduler._in_flight])
        self._check_blocked()
        self.seen = waiting
        sits = {r for r in rows.decoding if r.num_pending and is_lockstep(r)} if rows.num_lockstep else NOBODY
        flying, draining = bool(self.scheduler._in_flight), bool(rows.draining)
        waits = flying and self._pays(rows.decoding)
        alone = not rows.num_running
        output = self._schedule()
        victims = [request for request in ran if request.row is None]
        self._check_blocked()
        if victims:
            self._check_victims(victims, draining)
        if output is None:
            if not flying and not ran and waiting and not draining and not self.rows.num_running:
                raise InvariantError(f"nothing runs, and nobody of {[r.rid for r in waiting]} is admitted")
            if not waits and not draining and not victims and set(ran) - sits - self._kept(prompting, ()):
                raise InvariantError(f"{[r.rid for r in ran]} run, and nothing is planned")
            return None
        planned = output.requests
        if waits:
            raise InvariantError("a step is planned though its rows wait for the tokens of the one in flight")
        if (victims or output.preempted) and sorted(output.preempted) != sorted(request.rid for request in victims):
            raise InvariantError(f"told to be preempted: {output.preempted}, not {[r.rid for r in victims]}")
        for image, table_rows in output.encodes:
            if self.scheduler.images is None or self.scheduler.images._entries[image.key].rows != table_rows:
                raise InvariantError("an image is encoded for nobody")
        if self.scheduler.images is not None:
            self._check_images(output)
        self._check_budget(output)
        kept = self._kept(prompting, planned)
        going = [request for request in ran if request not in kept]
        self._check_progress(going, sits, planned, bool(victims), sum(output.counts))
        self._check_admitted(output, planned, [request for request in waiting if request.row is not None], alone)
        if output.drafts:
            self._check_drafts(output, planned)
        if self.scheduler.speculation is not None:
            self._check_asks(output, planned, guessed)
        self.computed += sum(output.counts)
        if self.scheduler.num_computed_tokens != self.computed:
            raise InvariantError(f"{self.computed} tokens are planned, counted otherwise")
        return output

    def _check_victims(self, victims: list[Request], draining: bool) -> None:
        """The latest arrivals are preempted, and only where no pages come back by themselves."""
        if any(a.arrival < b.arrival for a in victims for b in [*self.rows.prompting, *self.rows.decoding]):
            raise InvariantError("a request is preempted though a later one runs on")
        if draining:
            raise InvariantError("a request is preempted though pages come back with the step in flight")

    def _check_blocked(self) -> None:
        """Nobody is said to find too few pages who would find enough: of those whose place does not change."""
        if not self.admission.blocked or not self.rows.num_free:
            return
        if self.waiting.policy is not Policy.fcfs and not any(r.priority for r in self.waiting.requests()):
            return
        if self.rows.pool.windowed and self.scheduler.speculation:
            return  # drafts may have left windows behind: their update makes it known
        head = next(filter(self._could_start, self.queue.expected(self.rows.num_free)), None)
        if head is not None and head in self.seen and self._fits(head):
            raise InvariantError(f"{head.rid!r} waits for pages though there are enough")

    def _fits(self, request: Request) -> bool:
        rows, known = self.rows, len(request.token_ids)
        hit = 0
        if rows.cache is not None:
            hit = rows.cache.match_length(request.token_ids, min(known - 1, prefix_limit(request)), request.salts)
        need = -(-known // rows.page_size) - hit // rows.page_size
        if isinstance(rows.pool, WindowPages):
            windows = min(self._spare(), self._spare_windows(rows.pool))
            held = need <= self._spare() and min(need, self._most_windows(rows.pool)) <= windows
            return not hit and (held or not rows.num_running)  # a hit takes window pages, too
        # a hit's idle pages are counted as available, and are taken by the hit
        idle = self._idle(request, hit // rows.page_size)
        return not rows.num_running or need <= self._spare() - idle

    def _idle(self, request: Request, count: int) -> int:
        """How many of the first pages of a prefix nobody runs with."""
        cache = self.rows.cache
        nodes = [] if cache is None else cache._longest(request.token_ids, count * self.rows.page_size, request.salts)
        return sum(self.rows.pool.num_holders(node.page) == 1 for node in nodes)

    def _spare_windows(self, pool: WindowPages) -> int:
        """Window pages beyond one for each row, and what running prompts will take at once."""
        rows, most = self.rows, self._most_windows(pool)
        due = sum(min(-(-len(r.token_ids) // rows.page_size) - len(r.pages), most) for r in rows.prompting)
        return pool.num_windows - rows.num_running - due

    def _most_windows(self, pool: WindowPages) -> int:
        """That a row may need at once."""
        windows, size = pool.windows, self.rows.page_size
        return -(-(windows.window + windows.grain) // size) + 3 + windows.step_tokens // size

    def _spare(self) -> int:
        """Pages beyond one for each row, and what running prompts will take."""
        rows = self.rows
        due = sum(-(-len(r.token_ids) // rows.page_size) - len(r.pages) for r in rows.prompting)
        return rows.pool.num_free + rows.pool.num_idle - rows.num_running - due

    @staticmethod
    def _check_images(output: SchedulerOutput) -> None:
        """No chunk ends in an image whose tokens see each other; behind a hit it may begin there."""
        for request, start, count in zip(output.requests, output.starts, output.counts, strict=True):
            for at, image in request.images:
                if image.bidirectional and at < start + count < at + image.tokens:
                    raise InvariantError(f"an image of {request.rid!r} is cut by positions {start} : {start + count}")

    def _check_budget(self, output: SchedulerOutput) -> None:
        most = self.scheduler.max_step_tokens
        drafts = sum(len(draft.token_ids) for draft in output.drafts)
        if sum(output.counts) - drafts > most or len(output.rows) > self.rows.capacity:
            raise InvariantError(f"a step of {output.counts} tokens, more than {most}, or than there are rows")
        for request, start, count in zip(output.requests, output.starts, output.counts, strict=True):
            if start + count > max(request.full - 1, request.prompt_len):
                raise InvariantError(f"{request.rid!r} computes {start + count} tokens, behind which nothing is due")
        if drafts and sum(output.counts) > self.step_tokens:
            raise InvariantError(f"drafts fill a step up to {sum(output.counts)} tokens, more than {self.step_tokens}")

    @staticmethod
    def _kept(prompting: list[Request], planned: Collection[Request]) -> set[Request]:
        """The first whose image takes a step of its own, as long as others decode beside it, and those behind it."""
        whole = (any(image.bidirectional for _, image in r.images) and r not in planned for r in prompting)
        return set(prompting[next((i for i, waits in enumerate(whole) if waits), len(prompting)) :])

    def _check_progress(
        self, ran: list[Request], sits: Set[Request], planned: list[Request], pages_lack: bool, tokens: int
    ) -> None:
        """Who runs gets on, unless it waits for its own token, or for pages or the budget."""
        lacks = pages_lack or self.rows.pool.room == 0 or self.rows.pool.windowed
        inside = set(planned)
        idle = [request for request in ran if request not in inside and request not in sits]
        full = tokens + len(sits) >= self.scheduler.max_step_tokens
        if not sits.isdisjoint(inside):
            raise InvariantError("a row is planned before it knows the token that it waits for")
        for request in idle:
            if not lacks and not request.images and not (full and request in self.rows.prompting):
                raise InvariantError(f"{request.rid!r} sits out for no reason")

    def _check_admitted(self, output: SchedulerOutput, planned: list[Request], new: list[Request], alone: bool) -> None:
        """Who was admitted was next; what was cached of it is told as at its first admission."""
        starts = dict(zip(planned, output.starts, strict=True)) if new else {}
        if new and not self.rows.pool.windowed and self._spare() < -1:
            raise InvariantError(f"{new[-1].rid!r} is admitted, and others lack {-self._spare()} pages")
        if new and not alone and not output.drafts and isinstance(self.rows.pool, WindowPages):
            first = max(output.counts[planned.index(request)] for request in new)  # whichever was admitted last
            chunk = -(-first // self.rows.page_size) + 1
            if (left := self._spare_windows(self.rows.pool)) < -1 - chunk:
                raise InvariantError(f"{new[-1].rid!r} is admitted, and others lack {-left} window pages")
        self.hits += sum([starts[request] for request in new])
        if self.rows.num_hit_tokens != self.hits:
            raise InvariantError(f"{self.hits} tokens were hit, counted otherwise")
        for request in new:
            if not request.num_preempted:
                self.cached[request] = starts[request]
            if request.num_cached not in (0, self.cached.get(request, 0)) or (
                not request.num_preempted and request.num_cached != starts[request]
            ):
                raise InvariantError(f"{request.num_cached} tokens of {request.rid!r} are said to have been cached")

    def _could_start(self, request: Request) -> bool:
        ready = request.adapter is None or self.rows.adapters.fits(request.adapter)
        return ready and (not request.images or self.scheduler.images.ready(request.rid))  # type: ignore[union-attr]

    def _check_drafts(self, output: SchedulerOutput, planned: list[Request]) -> None:
        """Drafts take what is left: neither pages that are due to others, nor the last token."""
        rows, paged, speculation = self.rows, False, self.scheduler.speculation
        if output.drafts and (speculation is None or len(output.rows) >= speculation.full):
            raise InvariantError(f"a batch of {len(output.rows)} rows has drafts")
        for index, draft in output.drafts:
            request, start = planned[index], output.starts[index]
            if len(draft) > self.most_drafts or output.counts[index] != len(draft) + 1:
                raise InvariantError(f"{request.rid!r} has {len(draft)} drafts behind {output.counts[index]} tokens")
            if start < request.prompt_len or start + output.counts[index] >= request.full:
                raise InvariantError(f"{request.rid!r} has drafts up to its end, or in its prompt")
            if request.window_start < rows.pool.window_start(start):
                raise InvariantError(f"{request.rid!r} keeps window pages that it does not reach, and has drafts")
            paged = paged or len(request.pages) > -(-request.num_computed // rows.page_size)
        if paged and self._spare() < 0:
            raise InvariantError("drafts have pages that are due to others")

    def _pays(self, rows: Sequence[Request]) -> bool:
        """Whether decoding rows wait for their tokens, as a model that proposes can bring more than that costs."""
        speculation = self.scheduler.speculation
        if speculation is None or not speculation.waits or not 0 < len(rows) < speculation.full:
            return False
        told = [(self.records.get(r, r.drafting), r.num_computed) for r in rows if r.drafting is not None]
        gain = sum(
            record.gain if known < record.hope_from else speculation.hope
            for record, known in told if known >= record.try_from
        )  # fmt: skip
        return gain > (0 if len(rows) == 1 else len(rows) * (speculation.toll + len(rows) * speculation.crowd))

    def _check_asks(self, output: SchedulerOutput, planned: list[Request], guessed: bool) -> None:
        """Every row that decodes is asked for, and nobody else; drafts fill what is left of the step, in fair parts.
        `guessed`: guesses are in flight that nobody knows, so that nobody is asked."""
        speculation, drafts = self.scheduler.speculation, dict(output.drafts)
        assert speculation is not None
        left = self.step_tokens - sum(output.counts) + sum(map(len, drafts.values()))
        tried, expected = self._pays(self.rows.decoding), {}
        asked = tried or speculation.mixed or not speculation.waits
        if left > 0 and len(planned) < speculation.full and asked and not guessed:
            least = 1 if len(planned) == 1 or speculation.waits else min(FEW, self.most_drafts)
            untold = {new.rid for new in output.new_rows}
            for i, (request, start) in enumerate(zip(planned, output.starts, strict=True)):
                if request.rid in untold:
                    continue
                alone = output.counts[i] - len(drafts.get(i, ())) == 1 and output.samples[i]
                room = min(request.full - 2 - start, self.most_drafts)
                record = self.records.get(request)
                if alone and record and start >= max(record.rest_until, request.prompt_len) and room >= least:
                    expected[i] = room
            if speculation.waits and expected:
                expected = {i: min(room, -(-left // len(expected))) for i, room in expected.items()}
        if {ask.row: ask.most for ask in self.asks} != expected or any(ask.tried != tried for ask in self.asks):
            raise InvariantError(f"{[ask[3:] for ask in self.asks]} are asked for, not {expected}, tried {tried}")
        if output.guessed != (bool(output.drafts) and self.late):
            raise InvariantError(f"guesses are said to lie on the device: {output.guessed}, and are late: {self.late}")
        wanting = sum(map(bool, self.proposals))
        for ask, proposal in zip(self.asks, self.proposals, strict=True):
            if proposal:
                length = next((k for k, t in enumerate(proposal) if not 0 <= t < speculation.vocab_size), len(proposal))
                most, given = min(length, ask.most, -(-left // wanting)), len(drafts.get(ask.row, ()))
                if given > most or (given < most and not self.rows.pool.windowed and self._spare() > 0):
                    raise InvariantError(f"{ask.request.rid!r} has {given} drafts, not {most}")
                left, wanting = left - given, wanting - 1
