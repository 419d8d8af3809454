"""A config that was recorded, with changes, as a checked value. With compose.py the only users of Hydra and OmegaConf.

Recorded values are taken literally: no interpolation, no group, nothing of today's YAML files. Changes are written as
on the command line, one key each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fengine.errors import ConfigError
from fengine.runs.config import Schema
from fengine.runs.explain import explain
from fengine.runs.hydra_state import writable
from fengine.runs.vet import unknown, vet_override


def restore(recorded: Mapping[str, Any], changes: Sequence[str], schema: Schema) -> Any:
    """The config of `schema` that `flat` gave as `recorded` ("section.key" → JSON value), with `changes` (key=value).
    Keys that were not recorded have their defaults. Errors: ConfigError with every problem."""
    values = dict(recorded)
    strange = sorted(set(values) - set(_leaves(schema.kind)))
    if strange:
        raise ConfigError(f"the recorded config has keys that this version lacks: {', '.join(strange[:5])}")
    values |= dict(_change(word, schema) for word in changes)
    try:
        config = _build(schema.kind, values, "")
        problems = schema.check(config)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"the recorded config holds what is none: {error}") from error
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _build(kind: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """A dataclass of flat values. Pure. Errors: ValueError for a name that an Enum lacks."""
    given = {}
    for f in fields(kind):
        name = f"{prefix}{f.name}"
        if is_dataclass(f.type):
            given[f.name] = _build(f.type, values, f"{name}.")
        elif name in values:
            value, enum = values[name], f.type
            given[f.name] = enum(value) if isinstance(enum, type) and issubclass(enum, Enum) else value
    return kind(**given)


def _leaves(kind: Any, prefix: str = "") -> list[str]:
    """Every "section.key" of a dataclass. Pure."""
    found = []
    for f in fields(kind):
        found += _leaves(f.type, f"{prefix}{f.name}.") if is_dataclass(f.type) else [f"{prefix}{f.name}"]
    return found


def _change(word: str, schema: Schema) -> tuple[str, Any]:
    """One key=value as (key, JSON value of the key's type). Errors: ConfigError."""
    try:
        (given,) = OverridesParser.create().parse_overrides([word])
    except HydraException as error:
        raise ConfigError(explain(error, schema)) from error
    key = given.get_key_element()
    vet_override(word, key.lstrip("+~"), None if given.is_sweep_override() else given.value(), schema)
    if given.type is not OverrideType.CHANGE or given.is_sweep_override():
        raise ConfigError(f"{word}: a recorded config is changed by single values: key=value")
    if key not in _leaves(schema.kind):
        inside = [name for name in _leaves(schema.kind) if name.startswith(f"{key}.")]
        if inside:
            raise ConfigError(f"{word}: a recorded config has no groups; change single keys, such as {inside[0]}=VALUE")
        raise ConfigError(unknown(key, schema.kind))
    node = writable(OmegaConf.structured(schema.kind))
    try:
        OmegaConf.update(node, key, given.value())
        value = OmegaConf.select(node, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, schema)) from error
    if isinstance(value, ListConfig):
        return key, OmegaConf.to_container(value)
    return key, value.value if isinstance(value, Enum) else value
