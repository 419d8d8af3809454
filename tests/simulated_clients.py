"""What clients and operators of a simulated engine do: one function for each kind of `Event`."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from simulated_engine import STEP, Loop, Violation, World, check_output
from simulated_plan import Event, Job
from simulated_threads import FOREVER

from fengine.api.sessions import Turn
from fengine.api.streams import OutputCollector, Stream
from fengine.core.request import Adapter
from fengine.engine.request_state import RequestState
from fengine.errors import EngineClosedError, EngineDeadError, InvalidRequestError, MemoryReleasedError, SessionError


class Gone(BaseException):
    """No Exception: nothing that handles errors catches it."""


# -- clients -----------------------------------------------------------------------------------------------------------


def call(world: World, event: Event) -> None:
    try:
        results: Any = world.complete(event, world.requests(event))
    finally:
        if world.died_at is not None and world.machine.clock > max(world.died_at, event.at) + 1.0 + STEP:
            raise Violation(f"a caller waited {world.machine.clock - world.died_at:.2f} s for a dead engine")
    for result in results if isinstance(results, list) else [results]:
        check_output(result)


def stream(world: World, event: Event) -> None:
    collector = world.submit(event, world.requests(event))
    stream, chunks = Stream(collector, None), 0
    seen: dict[int, tuple[str, list[int]]] = {}
    for chunk in stream:
        take(world, seen, collector, chunk)
        chunks += 1
        if event.leave is not None and chunks > event.leave:
            world.aborted |= {state.request.rid for state in collector.states}
            stream.close()
            check_ended(world, collector.states)
        elif event.pace:
            world.machine.sleep(event.pace)
    check_chunks(world, seen, collector)


def async_stream(world: World, event: Event) -> None:
    loop = Loop(world.machine, bool(event.what % 2))
    collector = world.submit(event, world.requests(event), loop)
    chunks, seen = 0, {}
    while collector.open:
        function, arguments = loop.calls.get()
        function(*arguments)
        while len(collector.ready) and collector.open:
            chunk = collector.read(collector.ready.pop())
            if chunk is not None:
                take(world, seen, collector, chunk)
                chunks += 1
        if event.leave is not None and chunks > event.leave:
            world.aborted |= {state.request.rid for state in collector.states}
            loop.closed = True
            return
        if event.pace:
            world.machine.sleep(event.pace)
    check_chunks(world, seen, collector)


def take(world: World, seen: dict[int, tuple[str, list[int]]], collector: OutputCollector, chunk: Any) -> None:
    """What has come of each request so far; what is there only grows."""
    index = chunk.get("index", 0)
    state = id(collector.states[index])  # which the world keeps, so that no other has its number
    if state in world.answered:
        raise Violation("a request was answered twice")
    text, ids = seen.get(index, ("", []))
    new, finish = (
        len(chunk["output_ids"]) - (0 if collector.incremental else len(ids)),
        chunk["meta_info"]["finish_reason"],
    )
    if new < world.settings.interval and index in seen and finish is None:
        raise Violation("a chunk comes before its time")
    if collector.incremental:
        seen[index] = text + chunk["text"], ids + chunk["output_ids"]
    else:
        if not chunk["text"].startswith(text) or chunk["output_ids"][: len(ids)] != ids:
            raise Violation("a stream takes back what it has shown")
        seen[index] = chunk["text"], chunk["output_ids"]
    if collector.brief and ("id" in chunk["meta_info"]) == (finish is None):
        raise Violation(f"a chunk that is brief, or the last, tells {chunk}")
    if finish is not None:
        world.answered[state] = collector.states[index].finished
        check_output(chunk)


def check_ended(world: World, states: Iterable[RequestState]) -> None:
    """Who was aborted does not run on."""
    open_states = [state for state in states if not state.done]
    world.machine.sleep(5 * STEP)
    for state in open_states:
        if state.request.finish is None and not state.done and world.core.inbox.end is None and not world.stuck:
            raise Violation(f"{state.request.rid} was aborted and runs on")


def check_chunks(world: World, seen: dict[int, tuple[str, list[int]]], collector: OutputCollector) -> None:
    for index, (text, ids) in seen.items():
        state = collector.states[index]
        shown, count, finish = state.output
        if finish is not None and not state.abandoned and state.error is None:
            start = state.request.prompt_len
            if (text, ids) != (shown, state.request.token_ids[start : start + count]):
                raise Violation(f"the chunks of {state.request.rid} are not its output")


def again(world: World, event: Event) -> None:
    """Leaves a stream, and asks again with the same rids, perhaps before those have ended."""
    loop = Loop(world.machine, bool(event.what % 3))
    for attempt in range(3):
        try:
            if attempt == 2:
                world.complete(event, world.requests(event))
                continue
            collector = world.submit(event, world.requests(event), loop)
        except InvalidRequestError as error:
            if "is in use" not in str(error):
                raise
            world.machine.sleep(STEP)
            continue
        if event.what % 2:
            loop.closed = True
        else:
            world.machine.sleep(event.pace)
            collector.abort()


def chat(world: World, event: Event) -> None:
    """Turns of a session, some beside or in place of others. The context that each one has is known here, too."""
    rng = random.Random(event.what)
    timeout = rng.choice([FOREVER, FOREVER, 0.05])
    touched, told = world.machine.clock, None
    sid = world.sessions.open(timeout=None if timeout == FOREVER else timeout)
    contexts: dict[str, tuple[list[int], list[int]]] = {}  # (prompt, output) of each turn by rid
    parents: dict[str, str | None] = {}
    for number, job in enumerate(event.jobs * 3):
        rid = f"{event.name}.{number}"
        if timeout == FOREVER and rng.random() < 0.1:
            parents[f"{rid}b2"] = next(reversed(contexts), None)
            if not beside(world, event, f"{rid}b", sid, job, contexts):
                return
        params: dict[str, Any] = {"id": sid}
        parent = next(reversed(contexts), None)
        if contexts and rng.random() < 0.4:
            params["rid"] = parent = rng.choice(list(contexts))
        if contexts and rng.random() < 0.25:
            params["replace"] = True
            parent = params.get("rid")
        if parent is not None and rng.random() < 0.3:
            params["drop_previous_output"] = True
        prompt, output = contexts.get(parent or "", ([], []))
        above = prompt if params.get("drop_previous_output") else prompt + output
        if above and rng.random() < 0.2:
            params["offset"] = rng.choice([1, -1]) * rng.randrange(1, len(above) + 1)
        kept, bos = (
            above[: params.get("offset", len(above))],
            rng.choice([None, None, job.ids[0]]) if job.ids[1:] else None,
        )
        begun = world.machine.clock
        turn = next_turn(world, params, job, rid, bos, timeout, touched, world.machine.clock if told is None else told)
        if turn is None:
            return
        touched = begun
        if turn.prompt()[0] != kept + list(job.ids[bos is not None and parent is not None :]):
            raise Violation(f"turn {rid} has another context")
        requests = [world.request(rid, job, turn.prompt()[0])]
        try:
            result: Any = world.complete(event, requests, turn)
        except SessionError:
            if world.machine.clock - touched <= timeout:
                raise
            return
        told = world.machine.clock
        check_output(result)
        if params.get("replace"):
            gone = [name for name in contexts if parent is None or parent in above_of(parents, name)]
            for name in gone:
                del contexts[name]
            check_gone(world, sid, job, gone)
            told = world.machine.clock  # asking for them is a use, too, if its time is not up
        if result["meta_info"]["finish_reason"]["type"] != "abort":
            contexts[rid], parents[rid] = (turn.prompt()[0], result["output_ids"]), parent
        world.machine.sleep(rng.choice([0.0001, 0.03, 0.07]))
        if timeout != FOREVER and rng.random() < 0.3:
            touched, told = keep_alive(world, sid, job, timeout, touched, told)


def keep_alive(world: World, sid: str | None, job: Job, timeout: float, touched: float, told: float) -> Any:
    """Asks for a session, as who is about to use it, before its time is up. When it was used last: between which
    moments."""
    for _ in range(3):
        begun = world.machine.clock
        if next_turn(world, {"id": sid}, job, "nobody", None, timeout, touched, told) is None:
            break
        touched, told = begun, world.machine.clock
        world.machine.sleep(0.03)
    return touched, told


def beside(world: World, event: Event, rid: str, sid: str | None, job: Job, contexts: dict[str, Any]) -> bool:
    """A turn that runs: nothing follows it, and another takes its place. Whether all of that is known to be so."""
    ids = list(job.ids)
    prompt = (first := world.sessions.prepare({"id": sid}, ids, rid, None)).prompt()[0]
    world.aborted.add(rid)
    collector = OutputCollector(
        world.context(event), [world.request(rid, job, prompt)], {rid: first}, True, stream=True, loop=None
    )
    state = collector.states[0]
    if job.seed == 0:  # who goes away may come again at once
        collector.abort()
        world.sessions.prepare({"id": sid}, ids, "nobody", None)
        return first.aborted
    if parent := next(reversed(contexts), None):
        return all_replaced(world, event, f"{rid}3", {"id": sid, "rid": parent}, job, state)
    with suppress(SessionError):
        world.sessions.prepare({"id": sid}, ids, "nobody", None)
        if not state.done:
            raise Violation(f"a turn follows {rid}, which has not finished")
    other = world.sessions.prepare({"id": sid, "rid": rid, "replace": True}, ids, f"{rid}2", None)
    if state.done:
        return False
    if other.prompt()[0] != prompt:
        raise Violation(f"what takes the place of {rid} has another context")
    result: Any = world.complete(event, [world.request(f"{rid}2", job, prompt)], other)
    check_ended(world, [state])
    check_gone(world, sid, job, [rid])
    if ended := result["meta_info"]["finish_reason"]["type"] != "abort":
        contexts[f"{rid}2"] = prompt, result["output_ids"]
    return ended


def all_replaced(world: World, event: Event, rid: str, params: dict[str, Any], job: Job, other: RequestState) -> bool:
    """A branch runs beside another turn, and both end when a new turn takes the place of all."""
    branch = world.sessions.prepare(params, list(job.ids), rid, None)
    world.aborted.add(rid)
    requests = [world.request(rid, job, branch.prompt()[0])]
    collector = OutputCollector(world.context(event), requests, {rid: branch}, True, stream=True, loop=None)
    turn = world.sessions.prepare({"id": params["id"], "replace": True}, list(job.ids), f"{rid}2", None)
    world.complete(event, [world.request(f"{rid}2", job, turn.prompt()[0])], turn)
    check_ended(world, [other, *collector.states])
    return False


def above_of(parents: dict[str, str | None], rid: str) -> Iterator[str]:
    """The turns that a turn continues."""
    while (above := parents[rid]) is not None:
        yield above
        rid = above


def check_gone(world: World, sid: str | None, job: Job, rids: list[str]) -> None:
    for rid in rids:
        try:
            world.sessions.prepare({"id": sid, "rid": rid}, list(job.ids), "new", None)
        except SessionError:
            continue
        raise Violation(f"turn {rid} was replaced and can be continued")


def next_turn(
    world: World, params: dict[str, Any], job: Job, rid: str, bos: int | None, timeout: float, touched: float,
    told: float,
) -> Turn | None:  # fmt: skip
    """None: the session's time is up. It was last used between the moments `touched` and `told`."""
    before = world.machine.clock
    try:
        turn = world.sessions.prepare(params, list(job.ids), rid, bos)
    except SessionError:
        if world.machine.clock - touched <= timeout:
            raise
        return None
    if before - told > timeout:
        raise Violation(f"a session lives {before - told:.3f} s after its last use")
    return turn


