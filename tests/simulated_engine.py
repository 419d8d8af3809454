"""The real core, loop, inbox, output processor, collectors and sessions, in simulated threads over a simulated device.

`World` carries a `Plan` out. After every step the books of scheduler, pages, slots and cache must balance, and no row
may read a slot that holds anything but its own prefix; every request is answered once, as it would be alone.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from books import check_scheduler
from simulated_checks import Checks
from simulated_drafts import Drafts
from simulated_oracle import Solo, judge
from simulated_plan import BAD, EOS, PIECES, Event, Job, Plan, image_need, need
from simulated_references import CheckedCache, CheckedImages, CheckedWindows
from simulated_threads import FOREVER, Machine, SimulatedThread

from fengine.api.request_log import RequestLog
from fengine.api.server_args import ServerArgs
from fengine.api.sessions import Sessions, Turn
from fengine.api.streams import OutputCollector
from fengine.core import admission
from fengine.core.images import Image, ImageSpan
from fengine.core.kv_pages import PagePool
from fengine.core.request import Adapter, Request, SamplingParams
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput, Scores, Span, StepOutput
from fengine.core.simulated_device import SimulatedDevice
from fengine.engine import memory
from fengine.engine.engine_core import EngineCore
from fengine.engine.inbox import FORKED
from fengine.engine.memory import DeviceMemory, Memory
from fengine.engine.request_state import RequestState
from fengine.errors import (
    CapacityError,
    EngineBusyError,
    EngineClosedError,
    EngineDeadError,
    FengineError,
    LogitProcessorError,
    MemoryReleasedError,
    NumericsError,
    QueueFullError,
)
from fengine.models.kv_state import KVState

STEP = 0.001  # seconds of a step
PATIENCE = 100.0  # seconds until somebody is said to wait for ever
memory.trim = lambda: None  # collecting garbage takes longer than a schedule


class Violation(AssertionError):
    """What must not happen."""


class DeviceError(RuntimeError):
    """The device has failed, as planned."""


def tokenizer_of(known: int) -> Any:
    """Knows the first ids; the rest makes it fail."""
    table = dict(enumerate(PIECES[:known]))
    decoding = SimpleNamespace(as_bytes=True, cleanup=False, strip=0, tables={True: table, False: table})

    def decode(ids: list[int], skip_special_tokens: bool) -> str:
        return b"".join(table[token] for token in ids).decode(errors="replace")

    return SimpleNamespace(decoding=decoding, decode=decode, backend=SimpleNamespace(token_to_id=lambda _: None))


TOKENIZER, BROKEN = tokenizer_of(len(PIECES)), tokenizer_of(BAD)


@cache
def params_of(stop: tuple[str, ...], least: int, grammar: bool, scored: int | None) -> SamplingParams:
    """What most requests share."""
    return SamplingParams(
        stop=stop, min_new_tokens=least, grammar=grammar or None, logprob_start=scored, return_logprob=True
    )


class Loop:
    """A client's event loop."""

    def __init__(self, machine: Machine, fails: bool) -> None:
        self.calls, self.closed, self.fails = machine.system.queue(), False, fails

    def is_closed(self) -> bool:
        return self.closed

    def call_soon_threadsafe(self, function: Callable[..., Any], *arguments: Any) -> None:
        if self.closed:
            raise ValueError("a callback that fails") if self.fails else RuntimeError("Event loop is closed")
        self.calls.put((function, arguments))


