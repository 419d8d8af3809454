"""What must hold of every step that a scheduler plans, seen from outside: order, budgets, pages, progress."""

from collections.abc import Sequence
from typing import Any

from books import nodes_of

from fengine.config import Policy
from fengine.core.prefix_cache import PrefixCache, Salts
from fengine.core.request import Request
from fengine.core.running import is_lockstep, prefix_limit
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput
from fengine.errors import InvariantError


class CheckedCache(PrefixCache):
    """Evicts the pages that were used longest ago, and finds what it has said that it would."""

    def match(self, token_ids: Sequence[int], limit: int, salts: Salts | None = None) -> list[int]:
        length, used = self.match_length(token_ids, limit, salts), self._clock
        pages = super().match(token_ids, limit, salts)
        if len(pages) * self.page_size != length or (pages and self._clock == used):
            raise InvariantError(f"{len(pages)} pages are hit, or are not noted to be used, where {length} tokens are")
        return pages

    def evict(self, count: int) -> int:
        leaves = {node: node.used for node in nodes_of(self) if not node.children}
        idle, nodes = self.pool.num_idle, self.num_pages
        evicted = super().evict(count)
        if evicted != min(count, idle) or self.num_pages != nodes - evicted:
            raise InvariantError(f"{evicted} pages are evicted of {idle} idle ones, asked for {count}")
        gone = max((used for node, used in leaves.items() if node.parent is None), default=0)
        if any(node.parent is not None and self.pool.num_holders(node.page) == 1 and used < gone
               for node, used in leaves.items()):  # fmt: skip
            raise InvariantError("a page was evicted that was used later than one that stays")
        return evicted


