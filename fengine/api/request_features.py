"""What a call asks of features: its grammar, its logit processor, hidden states, and images and a session's turns."""

from collections.abc import Callable
from typing import Any

from fengine.api.context import EngineContext, HasContext
from fengine.api.generate_input import GenerateReqInput, with_preferred
from fengine.api.server_args import ServerArgs
from fengine.api.sessions import Turn
from fengine.core.parameter_kinds import json_like
from fengine.core.sampling_params import SamplingParams
from fengine.core.scalars import plain, told
from fengine.errors import FengineError, GrammarError, InvalidRequestError
from fengine.multimodal.images import Prompt, refuse_images
from fengine.structured_output.backend import Grammar, Source


def grammar_asked(context: EngineContext, params: SamplingParams) -> Grammar | None:
    """The compiled form of its grammar; None: it has none. Errors: GrammarError, MissingExtraError; InvalidRequestError
    for what would cut its text somewhere."""
    if params.grammar_key is None:
        return None
    kind, text = params.grammar_key
    if params.stop or params.stop_regex:
        raise InvalidRequestError(
            f"stop and stop_regex cannot be combined with {kind}: they would cut the text where it is not complete. "
            "The grammar itself says where it ends; stop_token_ids may be given."
        )
    if not any(id < context.parts.spec.vocab_size for id in params.end_ids(context.parts.eos_ids)):
        raise GrammarError(f"{kind} needs an id that ends the text, and this model has no eos; give stop_token_ids")
    return context.grammars.compile(Source(kind, text))


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


def processor_asked(context: EngineContext, value: Any, params: SamplingParams) -> dict[str, Any]:
    """The fields of SamplingParams for the processor of a call, and a copy of its parameters. Errors:
    InvalidRequestError."""
    if not context.args.enable_custom_logit_processor:
        raise InvalidRequestError(
            "The server is not configured to enable custom logit processor. Please set "
            "`--enable-custom-logit-processor` (enable_custom_logit_processor=True) when the engine is made."
        )
    if isinstance(value, str):
        if value not in context.processors:
            raise InvalidRequestError(
                f"custom_logit_processor {told(value)} is not the name of a registered processor. A serialized one is "
                "never loaded, for that would run code out of a string: pass the callable itself, or name it with "
                "Engine.register_logit_processor(name, callable)."
            )
        value = context.processors[value]
    elif isinstance(value, type) or not callable(value):
        raise InvalidRequestError(
            "custom_logit_processor must be a callable (logits, params) -> logits or a registered name, "
            f"got {told(value)}."
        )
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
    images, pictures = context.parts.images, ()
    if images is None:
        refuse_images(prompt.image_data)
    else:
        pictures = images.read(prompt.image_data)
    if prompt.session_params is not None:
        bos_id = None if context.parts.tokenizer is None else context.parts.tokenizer.bos_id
        turn = context.sessions.prepare(prompt.session_params, ids, prompt.rid[0], bos_id)
        turns[turn.rid] = turn
        turn.images = pictures
        ids, pictures = turn.prompt(-1 if images is None else images.placeholder)
        if not ids:
            raise InvalidRequestError("session_params['offset'] leaves nothing of the context; the prompt is empty.")
    return Prompt(ids) if images is None else images.prompt(ids, pictures)
