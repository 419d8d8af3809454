"""The real core, loop, inbox, output processor, collectors and sessions, in simulated threads over a simulated device.

`World` carries a `Plan` out. After every step the books of scheduler, pages, slots and cache must balance, and no row
may read a slot that holds anything but its own prefix; every request is answered once, as it would be alone.
"""

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from simulated_oracle import Solo, judge, text_of
from simulated_plan import BAD, EOS, PIECES, Event, Job, Plan, need
from simulated_threads import Machine, SimulatedThread

from fengine.api.collector import OutputCollector, Stream
from fengine.api.input_processor import CheckedRequest
from fengine.api.sessions import Sessions, Turn
from fengine.core.kv_pages import PagePool
from fengine.core.prefix_cache import PrefixCache
from fengine.core.record import Record
from fengine.core.request import Adapter, Request, SamplingParams
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import NewRow, SchedulerOutput
from fengine.core.simulated_device import SimulatedDevice
from fengine.core.speculation import Ask, Speculation
from fengine.core.step_output import StepOutput
from fengine.engine import commands, memory
from fengine.engine.engine_core import EngineCore
from fengine.engine.memory import Memory
from fengine.errors import (
    CapacityError,
    EngineBusyError,
    EngineClosedError,
    EngineDeadError,
    FengineError,
    InvalidRequestError,
    LogitProcessorError,
    MemoryReleasedError,
    NumericsError,
    QueueFullError,
    SessionError,
)

STEP = 0.001  # seconds of a step
PATIENCE = 100.0  # seconds until somebody is said to wait for ever
memory.trim = lambda: None  # collecting garbage takes longer than a schedule


class Violation(AssertionError):
    """What must not happen."""


class DeviceError(RuntimeError):
    """The device has failed, as planned."""


class Gone(BaseException):
    """No Exception: nothing that handles errors catches it."""


def tokenizer_of(known: int) -> Any:
    """Knows the first ids; the rest makes it fail."""
    table = dict(enumerate(PIECES[:known]))
    decoding = SimpleNamespace(as_bytes=True, cleanup=False, strip=0, tables={True: table, False: table})
    return SimpleNamespace(decoding=decoding)


