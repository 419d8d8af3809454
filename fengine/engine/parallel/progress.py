"""What is new of a request that another process computes, as plain values by name, and how it enters the state here."""

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_type_hints

import numpy as np

from fengine import errors
from fengine.core.images import ImageSpan
from fengine.core.plain import from_plain, to_plain
from fengine.core.request import Request
from fengine.engine.parallel.child import NOTHING
from fengine.engine.request_state import RequestState
from fengine.errors import EngineDeadError, FengineError

KINDS = get_type_hints(Request) | get_type_hints(RequestState)
GROWING = ("logprobs", "output_top", "output_ids", "token_ids")  # told are entries, and from which one on
WHOLE = ("started", "first_token", "versions", "num_cached", "num_preempted", "unasked", "drafting")
OF_PROMPT = ("input_logprobs", "input_top", "input_ids")  # complete with the first token
FAULTS = ("error", "fault")


def _owner(state: RequestState, name: str) -> Any:
    return state if name in RequestState.__slots__ else state.request


def encoded(array: np.ndarray | bytes) -> Any:
    if isinstance(array, bytes):
        return array.hex()
    return [array.dtype.str, list(array.shape), base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def decoded(told: Any) -> Any:
    if isinstance(told, str):
        return bytes.fromhex(told)
    kind, shape, data = told
    return np.frombuffer(base64.b64decode(data), kind).reshape(shape).copy()


def with_images(request: Request, code: Callable[[Any], Any]) -> Request:
    """Its images' keys, arrays and places `encoded`, or `decoded`. Pure."""
    if not request.images:
        return request
    spans = []
    for start, image in request.images:
        arrays = {name: code(array) for name, array in image.arrays.items()}
        spans.append(ImageSpan(start, replace(image, key=code(image.key), arrays=arrays)))
    rope = request.rope and request.rope._replace(positions_3P=code(request.rope.positions_3P))
    return replace(request, images=tuple(spans), rope=rope)


def kind_and_text(error: Exception | None) -> tuple[str, str] | None:
    """As another process may be told. Pure."""
    return None if error is None else (type(error).__name__, str(error))


def error_of(told: tuple[str, str]) -> FengineError:
    """As the other process had it. Pure."""
    kind = getattr(errors, told[0], None)
    if isinstance(kind, type) and issubclass(kind, FengineError):
        return kind(told[1])
    return EngineDeadError(f"{told[0]}: {told[1]}")


def progress(state: RequestState, sent: dict[str, Any]) -> dict[str, Any]:
    """What has not been sent before, in the order in which it is to be taken. The loop may write meanwhile. Modifies:
    sent, by name: how many entries, or which value."""
    request, done, tokens = state.request, state.done, state.request.num_output
    counts = {"logprobs": tokens, "output_top": len(state.output_top), "output_ids": len(state.output_ids)}
    told: dict[str, Any] = {}
    for name, count in counts.items():
        start = sent.get(name, 0)
        told[name] = [start, to_plain(getattr(_owner(state, name), name)[start:count], NOTHING)]
    now: dict[str, Any] = {name: getattr(_owner(state, name), name) for name in WHOLE}
    now["drafting"] = request.drafting and replace(request.drafting, memo=None)
    if tokens or done:
        now |= {name: list(getattr(state, name)) for name in OF_PROMPT}
    now["hidden"] = [encoded(array) for array in state.hidden]
    now["embedding"] = None if state.embedding is None else encoded(state.embedding)
    now["fault"] = kind_and_text(state.fault)
    values = to_plain(now, NOTHING)
    told |= {name: value for name, value in values.items() if name not in sent or sent[name] != value}
    start, end = request.prompt_len + sent.get("token_ids", 0), request.prompt_len + tokens
    told["token_ids"] = [start, request.token_ids[start:end]]  # others look at these
    if done:
        told |= {"finish": to_plain(request.finish, NOTHING), "error": kind_and_text(state.error)}
    sent.update(values, token_ids=tokens, **counts)
    return told


def take(state: RequestState, told: dict[str, Any]) -> bool:
    """False, and no more is taken: of a request that is computed again, what was told before is not the same. Modifies:
    the state and its request."""
    for name, plain in told.items():
        owner, value = _owner(state, name), plain
        if name in GROWING:
            start, more = plain[0], from_plain(KINDS[name], plain[1], NOTHING)
            values, end = getattr(owner, name), start + len(more)
            if values[start:end] != more[: len(values[start:end])]:
                return False
            values[start:end] = more
            continue
        if name in FAULTS:
            value = None if plain is None else error_of(plain)
        elif name == "hidden":
            value = [decoded(array) for array in plain]
        elif name == "embedding":
            value = None if plain is None else decoded(plain)
        else:
            value = from_plain(KINDS[name], plain, NOTHING)
        if name != "error" or (value is not None and not state.done):
            setattr(owner, name, value)
    return True


def forget(state: RequestState) -> None:
    """It is computed again, and nobody has seen anything of it. Modifies: the state and its request."""
    for name in GROWING:
        del getattr(_owner(state, name), name)[state.request.prompt_len if name == "token_ids" else 0 :]


def told_of(state: RequestState) -> list[Any]:
    """As a process hears of it that computes it from its beginning. Pure."""
    request = replace(
        state.request, token_ids=state.request.token_ids[: state.request.prompt_len], logprobs=[], versions=(),
        num_cached=0, num_preempted=0, unasked=None, drafting=None,
    )  # fmt: skip
    return [to_plain(with_images(request, encoded), NOTHING), state.live]
