"""Custom logit processors: callables of this process, given themselves or by the name they are registered with."""

from collections.abc import Callable
from typing import Any

from fengine.api.options import EngineContext, HasContext
from fengine.core.parameters import json_like
from fengine.core.sampling_params import SamplingParams
from fengine.errors import InvalidRequestError


def register_logit_processor(engine: HasContext, name: str, processor: Callable[..., Any]) -> None:
    """Lets requests name `processor` as their custom_logit_processor. The name may be given anew."""
    if not isinstance(name, str) or not name or isinstance(processor, type) or not callable(processor):
        raise InvalidRequestError(f"needed are a name and a callable, got {name!r:.80} and {processor!r:.80}.")
    engine._context.processors[name] = processor


def processor_asked(context: EngineContext, value: Any, params: SamplingParams) -> dict[str, Any]:
    """The fields of SamplingParams for the processor of a call, and a copy of its parameters. Errors:
    InvalidRequestError."""
    return {
        "processor": _processor(context, value),
        "custom_params": json_like(params.custom_params or {}, "custom_params"),
    }


def _processor(context: EngineContext, value: Any) -> Callable[..., Any]:
    """A callable of this process, given itself or by the name that it was registered with."""
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
