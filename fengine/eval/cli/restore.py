"""A config that was recorded, with changes, as a checked value. Uses Hydra's grammar of overrides, and OmegaConf.

Recorded values are taken literally: no interpolation, no group, nothing of today's YAML files. Changes are written as
on the command line, one key each.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import OverrideType
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fengine.errors import ConfigError
from fengine.eval.cli.compose import parsed, writable
from fengine.eval.cli.guard import TEXT_KEYS, explained, leaves, unescaped, unknown
from fengine.eval.cli.schema import Schema


def restore(recorded: Mapping[str, Any], changes: Sequence[str], schema: Schema) -> Any:
    """The config of `schema` that `flat` gave as `recorded` ("section.key" → JSON value), with `changes` (key=value).
    Keys that were not recorded have their defaults. Errors: ConfigError with every problem."""
    if schema.program == "fengine eval" and all(recorded.get(name) is None for name in ("task.data", "task.prompts")):
        raise ConfigError("the run's task is an object of Python: run it again with fengine.evaluate(task, engine)")
    if strange := sorted(set(recorded) - set(leaves(schema.keys))):
        raise ConfigError(f"the recorded config has keys that this version lacks: {', '.join(strange[:5])}")
    node = writable(OmegaConf.structured(schema.keys))
    changed = [_change(word, schema) for word in changes]
    try:
        for key, value in recorded.items():
            OmegaConf.update(node, key, _literal(value))
    except (OmegaConfBaseException, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"the recorded config holds what is none: {error}") from error
    try:
        for key, value in changed:
            OmegaConf.update(node, key, value)
        config = schema.assemble(vars(OmegaConf.to_object(node)))
    except OmegaConfBaseException as error:
        raise ConfigError(explained(error, schema)) from error
    if problems := schema.check(config):
        raise ConfigError("\n".join(problems))
    return config


def _literal(value: Any) -> Any:
    """A JSON value in which OmegaConf finds no interpolation. Pure."""
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    return [_literal(item) for item in value] if isinstance(value, list) else value


def _change(word: str, schema: Schema) -> tuple[str, Any]:
    """One key=value. Errors: ConfigError."""
    (given,) = parsed([word], schema)
    key, known = given.get_key_element(), leaves(schema.keys)
    if given.type is not OverrideType.CHANGE or given.is_sweep_override():
        raise ConfigError(f"{word:.500}: a recorded config is changed by single values: key=value")
    if key not in known:
        if inside := [name for name in known if name.startswith(f"{key}.")]:
            remedy = f"change single keys, such as {inside[0]}=VALUE"
            raise ConfigError(f"{word:.500}: a recorded config has no groups; {remedy}")
        raise ConfigError(unknown(key, schema.keys))
    return key, unescaped(given.value()) if key in TEXT_KEYS else given.value()
