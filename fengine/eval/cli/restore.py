"""A config that was recorded, with changes, as a checked value. Uses Hydra's grammar of overrides, and OmegaConf.

Recorded values are taken literally: no interpolation, no group, nothing of today's YAML files. Changes are written as
on the command line, one key each.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin

from hydra.core.override_parser.types import OverrideType
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fengine.errors import ConfigError
from fengine.eval.cli.compose import parsed, writable
from fengine.eval.cli.guard import TEXT_KEYS, explained, unescaped, unknown
from fengine.eval.cli.schema import Schema


def restore(recorded: Mapping[str, Any], changes: Sequence[str], schema: Schema) -> Any:
    """The config of `schema` that `flat` gave as `recorded` ("section.key" → JSON value), with `changes` (key=value).
    Keys that were not recorded have their defaults. Errors: ConfigError with every problem."""
    if schema.program == "fengine eval" and all(recorded.get(name) is None for name in ("task.data", "task.prompts")):
        raise ConfigError("the run's task is an object of Python: run it again with fengine.evaluate(task, engine)")
    values = dict(recorded)
    strange = sorted(set(values) - set(_leaves(schema.keys)))
    if strange:
        raise ConfigError(f"the recorded config has keys that this version lacks: {', '.join(strange[:5])}")
    values |= dict(_change(word, schema) for word in changes)
    try:
        config = schema.assemble(vars(_build(schema.keys, values, "")))
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
            if isinstance(enum, type) and issubclass(enum, Enum):
                value = enum(value)
            elif not _fits(value, f.type):
                raise ValueError(f"{name} is {value!r:.80}")
            given[f.name] = value
    return kind(**given)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a field's type: a scalar, a tuple of one kind of scalars, or a union of such. Pure."""
    if get_origin(kind) is UnionType:
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, (list, tuple)) and all(_fits(one, get_args(kind)[0]) for one in value)
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return kind is Any or type(value) is kind


def _leaves(kind: Any, prefix: str = "") -> list[str]:
    """Every "section.key" of a dataclass. Pure."""
    found = []
    for f in fields(kind):
        found += _leaves(f.type, f"{prefix}{f.name}.") if is_dataclass(f.type) else [f"{prefix}{f.name}"]
    return found


def _change(word: str, schema: Schema) -> tuple[str, Any]:
    """One key=value as (key, JSON value of the key's type). Errors: ConfigError."""
    (given,) = parsed([word], schema)
    key = given.get_key_element()
    if given.type is not OverrideType.CHANGE or given.is_sweep_override():
        raise ConfigError(f"{word}: a recorded config is changed by single values: key=value")
    if key not in _leaves(schema.keys):
        inside = [name for name in _leaves(schema.keys) if name.startswith(f"{key}.")]
        if inside:
            raise ConfigError(f"{word}: a recorded config has no groups; change single keys, such as {inside[0]}=VALUE")
        raise ConfigError(unknown(key, schema.keys))
    node = writable(OmegaConf.structured(schema.keys))
    try:
        OmegaConf.update(node, key, unescaped(given.value()) if key in TEXT_KEYS else given.value())
        value = OmegaConf.select(node, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explained(error, schema)) from error
    if isinstance(value, ListConfig):
        return key, OmegaConf.to_container(value)
    return key, value.value if isinstance(value, Enum) else value
