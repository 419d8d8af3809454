"""Sessions: trees of turns, each the continuation of an earlier one. Host words, no torch.

A turn remembers what it adds: how many tokens of its parent's context it keeps, its own prompt, its output. Its KV
pages are ordinary entries of the prefix cache: a turn that continues or forks it finds them there, none is pinned.

    open -> turn a (prompt, output) -> turn b (prompt, output)     append
                                   `-> turn c (prompt, output)     branch: session_params["rid"] is a's

`session_params` is SGLang's {"id", "rid", "offset", "replace", "drop_previous_output"}:

- rid: the turn to continue; None: the last one that finished, or a new root where none has.
- offset: only so many tokens of the context are kept (negative: so many fewer).
- drop_previous_output: the context is that turn's prompt without its output.
- replace: what continues that turn so far is aborted and forgotten. A turn that still runs, or was aborted, is replaced
  itself: the new one takes its place under the last turn that finished. Without rid everything is."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fengine.core.images import ImageSpan
from fengine.core.sampling_params import Parameter, Range
from fengine.core.scalars import flag, integer, told
from fengine.engine.request_state import RequestState
from fengine.engine.threads import REAL, Threads
from fengine.errors import InvalidRequestError, SessionError

TIMEOUT = Parameter(
    "timeout", "number", None, "session", "Seconds without a request until it closes; None: it does not.",
    Range(0, low_open=True, words="a number of seconds above 0, or None"), null=True,
)  # fmt: skip
KEYS = ("id", "rid", "offset", "replace", "drop_previous_output")


@dataclass(frozen=True, slots=True)
class SessionParams:
    """Checked `session_params`."""

    id: str
    rid: str | None = None
    offset: int = 0
    replace: bool = False
    drop_previous_output: bool = False

    @classmethod
    def of(cls, values: Any) -> "SessionParams":
        """Errors: InvalidRequestError; SessionError without an id."""
        if not isinstance(values, dict):
            raise InvalidRequestError(f"session_params must be a dict, got {type(values).__name__}.")
        if unknown := [str(key) for key in values if key not in KEYS]:
            raise InvalidRequestError(f"unknown key in session_params: {told(unknown[0])}; known: {', '.join(KEYS)}.")
        given = {key: value for key, value in values.items() if value is not None}
        if "id" not in given:
            raise SessionError("Invalid request session id: session_params needs the id that open_session returned.")
        for key, value in given.items():
            name = f"session_params[{told(key)}]"
            if key not in ("id", "rid"):
                given[key] = integer(name, value) if key == "offset" else flag(name, value)
            elif not isinstance(value, str):
                raise InvalidRequestError(f"{name} must be a string, got {told(value)}.")
        return cls(**given)


@dataclass(slots=True, eq=False)
class Turn:
    """One request of a session: made by `prepare`, part of the tree from `enter` on."""

    rid: str
    session_id: str
    parent: "Turn | None"
    kept: int  # tokens of the parent's context that it continues
    ids: list[int]  # its own prompt
    replaced: "tuple[Turn, ...]" = ()  # turns that go when it comes
    state: RequestState | None = None  # its request while that runs
    output: list[int] | None = None  # once it has finished
    aborted: bool = False
    children: "list[Turn]" = field(default_factory=list)
    images: tuple[ImageSpan, ...] = ()  # in its own prompt

    def prompt(self) -> tuple[list[int], list[ImageSpan]]:
        """All its prompt tokens, those that come from the turns above included, and where images stand in them. Errors:
        SessionError if an image is cut."""
        chain: list[Turn] = [self]
        while chain[-1].parent is not None:
            chain.append(chain[-1].parent)
        ids, images = list[int](), list[ImageSpan]()
        for turn in reversed(chain):
            if turn.parent is not None:
                ids += turn.parent.output or ()
            del ids[turn.kept :]
            images = [span for span in images if span.start < len(ids)]
            if images and images[-1].start + images[-1].image.tokens > len(ids):
                raise SessionError("session_params['offset'] cuts an image; give one in front of it or behind it.")
            images += [ImageSpan(len(ids) + start, image) for start, image in turn.images]
            ids += turn.ids
        return ids, images

    @property
    def running(self) -> bool:
        return self.output is None and not self.aborted

    def settle(self, now: float) -> float:
        """Takes over the outcome of its request, if that has ended. Returns until when it ran, as far as is known."""
        state = self.state
        if state is None or not (state.done or state.abandoned):
            return now
        start = state.request.prompt_len
        finish = state.output.finish
        self.aborted = state.error is not None or finish is None or finish["type"] == "abort"
        self.output = None if self.aborted else state.request.token_ids[start : start + state.output.num_tokens]
        self.state = None
        return now if state.finished is None else state.finished

    def with_below(self) -> "Iterator[Turn]":
        """This turn and every one that continues it."""
        stack: list[Turn] = [self]
        while stack:
            turn = stack.pop()
            stack.extend(turn.children)
            yield turn


@dataclass(slots=True)
class _Session:
    timeout: float | None
    used: float
    streaming: bool = False  # each turn continues the last one
    turns: dict[str, Turn] = field(default_factory=dict)  # by rid, in the order of arrival
    running: list[Turn] = field(default_factory=list)  # of these, those whose outcome is not known yet

    def settle(self, now: float) -> None:
        """Takes over what has ended. While a turn runs, the session is in use."""
        for turn in self.running:
            self.used = max(self.used, turn.settle(now))
        self.running = [turn for turn in self.running if turn.running]

    def last_finished(self) -> Turn | None:
        return next((turn for turn in reversed(self.turns.values()) if turn.output is not None), None)


class Sessions:
    """All sessions of an engine. Thread-safe. `abort` ends the requests of states; `system` has their clock."""

    def __init__(self, abort: Callable[[Sequence[RequestState]], None], system: Threads = REAL) -> None:
        self._abort, self._clock, self._lock = abort, system.now, system.lock()
        self._sessions: dict[str, _Session] = {}

    def open(self, session_id: Any = None, streaming: Any = False, timeout: Any = None) -> str | None:
        """A new session's id; None if that id is in use. It closes after `timeout` seconds without a request. A
        `streaming` session is append-only; its KV lies in the prefix cache, as any session's does. Errors:
        InvalidRequestError."""
        streaming = flag("streaming", streaming)
        if session_id is not None and (not isinstance(session_id, str) or not session_id):
            raise InvalidRequestError(f"session_id must be a string that is not empty, got {told(session_id)}.")
        seconds = TIMEOUT.checked(timeout)
        with self._lock:
            self._expire()
            if session_id in self._sessions:
                return None
            name = session_id or uuid.uuid4().hex
            self._sessions[name] = _Session(seconds, self._clock(), streaming)
            return name

    def close(self, session_id: Any) -> None:
        """Forgets a session; a turn that still runs goes on to its end. Errors: SessionError if there is none."""
        with self._lock:
            self._find(session_id)
            del self._sessions[session_id]

    def prepare(self, values: Any, new_ids: list[int], rid: str, bos_id: int | None) -> Turn:
        """The turn that a request `rid` with the prompt `new_ids` would be; its whole prompt is `Turn.prompt()`. A bos
        token that begins `new_ids` goes where there is a context. Changes nothing. Errors: InvalidRequestError,
        SessionError."""
        params = SessionParams.of(values)
        with self._lock:
            session = self._find(params.id)
            if rid in session.turns:
                raise SessionError(f"rid {told(rid)} is a turn of session {told(params.id)} already; choose another.")
            last = session.last_finished() if session.streaming else None
            appended = (SessionParams(params.id), SessionParams(params.id, last and last.rid))
            if session.streaming and params not in appended:
                raise SessionError(
                    f"session {told(params.id)} is streaming, so append-only: leave offset, replace and "
                    "drop_previous_output out of session_params, and any rid but the last turn's."
                )
            parent, replaced = self._place(session, params)
            if parent is None:
                return Turn(rid, params.id, None, 0, list(new_ids), replaced)
            above = parent.prompt()[0]
            length = len(above) + (0 if params.drop_previous_output else len(parent.output or ()))
            if abs(params.offset) > length:
                raise SessionError(
                    f"session_params['offset'] is {params.offset}, but the context of turn {told(parent.rid)} has "
                    f"{length} tokens; give an offset within it."
                )
            kept = params.offset if params.offset > 0 else length + params.offset
            fresh = new_ids[1:] if new_ids and new_ids[0] == bos_id else new_ids
            return Turn(rid, params.id, parent, kept, list(fresh), replaced)

    def _place(self, session: _Session, params: SessionParams) -> tuple[Turn | None, tuple[Turn, ...]]:
        """(the turn to continue, the turns that are replaced)."""
        if params.rid is None:
            if params.replace:
                return None, tuple(session.turns.values())
            last = next(reversed(session.turns.values()), None)
            if last is not None and last.running:
                raise SessionError(_UNFINISHED.format(told(last.rid)))
            return session.last_finished(), ()
        turn = session.turns.get(params.rid)
        if turn is None:
            raise SessionError(
                f"Invalid request session id: session {told(params.id)} has no turn {told(params.rid)}; give the rid "
                "(the meta_info id) of one of its requests."
            )
        if params.replace:
            if turn.output is None:
                return turn.parent, (turn,)  # nothing continues it
            return turn, tuple(below for child in turn.children for below in child.with_below())
        if turn.aborted:
            before = "nothing" if turn.parent is None else f"turn {told(turn.parent.rid)}"
            raise SessionError(f"turn {told(turn.rid)} was aborted and cannot be continued; before it came {before}.")
        if turn.running:
            raise SessionError(_UNFINISHED.format(told(turn.rid)))
        return turn, ()

    def enter(self, turns: Sequence[Turn]) -> None:
        """Puts prepared turns into their trees, all or none, and aborts what they replace. Errors: SessionError."""
        with self._lock:
            self._check(turns)
            gone = [turn for new in turns for turn in new.replaced]
            for turn in gone:
                session = self._sessions[turn.session_id]
                if session.turns.get(turn.rid) is turn:
                    del session.turns[turn.rid]
                    if turn.parent is not None:
                        turn.parent.children.remove(turn)
            for turn in turns:
                session = self._sessions[turn.session_id]
                session.turns[turn.rid] = turn
                session.running.append(turn)
                if turn.parent is not None:
                    turn.parent.children.append(turn)
                turn.replaced = ()
        if states := [turn.state for turn in gone if turn.state is not None]:
            self._abort(states)

    def _check(self, turns: Sequence[Turn]) -> None:
        """That trees still stand as when the turns were prepared, and turns of a streaming session come one by one.
        Errors: SessionError."""
        begun = set[str]()
        for turn in turns:
            session, parent, name = self._find(turn.session_id), turn.parent, told(turn.session_id)
            if turn.rid in session.turns or (parent is not None and session.turns.get(parent.rid) is not parent):
                raise SessionError(f"session {name} changed while a turn was added to it; try again.")
            goes_on = not session.running and turn.session_id not in begun and parent is session.last_finished()
            if session.streaming and not goes_on:
                raise SessionError(f"session {name} is streaming: send a turn when the one before has finished.")
            begun.add(turn.session_id)

    def _find(self, session_id: Any) -> _Session:
        self._expire()
        session = self._sessions.get(session_id) if isinstance(session_id, str) else None
        if session is None:
            name = told(session_id).strip("'")
            raise SessionError(
                f"Invalid request: session id {name} does not exist: it was never opened here, was closed, "
                "or its timeout has passed. open_session gives a new one."
            )
        session.used = self._clock()
        return session

    def _expire(self) -> None:
        """Settles every session, and closes those whose time is up."""
        now = self._clock()
        for session_id, session in list(self._sessions.items()):
            session.settle(now)
            if session.timeout is not None and now - session.used > session.timeout:
                del self._sessions[session_id]


_UNFINISHED = "Session request is appending to a request that hasn't finished. Wait for turn {}, or replace it."
