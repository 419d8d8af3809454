"""The engine behind a harness's model."""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from fengine.api.engine import Engine
from fengine.api.server_args import ServerArgs
from fengine.errors import ConfigError, UnknownParameterError, UnsupportedFeatureError


def open_engine(model: str | Engine, harness: str, settings: dict[str, Any]) -> Engine:
    """A new engine with these fields of ServerArgs; or `model` itself, which then takes no settings.

    Errors: UnknownParameterError, ConfigError, ModelLoadError and kinds, UnsupportedFeatureError (no text comes of it).
    """
    if isinstance(model, Engine):
        if settings:
            raise ConfigError(f"{', '.join(settings)} cannot be set on an engine that runs already")
        refuse_without_text(model, harness)
        return model
    refuse_unknown(settings)
    engine = Engine(model_path=model, **settings)
    try:
        refuse_without_text(engine, harness)
    except BaseException:
        engine.shutdown()
        raise
    return engine


def refuse_without_text(engine: Engine, harness: str) -> None:
    if not engine.tokenizer_manager.is_generation:
        raise UnsupportedFeatureError(f"{harness} needs a model that generates text")
    if engine.tokenizer is None:
        raise UnsupportedFeatureError(f"{harness} needs a tokenizer, and skip_tokenizer_init is on")


def refuse_unknown(settings: dict[str, Any]) -> None:
    known = sorted(field.name for field in fields(ServerArgs))
    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see fengine.ServerArgs"
            raise UnknownParameterError(f"neither the harness's model nor Engine has an argument {name!r}; {hint}")
