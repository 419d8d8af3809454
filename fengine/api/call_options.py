"""What a call asks for by arguments that most calls leave out, checked: logprobs, an adapter, a salt, a priority."""

from dataclasses import replace
from typing import Any

from fengine.api.generate_input import GenerateReqInput
from fengine.api.server_args import ServerArgs
from fengine.core.request import Adapter
from fengine.core.sampling_params import Parameter, Range, SamplingParams
from fengine.core.scalars import check_ids, told
from fengine.engine.parts import Parts
from fengine.errors import InvalidRequestError

MAX_SALT = 4096
MAX_TOP_LOGPROBS = 1024
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
MAX_LOGPROB_IDS = 65536
MAX_LOGPROBS = 1 << 23  # of one prompt with all its samples: some GiB of Python objects


def logprobs_asked(prompt: GenerateReqInput, count: int, vocab_size: int) -> dict[str, Any]:
    """The fields of SamplingParams for a prompt of `count` tokens. The options are checked in any case and, as in
    SGLang, have an effect only with return_logprob. Errors: InvalidRequestError."""
    return_logprob = option_of("return_logprob", prompt.return_logprob)
    start = _logprob_start(prompt.logprob_start_len, count)
    row, top = replace(OPTIONS["top_logprobs_num"], range=Range(0, min(MAX_TOP_LOGPROBS, vocab_size))), 0
    if prompt.top_logprobs_num is not None:
        top = row.checked(prompt.top_logprobs_num)
    ids = _logprob_ids(prompt.token_ids_logprob, vocab_size)
    if not return_logprob:
        return {}
    return {"return_logprob": True, "logprob_start": start, "top_logprobs": top, "logprob_ids": ids}


def _logprob_start(value: Any, count: int) -> int | None:
    """The first prompt position whose logprob is wanted; None for SGLang's -1, and where there is no such position."""
    start = option_of("logprob_start_len", value)
    if start > count:
        raise InvalidRequestError(
            f"logprob_start_len={start} is higher than the number of input tokens ({count}). "
            "Please use a smaller logprob_start_len."
        )
    return start if 0 <= start < count else None


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


def option_of(name: str, value: Any) -> Any:
    """The value of one of OPTIONS, or its default. Errors: InvalidRequestError."""
    return OPTIONS[name].default if value is None else OPTIONS[name].checked(value)


def queue_options(parts: Parts, args: ServerArgs, prompt: GenerateReqInput) -> dict[str, Any]:
    """The fields of Request by which it is admitted and shares a prefix. Errors: InvalidRequestError; AdapterError."""
    adapter, salt = _adapter_of(parts, prompt.lora_path), _salt_of(prompt.cache_salt)
    return {"adapter": adapter, "cache_salt": salt, "priority": _priority_of(args, prompt.priority)}


def _adapter_of(parts: Parts, name: Any) -> Adapter | None:
    """The loaded LoRA adapter of a name. Errors: InvalidRequestError; AdapterError if it cannot be read again."""
    if name is None:
        return None
    if parts.adapters is None:
        raise InvalidRequestError(
            f"LoRA adapter {told(name)} was requested, but LoRA is not enabled. Please set enable_lora=True, or "
            "lora_paths, when the engine is made; or leave lora_path out."
        )
    return parts.adapters.resolve(name)


def _salt_of(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or len(value) > MAX_SALT):
        raise InvalidRequestError(f"cache_salt must be a string of at most {MAX_SALT} characters, got {told(value)}.")
    return value or None


def _priority_of(args: ServerArgs, value: Any) -> int:
    """The order of admission: higher goes first. Errors: InvalidRequestError if priorities are off."""
    if not args.enable_priority_scheduling:
        if value is not None:
            raise InvalidRequestError(
                f"priority={told(value)} was given but priorities are off; set enable_priority_scheduling=True when "
                "the engine is made, or leave priority out."
            )
        return 0
    number = option_of("priority", args.default_priority_value if value is None else value)
    return -number if args.schedule_low_priority_values_first else number