# -- steering ----------------------------------------------------------------------------------------------------------


def abort(world: World, event: Event) -> None:
    world.aborted.add(event.what)
    state = world.core.requests.states.get(event.what)
    world.core.abort_rids({event.what})
    check_ended(world, [] if state is None else [state])


def abort_all(world: World, event: Event) -> None:
    states = list(world.core.requests.states.values())
    end_all(world)
    check_ended(world, states)


def end_all(world: World) -> None:
    world.aborted |= world.jobs.keys()
    world.core.abort_rids(None)
    world.aborted |= world.jobs.keys()  # those that came before the loop read it
    world.excused.add(type(world))


def pause(world: World, event: Event) -> None:
    if event.what == "abort":
        world.excused.add(type(world))
    stepper, resumed = world.core.stepper, world.resumed
    alone = not world.resuming
    world.core.call("pause", mode=event.what)
    if event.what == "retract" and alone and world.core.call("get_stats")["running"] and world.resumed == resumed:
        raise Violation("requests run that were sent back to the queue")
    steps, pending = stepper.steps, getattr(stepper, "pending", None)  # none is left where the engine has ended
    if event.pace:
        world.machine.sleep(event.pace)
    if alone and world.resumed == resumed and (pending is not None or stepper.steps != steps):
        raise Violation("a paused engine makes steps")
    world.resumed += 1
    world.resuming += 1
    world.core.call("resume")
    world.resuming -= 1


