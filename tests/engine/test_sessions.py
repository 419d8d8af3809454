"""Sessions: the tree of turns against contexts written out by hand, and, over the engine, against plain calls."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from checksum import checksum_engine, expected

from fengine.api.engine import Engine
from fengine.api.sessions import Sessions, Turn
from fengine.core.images import Image, ImageSpan
from fengine.core.request import Request
from fengine.engine.request_state import RequestOutput, RequestState
from fengine.engine.threads import Threads
from fengine.errors import FengineError, InvalidRequestError, MemoryReleasedError, SessionError

BOS = 1


class World:
    """Sessions without an engine: a clock to set, requests that end when told, and a list of what was aborted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.aborted: list[str] = []
        self.sessions = Sessions(self.abort, Threads(now=lambda: self.now))
        self.count = 0

    def abort(self, states: Any) -> None:
        for state in states:
            self.aborted.append(state.request.rid)
            state.output = state.output._replace(finish={"type": "abort", "message": "Aborted"})

    def start(self, params: Any, ids: list[int], rid: str | None = None) -> Turn:
        """A turn whose request runs."""
        self.count += 1
        turn = self.sessions.prepare(params, ids, rid or f"r{self.count}", BOS)
        self.sessions.enter([turn])
        prompt = turn.prompt()[0]
        turn.state = RequestState(Request(turn.rid, len(prompt), prompt, None, 0, 8, frozenset()), None, False, print)  # type: ignore[arg-type]
        return turn

    def finish(self, turn: Turn, output: list[int], kind: str = "length") -> None:
        """`kind` is what the caller sees. Behind a stop string one more token is drawn, which nobody sees."""
        assert turn.state is not None
        turn.state.request.token_ids.extend([*output, 99] if kind == "stop" else output)
        turn.state.output, turn.state.finished = RequestOutput("", len(output), {"type": kind}), self.now

    def turn(self, params: Any, ids: list[int], output: list[int], rid: str | None = None) -> Turn:
        turn = self.start(params, ids, rid)
        self.finish(turn, output, "stop")
        return turn


@pytest.fixture
def world() -> World:
    return World()


def opened(world: World, **options: Any) -> str:
    session_id = world.sessions.open(**options)
    assert session_id is not None
    return session_id


def test_turns_append_to_the_last_one_or_to_the_one_named(world: World) -> None:
    sid = opened(world)
    a = world.turn({"id": sid, "rid": None}, [BOS, 5, 6], [7, 8])
    assert a.prompt()[0] == [BOS, 5, 6]  # a first turn keeps its bos token
    b = world.turn({"id": sid}, [BOS, 9], [10])
    assert b.prompt()[0] == [BOS, 5, 6, 7, 8, 9]
    c = world.turn({"id": sid, "rid": b.rid}, [11, BOS], [12])
    assert c.prompt()[0] == [BOS, 5, 6, 7, 8, 9, 10, 11, BOS]
    branch = world.turn({"id": sid, "rid": a.rid}, [13], [14])
    assert branch.prompt()[0] == [BOS, 5, 6, 7, 8, 13]
    assert world.turn({"id": sid, "rid": branch.rid}, [15], []).prompt()[0] == [BOS, 5, 6, 7, 8, 13, 14, 15]
    assert c.prompt()[0] == [BOS, 5, 6, 7, 8, 9, 10, 11, BOS]


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, [BOS, 5, 6, 7, 8, 9]),
        ({"offset": 0}, [BOS, 5, 6, 7, 8, 9]),
        ({"offset": 4}, [BOS, 5, 6, 7, 9]),
        ({"offset": 2}, [BOS, 5, 9]),
        ({"offset": 5}, [BOS, 5, 6, 7, 8, 9]),
        ({"offset": -1}, [BOS, 5, 6, 7, 9]),
        ({"offset": -5}, [9]),
        ({"drop_previous_output": True}, [BOS, 5, 6, 9]),
        ({"drop_previous_output": True, "offset": 2}, [BOS, 5, 9]),
        ({"drop_previous_output": True, "offset": -1}, [BOS, 5, 9]),
        ({"replace": False, "drop_previous_output": False, "offset": None}, [BOS, 5, 6, 7, 8, 9]),
    ],
)
def test_what_of_the_context_is_kept(world: World, options: dict[str, Any], prompt: list[int]) -> None:
    sid = opened(world)
    first = world.turn({"id": sid}, [BOS, 5, 6], [7, 8])
    second = world.turn({"id": sid, "rid": first.rid, **options}, [BOS, 9], [3])
    assert second.prompt()[0] == prompt
    assert world.turn({"id": sid}, [4], []).prompt()[0] == [*prompt, 3, 4]  # the cut stays in force below


