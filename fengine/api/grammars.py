"""The grammars that a call's sampling parameters name, compiled."""

from typing import Any

from fengine.api.options import EngineContext, end_ids
from fengine.core.sampling_params import SamplingParams
from fengine.errors import FengineError, GrammarError, InvalidRequestError
from fengine.structured_output.backend import Grammar, Source


def grammar_asked(context: EngineContext, params: SamplingParams) -> Grammar | None:
    """The compiled form of its grammar; None: it has none.

    Errors: GrammarError, MissingExtraError; InvalidRequestError for what would cut its text somewhere.
    """
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