def flush(world: World, event: Event) -> None:
    world.core.call("flush_cache")


def weights(world: World, event: Event) -> None:
    world.core.call("update_weights")


def memory(world: World, event: Event) -> None:
    world.excused.add(MemoryReleasedError)
    parts: Any = [("kv_cache",), ("weights",)] if event.what == "parts" else [event.what]
    if event.name % 4 == 0:  # a step may still be in flight
        end_all(world)
    for tags in parts:
        world.memory.release(tags)
    if event.pace:
        world.machine.sleep(event.pace)
    for tags in parts:
        world.memory.resume(tags)


def adapter(world: World, event: Event) -> None:
    """Loads it, anew if it is there: requests that run keep the one that they began with."""
    if world.adapters[event.what].pinned:
        return
    world.loads += 1
    world.adapters[event.what] = Adapter(event.what, world.loads, None)


def stats(world: World, event: Event) -> None:
    stats = world.core.call("get_stats")
    if not 0 <= stats["used_pages"] <= stats["pages"] or stats["running"] > world.settings.rows:
        raise Violation(f"{stats}")


def watch(world: World, event: Event) -> None:
    """Is told of steps for a while, and fails at the third."""
    told: list[Any] = []

    def tell(record: Any) -> None:
        told.append(record)
        prompts = {state.request.rid: state.request.prompt_len for _, states, _ in world.calls for state in states}
        for rid, start, decodes in zip(record.rids, record.starts, record.decodes, strict=True):
            if decodes and start < prompts.get(rid, 0):
                raise Violation(f"a prompt's chunk of {rid} is said to decode")
        starts = dict(zip(record.rids, record.starts, strict=True))
        if any(new.hits * world.settings.page_size != starts[new.rid] for new in record.new_pages if not new.first):
            raise Violation(f"hits of {record.new_pages} are told, and rows begin at {starts}")
        if set(record.released) & starts.keys() or record.held + record.cached > record.pages:
            raise Violation(f"{record} tells of rows that run and are released, or of more pages than there are")
        if len(told) == 3:
            raise ValueError("as planned")

    world.core.call("watch_steps", tell, key=str(event.name))
    before = world.core.stepper.steps
    world.machine.sleep(event.pace + STEP)
    if world.core.stepper.steps > before + 2 and not told:
        raise Violation("a watcher is not told of steps that have landed")
    fault = world.core.call("unwatch_steps", key=str(event.name))
    if isinstance(fault, Violation):
        raise fault
    if (fault is not None) != (len(told) == 3) or len(told) > 3:
        raise Violation(f"a watcher that fails was told {len(told)} times")