def test_replace_forgets_and_aborts_what_continued_a_turn(world: World) -> None:
    sid = opened(world)
    a = world.turn({"id": sid}, [2], [3])
    b = world.turn({"id": sid}, [4], [5])
    c = world.start({"id": sid, "rid": b.rid}, [6])
    new = world.turn({"id": sid, "rid": a.rid, "replace": True}, [7], [8])
    assert new.prompt()[0] == [2, 3, 7] and world.aborted == [c.rid]
    for gone in (b, c):
        with pytest.raises(SessionError, match="has no turn"):
            world.start({"id": sid, "rid": gone.rid}, [9])
    assert world.turn({"id": sid}, [9], []).prompt()[0] == [2, 3, 7, 8, 9]


def test_replace_of_a_running_turn_takes_its_place(world: World) -> None:
    sid = opened(world)
    a = world.turn({"id": sid}, [2], [3])
    b = world.start({"id": sid}, [4])
    assert world.turn({"id": sid, "rid": b.rid, "replace": True}, [5], [6]).prompt()[0] == [2, 3, 5]
    assert world.aborted == [b.rid]
    fresh = world.turn({"id": sid, "replace": True}, [BOS, 7], [8])
    assert fresh.prompt()[0] == [BOS, 7]  # without a rid everything goes
    with pytest.raises(SessionError, match="has no turn"):
        world.start({"id": sid, "rid": a.rid}, [9])


def test_an_aborted_turn_is_no_context(world: World) -> None:
    sid = opened(world)
    a = world.turn({"id": sid}, [2], [3])
    b = world.start({"id": sid}, [4])
    world.finish(b, [5], "abort")
    with pytest.raises(SessionError, match=f"{b.rid!r} was aborted .* before it came turn {a.rid!r}"):
        world.start({"id": sid, "rid": b.rid}, [6])
    c = world.start({"id": sid}, [6])  # exactly the last turn that finished
    assert c.prompt()[0] == [2, 3, 6]
    assert c.state is not None
    c.state.error = FengineError("the row failed")
    assert world.turn({"id": sid}, [7], []).prompt()[0] == [2, 3, 7]
    other = opened(world)
    world.finish(world.start({"id": other}, [4]), [], "abort")
    assert world.turn({"id": other}, [6], []).prompt()[0] == [6]  # none has finished: a new root


def test_a_turn_in_flight_cannot_be_continued(world: World) -> None:
    sid = opened(world)
    a = world.start({"id": sid}, [2])
    for params in ({"id": sid}, {"id": sid, "rid": a.rid}):
        with pytest.raises(SessionError, match="appending to a request that hasn't finished"):
            world.start(params, [3])
    world.finish(a, [4])
    assert world.turn({"id": sid}, [3], []).prompt()[0] == [2, 4, 3]
    left, right = world.start({"id": sid, "rid": a.rid}, [5]), world.start({"id": sid, "rid": a.rid}, [6])
    world.finish(right, [7])
    world.finish(left, [8])
    assert world.turn({"id": sid, "rid": right.rid}, [9], []).prompt()[0] == [2, 4, 6, 7, 9]


def test_ids_of_sessions(world: World) -> None:
    sessions = world.sessions
    assert sessions.open("mine") == "mine" and sessions.open("mine") is None
    assert opened(world) != opened(world)
    world.turn({"id": "mine"}, [2], [3])
    sessions.close("mine")
    for bad in ("mine", "never", "", 7):
        with pytest.raises(SessionError, match="session id .* does not exist"):
            sessions.close(bad)
    with pytest.raises(SessionError, match="Invalid request: session id mine does not exist"):
        world.start({"id": "mine"}, [2])
    assert sessions.open("mine") == "mine"
    assert world.turn({"id": "mine"}, [4], []).prompt()[0] == [4]  # nothing is left of the old one


