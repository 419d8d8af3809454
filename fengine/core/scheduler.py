"""`Scheduler`: continuous batching without phases. No torch.

A request has tokens (`token_ids`, and `num_pending` that are drawn but not read yet), and `num_computed` of them have
their KV written. Each step brings `num_computed` nearer: by one token for a row that decodes, by a chunk for one that
has a prompt to compute, or to compute again after a preemption. A row draws a token when nothing is left.

    waiting  --admit-->  prompting  --last chunk-->  decoding  --last one planned-->  draining  --update-->  finished
       ^                     |                          |
       `------ preempt ------+--------------------------'

**Overlap.** `schedule()` for step n+1 may run before `update()` of step n. The token of step n is then pending, and
step n+1 feeds it on the device. Every step is executed, in order, whatever happens to its requests meanwhile: results
for requests that have ended are discarded, and pages and row slots given back are used again only by later steps, which
the device runs later.
A *lockstep* row (`is_lockstep`) sits out while its token is pending: what changes its logits must be known first.

**Sharing within a step.** On the device every layer writes the KV of all rows before any row attends. So prompt pages
go into the prefix cache when they are scheduled, and another request may hit them in the same step. Such a chunk is
never taken out of its step again: only decoding rows are, and those put pages into the cache when they leave."""

from collections import deque
from collections.abc import Mapping

from fengine.config import Policy
from fengine.core.admission import Admission, WaitingQueue
from fengine.core.images import ImageRows, least, uncut
from fengine.core.kv_pages import PagePool
from fengine.core.prefix_cache import PrefixCache
from fengine.core.request import ABORTED, FinishReason, Request, Status
from fengine.core.running import Rows, arrival_of, draws_last, is_lockstep, shortness, verdict
from fengine.core.scheduler_output import SchedulerOutput
from fengine.core.speculation import Speculation, drafting_of, pays, schedule_drafts, take_drafts
from fengine.errors import InvalidRequestError, InvariantError


