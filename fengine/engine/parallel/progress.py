"""`Progress`: what is new of a request that another process computes, as plain values, and how it enters the state."""

import base64
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fengine import errors
from fengine.core.plain import from_plain, to_plain
from fengine.core.request import Drafting, FinishReason
from fengine.engine.parallel.child import NOTHING
from fengine.engine.request_state import RequestState
from fengine.errors import EngineDeadError, FengineError

Pairs = list[list[tuple[float, int]]]


class Progress(NamedTuple):
    """Lists hold what came since the progress before; those of the prompt come once, with the first token."""

    rid: str
    token_ids: list
    logprobs: list
    output_top: Pairs
    output_ids: Pairs
    moments: tuple[float | None, float | None] = (None, None)  # it started, its first token came
    versions: tuple[tuple[str, int], ...] = ()
    num_cached: int = 0
    num_preempted: int = 0
    unasked: tuple[float, int] | None = None
    drafting: Drafting | None = None
    input_logprobs: list[tuple[float | None, int]] | None = None
    input_top: list[list[tuple[float, int]] | None] = []
    input_ids: list[list[tuple[float, int]] | None] = []
    hidden: list = []  # all so far, encoded
    embedding: list | None = None
    finish: FinishReason | None = None
    error: tuple[str, str] | None = None  # its kind, and what it says
    fault: tuple[str, str] | None = None


class Sent(NamedTuple):
    """How much of a request's lists has been sent."""

    tokens: int = 0
    top: int = 0
    ids: int = 0
    prompt: bool = False


def encoded(array: np.ndarray) -> list[Any]:
    return [array.dtype.str, list(array.shape), base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def decoded(told: list[Any]) -> np.ndarray:
    kind, shape, data = told
    return np.frombuffer(base64.b64decode(data), kind).reshape(shape).copy()


def _told(error: FengineError | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


def error_of(told: tuple[str, str]) -> FengineError:
    """As the other process had it. Pure."""
    kind = getattr(errors, told[0], None)
    return (kind if isinstance(kind, type) and issubclass(kind, FengineError) else EngineDeadError)(told[1])


def progress(state: RequestState, sent: Sent) -> tuple[Any, Sent]:
    """What is new, as plain values, and what has been sent with it. The loop may write meanwhile. Pure."""
    request, done = state.request, state.done
    tokens, prompt = request.num_output, bool(request.num_output) or done
    now = Sent(tokens, len(state.output_top), len(state.output_ids), prompt)
    inputs: dict[str, Any] = {}
    if prompt and not sent.prompt:
        names = ("input_logprobs", "input_top", "input_ids")
        inputs = {name: list(getattr(state, name)) for name in names}
    found = Progress(
        request.rid, request.token_ids[request.prompt_len + sent.tokens : request.prompt_len + tokens],
        request.logprobs[sent.tokens : tokens], state.output_top[sent.top : now.top],
        state.output_ids[sent.ids : now.ids], (state.started, state.first_token), request.versions, request.num_cached,
        request.num_preempted, request.unasked, request.drafting and replace(request.drafting, memo=None), **inputs,
        hidden=[encoded(array) for array in state.hidden],
        embedding=None if state.embedding is None else encoded(state.embedding),
        finish=request.finish if done else None, error=_told(state.error), fault=_told(state.fault),
    )  # fmt: skip
    return to_plain(found, NOTHING), now


def take(state: RequestState, told: Any) -> None:
    """Modifies: the state and its request."""
    found: Progress = from_plain(Progress, told, NOTHING)
    request = state.request
    request.logprobs += found.logprobs
    state.output_top += found.output_top
    state.output_ids += found.output_ids
    state.started, state.first_token = found.moments
    request.versions, request.num_cached = found.versions, found.num_cached
    request.num_preempted, request.unasked, request.drafting = found.num_preempted, found.unasked, found.drafting
    if found.input_logprobs is not None:
        state.input_logprobs, state.input_top, state.input_ids = found.input_logprobs, found.input_top, found.input_ids
    state.hidden = [decoded(array) for array in found.hidden]
    state.embedding = None if found.embedding is None else decoded(found.embedding)
    state.fault = None if found.fault is None else error_of(found.fault)
    request.token_ids += found.token_ids  # the last, for others look at their number
    request.finish = found.finish
    if found.error is not None and not state.done:
        state.error = error_of(found.error)