class World:
    """One schedule. Errors of `run`: whatever is wrong with the engine."""

    def __init__(self, plan: Plan, actions: Mapping[str, Callable[[Any, Event], None]]) -> None:
        self.plan, self.settings, self.actions = plan, plan.settings, actions
        self.machine = Machine(random.Random(plan.seed * 2 + 1), self.settings.eager)
        self.solo = Solo()
        self.drafts = Drafts(self)
        s = self.settings
        self.args = ServerArgs(
            model_path="box",
            incremental_streaming_output=s.incremental,
            stream_interval=s.interval,
            enable_metrics=True,
        )
        self.jobs: dict[str, Job] = {}
        self.calls: list[tuple[Event, list[RequestState], Any]] = []  # and the event loop of the caller, if it has one
        self.adapters = {name: Adapter(name, i, None, s.pinned and name == "A") for i, name in enumerate("ABC")}
        self.loads = len(self.adapters)
        self.labels = {"default": 0}
        self.drawn = 0  # tokens, but for those behind drafts
        self.released: set[str] = set()  # what memory is not there
        self.ended_by_text: set[RequestState] = set()
        self.resumed = self.resuming = 0  # how often somebody let the engine go on, and how many are about to
        self.first: dict[Request, float] = {}  # when its first token was drawn
        self.aborted: set[str] = set()
        self.answered: dict[int, float | None] = {}  # by the ids of states of streams that have ended: when they had
        self.excused: set[type] = {EngineBusyError}  # errors that callers may get, for what was done to the engine
        self.fault: tuple[str, int] | None = None  # what the device does wrong: in which step
        self.died_at: float | None = None
        self.threads: list[SimulatedThread] = []
        self.ranks: Any = None  # the other ones
        self.every = 1 if plan.short or plan.seed % 8 == 0 else 4  # of so many steps the books are checked once

    @property
    def stuck(self) -> bool:
        """Whether a step never ends."""
        return self.fault is not None and self.fault[0] == "stuck"

    def run(self) -> None:
        before = admission.LPM_PATIENCE, admission.LPM_WINDOW
        admission.LPM_PATIENCE, admission.LPM_WINDOW = self.settings.patience, self.settings.window
        try:
            self.machine.run(self._main, PATIENCE)
        finally:
            self.machine.end(self.threads)
            admission.LPM_PATIENCE, admission.LPM_WINDOW = before

    def _main(self) -> None:
        self._build()
        self.threads += self.core.threads  # type: ignore[arg-type]
        actors = [self._actor(event) for event in self.plan.events]
        self.threads += actors
        for actor in actors:
            actor.start()
        for actor in actors:
            actor.join()
            if actor.error is not None:
                raise actor.error
        self.machine.sleep(0.5)  # what was aborted ends
        self._check_end()

    # -- the engine ----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        s = self.settings
        pool = PagePool(s.num_pages) if s.windows is None else CheckedWindows(s.num_pages, s.windows)
        self.scheduler = Scheduler(
            pool, CheckedCache(pool, s.page_size) if s.cached else None, page_size=s.page_size,
            max_running_requests=s.rows, max_step_tokens=s.budget, policy=s.policy, adapter_slots=s.adapter_slots,
            speculation=self.drafts.speculation(), max_queued=s.max_queued,
            images=CheckedImages(s.image_rows, s.patches) if s.image_rows else None,
        )  # fmt: skip
        checks = Checks(self.scheduler, 6, max(s.budget, 4))
        self.scheduler.add, self.scheduler.schedule = checks.add, checks.schedule  # type: ignore[method-assign]
        self.device = SimulatedDevice(
            s.page_size, s.num_pages, self.scheduler._requests.__getitem__, self._draw, s.windows
        )
        batch, runner = self._parts()
        self.core = EngineCore(self.scheduler, batch, runner, self._kv(), overlap=s.overlap, system=self.machine.system)
        weights: Any = SimpleNamespace(
            places={}, tensors=list, spec=SimpleNamespace(quantization=None), read_again=lambda: True, agreed=bool
        )
        device = DeviceMemory(runner, weights, self._kv, s.page_size, self.core.stepper.swap_kv)
        self.memory = Memory(self.core, device, lambda names: None, self.ranks)
        self.core.handlers["update_weights"] = self._update_weights
        self.sessions = Sessions(self.core.abort, self.machine.system)
        update, close = self.scheduler.update, self.core.inbox.close

        def checked(*arguments: Any) -> list[Request]:
            cache = self.scheduler.cache
            pages = 0 if cache is None else cache.num_pages
            finished = update(*arguments)
            self._check_forgotten(finished, pages)
            self.drawn += sum(arguments[0].samples)
            first = self.first
            for request in arguments[0].requests:
                if request not in first and (request.num_output or request in finished):
                    first[request] = self.machine.clock
            self._check_step(arguments[0].step)
            return finished

        def noted(end: Any) -> bool:
            first = close(end)
            if first and isinstance(end, EngineDeadError):
                self.died_at = self.machine.clock
            return first

        for name, change in {"release": self.released.update, "resume": self.released.difference_update}.items():
            self.core.handlers[f"{name}_memory"] = self._noted(self.core.handlers[f"{name}_memory"], name, change)
        abort = self.core.requests.abort_later

        def aborted(states: Sequence[RequestState]) -> None:
            self.ended_by_text.update(states)
            abort(states)

        self.core.requests.abort_later = aborted
        flush = self.core.handlers["flush_cache"]

        def flushed() -> bool:
            counters = self.scheduler.counters()
            held = counters["running"] or counters["waiting"] and not self.core.stepper.paused
            emptied = flush()
            if emptied == bool(held) or emptied and self.scheduler.counters()["cached_pages"]:
                raise Violation(f"flush_cache answers {emptied} with {counters}")
            return emptied

        self.core.handlers["flush_cache"] = flushed
        self.scheduler.update = checked  # type: ignore[method-assign]
        self.core.inbox.close = noted  # type: ignore[method-assign]

    def _noted(self, handler: Any, name: str, change: Callable[[Any], None]) -> Any:
        """A command that changes what memory is there."""

        def noted(tags: Sequence[str], everything: bool) -> None:
            handler(tags=tags, everything=everything)
            change([tag for tag in tags if tag in ("kv_cache", "weights")])
            if self.released - self.core.refusals.keys():
                raise Violation(f"requests are taken while {self.released} is released")

        return noted

    def _parts(self) -> tuple[Any, Any]:
        """What becomes of steps on their way to the device, and the device."""
        batch = SimpleNamespace(stage=lambda output: output, release=self.device.release)
        return batch, SimpleNamespace(params={}, launch=self._execute)

    def _kv(self) -> KVState:
        """A new KV state: every slot is empty."""
        for page in [page for pages in self.device.groups for page in pages]:
            page[:] = [None] * len(page)
        return KVState((), ())

    def _execute(self, kv: Any, output: SchedulerOutput) -> tuple[Any, Callable[[], StepOutput]]:
        self.machine.clock += STEP
        self.machine.pause()
        if output.step % 4 == 0:  # it is checked when it has landed, too
            self._check_step(output.step)
        if self.released:
            raise Violation(f"a step runs while {self.released} is released")
        if self.fault == ("launch", output.step):
            raise DeviceError
        tokens, logprobs, errors = self.device.execute(self.drafts.fed(output))
        prompts = self._scores(output)

        def result() -> StepOutput:
            self.machine.pause()
            if self.fault == ("result", output.step):
                raise DeviceError
            if self.fault == ("stuck", output.step):
                self.machine.wait([], None)
            return StepOutput(tokens, logprobs, errors, prompts=prompts)

        return kv, result

    def _scores(self, output: SchedulerOutput) -> list[tuple[list[Span], Scores]]:
        """Logprobs of prompt tokens, as far as this step computes what they need."""
        drafts = {draft.index: len(draft.token_ids) for draft in output.drafts}
        found = []
        for i, (slot, start, count) in enumerate(zip(output.rows, output.starts, output.counts, strict=True)):
            row, end = self.device.rows[slot], start + count - drafts.get(i, 0)
            if start >= (prompt_len := row.new.prompt_len):
                continue
            first = row.new.first_scored
            if first >= prompt_len or not (output.samples[i] or first < end):
                continue
            first = max(start, first)
            places = range(first, max(first, min(end, prompt_len - 1)))
            scores = [self.solo.score(row.chain[at], row.new.token_ids[at + 1]) for at in places]
            none = np.zeros((len(scores), 0), np.float32)
            score_PK = np.array(scores, np.float32).reshape(-1, 1)
            found.append(([Span(i, first, len(scores), 0)], Scores(score_PK, none, none.astype(np.int32))))
        return found

    def _draw(self, new: Request, count: int, prefix: int) -> tuple[int, float]:
        if new.params.processor is not None:
            new.params.processor(count - new.prompt_len)
        return self.solo.draw(self.jobs[new.rid], new.seed, prefix, count - new.prompt_len)

    def _processor(self, job: Job) -> Callable[[int], None]:
        def process(count: int) -> None:
            if job.fails_at == count:
                raise LogitProcessorError("as planned")
            if job.processor == "asks":
                self.core.call("ping")
                try:
                    self.core.call("flush_cache")
                except EngineBusyError:
                    return
                raise Violation("a command was executed inside of a step")

        return process

    def _update_weights(self) -> None:
        if (reason := self.core.refusals.get("weights")) is not None:
            raise MemoryReleasedError(reason)
        self.core.stepper.forget_weights()
        self.device.weights += 1
        self.labels[str(self.device.weights)] = self.device.weights
        for request in (state.request for state in self.core.requests.states.values()):
            if not request.params.bare and not request.num_output and (request.num_cached or request.num_scored):
                raise Violation(f"what old weights told of the prompt of {request.rid} is kept")
        self.core.label_weights(str(self.device.weights))

    # -- clients -------------------------------------------------------------------------------------------------------

    def _actor(self, event: Event) -> SimulatedThread:
        def act() -> None:
            if event.at:
                self.machine.sleep(event.at)
            try:
                self.actions[event.kind](self, event)
            except (FengineError, MemoryError) as error:
                if not self._is_explained(event, error):
                    raise

        return SimulatedThread(self.machine, act, name=f"{event.kind} {event.name}")

    def _is_explained(self, event: Event, error: FengineError | MemoryError) -> bool:
        if type(error) in self.excused and not isinstance(error.__cause__, AssertionError):
            return True
        jobs, s = event.jobs, self.settings
        return (
            isinstance(error, NumericsError) and any(job.nan_at is not None for job in jobs)
            or isinstance(error, LogitProcessorError) and any(job.fails_at is not None for job in jobs)
            or isinstance(error, CapacityError) and any(need(job, s.page_size) >= s.num_pages for job in jobs)
            or isinstance(error, CapacityError) and event.kind == "chat"
            or isinstance(error, CapacityError) and any(image_need(job) > s.image_rows for job in jobs)
            or isinstance(error, CapacityError) and s.together
            and any(picture.tokens > s.budget for job in jobs for picture in job.pictures)
            or isinstance(error, QueueFullError) and s.max_queued is not None
            or isinstance(error, EngineDeadError) and "detokenizing" in str(error) and self._is_broken(event)
        )  # fmt: skip

    def _is_broken(self, event: Event) -> bool:
        """Whether the call's tokenizer fails."""
        return event.kind in ("call", "stream") and event.what % 16 == 0

    def request(self, rid: str, job: Job, ids: list[int]) -> Request:
        self.jobs[rid] = job
        scored = None if job.scored is None or job.scored >= len(ids) else job.scored  # of a session's turn: fewer ids
        params = params_of(job.stop, job.least, job.grammar, scored)
        if job.processor is not None:
            params = replace(params, processor=self._processor(job))
        request = Request(rid, len(ids), list(ids), params, job.seed, job.new, job.stop_ids)
        request.early_ids = frozenset({EOS}) if job.least else frozenset()
        request.cache_salt, request.priority = job.salt, job.priority
        request.adapter = self.adapters.get(job.adapter or "")
        request.images = tuple(
            ImageSpan(p.start, Image(bytes([p.key]), p.tokens, p.patches, {}, self.settings.together))
            for p in job.pictures
        )
        return request

    def context(self, event: Event, loop: Any = None) -> Any:
        """Of one call, whose states are checked at the end."""

        def submit(states: list[RequestState]) -> None:
            self.core.submit(states)
            self.calls.append((event, states, loop))

        core = SimpleNamespace(
            system=self.core.system, submit=submit, abort=self.core.abort, check_process=self.core.check_process,
            owns_thread=self.core.owns_thread,
        )  # fmt: skip
        parts = SimpleNamespace(core=core, tokenizer=BROKEN if self._is_broken(event) else TOKENIZER)
        log = RequestLog(self.args, None)
        return SimpleNamespace(parts=parts, args=self.args, sessions=self.sessions, log=log)

    def submit(self, event: Event, requests: list[Request], loop: Any = None) -> OutputCollector:
        stream, deltas = event.kind in ("stream", "async"), event.kind == "async" and event.what % 4 == 3
        return OutputCollector(self.context(event, loop), requests, {}, len(requests) == 1, stream=stream, loop=loop,
                               deltas=deltas)  # fmt: skip

    def complete(self, event: Event, requests: list[Request], turn: Turn | None = None) -> Any:
        turns = {} if turn is None else {turn.rid: turn}
        return OutputCollector(self.context(event), requests, turns, len(requests) == 1, stream=False, loop=None).wait()

    def requests(self, event: Event) -> list[Request]:
        return [self.request(f"{event.name}.{i}", job, list(job.ids)) for i, job in enumerate(event.jobs)]

    def _check_step(self, step: int) -> None:
        """After every step; of long schedules most look at each fourth."""
        if (step + self.plan.seed) % self.every:
            return
        check_scheduler(self.scheduler)
        waiting = self.scheduler._waiting._requests.values()
        places = [request.arrival if request.num_preempted else FOREVER for request in waiting]
        if places != sorted(places):
            raise Violation("requests that were preempted lost their place in the queue")

    def _check_forgotten(self, finished: list[Request], pages: int) -> None:
        """Nobody hits what a request has computed whose numbers are not finite; nothing else is forgotten at an end.

        `pages` were cached before."""
        cache = self.scheduler.cache
        bad = [r for r in finished if "non-finite" in str(r.finish and r.finish.get("message"))]
        if any(self.jobs[request.rid].nan_at is None for request in bad):
            raise Violation("a request whose processor failed is said to have numbers that are not finite")
        for request in bad if len(finished) == 1 else ():  # another one may have put it back
            if cache is not None and cache.match_length(request.token_ids, self.settings.page_size, request.salts):
                raise Violation(f"a page of {request.rid} can be hit, whose numbers are not finite")
        if not bad and cache is not None and cache.num_pages < pages:
            raise Violation("an end makes the cache forget")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        alive = self.core.inbox.end is None
        if alive and self.excused.isdisjoint({EngineDeadError}):
            for _ in range(100):  # the last one may end just now
                self.machine.sleep(STEP if self.core.requests.untold else 0.0)
            self.core.handlers["check_books"] = self._check_books
            self.core.call("check_books")
        self.excused.add(EngineClosedError)
        self.core.close()
        if self.ranks is None and self.died_at is not None and self.core.inbox.end.__cause__ is None:  # type: ignore[union-attr]
            raise Violation("nobody says what the engine died of")
        began = self.machine.clock
        try:
            self.core.call("ping")
        except (EngineClosedError, EngineDeadError):
            if self.machine.clock > began:
                raise Violation("a command waits for a closed engine") from None
        self._check_forked()
        if any(thread.is_alive() for thread in self.core.threads) and not self.stuck:
            raise Violation("a thread goes on after the end")
        if self.core.requests.untold:
            raise Violation("somebody was not told of the end")
        if self.died_at is not None and EngineDeadError not in self.excused:
            raise self.core.inbox.end.__cause__ or Violation("the engine died")  # type: ignore[union-attr]
        bound = 60 + 25 * sum(len(job.ids) + job.new + 2 for job in self.jobs.values()) * (1 + self.device.weights)
        if self.core.stepper.steps > bound:
            raise Violation(f"{self.core.stepper.steps} steps, more than {bound}: somebody starves")
        self._check_drafts()
        for event, states, loop in self.calls:
            for state in states:
                job = self.jobs[state.request.rid]
                if not state.done:
                    raise Violation(f"{state.request.rid} was never answered")
                gone = loop is not None and loop.is_closed()
                if state.error is not None:
                    told = "detokenizing failed" in str(state.error) or "be told" in str(state.error)
                    if told and state not in self.ended_by_text:
                        raise Violation(f"{state.request.rid} runs on though nobody can have its text")
                    if not self._is_explained(event, state.error) and not (gone and "be told" in str(state.error)):
                        raise state.error
                    continue
                self._check_times(state)
                if self.answered.get(id(state), state.finished) != state.finished:
                    raise Violation(f"{state.request.rid} has ended, and ends again")
                count, finish = state.output[1:]
                early = (
                    finish is not None and isinstance(finish.get("matched"), str) and count < state.request.num_output
                )
                if early and state not in self.ended_by_text:
                    raise Violation(f"{state.request.rid} runs on behind {finish}")
                excused = gone or state.abandoned or type(self) in self.excused or state.request.rid in self.aborted
                broken = BROKEN if self._is_broken(event) else TOKENIZER
                if wrong := judge(self.solo, state, job, self.labels, broken, excused):
                    raise Violation(f"{state.request.rid}: {wrong}")

    def _check_forked(self) -> None:
        """A child of this process has none of the threads, and says so."""
        inbox, core = self.core.inbox, self.core
        own, inbox._pid = inbox._pid, -1
        for ask in (core.stats, core.check_process, partial(core.submit, []), partial(core.call, "ping")):
            with suppress(EngineClosedError):
                try:
                    ask()
                except EngineClosedError as error:
                    if str(error) == FORKED:
                        raise
                raise Violation(f"{ask} is answered in a child")
        inbox._pid = own

    def _check_drafts(self) -> None:
        """What requests tell of their drafts adds up to what the scheduler counts."""
        counters, records = self.scheduler.counters(), [
            state.request.drafting for _, states, _ in self.calls for state in states if state.request.drafting
        ]  # fmt: skip
        told = sum(record.proposed for record in records), sum(record.correct for record in records)
        if told != (counters["drafts"], counters["correct_drafts"]):
            raise Violation(f"of {counters['drafts']} drafts {counters['correct_drafts']} were right, {told} are told")
        if any(sum(k * n for k, n in enumerate(record.histogram)) != record.correct for record in records):
            raise Violation("the histogram of drafts is not that of its tries")

    def _check_times(self, state: RequestState) -> None:
        first, finish = self.first.get(state.request), state.request.finish
        moments = [state.submitted, state.started, state.first_token, state.finished]
        known = [moment for moment in moments if moment is not None]
        if known != sorted(known):
            raise Violation(f"{state.request.rid} was submitted, started, drawn for and finished at {moments}")
        if first is not None and state.first_token != first and finish and finish["type"] != "abort":
            raise Violation(f"{state.request.rid} had its first token at {first}, not at {state.first_token}")

    def _check_books(self) -> None:
        """Of an idle engine: nothing is held, nothing is kept."""
        check_scheduler(self.scheduler)
        requests = self.core.requests
        if requests.states or requests.live or requests.unstarted or requests.untold:
            raise Violation(f"the loop keeps {list(requests.states)}, {len(requests.untold)} are not told of the end")
        if len(self.core.inbox._waiting) > 1:  # who has asked for this
            raise Violation("replies are kept of which nobody waits any more")
        told, counters = self.core.stats()["output_tokens"], self.scheduler.counters()
        if told != self.drawn + counters["correct_drafts"]:
            raise Violation(f"{told} tokens are said to be drawn, not {self.drawn} and {counters['correct_drafts']}")
        if self.scheduler.has_work or self.scheduler.counters()["used_pages"] or self.core.stepper.pending:
            raise Violation("an idle engine holds pages")
        self.sessions._expire()
        for session in self.sessions._sessions.values():
            if session.running:
                raise Violation("a turn runs for ever")
            if any(
                session.turns.get(child.rid) is not child for turn in session.turns.values() for child in turn.children
            ):
                raise Violation("a session keeps a turn that was replaced")
        if self.device.rows:
            raise Violation("the device keeps rows of requests that have ended")


def check_output(result: Any) -> None:
    meta = result["meta_info"]
    if meta["finish_reason"] is None or meta["completion_tokens"] < len(result["output_ids"]):
        raise Violation(f"an answer without an end: {meta}")


def events_of(plan: Plan) -> Iterator[str]:
    """A plan, to be read."""
    yield f"seed {plan.seed}: {plan.settings}"
    for event in plan.events:
        yield f"  {event}"
