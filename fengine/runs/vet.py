"""What a composed config may hold: values of the schema, never the name of code. Plain functions of plain values."""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

from fengine.errors import ConfigError

REFUSED_KEYS = frozenset({"_target_", "_partial_", "_recursive_", "_convert_"})
OPEN_HYDRA_KEYS = ("hydra.run.", "hydra.sweep.", "hydra.sweeper.params", "hydra.mode", "hydra.output_subdir")
NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
HYDRAS_OWN = "hydra._internal.core_plugins.basic_"
IN_PROCESS = "a sweep runs in this process, with the basic sweeper, so that the model is loaded once"
# The parts of Hydra's own config by which a file could make Hydra import or call something: key, only value, reason.
FIXED_HYDRA: tuple[tuple[str, Any, str], ...] = (
    ("callbacks", {}, "callbacks are not supported"),
    ("job_logging", NO_LOGGING, "logging is fixed"),
    ("hydra_logging", NO_LOGGING, "logging is fixed"),
    ("runtime.choices.hydra/launcher", "basic", IN_PROCESS),
    ("runtime.choices.hydra/sweeper", "basic", IN_PROCESS),
    ("job.env_set", {}, "set environment variables in the shell"),
    ("job.env_copy", [], "set environment variables in the shell"),
    ("job.chdir", False, "a run never changes the working directory"),
)


def vet_override(text: str, key: str, value: Any) -> None:
    """Refuses one `key=value` before Hydra acts on it. Errors: ConfigError."""
    bad = REFUSED_KEYS & {*key.replace("/", ".").split("."), *_keys(value)}
    if bad:
        raise ConfigError(f"{text}: {min(bad)} is refused: a config holds values, it never names code")
    if key == "hydra" or (key.startswith(("hydra.", "hydra/")) and not key.startswith(OPEN_HYDRA_KEYS)):
        names = ", ".join(k.rstrip(".") for k in OPEN_HYDRA_KEYS)
        raise ConfigError(f"{text}: this part of Hydra's own config is fixed; open are {names}")


def vet_config(job: dict[str, Any], hydra: dict[str, Any], schema: type) -> None:
    """Refuses what files brought in: keys that the schema lacks, changes to `FIXED_HYDRA`. Errors: ConfigError."""
    for key, only, why in FIXED_HYDRA:
        value: Any = hydra
        for part in key.split("."):
            value = value[part]
        if value != only:
            raise ConfigError(f"hydra.{key} cannot be changed: {why}")
    plugins = [dict(hydra[name]) for name in ("launcher", "sweeper")]
    named = [plugin.pop("_target_", "") for plugin in plugins]
    if not all(name.startswith(HYDRAS_OWN) for name in named):
        raise ConfigError(f"hydra.launcher and hydra.sweeper cannot be changed: {IN_PROCESS}")
    bad = REFUSED_KEYS & set(_keys([job, plugins]))
    if bad:
        raise ConfigError(f"{min(bad)} is refused: a config holds values, it never names code")
    _refuse_unknown(job, schema, schema, "")


def _keys(value: Any) -> Iterator[str]:
    """Every key of nested dicts, also inside lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _keys(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _keys(inner)


def _refuse_unknown(values: Any, section: Any, schema: Any, prefix: str) -> None:
    """`+key=value` and untyped files can add keys that no dataclass has."""
    types = {f.name: f.type for f in dataclasses.fields(section)}
    for key, value in values.items():
        if key not in types:
            raise ConfigError(unknown(f"{prefix}{key}", schema))
        if dataclasses.is_dataclass(types[key]) and isinstance(value, dict):
            _refuse_unknown(value, types[key], schema, f"{prefix}{key}.")


def unknown(key: str, schema: Any) -> str:
    """What to say of a key that the schema lacks. A last name is looked for everywhere: temprature, sampling.temprature
    and model.temperature all find sampling.temperature. Pure."""
    names = _names(schema, "")
    section, _, last = key.rpartition(".")
    tails: dict[str, str] = {}
    for name in names:
        tail = name.rpartition(".")[2]
        if tail not in tails or name.rpartition(".")[0] == section:
            tails[tail] = name
    near = difflib.get_close_matches(last, list(tails), 1)
    if near:
        return f"unknown key {key}; did you mean {tails[near[0]]}?"
    inside = [name.rpartition(".")[2] for name in names if section and name.rpartition(".")[0] == section]
    hint = f"{section} has {', '.join(inside)}" if inside else "`fengine --help` lists all keys"
    return f"unknown key {key}; {hint}"


def _names(schema: Any, prefix: str) -> list[str]:
    names = []
    for f in dataclasses.fields(schema):
        names.append(prefix + f.name)
        if dataclasses.is_dataclass(f.type):
            names += _names(f.type, f"{prefix}{f.name}.")
    return names