TOKENIZER, BROKEN = tokenizer_of(len(PIECES)), tokenizer_of(BAD)


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

    def __init__(self, plan: Plan) -> None:
        self.plan, self.settings = plan, plan.settings
        self.machine = Machine(random.Random(plan.seed * 2 + 1), self.settings.eager)
        self.solo = Solo()
        self.jobs: dict[str, Job] = {}
        self.collectors: list[tuple[Event, OutputCollector]] = []
        self.adapters: dict[str, Adapter] = {}
        self.loads = 0
        self.labels = {"default": 0}
        self.aborted: set[str] = set()
        self.answered: set[tuple[int, int]] = set()  # (call, index) of streams that have ended
        self.excused: set[type] = {EngineBusyError}  # errors that callers may get, for what was done to the engine
        self.fault: tuple[str, int] | None = None  # what the device does wrong: in which step
        self.died_at: float | None = None

    def run(self) -> None:
        try:
            self.machine.run(self._main, PATIENCE)
        finally:
            self.machine.end(self.threads if hasattr(self, "threads") else [])

    def _main(self) -> None:
        self._build()
        self.threads = list(self.core.threads)
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
        pool = PagePool(s.num_pages)
        self.scheduler = Scheduler(
            pool, PrefixCache(pool, s.page_size) if s.cached else None, page_size=s.page_size,
            max_running_requests=s.rows, max_step_tokens=s.budget, policy=s.policy, adapter_slots=s.adapter_slots,
            speculation=None if s.guess is None else Speculation(self._propose, 6, max(s.budget, 4), len(PIECES)),
            max_queued=s.max_queued,
        )  # fmt: skip
        self.device = SimulatedDevice(s.page_size, s.num_pages, self.scheduler._requests.__getitem__, self._draw)
        batch: Any = SimpleNamespace(stage=lambda output: output, release=self.device.release)
        runner: Any = SimpleNamespace(params={}, launch=self._execute)
        self.core = EngineCore(
            self.scheduler, batch, runner, self._kv(), overlap=s.overlap, system=self.machine.system
        )
        weights: Any = SimpleNamespace(places={}, origin=None, lose=lambda names: None)
        self.memory = Memory(self.core, runner, weights, self._kv, s.page_size)
        self.core.handle(commands.UpdateWeights, self._update_weights)
        self.sessions = Sessions(self.core.abort, self.machine.system)
        update, close = self.scheduler.update, self.core.inbox.close

        def checked(*arguments: Any) -> list[Request]:
            finished = update(*arguments)
            self.scheduler.check()
            return finished

        def noted(end: Any) -> bool:
            first = close(end)
            if first and isinstance(end, EngineDeadError):
                self.died_at = self.machine.clock
            return first

        self.scheduler.update = checked  # type: ignore[method-assign]
        self.core.inbox.close = noted  # type: ignore[method-assign]

    def _kv(self) -> Any:
        """A new KV state: every slot is empty."""
        for page in self.device.pages:
            page[:] = [None] * len(page)
        return SimpleNamespace(k_PSGK=(), v_PSGK=())

    def _execute(self, kv: Any, output: SchedulerOutput) -> tuple[Any, Callable[[], StepOutput]]:
        self.machine.clock += STEP
        self.machine.pause()
        self.scheduler.check()
        if self.fault == ("launch", output.step):
            raise DeviceError
        tokens, logprobs, errors = self.device.execute(output)

        def result() -> StepOutput:
            self.machine.pause()
            if self.fault == ("result", output.step):
                raise DeviceError
            if self.fault == ("stuck", output.step):
                self.machine.wait([], None)
            return StepOutput(tokens, logprobs, errors)

        return kv, result

    def _draw(self, new: NewRow, ids: list[int], prefix: int) -> tuple[int, float]:
        job, count = self.jobs[new.rid], len(ids) - new.prompt_len
        if new.params.processor is not None:
            new.params.processor(count)
        return self.solo.draw(job, new.seed, prefix, count)

    def _processor(self, job: Job) -> Callable[[int], None]:
        def process(count: int) -> None:
            if job.fails_at == count:
                raise LogitProcessorError("as planned")
            if job.processor == "asks":
                self.core.call(commands.Ping())
                try:
                    self.core.call(commands.FlushCache())
                except EngineBusyError:
                    return
                raise Violation("a command was executed inside of a step")

        return process

    def _propose(self, asks: list[Ask]) -> list[list[int]]:
        found = []
        for ask in asks:
            request, job = ask.request, self.jobs[ask.request.rid]
            right = self.solo.follow(job, request, self.device.weights, ask.skip + ask.most)[ask.skip :]
            good = {"right": 99, "wrong": 0, "mixed": len(request.token_ids) * 7 % 5}[self.settings.guess or ""]
            found.append(right[:good] + [(token + 1) % len(PIECES) for token in right[good:]])
        return found

    def _update_weights(self, command: commands.UpdateWeights, attached: None) -> None:
        if (reason := self.core.refusal("weights")) is not None:
            raise MemoryReleasedError(reason)
        self.core.stepper.forget_weights()
        self.device.weights += 1
        self.labels[str(self.device.weights)] = self.device.weights
        self.core.label_weights(str(self.device.weights))

    # -- clients -------------------------------------------------------------------------------------------------------

    def _actor(self, event: Event) -> SimulatedThread:
        def act() -> None:
            if event.at:
                self.machine.sleep(event.at)
            try:
                getattr(self, f"_{event.kind}")(event)
            except FengineError as error:
                if not self._is_explained(event, error):
                    raise

        return SimulatedThread(self.machine, act, name=f"{event.kind} {event.name}")

    def _is_explained(self, event: Event, error: FengineError) -> bool:
        if type(error) in self.excused and not isinstance(error.__cause__, AssertionError):
            return True
        jobs, s = event.jobs, self.settings
        return (
            isinstance(error, NumericsError) and any(job.nan_at is not None for job in jobs)
            or isinstance(error, LogitProcessorError) and any(job.fails_at is not None for job in jobs)
            or isinstance(error, CapacityError) and any(need(job, s.page_size) >= s.num_pages for job in jobs)
            or isinstance(error, CapacityError) and event.kind == "chat"
            or isinstance(error, QueueFullError) and s.max_queued is not None
            or isinstance(error, EngineDeadError) and "detokenizing" in str(error) and self._is_broken(event)
        )  # fmt: skip

    def _is_broken(self, event: Event) -> bool:
        """Whether the call's tokenizer fails."""
        return event.kind in ("call", "stream") and event.what % 16 == 0

    def _request(self, rid: str, job: Job, ids: list[int]) -> Request:
        self.jobs[rid] = job
        params = SamplingParams(
            stop=job.stop, min_new_tokens=job.least, grammar=job.grammar or None,
            processor=None if job.processor is None else self._processor(job),
        )  # fmt: skip
        request = Request(rid, len(ids), list(ids), params, job.seed, job.new, job.stop_ids)
        request.early_ids = frozenset({EOS}) if job.least else frozenset()
        request.cache_salt, request.priority = job.salt, job.priority
        request.adapter = self.adapters.get(job.adapter or "")
        request.record = None if params.bare else Record()
        return request

    def _submit(self, event: Event, requests: list[CheckedRequest], loop: Any = None) -> OutputCollector:
        args = SimpleNamespace(
            incremental_streaming_output=self.settings.incremental, stream_output=False, enable_metrics=True,
            stream_interval=self.settings.interval,
        )  # fmt: skip
        tokenizer = BROKEN if self._is_broken(event) else TOKENIZER
        parts = SimpleNamespace(core=self.core, tokenizer=tokenizer)
        context: Any = SimpleNamespace(parts=parts, args=args, sessions=self.sessions, log=None)
        stream = event.kind in ("stream", "async")
        collector = OutputCollector(context, requests, stream=stream, single=len(requests) == 1, loop=loop)
        self.collectors.append((event, collector))
        return collector

    def _requests(self, event: Event) -> list[CheckedRequest]:
        return [
            CheckedRequest(self._request(f"{event.name}.{i}", job, list(job.ids)), return_logprob=True)
            for i, job in enumerate(event.jobs)
        ]

    def _call(self, event: Event) -> None:
        try:
            results: Any = self._submit(event, self._requests(event)).wait()
        finally:
            if self.died_at is not None and self.machine.clock > max(self.died_at, event.at) + 1.0 + STEP:
                raise Violation(f"a caller waited {self.machine.clock - self.died_at:.2f} s for a dead engine")
        for result in results if isinstance(results, list) else [results]:
            _check_output(result)

    def _stream(self, event: Event) -> None:
        collector = self._submit(event, self._requests(event))
        stream, chunks = Stream(collector, None), 0
        seen: dict[int, tuple[str, list[int]]] = {}
        for chunk in stream:
            self._take(seen, collector, chunk)
            chunks += 1
            if event.leave is not None and chunks > event.leave:
                self.aborted |= {state.request.rid for state in collector.states}
                stream.close()
            elif event.pace:
                self.machine.sleep(event.pace)
        self._check_chunks(seen, collector)

    def _async(self, event: Event) -> None:
        loop = Loop(self.machine, bool(event.what % 2))
        collector = self._submit(event, self._requests(event), loop)
        chunks, seen = 0, {}
        while collector.open:
            function, arguments = loop.calls.get()
            function(*arguments)
            while len(collector.ready) and collector.open:
                chunk = collector.read(collector.ready.pop())
                if chunk is not None:
                    self._take(seen, collector, chunk)
                    chunks += 1
            if event.leave is not None and chunks > event.leave:
                self.aborted |= {state.request.rid for state in collector.states}
                loop.closed = True
                return
            if event.pace:
                self.machine.sleep(event.pace)
        self._check_chunks(seen, collector)

    def _take(self, seen: dict[int, tuple[str, list[int]]], collector: OutputCollector, chunk: Any) -> None:
        """What has come of each request so far; what is there only grows."""
        index = chunk.get("index", 0)
        if (id(collector), index) in self.answered:
            raise Violation("a request was answered twice")
        text, ids = seen.get(index, ("", []))
        if self.settings.incremental:
            seen[index] = text + chunk["text"], ids + chunk["output_ids"]
        else:
            if not chunk["text"].startswith(text) or chunk["output_ids"][: len(ids)] != ids:
                raise Violation("a stream takes back what it has shown")
            seen[index] = chunk["text"], chunk["output_ids"]
        if chunk["meta_info"]["finish_reason"] is not None:
            self.answered.add((id(collector), index))
            _check_output(chunk)

    def _check_chunks(self, seen: dict[int, tuple[str, list[int]]], collector: OutputCollector) -> None:
        for index, (text, ids) in seen.items():
            state = collector.states[index]
            if state.finish is not None and not state.abandoned and state.error is None:
                start = state.request.prompt_len
                if (text, ids) != (state.seen[0], state.request.token_ids[start : start + state.num_tokens]):
                    raise Violation(f"the chunks of {state.request.rid} are not its output")

    def _again(self, event: Event) -> None:
        """Leaves a stream, and asks again with the same rids, perhaps before those have ended."""
        for attempt in range(3):
            try:
                collector = self._submit(event, self._requests(event))
            except InvalidRequestError as error:
                if "is in use" not in str(error):
                    raise
                self.machine.sleep(STEP)
                continue
            if attempt == 2 or event.leave is None:
                collector.wait()
                return
            self.machine.sleep(event.pace)
            collector.abort()

    def _chat(self, event: Event) -> None:
        """Turns of a session, some beside or in place of others. The context that each one has is known here, too."""
        rng = random.Random(event.what)
        timeout = rng.choice([None, None, 0.05])
        sid = self.sessions.open(100, timeout=timeout)
        contexts: dict[str, tuple[list[int], list[int]]] = {}  # (prompt, output) of each turn by rid
        last: str | None = None
        for number, job in enumerate(event.jobs * 2):
            rid = f"{event.name}.{number}"
            params: dict[str, Any] = {"id": sid}
            parent = last
            if contexts and rng.random() < 0.4:
                params["rid"] = parent = rng.choice(list(contexts))
            if parent is not None and rng.random() < 0.3:
                params["drop_previous_output"] = True
            prompt, output = contexts.get(parent or "", ([], []))
            above = prompt if params.get("drop_previous_output") else prompt + output
            if above and rng.random() < 0.2:
                params["offset"] = rng.randrange(1, len(above) + 1)
            kept = above[: params.get("offset", len(above))]
            turn = self._turn(params, job, rid, timeout)
            if turn is None:
                return
            if turn.prompt_ids() != kept + list(job.ids):
                raise Violation(f"turn {rid} has another context")
            requests = [CheckedRequest(self._request(rid, job, turn.prompt_ids()), return_logprob=True, turn=turn)]
            result: Any = self._submit(event, requests).wait()
            _check_output(result)
            if result["meta_info"]["finish_reason"]["type"] != "abort":
                contexts[rid], last = (turn.prompt_ids(), result["output_ids"]), rid
            self.machine.sleep(rng.choice([0.0001, 0.03, 0.07]))

    def _turn(self, params: dict[str, Any], job: Job, rid: str, timeout: float | None) -> Turn | None:
        """None: the session's time was up."""
        idle = next((self.machine.clock - c.used for c in self.sessions._sessions.values()), 0.0)
        try:
            return self.sessions.prepare(params, list(job.ids), rid, None)
        except SessionError:
            if timeout is None or idle < timeout and params["id"] in self.sessions._sessions:
                raise
            return None

    # -- steering ------------------------------------------------------------------------------------------------------

    def _abort(self, event: Event) -> None:
        self.aborted.add(event.what)
        self.core.abort_rids({event.what})

    def _abort_all(self, event: Event) -> None:
        self.aborted |= self.jobs.keys()
        self.core.abort_rids(None)
        self.aborted |= self.jobs.keys()  # those that came before the loop read it
        self.excused.add(type(self))

    def _pause(self, event: Event) -> None:
        if event.what == "abort":
            self.excused.add(type(self))
        self.core.call(commands.Pause(event.what))
        if event.pace:
            self.machine.sleep(event.pace)
        self.core.call(commands.Resume())

    def _flush(self, event: Event) -> None:
        self.core.call(commands.FlushCache())

    def _weights(self, event: Event) -> None:
        self.core.call(commands.UpdateWeights((), None))

    def _memory(self, event: Event) -> None:
        self.excused.add(MemoryReleasedError)
        self.memory.release(event.what)
        if event.pace:
            self.machine.sleep(event.pace)
        self.memory.resume(event.what)

    def _adapter(self, event: Event) -> None:
        """Loads it, anew if it is there: requests that run keep the one that they began with."""
        self.loads += 1
        self.adapters[event.what] = Adapter(event.what, self.loads, None)

    def _stats(self, event: Event) -> None:
        stats = self.core.call(commands.GetStats())
        if not 0 <= stats["used_pages"] <= stats["pages"] or stats["running"] > self.settings.rows:
            raise Violation(f"{stats}")

    def _watch(self, event: Event) -> None:
        """Is told of steps for a while, and fails at the third."""
        told: list[Any] = []

        def tell(record: Any) -> None:
            told.append(record)
            if len(told) == 3:
                raise ValueError("as planned")

        self.core.call(commands.WatchSteps(str(event.name)), tell)
        self.machine.sleep(event.pace + STEP)
        fault = self.core.call(commands.UnwatchSteps(str(event.name)))
        if (fault is not None) != (len(told) == 3) or len(told) > 3:
            raise Violation(f"a watcher that fails was told {len(told)} times")

    # -- faults --------------------------------------------------------------------------------------------------------

    def _launch(self, event: Event) -> None:
        self.excused.add(EngineDeadError)
        self.fault = (event.kind, self.core.stepper.steps + event.what)

    _result = _launch

    def _die(self, event: Event) -> None:
        self.excused.add(EngineDeadError)
        kind = (MemoryError, SystemExit, Gone)[event.what % 3]
        self.core.threads[event.what // 3].thrown = kind("as planned")  # type: ignore[attr-defined]

    def _stuck(self, event: Event) -> None:
        """A step never ends; whoever waits is answered all the same when the engine is closed."""
        self.fault = (event.kind, self.core.stepper.steps + event.what)
        self.machine.sleep(0.05)
        self._shutdown(event)

    def _shutdown(self, event: Event) -> None:
        self.excused.add(EngineClosedError)
        self.core.close()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        alive = self.core.inbox.end is None
        if alive and self.excused.isdisjoint({EngineDeadError}):
            self.core.handle(commands.Ping, lambda command, attached: self._check_books())
            self.core.call(commands.Ping())
        self.excused.add(EngineClosedError)
        self.core.close()
        if any(thread.is_alive() for thread in self.core.threads) and (self.fault or "")[0] != "stuck":
            raise Violation("a thread goes on after the end")
        if self.core.requests.untold:
            raise Violation("somebody was not told of the end")
        if self.died_at is not None and EngineDeadError not in self.excused:
            raise self.core.inbox.end.__cause__ or Violation("the engine died")  # type: ignore[union-attr]
        bound = 60 + 25 * sum(len(job.ids) + job.new + 2 for job in self.jobs.values()) * (1 + self.device.weights)
        if self.core.stepper.steps > bound:
            raise Violation(f"{self.core.stepper.steps} steps, more than {bound}: somebody starves")
        for event, collector in self.collectors:
            for state in collector.states:
                job = self.jobs[state.request.rid]
                if not state.done:
                    raise Violation(f"{state.request.rid} was never answered")
                if state.error is not None:
                    if not self._is_explained(event, state.error):
                        raise state.error
                    continue
                excused = state.abandoned or type(self) in self.excused or state.request.rid in self.aborted
                broken = BROKEN if self._is_broken(event) else TOKENIZER
                if wrong := judge(self.solo, state, job, self.labels, broken, excused):
                    raise Violation(f"{state.request.rid}: {wrong}")

    def _check_books(self) -> None:
        """Of an idle engine: nothing is held, nothing is kept."""
        self.scheduler.check()
        requests = self.core.requests
        if requests.states or requests.live or requests.times.unstarted or requests.times.unscheduled:
            raise Violation(f"the loop keeps {list(requests.states)}")
        if self.scheduler.has_work or self.scheduler.counters()["used_pages"] or self.core.stepper.pending:
            raise Violation("an idle engine holds pages")
        self.sessions._expire()
        if any(session.running for session in self.sessions._sessions.values()):
            raise Violation("a turn runs for ever")
        if self.device.rows.keys() - set(self.scheduler._rows.released):
            raise Violation("the device keeps rows of requests that have ended")


def _check_output(result: Any) -> None:
    meta = result["meta_info"]
    if meta["finish_reason"] is None or meta["completion_tokens"] < len(result["output_ids"]):
        raise Violation(f"an answer without an end: {meta}")


def events_of(plan: Plan) -> Iterator[str]:
    """A plan, to be read."""
    yield f"seed {plan.seed}: {plan.settings}"
    for event in plan.events:
        yield f"  {event}"


__all__ = ["DeviceError", "InvalidRequestError", "Violation", "World", "events_of", "text_of"]
