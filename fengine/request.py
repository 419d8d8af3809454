"""`SamplingParams` (what a caller asks for), `Request` (what the scheduler moves along), `Finish`. No torch."""

import difflib
import hashlib
import math
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from fengine.errors import InvalidRequestError, UnknownParameterError, UnsupportedFeatureError

TOP_K_ALL = 1 << 30  # stored form of "top_k off", as SGLang does
MAX_STOP_STRINGS = 32
MAX_STOP_BYTES = 1024
MAX_TEMPERATURE = 1e30  # still a finite float32; above it every token is equally likely anyway

# Known to SGLang's users but not built yet. A value that means "off" is accepted, anything else is refused by name.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_new_tokens": (None, 0),
    "n": (None, 1),
    "beam_width": (None, 1),
    "stop_regex": (None, "", []),
    "json_schema": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "spaces_between_special_tokens": (None, True),
    "no_stop_trim": (None, False),
    "stream_interval": (None, 1),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "watermark": (None,),
}


def exact_int(value: Any) -> int | None:
    """The int that `value` is: an int, or an integer scalar of numpy or torch. None for bool and all else. Pure."""
    try:
        value = value.tolist() if hasattr(value, "tolist") else value
        return None if isinstance(value, bool) else value.__index__()
    except (AttributeError, TypeError, RuntimeError):  # no integer; or a tensor that holds no data
        return None


def _number(name: str, value: Any) -> float:
    """A float from int, float, or a scalar of numpy or torch; never bool, str or an array."""
    try:
        scalar = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(scalar, (bool, str, bytes)) and hasattr(scalar, "__float__"):
            return float(scalar)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass  # told below
    raise InvalidRequestError(f"{name} must be a number, got {value!r:.80} of type {type(value).__name__}.")