# -- faults ------------------------------------------------------------------------------------------------------------


def launch(world: World, event: Event) -> None:
    world.excused.add(EngineDeadError)
    world.fault = (event.kind, world.core.stepper.steps + event.what)


def die(world: World, event: Event) -> None:
    world.excused |= {EngineDeadError, MemoryError}  # the latter where it hits a command, and not a step
    kind = (MemoryError, SystemExit, Gone)[event.what % 3]
    world.core.threads[event.what // 3].thrown = kind("as planned")  # type: ignore[attr-defined]


def stuck(world: World, event: Event) -> None:
    """A step never ends; whoever waits is answered all the same when the engine is closed."""
    world.fault = (event.kind, world.core.stepper.steps + event.what)
    world.machine.sleep(0.05)
    shutdown(world, event)


def shutdown(world: World, event: Event) -> None:
    world.excused.add(EngineClosedError)
    world.core.close()


ACTIONS: dict[str, Callable[[World, Event], None]] = {
    "call": call, "stream": stream, "async": async_stream, "again": again, "chat": chat, "abort": abort,
    "abort_all": abort_all, "pause": pause, "flush": flush, "weights": weights, "memory": memory, "adapter": adapter,
    "stats": stats, "watch": watch, "launch": launch, "result": launch, "die": die, "stuck": stuck,
    "shutdown": shutdown,
}  # fmt: skip