def test_a_session_lives_as_long_as_one_of_its_turns_runs(world: World) -> None:
    """Whichever of them has ended, and in whatever order they came."""
    for first in (True, False):
        sid = opened(world, timeout=10.0)
        world.turn({"id": sid}, [5], [6], f"{sid}above")
        turns = [world.start({"id": sid, "rid": f"{sid}above"}, [7], f"{sid}{i}") for i in range(2)]
        ended, running = turns if first else turns[::-1]
        world.finish(ended, [8])
        world.now += 1000
        assert world.sessions.open(sid) is None  # it is there
        world.finish(running, [8])
        world.now += 10.5
        assert world.sessions.open(sid) == sid


def test_images_of_what_is_cut_off_are_gone() -> None:
    """An offset counts their tokens, as all others, and cuts none."""
    x, y, z = (Image(name, 2, 1, {}) for name in (b"x", b"y", b"z"))
    above = Turn("a", "s", None, 0, [1, 9, 9, 9, 9, 3], output=[4], images=(ImageSpan(1, x), ImageSpan(3, y)))
    for kept, spans in ((7, [(1, x), (3, y)]), (5, [(1, x), (3, y)]), (3, [(1, x)]), (1, []), (0, []), (4, None)):
        below = Turn("b", "s", above, kept, [5, 9, 9], images=(ImageSpan(1, z),))
        if spans is None:
            with pytest.raises(SessionError, match="offset'] cuts an image"):
                below.prompt()
        else:
            assert below.prompt() == ([1, 9, 9, 9, 9, 3, 4][:kept] + [5, 9, 9], [*spans, (kept + 1, z)])


