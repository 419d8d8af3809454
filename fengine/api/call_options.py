"""What a call asks for by arguments that most calls leave out, checked: logprobs, an adapter, a salt, a priority; its
grammar, its logit processor, hidden states, and images and a session's turns."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from fengine.api.context import EngineContext, HasContext
from fengine.api.generate_input import GenerateReqInput, with_preferred
from fengine.api.server_args import ServerArgs
from fengine.api.sessions import Turn
from fengine.core.images import ImageSpan
from fengine.core.parameter_kinds import json_like
from fengine.core.request import Adapter
from fengine.core.sampling_params import Parameter, Range, SamplingParams
from fengine.core.scalars import check_ids, plain, told
from fengine.engine.parts import Parts
from fengine.errors import FengineError, GrammarError, InvalidRequestError
from fengine.multimodal.images import Prompt, refuse_images
from fengine.structured_output.backend import Grammar, Source

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
    start = option_of("logprob_start_len", prompt.logprob_start_len)
    if start > count:
        why = f"logprob_start_len={start} is higher than the number of input tokens ({count})"
        raise InvalidRequestError(f"{why}. Please use a smaller logprob_start_len.")
    row, top = replace(OPTIONS["top_logprobs_num"], range=Range(0, min(MAX_TOP_LOGPROBS, vocab_size))), 0
    if prompt.top_logprobs_num is not None:
        top = row.checked(prompt.top_logprobs_num)
    ids = _logprob_ids(prompt.token_ids_logprob, vocab_size)
    if not return_logprob:
        return {}
    at = start if 0 <= start < count else None  # of a prompt that has no such position, or of -1
    return {"return_logprob": True, "logprob_start": at, "top_logprobs": top, "logprob_ids": ids}


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
    adapter, salt = _adapter_of(parts, prompt.lora_path), prompt.cache_salt
    if salt is not None and (not isinstance(salt, str) or len(salt) > MAX_SALT):
        raise InvalidRequestError(f"cache_salt must be a string of at most {MAX_SALT} characters, got {told(salt)}.")
    return {"adapter": adapter, "cache_salt": salt or None, "priority": _priority_of(args, prompt.priority)}


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


# -- what it asks of features ------------------------------------------------------------------------------------------


def grammar_asked(context: EngineContext, params: SamplingParams, source: Source) -> Grammar:
    """The compiled form of its grammar. Errors: GrammarError, MissingExtraError; InvalidRequestError for what would cut
    its text somewhere."""
    if params.stop or params.stop_regex:
        raise InvalidRequestError(
            f"stop and stop_regex cannot be combined with {source.kind}: they would cut the text where it is not "
            "complete. The grammar itself says where it ends; stop_token_ids may be given."
        )
    if not any(id < context.parts.spec.vocab_size for id in params.end_ids(context.parts.eos_ids)):
        raise GrammarError(
            f"{source.kind} needs an id that ends the text, and this model has no eos; give stop_token_ids"
        )
    return context.grammars.compile(source)


def grammars_in(context: EngineContext, sampling: Any) -> set[Source]:
    """The grammars of a call's sampling parameters, as far as these are valid. Pure."""
    found, sampling = set(), plain(sampling)
    for values in with_preferred(sampling if isinstance(sampling, list) else [sampling], context.preferred):
        try:
            params = SamplingParams.of(values)
        except FengineError:
            continue  # reported when the call is checked
        if params.grammar_key is not None:
            found.add(Source(*params.grammar_key))
    return found


def register_logit_processor(engine: HasContext, name: str, processor: Callable[..., Any]) -> None:
    """Lets requests name `processor` as their custom_logit_processor. The name may be given anew."""
    if not isinstance(name, str) or not name or isinstance(processor, type) or not callable(processor):
        raise InvalidRequestError(f"needed are a name and a callable, got {told(name)} and {told(processor)}.")
    engine._context.processors[name] = processor


class CustomLogitProcessor(ABC):
    """SGLang's base of classes whose instances are processors."""

    named: ClassVar[dict[str, Callable[..., Any]]] = {}

    @classmethod
    def to_str(cls) -> str:
        """A name for an instance, which stays in this process: nothing is serialized. Modifies: `named`."""
        name = f"{cls.__module__}.{cls.__qualname__}"
        if type(CustomLogitProcessor.named.get(name)) is not cls:
            CustomLogitProcessor.named[name] = cls()
        return name

    @abstractmethod
    def __call__(self, logits: Any, params: Any) -> Any:
        """The logits, edited."""


def processor_asked(context: EngineContext, value: Any, params: SamplingParams) -> dict[str, Any]:
    """The fields of SamplingParams for the processor of a call, and a copy of its parameters. Errors:
    InvalidRequestError."""
    if not context.args.enable_custom_logit_processor:
        raise InvalidRequestError(
            "The server is not configured to enable custom logit processor. Please set "
            "`--enable-custom-logit-processor` (enable_custom_logit_processor=True) when the engine is made."
        )
    if isinstance(value, str):
        known = CustomLogitProcessor.named | context.processors
        if value not in known:
            raise InvalidRequestError(
                f"custom_logit_processor {told(value)} is not the name of a registered processor. A serialized one is "
                "never loaded, for that would run code out of a string: pass the callable itself, or name it with "
                "Engine.register_logit_processor(name, callable)."
            )
        value = known[value]
    elif isinstance(value, type) or not callable(value):
        needed = "custom_logit_processor must be a callable (logits, params) -> logits or a registered name"
        raise InvalidRequestError(f"{needed}, got {told(value)}.")
    return {"processor": value, "custom_params": json_like(params.custom_params or {}, "custom_params")}


def hidden_asked(args: ServerArgs, value: Any) -> str | None:
    """Of which tokens they are wanted. Errors: InvalidRequestError."""
    if value is None or value is False:
        return "full" if args.return_hidden_states else None
    if value is not True and not (isinstance(value, str) and value in ("full", "last")):
        raise InvalidRequestError(f'return_hidden_states must be False, True, "full" or "last", got {told(value)}.')
    mode, allowed = "last" if value == "last" else "full", args.hidden_states_mode
    if allowed is None or (allowed, mode) == ("last", "full"):
        raise InvalidRequestError(
            "The server is not configured to return hidden states. Please set enable_return_hidden_states=True "
            f'(or return_hidden_states_mode="{mode}") when the engine is made.'
        )
    return mode


def prompt_in_place(context: EngineContext, prompt: GenerateReqInput, ids: list[int], turns: dict[str, Turn]) -> Prompt:
    """All prompt ids, with placeholders for each part of their images; of a session's turn those of its context, too.
    Modifies: `turns`, to which a session's turn goes. Errors: InvalidRequestError and kinds."""
    images = context.parts.images
    if images is None:
        refuse_images(prompt.image_data)
    own = Prompt(ids) if images is None else images.prompt(ids, images.read(prompt.image_data))
    if prompt.session_params is None:
        return own
    bos_id = None if context.parts.tokenizer is None else context.parts.tokenizer.bos_id
    turn = context.sessions.prepare(prompt.session_params, own.ids, prompt.rid[0], bos_id)
    turns[turn.rid] = turn
    moved = len(turn.ids) - len(own.ids)  # by a bos token that went
    turn.images = tuple(ImageSpan(start + moved, image) for start, image in own.spans)
    ids, spans = turn.prompt()
    if not ids:
        raise InvalidRequestError("session_params['offset'] leaves nothing of the context; the prompt is empty.")
    return Prompt(ids) if images is None else images.placed(ids, spans)