class Scheduler:
    """Modifies: itself, its requests, `pool` and `cache`. Deterministic; for one thread."""

    def __init__(
        self, pool: PagePool, cache: PrefixCache | None, *, page_size: int, max_running_requests: int,
        max_step_tokens: int, policy: Policy = Policy.fcfs, speculation: Speculation | None = None,
        adapter_slots: int = 0, whole_prompts: bool = False, max_queued: int | None = None,
        images: ImageRows | None = None,
    ) -> None:  # fmt: skip
        """`cache` None: no prefix is ever shared. `whole_prompts`: each takes one step, its tokens see each other.
        `images`: of a model that takes images."""
        self.pool, self.cache, self.speculation = pool, cache, speculation
        self.page_size, self.max_step_tokens, self.whole_prompts = page_size, max_step_tokens, whole_prompts
        self.num_computed_tokens = self.num_finished = 0
        self._rows = Rows(pool, cache, page_size, max_running_requests, adapter_slots)
        self._waiting = WaitingQueue(policy, cache, max_queued)
        self._requests: dict[str, Request] = {}  # all that have not finished
        self._arrivals = self._steps_scheduled = 0
        self._in_flight: deque[SchedulerOutput] = deque()  # scheduled, not updated yet
        self.images = images
        self._admission = Admission(self._rows, self._waiting, images, whole_prompts)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def counters(self) -> dict[str, int]:
        """Gauges of this moment, and counters since the start."""
        return self._rows.counters() | {
            "waiting": len(self._waiting),
            "finished": self.num_finished,
            "computed_tokens": self.num_computed_tokens,
        }

    def add(self, request: Request) -> None:
        """Queues a request, or changes nothing. Errors: CapacityError if it could never fit, QueueFullError,
        InvalidRequestError."""
        self._waiting.check_room(self._rows.num_free)
        request.full = request.prompt_len + request.max_new_tokens
        self._rows.check_fits(request, self.max_step_tokens, self.whole_prompts, self.images)
        if request.rid in self._requests:
            raise InvalidRequestError(f"rid {request.rid!r} belongs to a request that has not finished: choose another")
        if request.finish is not None or request.prompt_len < 1 or len(request.token_ids) != request.prompt_len:
            raise InvalidRequestError(f"request {request.rid!r} must be new and have at least one prompt token")
        request.drafting = drafting_of(request, self.speculation.hope) if self.speculation else None
        request.salts = request.salted(self.page_size)
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.rid] = request
        self._waiting.add(request)
        self._admission.blocked = False  # it may go before the next to admit

    def abort(self, rid: str) -> Request | None:
        """Ends a request in any state and frees at once what it holds. None if no such request is unfinished."""
        if (request := self._requests.get(rid)) is not None:
            self._end(request, {"type": "abort", "message": ABORTED})
        return request

    def retract(self) -> int:
        """Sends what runs back to the queue, in its order, to be computed again from its tokens. Returns how many. A
        change of the weights asks for that: the KV belongs to the old ones. Errors: InvariantError if a step is in
        flight."""
        running = sorted(self._rows.prompting + self._rows.decoding, key=arrival_of)
        if self._in_flight:
            raise InvariantError("requests were retracted while a step was in flight")
        for request in reversed(running):  # the latest first: each one goes to the queue's front
            self._leave(request)
        if self.images is not None:
            self.images.forget()
        return len(running)

    def flush_cache(self) -> None:
        """Forgets every prefix."""
        if self.cache is not None:
            self.cache.flush()

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if nothing can be done before the next `update` or `add`."""
        output = SchedulerOutput(self._steps_scheduled)
        if self._in_flight and self.speculation and pays(self._rows, self.speculation):
            self.speculation.go_ahead(self._in_flight[-1])
            return None  # drafts begin behind tokens that are known
        left = self.max_step_tokens - self._schedule_decoding(output)
        for request in list(self._rows.prompting):
            if left and request.row is not None:
                left -= self._schedule_prompt(output, request, left)
        if left and not output.preempted:
            self._admission.admit(output, left)
        if not output.requests:
            return None
        output.encodes = [] if self.images is None else self.images.hand_out()
        if self.speculation and not any(before.guessed for before in self._in_flight):  # it is not read yet
            schedule_drafts(output, self._rows, self.speculation)
        self._steps_scheduled += 1
        self.num_computed_tokens += sum(output.counts)
        output.fill_in(self._in_flight[-1] if self._in_flight else None)
        output.released = self.released()
        self._rows.tell_new(output)
        self._in_flight.append(output)
        return output

    def released(self) -> list[int]:
        """Row slots given back since this was last asked. Modifies: itself."""
        released, self._rows.released = self._rows.released, []
        return released

    def held_pages(self) -> dict[str, int]:
        """How many pages each running request holds, by rid. Pure."""
        return {rid: len(r.pages) for rid, r in self._requests.items() if r.status is Status.RUNNING}

    def _schedule_decoding(self, output: SchedulerOutput) -> int:
        """One token for each decoding row. The hot loop: as little per row as can be. Returns the tokens of the budget.
        They always fit: a row begins to decode with a chunk for which the budget had room beside all rows that decode,
        lockstep rows that sit out included."""
        requests, page_size = self._rows.decoding.copy(), self._rows.page_size
        reserved = len(requests)
        if self._rows.num_lockstep:
            requests = [request for request in requests if not request.num_pending or not is_lockstep(request)]
        starts: list[int] = []
        unpaged: list[Request] = []
        last: list[Request] = []
        for request in requests:
            start = request.num_computed
            starts.append(start)
            request.num_computed = start + 1
            request.num_pending += 1
            if not start % page_size:
                unpaged.append(request)
            if start + 2 >= request.full:
                last.append(request)
        count = len(starts)
        output.requests, output.starts, output.counts, output.samples = requests, starts, [1] * count, [True] * count
        unpaged.sort(key=arrival_of)
        for request in unpaged:
            if request.row is not None and self._make_room(output, request, 1):
                self._rows.grow(request, request.num_computed)
            else:
                output.take_out(request)
        for request in last:
            if request.row is not None and draws_last(request):  # still in the step
                self._rows.move(request)
        return reserved

    def _schedule_prompt(self, output: SchedulerOutput, request: Request, left: int) -> int:
        """The next chunk of a running prompt: all that budget and pages allow. Returns what it takes of the budget."""
        rows, start = self._rows, request.num_computed
        room = len(request.pages) * rows.page_size - start
        lacks = (least(request.images, start) if request.images else 1) - room
        if not self._make_room(output, request, max(-(-lacks // rows.page_size), 0)):
            return 0
        room += self.pool.room * rows.page_size
        count = min(len(request.token_ids) - start, left, room)
        if request.images and not (count := uncut(request.images, start, count)):
            return left  # kept for it: nobody goes in its place
        rows.compute(output, request, count)
        self._admission.blocked = False  # the next to admit may share these pages
        return count

    def _make_room(self, output: SchedulerOutput, request: Request, pages: int) -> bool:
        """Makes so many pages available: the request's own that no window of it reaches, then those of the latest
        arrivals, which are preempted. False: `request` sits this step out.

        That is when it is the latest itself, or when rows are draining, whose pages come back at the next update. The
        earliest running request is never preempted, so it always gets on."""
        if self.pool.windowed and self._rows.leave_behind(request):
            self._admission.blocked = False
        while self.pool.room < pages:
            if self._rows.draining:
                return False
            victim = self._rows.latest()
            self._preempt(output, victim)
            if victim is request:
                return False
        return True

    def _preempt(self, output: SchedulerOutput, victim: Request) -> None:
        """Back to the queue's front, to be computed again. A token that is still in flight arrives and counts."""
        output.take_out(victim)
        self._leave(victim)
        output.preempted.append(victim.rid)

    def _leave(self, request: Request) -> None:
        self._rows.preempt(request)
        self._admission.blocked = False
        self._waiting.put_back(request)

    def update(
        self, output: SchedulerOutput, tokens: list[int], logprobs: list[float], faults: Mapping[str, str] | None = None
    ) -> list[Request]:
        """Takes token and logprob of each of the step's draws; those of rows that do not sample are ignored. `faults`
        tells, by rid, what a request's own processor or grammar did wrong: its logprob is NaN. Returns the requests
        that finished now. Steps are updated in order, once each. Errors: InvariantError."""
        due = self._in_flight[0].step if self._in_flight else None
        if output.step != due or min(len(tokens), len(logprobs)) < output.num_draws:
            raise InvariantError(f"update of step {output.step}, {len(tokens)} draws; {due} is due")
        scheduled = self._in_flight.popleft()
        finished = scheduled.take(tokens, logprobs)
        for request in finished:
            self._end_drawn(request, faults.get(request.rid) if faults else None)
        if scheduled.guessed and self.speculation and self.speculation.reveal:
            guesses = self.speculation.reveal()
            for draft in scheduled.drafts:
                draft.token_ids[:] = guesses[scheduled.requests[draft.index]][: len(draft.token_ids)]
        if scheduled.drafts:
            finished += take_drafts(scheduled, self._rows, tokens, logprobs, self._end_drawn)
            self._rows.decoding.sort(key=shortness)  # some have grown more than others
            self._admission.blocked = False  # pages have come back
        return finished

    def _end_drawn(self, request: Request, fault: str | None = None) -> None:
        """Ends a request because of the token that was appended last."""
        self._end(request, *verdict(request, fault))

    def _end(self, request: Request, finish: FinishReason, sound: bool = True) -> None:
        if request.status is Status.RUNNING:
            self._rows.leave(request)
        else:
            self._waiting.remove(request)
        if request.images and self.images is not None:
            self.images.leave(request.rid)
        if self.cache is not None and not sound:
            self.cache.drop(request.token_ids, request.salts)  # whichever page is bad, nobody may hit it again
        del self._requests[request.rid]
        request.status, request.finish, request.num_pending = Status.FINISHED, finish, 0
        self.num_finished += 1
        self._admission.blocked = False
