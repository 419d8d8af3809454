"""The engine behind a harness's model, and what the harness writes down about it."""

import hashlib
from typing import Any

from fengine import __version__
from fengine.api.engine import Engine
from fengine.errors import ConfigError, UnsupportedFeatureError
from fengine.eval.cli.engines import model_directory
from fengine.eval.runs.manifest import in_force
from fengine.eval.runs.provenance import canonical, code_digest, file_digests


def open_engine(model: str | Engine, harness: str, settings: dict[str, Any]) -> Engine:
    """A new engine with these fields of ServerArgs; or `model` itself, which then takes no settings.

    Errors: UnknownParameterError, ConfigError, ModelLoadError and kinds, UnsupportedFeatureError (no text comes of it).
    """
    if isinstance(model, Engine):
        if settings:
            raise ConfigError(f"{', '.join(settings)} cannot be set on an engine that runs already")
        refuse_without_text(model, harness)
        return model
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


def engine_facts(engine: Engine) -> dict[str, Any]:
    """Under lm-eval's names: size, dtype, revision and a digest of the weights' files; and what else bits depend on.

    Reads the checkpoint's files once; their digests are kept. Errors: StorageError.
    """
    info, digests = engine.get_model_info(), file_digests(model_directory(engine.config.model))
    weights = {name: digest for name, digest in digests.items() if name.endswith(".safetensors")}
    return {
        "model_num_parameters": info["num_parameters"],
        "model_dtype": ", ".join(info["weight_dtypes"]),
        "model_revision": engine.server_args.revision or "",
        "model_sha": canonical(weights),
        "fengine": {
            "version": __version__,
            "code_sha256": code_digest(),
            "model_files": digests,
            "weight_version": info["weight_version"],
            **in_force(engine),
        },
    }


def template_digest(template: str | None) -> str:
    """The first digits of a chat template's SHA-256. Pure."""
    return "none" if template is None else hashlib.sha256(template.encode()).hexdigest()[:12]
