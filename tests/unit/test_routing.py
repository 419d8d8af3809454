"""Where requests go among replicas, and what the first process makes of their words: those of processes by hand."""

import copy
import json
import queue
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from fengine.api.replica import Server
from fengine.config import EngineConfig, ParallelConfig
from fengine.core.plain import from_plain
from fengine.core.request import ABORTED, FinishReason, Request, SamplingParams, Status
from fengine.engine.parallel import replicas, routing
from fengine.engine.parallel.child import NOTHING
from fengine.engine.parallel.progress import progress, take
from fengine.engine.parallel.remote import RemoteUpdates
from fengine.engine.parallel.replicas import Replicas, joined
from fengine.engine.parallel.routing import BLOCK, SLACK, STARTS, Replica, chosen, prefix_keys
from fengine.engine.request_state import RequestOutput, RequestState, version_spans
from fengine.errors import EngineBusyError, EngineDeadError

REFUSED: set[str] = set()  # versions whose files are not there
LOADING: list[int] = []  # if it has something, processes are not ready at once


class Process:
    """In place of a child: it is ready at once, and answers what is asked with its rank."""

    def __init__(
        self, start: Any, threads: int, hear: Callable[[Any], None], ended: Callable[[str], None],
        files: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.rank, self.hear, self.ended = start["replica"], hear, ended
        self.process = SimpleNamespace(pid=self.rank)
        self.sent: list[Any] = []
        self.requests: dict[str, Request] = {}
        if not LOADING:
            self.hear({"ready": {"pool_tokens": 64}})

    def send(self, value: Any) -> None:
        self.sent.append(value)
        for plain, _ in value.get("add", ()):
            request = from_plain(Request, plain, NOTHING)
            self.requests[request.rid] = request
        if "abort" in value:
            meant = self.requests if value["abort"] is None else value["abort"]
            for rid in [rid for rid in self.requests if rid in meant]:
                self.finish(rid, [], {"type": "abort", "message": ABORTED})
        self.answer(value.get("ask", ()))

    def answer(self, asked: Sequence[Any]) -> None:
        for number, _, _, _, arguments in asked:
            refused = arguments.get("version") in REFUSED
            self.hear({"answer": number, "value": [False, "no files"] if refused else {"rank": self.rank}})

    def finish(self, rid: str, tokens: list[int], finish: FinishReason | None = None) -> None:
        """The request ends with these tokens."""
        request = self.requests.pop(rid)
        request.token_ids += tokens
        request.logprobs += [0.0] * len(tokens)
        request.status, request.finish = Status.FINISHED, finish or {"type": "length", "length": len(tokens)}
        state = RequestState(
            request, None, False, lambda _: None, output=RequestOutput("", len(tokens), request.finish)
        )
        self.hear({"progress": [(rid, progress(state, {}))]})

    def kill(self) -> None: ...

    close = kill

    def asked(self) -> list[str]:
        return [name for value in self.sent for _, _, name, *_ in value.get("ask", ())]


class Calls:
    """Requests of a caller of two replicas."""

    def __init__(self, core: Replicas) -> None:
        self.core, self.ended = core, queue.SimpleQueue[RequestState]()
        self.states: dict[str, RequestState] = {}

    def submit(self, ids: list[int], rid: str | None = None, **fields: Any) -> str:
        rid = rid or f"r{len(self.states)}"
        request = Request(rid, len(ids), list(ids), SamplingParams(), 0, 100, frozenset(), **fields)
        notify = lambda state: self.ended.put(state) if state.done else None  # noqa: E731
        self.states[rid] = RequestState(request, None, False, notify)
        self.core.submit([self.states[rid]])
        return rid

    def place(self, rid: str) -> int:
        return next(each.rank for each in self.core.replicas if rid in each.open)

    def finish(self, rid: str, tokens: Sequence[int] = (1,)) -> None:
        self.process(self.place(rid)).finish(rid, list(tokens))
        assert self.ended.get(timeout=30) is self.states[rid]

    def process(self, rank: int) -> Any:
        return self.core.replicas[rank].child


@pytest.fixture(params=[False])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    monkeypatch.setattr(routing, "Child", Process)
    parallel = ParallelConfig(dp_size=2, dp_restart=request.param)
    core = Replicas(replace(EngineConfig(), parallel=parallel), 100, {})
    yield Calls(core)
    core.close()


def prompt(start: int, blocks: int, more: int = 0) -> list[int]:
    return list(range(start, start + blocks * BLOCK + more))


def test_keys_are_those_of_whole_blocks_behind_the_same_tokens_and_salt() -> None:
    rng, known = random.Random(0), dict[tuple[Any, ...], Any]()
    for _ in range(200):
        ids = [rng.randrange(2)] * rng.randrange(3 * BLOCK) + [2] * rng.randrange(2 * BLOCK)
        request = Request("r", len(ids), ids, SamplingParams(), 0, 1, frozenset())
        request.cache_salt = rng.choice([None, "a", "b"])
        keys = prefix_keys(request)
        assert len(keys) == len(ids) // BLOCK
        for i, key in enumerate(keys):
            meant = (request.cache_salt, *ids[: (i + 1) * BLOCK])
            assert known.setdefault(meant, key) == key
    assert len(set(known.values())) == len(known) > 100


def test_what_is_told_in_pieces_is_the_whole() -> None:
    """Tokens and what belongs to them come at any pace, and each once; what is whole is told again where it changed."""

    def state() -> RequestState:
        return RequestState(Request("r", 2, [1, 2], SamplingParams(), 0, 1, frozenset()), None, False, lambda _: None)

    rng, here, there, sent = random.Random(5), state(), state(), dict[str, Any]()
    for _ in range(40):
        for _ in range(rng.randrange(4)):
            here.request.logprobs.append(-rng.random())
            here.request.token_ids.append(rng.randrange(9))
            here.output_top.append([(-rng.random(), rng.randrange(9))])
            here.hidden.append(np.full(3, rng.random(), np.float32))
        here.request.num_cached = rng.randrange(2)
        take(there, json.loads(json.dumps(progress(here, sent))))
    assert there.request.token_ids == here.request.token_ids and there.request.logprobs == here.request.logprobs
    assert there.output_top == here.output_top and there.request.num_cached == here.request.num_cached
    assert np.array_equal(there.hidden, here.hidden)
    before, anew = copy.deepcopy(there), dict[str, Any]()
    for count in (7, 30, 40):  # told of another process, which computes it again
        part = copy.deepcopy(here)
        for values in (part.request.logprobs, part.output_top, part.request.token_ids):
            del values[len(values) * count // 40 :]
        assert take(there, json.loads(json.dumps(progress(part, anew)))) and there.output_top == before.output_top
        assert there.request.token_ids == before.request.token_ids and there.request.logprobs == before.request.logprobs
    here.request.logprobs[4] += 1.0
    assert not take(there, progress(here, {})) and there.request.logprobs == before.request.logprobs
    there.error = first = EngineDeadError("its process was killed")
    here.error = EngineDeadError("another word")
    take(there, progress(here, sent))
    assert there.error is first


def test_what_was_used_longest_ago_is_no_longer_known() -> None:
    rng, replica, order = random.Random(1), Replica(0, 7), list[int]()
    for _ in range(500):
        keys = [rng.randrange(5) * 10 + i for i in range(rng.randrange(6))]
        replica.learn(keys)
        for key in keys:
            order = [*(other for other in order if other != key), key]
        order = order[-7:]
        asked = [rng.randrange(5) * 10 + i for i in range(5)]
        missing = (i for i, key in enumerate(asked) if key not in order)
        assert list(replica.known) == order and replica.hit(asked) == next(missing, 5)
    replica.end(EngineDeadError("it was killed"))
    assert not replica.known  # its pages went with its process


def test_the_choice_is_who_knows_most_of_those_about_as_busy_as_the_least() -> None:
    rng = random.Random(2)
    for _ in range(2000):
        some = [Replica(rank, 100) for rank in range(rng.randrange(1, 5))]
        keys = list(range(rng.randrange(4)))
        for each in some:
            each.learn(keys[: rng.randrange(len(keys) + 1)])
            each.open = cast(Any, dict.fromkeys(range(rng.choice([0, 1, 4, 5, 6, 20, 24, 29, 30]))))
        least = min(len(each.open) for each in some)
        near = [each for each in some if 4 * len(each.open) <= 4 * least + 4 * SLACK + least]
        near = [each for each in near if len(each.open) - least <= SLACK + least // 4]
        most = max(each.hit(keys) for each in near)
        best = [each for each in near if each.hit(keys) == most]
        idle = [each for each in best if len(each.open) == min(len(other.open) for other in best)]
        assert chosen(some, keys) is idle[0]


def test_prompts_outputs_and_a_flush_decide_where_a_prompt_goes(calls: Calls) -> None:
    """An output is known, too, where its request was; after a flush nothing is."""
    first, other = calls.submit(prompt(0, 0, 60)), calls.submit(prompt(500, 1))
    assert (calls.place(first), calls.place(other)) == (0, 1)
    calls.finish(first, prompt(60, 0, 10))
    calls.finish(other)
    again = calls.submit(prompt(500, 1, 3))
    assert calls.place(again) == 1
    calls.finish(again)
    pinned = calls.submit(prompt(900, 0, 60), dp_rank=1)
    calls.finish(pinned, prompt(960, 0, 10))
    behind = calls.submit(prompt(900, 1, 5))
    assert calls.place(behind) == 1
    calls.finish(behind)
    assert calls.core.call("flush_cache") == {"rank": 1}  # added
    assert not any(each.known for each in calls.core.replicas)
    unknown = calls.submit(prompt(900, 1, 5))
    assert calls.place(unknown) == 0 and [each.finished for each in calls.core.replicas] == [1, 4]


@pytest.mark.parametrize("calls", [True], indirect=True)
def test_who_comes_back_is_told_what_holds(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of the dead go there, too; the new process hears what was asked of all, but no pause that is over."""
    here, there = calls.submit([1], dp_rank=0), calls.submit([2], dp_rank=1)
    monkeypatch.setattr(f"{__name__}.LOADING", [1])
    for name in ("pause", "label_weights"):
        calls.core.call(name)
    for paused in (True, False):
        before = calls.process(1)
        before.ended("was ended by SIGKILL")
        assert calls.process(1) is not before and not calls.core.replicas[1].known
        calls.process(1).sent.clear()
        calls.process(1).hear({"ready": {"pool_tokens": 64}})
        assert calls.process(1).asked() == ["pause", "label_weights"][not paused :]
        if paused:
            calls.core.call("resume")
    for rid in (here, there, calls.submit([3], dp_rank=1)):
        calls.finish(rid)
        assert calls.states[rid].error is None
    calls.process(1).answer = lambda _: calls.process(1).ended("was ended by SIGKILL")
    assert calls.core.call("pause") == {"rank": 0}  # who dies by then hears it when it is back
    calls.process(1).hear({"ready": {"pool_tokens": 64}})
    assert calls.process(1).asked() == ["label_weights", "pause"]


@pytest.mark.parametrize("calls", [True], indirect=True)
def test_who_comes_back_has_the_weights_of_the_others_or_takes_no_requests(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all refused is not told again, and not instead of what they took."""
    monkeypatch.setattr(f"{__name__}.REFUSED", {"bad"})
    calls.core.ask("updates", "update_from_disk", "a folder", version="good")
    assert calls.core.ask("updates", "update_from_disk", "no folder", version="bad") == (False, "no files")
    for gone in (False, True):
        monkeypatch.setattr(f"{__name__}.REFUSED", {"good"} if gone else {"bad"})
        calls.process(1).ended("was ended by SIGKILL")
        calls.process(1).hear({"ready": {"pool_tokens": 64}})
        again = [each for value in calls.process(1).sent for each in value["ask"]]
        assert [arguments["version"] for *_, arguments in again] == ["good"]
        if not gone:
            calls.finish(calls.submit([1], dp_rank=1))
    assert [calls.place(calls.submit([i])) for i in range(9)] == [0] * 9
    with pytest.raises(EngineDeadError, match="replica 1 of 2 was started again, but not with all.*no files"):
        calls.submit([1], dp_rank=1)


@pytest.mark.parametrize("calls", [True], indirect=True)
def test_what_is_asked_of_all_comes_behind_what_is_told_again(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that was started again might be paused when the others go on."""
    core: Any = calls.core
    core.call("pause")
    calls.process(1).ended("was ended by SIGKILL")
    process = calls.process(1)
    process.answer = lambda *_: None
    process.hear({"ready": {"pool_tokens": 64}})
    (told,) = process.asked()
    del process.answer

    def wait_for(ready: Callable[[], bool]) -> None:
        assert not ready() and process.asked() == [told]
        process.answer(process.sent[0]["ask"])
        assert ready()

    monkeypatch.setattr(core._lock, "wait_for", wait_for)
    core.call("resume")
    assert process.asked() == ["pause", "resume"]


def test_an_interrupted_start_ends_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    class Interrupted(Process):
        def __init__(self, start: Any, *given: Any) -> None:
            if start["replica"] == 1:
                raise KeyboardInterrupt
            super().__init__(start, *given)

        def close(self) -> None:
            ended.append(self.rank)

    monkeypatch.setattr(routing, "Child", Interrupted)
    before = threading.enumerate()
    with pytest.raises(KeyboardInterrupt):
        Replicas(replace(EngineConfig(), parallel=ParallelConfig(dp_size=2)), 100, {})
    assert ended == [0] and threading.enumerate() == before


def test_an_interrupted_change_ends_before_the_next_one(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked has gone, one replica has not answered: no other has a change before."""
    core, slow, waits = calls.core, calls.process(1), []

    def interrupted(answers: Any) -> Any:
        waits.append(answers)
        return signal.raise_signal(signal.SIGINT) if len(waits) == 1 else wait(answers)

    monkeypatch.setattr(replicas, "wait", interrupted)
    monkeypatch.setattr(slow, "answer", lambda asked: None)
    with pytest.raises(KeyboardInterrupt):
        core.ask("updates", "update_from_disk", "a folder", version="first")
    assert core._changes.locked() and core._kept._under_way == 1
    monkeypatch.undo()
    assert core.stats() == {"rank": 1}  # added; what is no change does not wait
    slow.answer(slow.sent[0]["ask"])
    core.ask("updates", "update_from_disk", "a folder", version="second")
    assert [command[3]["version"] for command in core._kept.commands] == ["second"] and not core._kept._under_way
    calls.finish(calls.submit([1], dp_rank=1))


def test_tensors_stay_for_replicas_that_read_them_after_an_interruption(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one of them would have them, and another not."""
    core, slow = calls.core, calls.process(1)
    core.replicas[0].facts = {"weights": []}
    updates = RemoteUpdates(core, "updates")

    def left() -> list[Any]:
        return list(Path(core.folder.name).glob("*.safetensors"))

    with monkeypatch.context() as patch:
        waits = iter([lambda answers: signal.raise_signal(signal.SIGINT)])
        patch.setattr(replicas, "wait", lambda answers: next(waits, wait)(answers))
        patch.setattr(slow, "answer", lambda asked: None)
        with pytest.raises(KeyboardInterrupt):
            updates.update_from_tensor([("a", torch.zeros(2))], None)
    assert [str(path) for path in left()] == [slow.sent[0]["ask"][0][3][0]]
    slow.answer(slow.sent[0]["ask"])
    updates.update_from_tensor([("a", torch.zeros(2))], None)
    assert len(left()) == 1


def test_a_replica_that_cannot_tell_what_it_reads_answers_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """That tells it apart from the others."""
    told: list[Any] = []
    server: Any = Server.__new__(Server)
    server.owners, server.parts = {"files": SimpleNamespace(take=lambda one: one + 1)}, None
    server.link = SimpleNamespace(say=lambda **words: told.append(words))
    server._answer([1, "files", "take", [1], {}], [2, "files", "take", [None], {}])
    (value, failure), read = told, {"what it reads": "AttributeError: 'NoneType' object has no attribute 'weights'"}
    assert value == {"answer": 1, "value": 2, "read": read}
    assert failure["answer"] == 2 and "NoneType" in failure["failed"][1] and failure["read"] == read


@pytest.mark.parametrize("calls", [True], indirect=True)
def test_one_that_cannot_be_started_again_ends_no_other(calls: Calls) -> None:
    calls.process(1).ended("was ended by SIGKILL")
    calls.core.replicas[1].facts = None
    calls.process(1).hear({"failed_start": ("ModelLoadError", "replica 1: no files")})
    calls.process(1).ended("ended with exit status 0")
    calls.finish(calls.submit([1]))
    with pytest.raises(EngineDeadError, match="replica 1 of 2 has ended"):
        calls.submit([1], dp_rank=1)


@pytest.mark.parametrize("calls", [True], indirect=True)
def test_one_that_dies_while_it_starts_is_started_again_a_few_times(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    calls.process(1).ended("was ended by SIGKILL")
    for i in range(1, STARTS + 1):
        before, calls.core.replicas[1].facts = calls.process(1), None
        before.ended("was ended by SIGTERM")
        assert (calls.process(1) is before) == ("it is not started again" in caplog.text) == (i == STARTS)
    calls.finish(calls.submit([1]))
    with pytest.raises(EngineDeadError, match="replica 1 of 2 has ended"):
        calls.submit([1], dp_rank=1)


@pytest.mark.parametrize("calls", [True], indirect=True)
def test_in_any_order_each_request_ends_once_by_what_became_of_it(calls: Calls) -> None:
    """Rids are used again, callers abort what has ended before, processes die with and without a word: what they had is
    computed again, a few times."""
    rng, core, ever, lost = random.Random(7), calls.core, list[RequestState](), Counter[RequestState]()

    def ended(meant: Sequence[RequestState]) -> None:
        assert {calls.ended.get(timeout=30) for _ in meant} == set(meant)

    for count in range(500):
        here = [state for each in core.replicas for state in each.open.values()]
        what = rng.choice(["submit", "submit", "finish", "abort", "abort rids", "die", "die"])
        if what == "submit" and (free := sorted(set("abcdef") - {state.request.rid for state in here})):
            ever.append(calls.states[calls.submit([count], rng.choice(free))])
        elif what == "finish" and here:
            state = rng.choice(here)
            calls.finish(state.request.rid, [count, 1])
            assert state.request.token_ids[1:] == [count, 1] and state.error is None
        elif what == "abort" and ever:
            state = rng.choice(ever[-9:])
            core.abort([state])
            ended([state] if state in here else [])
        elif what == "abort rids":
            rids = None if rng.random() < 0.1 else set(rng.sample("abcdefg", 2))
            core.abort_rids(rids)
            ended([state for state in here if rids is None or state.request.rid in rids])
        elif what == "die":
            rank, why = rng.randrange(2), rng.choice([None, "no memory"])
            gone, process = list(core.replicas[rank].open.values()), calls.process(rank)
            if why is not None:
                process.hear({"error": why})
            process.ended("was ended by SIGKILL")
            lost.update(gone)
            gone = [state for state in gone if lost[state] == STARTS]
            ended(gone)
            told = f"replica {rank} of 2 {'was ended by SIGKILL' if why is None else f'failed: {why}'}; its"
            assert all(str(state.error).startswith(told) for state in gone)
        for each in core.replicas:
            assert each.open.keys() == calls.process(each.rank).requests.keys()
        assert core.requests.states.keys() == {rid for each in core.replicas for rid in each.open}
        assert calls.ended.empty()
    assert len(ever) > 100 and [sum(map(times.__le__, lost.values())) > 3 for times in (1, STARTS)] == [True] * 2


@pytest.mark.parametrize("calls", [True], indirect=True)
def test_requests_wait_for_who_comes_back(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no replica is there; what is aborted meanwhile, or was when its process died, has ended."""
    core = calls.core
    old = calls.submit([1])
    monkeypatch.setattr(f"{__name__}.LOADING", [1])
    monkeypatch.setattr(Process, "finish", lambda *_: None)  # it dies before
    core.abort_rids({aborted := calls.submit([2])})
    for rank in (0, 1):
        calls.process(rank).ended("was ended by SIGKILL")
    new, *rids = [calls.submit([3 + i], dp_rank=i % 2) for i in range(4)]
    core.abort_rids({rids[0]})
    core.abort([calls.states[rids[1]]])
    calls.process(1).hear({"ready": {"pool_tokens": 64}})
    core.abort_rids(None)  # those with a process end there
    monkeypatch.undo()
    ended = [aborted, rids[0], rids[1], new]
    assert {calls.ended.get(timeout=30) for _ in ended} == {calls.states[rid] for rid in ended}
    told = [calls.states[rid].request.finish for rid in ended]
    assert told == [{"type": "abort", "message": ABORTED}] * 4 and calls.ended.empty()
    versions = [version_spans(calls.states[rid].request, 0) for rid in ended[:3]]  # as their callers read them
    assert versions == [[{"version": "default", "start": 0, "end": 0}]] * 3
    assert [calls.place(rid) for rid in (old, rids[2])] == [1, 1]


def test_an_adapter_that_is_gone_is_not_told_again(calls: Calls) -> None:
    for i in range(3):
        calls.core.ask("adapters", "load", f"a{i}", "path", False, i)
    for i in (2, 0):
        calls.core.ask("adapters", "unload", f"a{i}", i)
    assert [command[1:3] for command in calls.core._kept.commands] == [["load", ["a1", "path", False, 1]]]


def test_all_give_their_memory_back_or_none(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a request at one of them; one that comes meanwhile is sent behind it."""
    core, slow, release = calls.core, calls.process(1), ("memory", "release", ["kv_cache"])
    rid = calls.submit([1])
    with pytest.raises(EngineBusyError, match="memory is not released while"):
        core.ask(*release)
    assert calls.process(0).asked() == slow.asked() == []
    calls.finish(rid)
    asked = threading.Event()
    monkeypatch.setattr(slow, "answer", lambda _: asked.set())
    thread = threading.Thread(target=core.ask, args=release)
    thread.start()
    assert asked.wait(30)
    rid = calls.submit([2])
    assert not any(each.open for each in core.replicas)
    monkeypatch.undo()
    slow.answer(slow.sent[-1]["ask"])
    thread.join(30)
    calls.finish(rid)


def test_without_a_replica_there_is_no_engine(calls: Calls) -> None:
    assert calls.core.stats() == {"rank": 1}
    calls.process(0).ended("was ended by SIGKILL")
    assert calls.place(calls.submit([1])) == 1
    with pytest.raises(EngineDeadError, match="replica 0 of 2 has ended"):
        calls.submit([1], dp_rank=0)
    calls.process(1).ended("was ended by SIGKILL")
    assert isinstance(calls.ended.get(timeout=30).error, EngineDeadError)
    with pytest.raises(EngineDeadError, match="no replica is left"):
        calls.submit([1])
    assert calls.core.stats() == {"rank": 0}  # which a page of metrics tells, as of an engine that has ended


def test_answers_of_all_are_one() -> None:
    """Counters are added, gauges of flags hold if one's does, an answer holds if all do; the first refusal is told."""
    both = [{"n": 1, "x": 0.5, "paused": False, "why": {"a": "b"}, "name": "v"},
            {"n": 2, "x": 1.0, "paused": True, "why": {"c": "d"}, "name": "w"}]  # fmt: skip
    assert joined(both) == {"n": 3, "x": 1.5, "paused": True, "why": {"a": "b", "c": "d"}, "name": "v"}
    assert joined([True, True]) is True and joined([True, False]) is False
    assert tuple(joined([[True, "good"], [False, "bad"], [False, "worse"]])) == (False, "bad")
    assert joined([]) is None and joined(["a", "b"]) == "a"


@pytest.mark.parametrize("calls", [True], indirect=True)
def test_counters_never_fall_and_stay_told(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever dies, while it is asked, too; gauges are of those that are there."""
    rng, core, before = random.Random(3), calls.core, 0
    told = {rank: {"steps": 0, "running": 2, "paused": False, "weight_version": "v"} for rank in (0, 1)}

    def answer(process: Any, asked: Sequence[Any]) -> None:
        if process.rank == rng.randrange(9):
            return die(process)
        told[process.rank]["steps"] += rng.randrange(9)
        for number, *_ in asked:
            process.hear({"answer": number, "value": dict(told[process.rank])})

    def die(process: Any) -> None:
        told[process.rank]["steps"] = 0
        core.replicas[process.rank].failures = 0
        process.ended("was ended by SIGKILL")

    monkeypatch.setattr(Process, "answer", answer)
    for _ in range(100):
        found = core.call("get_stats")
        alive = sum(each.facts is not None for each in core.replicas)
        assert found["steps"] >= before and found["weight_version"] == "v" and found["running"] <= 2 * alive
        before = found["steps"]
    assert before > 300