def test_a_session_closes_after_its_timeout(world: World) -> None:
    sid, forever = opened(world, timeout=np.float32(10)), opened(world)
    world.now = 9.0
    turn = world.start({"id": sid}, [2])
    world.now = 100.0  # its request has run all the time
    with pytest.raises(SessionError, match="hasn't finished"):
        world.start({"id": sid}, [3])
    world.finish(turn, [4])
    world.now = 101.0
    assert world.turn({"id": sid}, [3], [5]).prompt()[0] == [2, 4, 3]
    world.now = 110.0
    assert world.turn({"id": sid}, [6], [7]).prompt()[0] == [2, 4, 3, 5, 6]
    world.now = 121.0
    assert world.turn({"id": forever}, [8], []).prompt()[0] == [8]
    with pytest.raises(SessionError, match="timeout"):
        world.start({"id": sid}, [9])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("s", "must be a dict, got str"),
        ({}, "needs the id"),
        ({"id": None}, "needs the id"),
        ({"id": 5}, r"\['id'\] must be a string, got 5"),
        ({"id": "s", "rid": 5}, r"\['rid'\] must be a string, got 5"),
        ({"id": "s", "rid": "nobody"}, "Invalid request session id: session 's' has no turn 'nobody'"),
        ({"id": "s", "rid": "nobody", "replace": True}, "has no turn 'nobody'"),
        ({"id": "s", "offset": 1.0}, r"\['offset'\] must be an integer, got 1.0"),
        ({"id": "s", "offset": True}, r"\['offset'\] must be an integer, got True"),
        ({"id": "s", "offset": 3}, "offset'.* is 3, but the context of turn 'a' has 2 tokens"),
        ({"id": "s", "offset": -3}, "offset'.* is -3, but"),
        ({"id": "s", "offset": 2, "drop_previous_output": True}, "has 1 tokens"),
        ({"id": "s", "replace": 1}, r"\['replace'\] must be True or False, got 1"),
        ({"id": "s", "drop_previous_output": "no"}, "must be True or False"),
        ({"id": "s", "ofset": 1}, "unknown key in session_params: 'ofset'"),
    ],
)
def test_bad_params_leave_the_session_as_it_was(world: World, params: Any, message: str) -> None:
    opened(world, session_id="s")
    world.turn({"id": "s"}, [2], [3], rid="a")
    with pytest.raises(InvalidRequestError, match=message):
        world.sessions.prepare(params, [4], "b", BOS)
    with pytest.raises(SessionError, match="rid 'a' is a turn of session 's' already"):
        world.sessions.prepare({"id": "s"}, [4], "a", BOS)
    assert world.turn({"id": "s"}, [5], []).prompt()[0] == [2, 3, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"session_id": ""}, "session_id must be a string that is not empty"),
        ({"session_id": 5}, "session_id must be a string"),
        ({"streaming": 1}, "streaming must be True or False"),
        ({"timeout": 0}, "timeout must be a number of seconds above 0"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"timeout": True}, "timeout"),
    ],
)
def test_bad_arguments_of_open(world: World, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        world.sessions.open(**options)


def test_turns_enter_all_or_none(world: World) -> None:
    sid = opened(world)
    a = world.turn({"id": sid}, [2], [3])
    good = world.sessions.prepare({"id": sid, "rid": a.rid}, [4], "x", BOS)
    bad = world.sessions.prepare({"id": sid, "rid": a.rid}, [5], "y", BOS)
    world.turn({"id": sid, "replace": True}, [6], [7])  # meanwhile their parent goes
    with pytest.raises(SessionError, match="changed while"):
        world.sessions.enter([good, bad])
    assert world.turn({"id": sid}, [9], [], rid="x").prompt()[0] == [6, 7, 9]


# -- over the engine ---------------------------------------------------------------------------------------------------

GREEDY = {"temperature": 0, "max_new_tokens": 6}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with checksum_engine(pool=400, context=128, page_size=4) as one:
        yield one


def ask(engine: Engine, ids: Any, session_params: Any, **more: Any) -> Any:
    return engine.generate(input_ids=ids, sampling_params=GREEDY, session_params=session_params, **more)


def test_a_conversation_equals_plain_calls(engine: Engine) -> None:
    sid = engine.open_session(1000)
    context: list[int] = []
    outputs = []
    for ids in ([5, 6, 7], [8], [9, 10], [11, 12, 13, 14]):
        output = ask(engine, ids, {"id": sid, "rid": outputs[-1]["meta_info"]["id"] if outputs else None})
        context += ids
        assert output["output_ids"] == expected(context, 6)
        assert output["meta_info"]["prompt_tokens"] == len(context)
        context += output["output_ids"]
        outputs.append(output)
    for i, kept in ((0, 9), (1, 16)):  # forks of the first and the second turn
        fork = ask(engine, [20 + i], {"id": sid, "rid": outputs[i]["meta_info"]["id"]})
        assert fork["output_ids"] == expected([*context[:kept], 20 + i], 6)
        assert fork["meta_info"]["cached_tokens"] == kept // 4 * 4  # it shares its pages
    cut = ask(engine, [30], {"id": sid, "rid": outputs[3]["meta_info"]["id"], "offset": 10})
    assert cut["output_ids"] == expected([*context[:10], 30], 6)
    dropped = ask(engine, [30], {"id": sid, "rid": outputs[1]["meta_info"]["id"], "drop_previous_output": True})
    assert dropped["output_ids"] == expected([*context[:10], 30], 6)
    engine.close_session(str(sid))
    with pytest.raises(SessionError, match="does not exist"):
        ask(engine, [5], {"id": sid})
    assert engine.generate(input_ids=context, sampling_params=GREEDY)["output_ids"] == expected(context, 6)


def test_several_turns_of_one_call_are_branches(engine: Engine) -> None:
    sid, other = engine.open_session(1000), engine.open_session(1000)
    root = ask(engine, [5, 6], {"id": sid})
    above = [5, 6, *root["output_ids"]]
    params = [{"id": sid, "rid": root["meta_info"]["id"]}, {"id": other}, {"id": sid}]
    outputs = ask(engine, [[7], [8, 9], [10]], params)
    prompts = [[*above, 7], [8, 9], [*above, 10]]
    assert [output["output_ids"] for output in outputs] == [expected(prompt, 6) for prompt in prompts]
    with pytest.raises(SessionError, match="prompt 1: .* has no turn 'nobody'"):
        ask(engine, [[7], [8]], [{"id": sid}, {"id": sid, "rid": "nobody"}])
    with pytest.raises(InvalidRequestError, match="n must be 1"):
        engine.generate(input_ids=[5], sampling_params=GREEDY | {"n": 2}, session_params={"id": sid})
    with pytest.raises(InvalidRequestError, match="session_id and session_params cannot both be set"):
        ask(engine, [5], {"id": sid}, session_id=sid)
    last = outputs[2]["output_ids"]
    again = ask(engine, [11], {"id": sid})  # what failed left no trace
    assert again["output_ids"] == expected([*prompts[2], *last, 11], 6)


def test_an_abandoned_turn_and_its_replacement(engine: Engine) -> None:
    sid = engine.open_session(1000)
    root = ask(engine, [5, 6], {"id": sid}, rid="root")
    above = [5, 6, *root["output_ids"]]
    long = {"temperature": 0, "max_new_tokens": 100}
    stream = engine.generate(input_ids=[7], sampling_params=long, session_params={"id": sid}, rid="long", stream=True)
    first = next(stream)
    assert first["output_ids"][0] == expected([*above, 7], 1)[0]
    with pytest.raises(SessionError, match="hasn't finished"):
        ask(engine, [8], {"id": sid, "rid": "long"})
    new = ask(engine, [8], {"id": sid, "rid": "long", "replace": True})
    assert new["output_ids"] == expected([*above, 8], 6)
    chunks = list(stream)
    assert (chunks[-1]["meta_info"]["finish_reason"] or {})["type"] == "abort"
    drawn = chunks[-1]["output_ids"]
    assert drawn == expected([*above, 7], 100)[: len(drawn)]
    abandoned = engine.generate(input_ids=[9], sampling_params=long, session_params={"id": sid}, stream=True)
    next(abandoned)
    abandoned.close()  # type: ignore[attr-defined]
    at_once = ask(engine, [12], {"id": sid})  # the abort need not have happened yet
    assert at_once["output_ids"] == expected([*above, 8, *new["output_ids"], 12], 6)
    after = ask(engine, [10], {"id": sid, "rid": new["meta_info"]["id"]})
    assert after["output_ids"] == expected([*above, 8, *new["output_ids"], 10], 6)


def test_a_replacement_that_cannot_be_queued_replaces_nothing(engine: Engine) -> None:
    sid = engine.open_session(100)
    first = ask(engine, [5], {"id": sid}, rid="first")
    engine.pause_generation("in_place")
    running = ask(engine, [6], {"id": sid}, rid="running", stream=True)
    taken: Any = engine.generate(input_ids=[9], sampling_params=GREEDY, rid="taken", stream=True)
    with pytest.raises(InvalidRequestError, match="'taken' is in use"):
        ask(engine, [7], {"id": sid, "rid": "first", "replace": True}, rid="taken")
    engine.continue_generation()
    *_, last = running
    assert last["output_ids"] == expected([5, *first["output_ids"], 6], 6)
    *_, last = taken
    assert last["output_ids"] == expected([9], 6)
    engine._parts.core.refuse({"weights": "released"})
    with pytest.raises(MemoryReleasedError):
        ask(engine, [7], {"id": sid, "rid": "first", "replace": True})
    engine._parts.core.allow("weights")
    more = ask(engine, [8], {"id": sid, "rid": "running"})
    assert more["meta_info"]["prompt_tokens"] == 15


def test_a_session_of_texts_keeps_one_bos_token() -> None:
    with Engine(model_path="box", device="cpu", enable_torch_compile=False) as llm:
        sid = llm.open_session(1000)
        first: Any = llm.generate("The capital of France is", GREEDY, session_params={"id": sid})
        second: Any = llm.generate(" And the capital of Italy is", GREEDY, session_params={"id": sid})
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode("The capital of France is") + first["output_ids"]
        ids += llm.tokenizer.encode(" And the capital of Italy is", add_special_tokens=False)
        plain: Any = llm.generate(input_ids=ids, sampling_params=GREEDY)
        assert second["text"] == plain["text"] and second["output_ids"] == plain["output_ids"]
        assert second["meta_info"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("seed", range(20))
def test_random_trees_equal_contexts_kept_whole(world: World, seed: int) -> None:
    """The oracle keeps every context as one list, and forgets what `replace` forgets."""
    rng = random.Random(seed)
    sid = opened(world)
    contexts: dict[str, tuple[list[int], list[int]]] = {}  # rid -> (prompt, output)
    above: dict[str, str | None] = {}
    for step in range(60):
        ids, rid = [rng.randrange(2, 50) for _ in range(rng.randrange(1, 4))], f"t{step}"
        parent = rng.choice([None, *contexts]) if contexts else None
        replace, drop = rng.random() < 0.1 and parent is not None, rng.random() < 0.2
        params = {"id": sid, "rid": parent, "replace": replace, "drop_previous_output": drop}
        before, output = contexts[parent or next(reversed(contexts))] if contexts else ([], [])
        whole = before if drop else before + output
        if whole and rng.random() < 0.3:
            params["offset"] = rng.randrange(-len(whole) + 1, len(whole) + 1)
            whole = whole[: params["offset"]] if params["offset"] else whole
        if replace:
            gone = [parent]
            for name in list(contexts):  # in order of arrival: parents first
                if above[name] in gone:
                    gone.append(name)
            for name in gone[1:]:
                del contexts[str(name)], above[str(name)]
        turn = world.turn(params, ids, drawn := [rng.randrange(2, 50) for _ in range(rng.randrange(4))], rid)
        above[rid] = parent or (next(reversed(contexts)) if contexts else None)
        contexts[rid] = (whole + ids, drawn)
        assert turn.prompt()[0] == whole + ids
    for name, (before, output) in contexts.items():
        probe = world.sessions.prepare({"id": sid, "rid": name}, [1000], "probe", BOS)
        assert probe.prompt()[0] == [*before, *output, 1000]


def test_a_streaming_session_is_append_only_with_the_bits_of_any(engine: Engine) -> None:
    plain, streaming = (engine.open_session(1000, streaming=value) for value in (False, True))
    streamed = []
    for turn in ([5, 6], [7], [8, 9, 10]):
        outputs: list[Any] = [
            engine.generate(input_ids=turn, sampling_params=GREEDY, session_params={"id": sid}, return_logprob=True,
                            logprob_start_len=0)
            for sid in (plain, streaming)
        ]  # fmt: skip
        for key in ("output_ids", "prompt_tokens", "output_token_logprobs", "input_token_logprobs"):
            one, other = ((o | o["meta_info"])[key] for o in outputs)
            assert one == other
        assert len(outputs[1]["meta_info"]["input_token_logprobs"]) == outputs[1]["meta_info"]["prompt_tokens"]
        streamed.append(outputs[1]["meta_info"]["id"])
    first, last = streamed[0], streamed[-1]
    for more in ({"rid": first}, {"replace": True}, {"offset": 1}, {"rid": last, "drop_previous_output": True}):
        with pytest.raises(SessionError, match="append-only"):
            engine.generate(input_ids=[1], sampling_params=GREEDY, session_params={"id": streaming, **more})
    one, other = (
        engine.generate(input_ids=[1], sampling_params=GREEDY, session_params=params)
        for params in ({"id": plain}, {"id": streaming, "rid": last})
    )
    assert one["output_ids"] == other["output_ids"]


def test_turns_of_a_streaming_session_come_one_after_the_other(engine: Engine, world: World) -> None:
    sid = engine.open_session(1000, streaming=True)
    with pytest.raises(SessionError, match="is streaming: send a turn when the one before has finished"):
        ask(engine, [[5], [6]], {"id": sid})
    first = ask(engine, [5], {"id": sid})
    assert ask(engine, [6], {"id": sid})["meta_info"]["prompt_tokens"] == 2 + len(first["output_ids"])
    name = world.sessions.open(streaming=True)
    late, early = (world.sessions.prepare({"id": name}, [5], rid, BOS) for rid in ("late", "early"))
    world.sessions.enter([early])
    with pytest.raises(SessionError, match="is streaming"):  # whose text it would not have
        world.sessions.enter([late])
