"""What a call's options come to for one request, and `EngineContext`: what they are checked against."""

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from operator import countOf
from typing import Any, Protocol

import numpy as np

from fengine.api.io_struct import GenerateReqInput
from fengine.api.request_log import RequestLog
from fengine.api.server_args import ServerArgs
from fengine.api.sessions import Sessions
from fengine.core.parameters import Parameter, Range, json_like
from fengine.core.request import Adapter, SamplingParams
from fengine.core.scalars import exact_int, told
from fengine.engine.parts import Parts
from fengine.errors import FengineError, GrammarError, InvalidRequestError
from fengine.structured_output.backend import Grammar, Grammars, Source

MAX_TOP_LOGPROBS = 1024
MAX_LOGPROB_IDS = 65536
MAX_LOGPROBS = 1 << 23  # of one prompt with all its samples: some GiB of Python objects
MAX_SALT = 4096
OPTIONS = {  # arguments of a call that are flags and numbers, as sampling parameters are declared
    row.name: row
    for row in (
        Parameter("return_logprob", "flag", False, "logprobs", "Logprobs of the drawn tokens are returned."),
        Parameter("logprob_start_len", "integer", -1, "logprobs", "And from which position of the prompt on; -1: none.",
                  Range(-1, words="-1 (no input logprobs) or at least 0")),
        Parameter("top_logprobs_num", "integer", 0, "logprobs", "How many of the likeliest tokens beside each.",
                  Range(0, MAX_TOP_LOGPROBS)),
        Parameter("priority", "integer", 0, "queue", "The higher, the earlier it is admitted.",
                  Range(-(2**31), 2**31 - 1, words="in [-2**31, 2**31 - 1]")),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What requests are checked against: the model, the settings, and what the caller has registered."""

    parts: Parts
    args: ServerArgs
    sessions: Sessions
    grammars: Grammars
    log: RequestLog
    preferred: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters where a call gives none
    processors: dict[str, Callable[..., Any]] = field(default_factory=dict)  # custom logit processors by name
    indices: Iterator[int] = field(default_factory=count)  # of prompts: seeds that are not given derive from them


class HasContext(Protocol):
    """What the functions that are methods of `Engine` need of it."""

    _parts: Parts
    _context: EngineContext


def check_ids(ids: Any, vocab_size: int, name: str = "input_ids") -> list[int]:
    """Token ids as a list of int, each within the width of the logits. Errors: InvalidRequestError."""
    if hasattr(ids, "tolist"):
        try:
            ids = ids.tolist()
        except RuntimeError as error:  # a tensor of torch that is sparse, or holds no data
            raise InvalidRequestError(f"{name} must be readable as a list of token ids: {error}") from error
    if not isinstance(ids, (list, tuple)):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {type(ids).__name__}.")
    if not ids:
        raise InvalidRequestError(f"{name} cannot be empty.")
    if countOf(map(type, ids), int) != len(ids):
        exact = [exact_int(value) for value in ids]
        if None in exact:
            i = exact.index(None)
            kind = type(ids[i]).__name__
            raise InvalidRequestError(f"{name}[{i}] must be an integer, got {told(ids[i])} ({kind}).")
        ids = exact
    try:  # a call may bring a million ids, before which no step can start: one pass over the objects, not two
        fit = np.frombuffer(array("I", ids), np.uintc).max() < vocab_size
    except OverflowError:
        fit = False
    if not fit:
        i, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise InvalidRequestError(
            f"{name}[{i}] is {told(bad)}, out of vocabulary; token ids must be in [0, {vocab_size - 1}]."
        )
    return list(ids)


def end_ids(context: EngineContext, params: SamplingParams) -> frozenset[int]:
    """The ids that end a request, unless it has ignore_eos. Pure."""
    return context.parts.eos_ids | frozenset(params.stop_token_ids)


def stop_ids(context: EngineContext, params: SamplingParams) -> frozenset[int]:
    """The ids that do end it: a grammar's text has an end in any case. Pure."""
    return frozenset() if params.ignore_eos and params.grammar_key is None else end_ids(context, params)


def request_params(
    context: EngineContext, prompt: GenerateReqInput, params: SamplingParams, count: int
) -> SamplingParams:  # fmt: skip
    """`params` with what the call's other arguments ask for, a request's own copy.

    Logprob options are checked in any case and, as in SGLang, have an effect only with return_logprob.
    Errors: InvalidRequestError.
    """
    vocab_size, return_logprob = context.parts.spec.vocab_size, _option("return_logprob", prompt.return_logprob)
    start = _logprob_start(prompt.logprob_start_len, count)
    top = _top_logprobs(prompt.top_logprobs_num, vocab_size)
    ids = _logprob_ids(prompt.token_ids_logprob, vocab_size)
    asked = {
        "processor": _processor(context, prompt.custom_logit_processor),
        "grammar": _grammar(context, params),
        "hidden": _hidden(context.args, prompt.return_hidden_states),
    }
    if return_logprob:
        asked |= {"return_logprob": True, "logprob_start": start, "top_logprobs": top, "logprob_ids": ids}
    if asked["processor"] is not None:
        asked["custom_params"] = json_like(params.custom_params or {}, "custom_params")
    return replace(params, **asked) if any(value is not None for value in asked.values()) else params


def _grammar(context: EngineContext, params: SamplingParams) -> Grammar | None:
    """Errors: GrammarError, MissingExtraError; InvalidRequestError for what would cut its text somewhere."""
    if params.grammar_key is None:
        return None
    kind, text = params.grammar_key
    if params.stop or params.stop_regex:
        raise InvalidRequestError(
            f"stop and stop_regex cannot be combined with {kind}: they would cut the text where it is not complete. "
            "The grammar itself says where it ends; stop_token_ids may be given."
        )
    if not any(id < context.parts.spec.vocab_size for id in end_ids(context, params)):
        raise GrammarError(f"{kind} needs an id that ends the text, and this model has no eos; give stop_token_ids")
    return context.grammars.compile(Source(kind, text))


def grammars_in(context: EngineContext, sampling: Any) -> set[Source]:
    """The grammars of a call's sampling parameters, as far as these are valid. Pure."""
    found = set()
    for values in sampling if isinstance(sampling, list) else [sampling]:
        merged = {**context.preferred, **(values or {})} if values is None or isinstance(values, dict) else values
        try:
            params = SamplingParams.of(merged)
        except FengineError:
            continue  # reported when the call is checked
        if params.grammar_key is not None:
            found.add(Source(*params.grammar_key))
    return found


def _option(name: str, value: Any) -> Any:
    """The value of one of OPTIONS, or its default. Errors: InvalidRequestError."""
    return OPTIONS[name].default if value is None else OPTIONS[name].checked(value)


def _logprob_start(value: Any, count: int) -> int | None:
    """The first prompt position whose logprob is wanted; None for SGLang's -1, and where there is no such position."""
    start = _option("logprob_start_len", value)
    if start > count:
        raise InvalidRequestError(
            f"logprob_start_len={start} is higher than the number of input tokens ({count}). "
            "Please use a smaller logprob_start_len."
        )
    return start if 0 <= start < count else None


def _top_logprobs(value: Any, vocab_size: int) -> int:
    row = OPTIONS["top_logprobs_num"]
    return replace(row, range=Range(0, min(MAX_TOP_LOGPROBS, vocab_size))).checked(0 if value is None else value)


def _logprob_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return ()
    ids = check_ids(value, vocab_size, "token_ids_logprob")
    if len(ids) > MAX_LOGPROB_IDS:
        raise InvalidRequestError(f"token_ids_logprob may have at most {MAX_LOGPROB_IDS} ids, got {len(ids)}.")
    return tuple(ids)


def check_amount(params: SamplingParams, samples: int, count: int, most: int) -> None:
    """That logprobs beyond those of the tokens themselves fit into memory. Errors: InvalidRequestError."""
    each = params.top_logprobs + len(params.logprob_ids)
    start = count if params.logprob_start is None else params.logprob_start
    if (total := samples * (count - start + most) * each) > MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs_num and token_ids_logprob ask for {total} logprobs ({each} at each of {count - start} "
            f"positions of the prompt and {most} of the output, {samples} times), more than {MAX_LOGPROBS}; ask for "
            "fewer at a time."
        )


def _hidden(args: ServerArgs, value: Any) -> str | None:
    if value is None or value is False:
        return "full" if args.return_hidden_states else None
    if value is not True and not (isinstance(value, str) and value in ("full", "last")):
        raise InvalidRequestError(f'return_hidden_states must be False, True, "full" or "last", got {value!r:.80}.')
    mode, allowed = "last" if value == "last" else "full", args.hidden_states_mode
    if allowed is None or (allowed, mode) == ("last", "full"):
        raise InvalidRequestError(
            "The server is not configured to return hidden states. Please set enable_return_hidden_states=True "
            f'(or return_hidden_states_mode="{mode}") when the engine is made.'
        )
    return mode


def _processor(context: EngineContext, value: Any) -> Callable[..., Any] | None:
    """A callable of this process, given itself or by the name that it was registered with."""
    if value is None:
        return None
    if not context.args.enable_custom_logit_processor:
        raise InvalidRequestError(
            "The server is not configured to enable custom logit processor. Please set "
            "`--enable-custom-logit-processor` (enable_custom_logit_processor=True) when the engine is made."
        )
    if isinstance(value, str):
        if value not in context.processors:
            raise InvalidRequestError(
                f"custom_logit_processor {value!r:.80} is not the name of a registered processor. A serialized one is "
                "never loaded, for that would run code out of a string: pass the callable itself, or name it with "
                "Engine.register_logit_processor(name, callable)."
            )
        return context.processors[value]
    if isinstance(value, type) or not callable(value):
        raise InvalidRequestError(
            "custom_logit_processor must be a callable (logits, params) -> logits or a registered name, "
            f"got {value!r:.80}."
        )
    return value


def adapter_of(parts: Parts, name: Any) -> Adapter | None:
    """The loaded LoRA adapter of a name. Errors: InvalidRequestError; AdapterError if it cannot be read again."""
    if name is None:
        return None
    if parts.adapters is None:
        raise InvalidRequestError(
            f"LoRA adapter {name!r:.80} was requested, but LoRA is not enabled. Please set enable_lora=True, or "
            "lora_paths, when the engine is made; or leave lora_path out."
        )
    return parts.adapters.resolve(name)


def salt_of(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or len(value) > MAX_SALT):
        raise InvalidRequestError(f"cache_salt must be a string of at most {MAX_SALT} characters, got {value!r:.80}.")
    return value or None


def priority_of(args: ServerArgs, value: Any) -> int:
    """The order of admission: higher goes first. Errors: InvalidRequestError if priorities are off."""
    if not args.enable_priority_scheduling:
        if value is not None:
            raise InvalidRequestError(
                f"priority={value!r:.80} was given but priorities are off; set enable_priority_scheduling=True when "
                "the engine is made, or leave priority out."
            )
        return 0
    number = _option("priority", args.default_priority_value if value is None else value)
    return -number if args.schedule_low_priority_values_first else number