class Checks:
    """Looks at a scheduler before and after each step that it plans. Modifies: itself."""

    def __init__(self, scheduler: Scheduler, most_drafts: int, step_tokens: int) -> None:
        """`most_drafts` of a row, which fill a step up to `step_tokens`."""
        self.scheduler, self.most_drafts, self.step_tokens = scheduler, most_drafts, step_tokens
        self.rows, self.admission, self.waiting = scheduler._rows, scheduler._admission, scheduler._waiting
        self._schedule = scheduler.schedule
        self.seen: set[Request] = set()  # who waited when the last step was planned
        self.cached: dict[Request, int] = {}  # prompt tokens found in the prefix cache at the first admission

    def schedule(self) -> SchedulerOutput | None:
        """In place of the scheduler's. Errors: InvariantError."""
        rows, waiting = self.rows, self.waiting.requests()
        self._check_blocked()
        self.seen = set(waiting)
        ran = [*rows.prompting, *rows.decoding]
        sits = {r for r in rows.decoding if r.num_pending and is_lockstep(r)}
        flying, draining = bool(self.scheduler._in_flight), bool(rows.draining)
        output = self._schedule()
        victims = [request for request in ran if request.row is None]
        self._check_blocked()
        if any(a.arrival < b.arrival for a in victims for b in [*rows.prompting, *rows.decoding]):
            raise InvariantError("a request is preempted though a later one runs on")
        if victims and draining:
            raise InvariantError("a request is preempted though pages come back with the step in flight")
        if output is None:
            if not flying and not ran and waiting and not draining and not self.rows.num_running:
                raise InvariantError(f"nothing runs, and nobody of {[r.rid for r in waiting]} is admitted")
            waits = flying and self.scheduler.speculation is not None and self.scheduler.speculation.waits
            if not waits and not draining and not victims and set(ran) - sits:
                raise InvariantError(f"{[r.rid for r in ran]} run, and nothing is planned")
            return None
        planned = list(output.requests)
        if sorted(output.preempted) != sorted(request.rid for request in victims):
            raise InvariantError(f"told to be preempted: {output.preempted}, not {[r.rid for r in victims]}")
        self._check_budget(output)
        self._check_progress(ran, sits, planned, bool(victims), sum(output.counts))
        self._check_admitted(output, planned, waiting, ran)
        self._check_drafts(output, planned)
        return output

    def _check_blocked(self) -> None:
        """Nobody is said to find too few pages who would find enough: of those who go in order of arrival."""
        waiting = self.waiting.requests()
        if not self.admission.blocked or self.waiting.policy is Policy.lpm or any(r.priority for r in waiting):
            return
        if self.rows.pool.windowed and self.scheduler.speculation:
            return  # drafts may have left windows behind: their update makes it known
        head = next((request for request in waiting[: self.rows.num_free] if self._could_start(request)), None)
        if head is not None and head in self.seen and self._fits(head):
            raise InvariantError(f"{head.rid!r} waits for pages though there are enough")

    def _fits(self, request: Request) -> bool:
        rows, known = self.rows, len(request.token_ids)
        hit = 0
        if rows.cache is not None:
            hit = rows.cache.match_length(request.token_ids, min(known - 1, prefix_limit(request)), request.salts)
        need = -(-known // rows.page_size) - hit // rows.page_size
        if rows.pool.windowed:
            return not hit and rows.admits(need)  # a hit takes window pages, too
        # a hit's idle pages are counted as available, and are taken by the hit
        idle = self._idle(request, hit // rows.page_size)
        return not rows.num_running or need <= self._spare() - idle

    def _idle(self, request: Request, count: int) -> int:
        """How many of the first pages of a prefix nobody runs with."""
        cache = self.rows.cache
        nodes = [] if cache is None else cache._longest(request.token_ids, count * self.rows.page_size, request.salts)
        return sum(self.rows.pool.num_holders(node.page) == 1 for node in nodes)

    def _spare(self) -> int:
        """Pages beyond one for each row, and what running prompts will take."""
        rows = self.rows
        due = sum(-(-len(r.token_ids) // rows.page_size) - len(r.pages) for r in rows.prompting)
        return rows.pool.num_free + rows.pool.num_idle - rows.num_running - due

    def _check_budget(self, output: SchedulerOutput) -> None:
        most = self.scheduler.max_step_tokens
        drafts = sum(len(draft.token_ids) for draft in output.drafts)
        if sum(output.counts) - drafts > most or len(output.rows) > self.rows.capacity:
            raise InvariantError(f"a step of {output.counts} tokens, more than {most}, or than there are rows")
        if drafts and sum(output.counts) > self.step_tokens:
            raise InvariantError(f"drafts fill a step up to {sum(output.counts)} tokens, more than {self.step_tokens}")

    def _check_progress(
        self, ran: list[Request], sits: set[Request], planned: list[Request], pages_lack: bool, tokens: int
    ) -> None:
        """Who runs gets on, unless it waits for its own token, or for pages or the budget."""
        lacks = pages_lack or self.rows.pool.room == 0 or self.rows.pool.windowed
        idle = set(ran) - sits - set(planned)
        full = tokens + len(sits) >= self.scheduler.max_step_tokens
        if sits & set(planned):
            raise InvariantError("a row is planned before it knows the token that it waits for")
        for request in idle:
            if not lacks and not request.images and not (full and request in self.rows.prompting):
                raise InvariantError(f"{request.rid!r} sits out for no reason")

    def _check_admitted(
        self, output: SchedulerOutput, planned: list[Request], waiting: list[Request], ran: list[Request]
    ) -> None:
        """Who was admitted was next; what was cached of it is told as at its first admission."""
        starts = dict(zip(planned, output.starts, strict=True))
        new = [request for request in waiting if request.row is not None]
        left = [request for request in waiting if request.row is None and self._could_start(request)]
        by_hit = self.waiting.policy is Policy.lpm and not any(request.priority for request in waiting)
        for request in new:
            before = [other for other in left if self._rank(other, by_hit) < self._rank(request, by_hit)]
            if before:
                raise InvariantError(f"{request.rid!r} goes before {before[0].rid!r}")
            if not request.num_preempted:
                self.cached[request] = starts[request]
            if request.num_cached not in (0, self.cached.get(request, 0)) or (
                not request.num_preempted and request.num_cached != starts[request]
            ):
                raise InvariantError(f"{request.num_cached} tokens of {request.rid!r} are said to have been cached")

    def _could_start(self, request: Request) -> bool:
        ready = request.adapter is None or self.rows.adapters.fits(request.adapter)
        return ready and (not request.images or self.scheduler.images.ready(request.rid))  # type: ignore[union-attr]

    @staticmethod
    def _rank(request: Request, by_hit: bool) -> tuple[Any, ...]:
        if request.num_preempted:
            return (0, 0, request.arrival)
        return (1, 0, 0) if by_hit else (1, -request.priority, request.arrival)

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
            paged = paged or len(request.pages) > -(-request.num_computed // rows.page_size)
        if paged and self._spare() < 0:
            raise InvariantError("drafts have pages that are due to others")