def _integer(name: str, value: Any) -> int:
    number = exact_int(value)
    if number is None:
        raise InvalidRequestError(f"{name} must be an integer, got {value!r:.80} of type {type(value).__name__}.")
    return number


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters in SGLang's words. Build with `SamplingParams.of(mapping)`, which validates.

    Stored values are normalised: greedy (temperature < 1e-6) becomes temperature 1 with top_k 1, top_k -1 becomes
    TOP_K_ALL, stop becomes a tuple. Errors: InvalidRequestError, UnknownParameterError, UnsupportedFeatureError.
    """

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.top_k == 1

    @classmethod
    def of(cls, values: "dict[str, Any] | SamplingParams | None", vocab_size: int | None = None) -> "SamplingParams":
        """Validates a mapping of SGLang sampling keys. `vocab_size` is the logits width, for the id checks."""
        if isinstance(values, SamplingParams):  # it may have been made by hand
            values = {f.name: getattr(values, f.name) for f in fields(cls)}
        if values is None:
            return cls()
        if not isinstance(values, dict):
            raise InvalidRequestError(f"sampling_params must be a dict, got {type(values).__name__}.")
        known = {f.name for f in fields(cls)}
        for key, value in values.items():
            if key in known:
                continue
            if key not in NOT_BUILT:
                near = difflib.get_close_matches(str(key), sorted(known | set(NOT_BUILT)), n=1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(sorted(known))}."
                raise UnknownParameterError(f"unknown sampling parameter {key!r}.{hint}")
            if not any(type(value) is type(off) and value == off for off in NOT_BUILT[key]):
                raise UnsupportedFeatureError(
                    f"sampling parameter {key!r} is not built yet (got {value!r}); leave it out."
                )
        given = {k: v for k, v in values.items() if k in known and (v is not None or k == "max_new_tokens")}
        return cls(**_checked(given, vocab_size))


def _checked(given: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """Range checks, in SGLang's words, and normalisation of the known keys."""
    out: dict[str, Any] = {}
    if given.get("max_new_tokens", 0) is not None and "max_new_tokens" in given:
        out["max_new_tokens"] = _integer("max_new_tokens", given["max_new_tokens"])
        if out["max_new_tokens"] < 0:
            raise InvalidRequestError(f"max_new_tokens must be at least 0, got {out['max_new_tokens']}.")
    elif "max_new_tokens" in given:
        out["max_new_tokens"] = None
    temperature = _number("temperature", given.get("temperature", 1.0))
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidRequestError(f"temperature must be a non-negative finite number, got {temperature}.")
    out["top_p"] = top_p = _number("top_p", given.get("top_p", 1.0))
    if not 0 < top_p <= 1:
        raise InvalidRequestError(f"top_p must be in (0, 1], got {top_p}.")
    top_k = _integer("top_k", given.get("top_k", -1))
    if top_k < 1 and top_k != -1:
        raise InvalidRequestError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    out["top_k"] = TOP_K_ALL if top_k == -1 else min(top_k, TOP_K_ALL)
    out["min_p"] = min_p = _number("min_p", given.get("min_p", 0.0))
    if not 0 <= min_p <= 1:
        raise InvalidRequestError(f"min_p must be in [0, 1], got {min_p}.")
    out["temperature"] = min(temperature, MAX_TEMPERATURE)
    if temperature < 1e-6:  # SGLang's greedy
        out["temperature"], out["top_k"] = 1.0, 1
    out["stop"] = _stop_strings(given.get("stop", ()))
    out["stop_token_ids"] = _stop_ids(given.get("stop_token_ids", ()), vocab_size)
    for name in ("ignore_eos", "skip_special_tokens"):
        if name in given:
            if not isinstance(given[name], bool):
                raise InvalidRequestError(f"{name} must be True or False, got {given[name]!r}.")
            out[name] = given[name]
    if "sampling_seed" in given:
        seed = exact_int(given["sampling_seed"])
        if seed is None:
            raise InvalidRequestError(f"sampling_seed must be an integer, got {type(given['sampling_seed']).__name__}.")
        out["sampling_seed"] = seed
        if not -(2**63) <= seed < 2**63:
            raise InvalidRequestError(f"sampling_seed must be in [-2**63, 2**63 - 1], got {seed}.")
    return out


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, (list, tuple)) else None
    if stops is None or any(not isinstance(s, str) for s in stops):
        raise InvalidRequestError(f"stop must be a string or a list of strings, got {stop!r}.")
    if "" in stops:
        raise InvalidRequestError("stop must not contain the empty string: it would match at once.")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(stops)}.")
    for s in stops:
        if len(s.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise InvalidRequestError(
                f"a stop string may have at most {MAX_STOP_BYTES} bytes, got {len(s)} characters."
            )
    return stops


def _stop_ids(ids: Any, vocab_size: int | None) -> tuple[int, ...]:
    if not isinstance(ids, (list, tuple, set, frozenset)):
        raise InvalidRequestError(f"stop_token_ids must be a list of token ids, got {ids!r}.")
    out = tuple(_integer("stop_token_ids", i) for i in ids if i is not None)
    for i in out:
        if i < 0 or (vocab_size is not None and i >= vocab_size):
            raise InvalidRequestError(f"stop_token_ids must be in [0, {(vocab_size or 2**31) - 1}], got {i}.")
    return tuple(sorted(set(out)))


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from (engine seed, request index, ...): SHA-256, so that neighbours are unrelated. Pure."""
    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Status(Enum):
    WAITING = "waiting"  # in the queue: new, or preempted
    RUNNING = "running"  # owns pages and a row slot
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended. `kind` is "stop", "length" or "abort"; `matched` is the token id or stop string."""

    kind: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """SGLang's `finish_reason`."""
        if self.kind == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.kind == "length":
            return {"type": "length", "length": self.length}
        return {"type": "abort", "message": self.message or "Aborted"}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Only the scheduler changes it after `Scheduler.add`.

    `token_ids` = prompt + drawn tokens that the host knows. With overlapped scheduling one more drawn token may be in
    flight on the device (`num_pending`); `num_computed` counts tokens whose KV is written, or scheduled to be.
    """

    rid: str
    prompt_len: int
    token_ids: list[int]
    params: SamplingParams
    seed: int  # the resolved sampling seed: the caller's, or derived from (engine seed, request index)
    max_new_tokens: int  # after clamping to context and pool
    stop_ids: frozenset[int]  # eos ids and stop_token_ids that end this request; empty with ignore_eos
    arrival: int = 0  # set by Scheduler.add; the order of service in FCFS and of preemption
    logprobs: list[float] = field(default_factory=list)
    status: Status = Status.WAITING
    finish: Finish | None = None
    row: int | None = None  # row slot in the batch's tables while running
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preempted: int = 0

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len
