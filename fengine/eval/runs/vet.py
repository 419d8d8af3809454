"""What a composed config may hold: values of the schema, never the name of code. Plain functions of plain values."""

import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any, NamedTuple

from fengine.errors import ConfigError
from fengine.eval.runs.config import Schema

REFUSED_KEYS = frozenset({"_target_", "_partial_", "_recursive_", "_convert_"})
OPEN_HYDRA_KEYS = ("hydra.run.", "hydra.sweep.", "hydra.sweeper.params", "hydra.mode", "hydra.output_subdir")
NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
BASIC = {
    "launcher": "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "sweeper": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
}
IN_PROCESS = "a sweep runs in this process, with the basic sweeper, so that the model is loaded once"


class LauncherKind(NamedTuple):
    """A launcher that may be chosen: the class that its own config names, and how to install it."""

    target: str
    remedy: str


# Those of Hydra's launchers that `fengine eval -m` takes, by the name of their config. No other class is ever made.
LAUNCHERS = {
    "joblib": LauncherKind(
        "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher", "pip install 'fengine[joblib]'"
    ),
    "submitit_local": LauncherKind(
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher", "pip install 'fengine[submitit]'"
    ),
    "submitit_slurm": LauncherKind(
        "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher", "pip install 'fengine[submitit]'"
    ),
    "ray": LauncherKind("hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher", "pip install hydra-ray-launcher"),
}
# The parts of Hydra's own config by which a file could make Hydra import or call something: key, only value, reason.
FIXED_HYDRA: tuple[tuple[str, Any, str], ...] = (
    ("callbacks", {}, "callbacks are not supported"),
    ("job_logging", NO_LOGGING, "logging is fixed"),
    ("hydra_logging", NO_LOGGING, "logging is fixed"),
    ("runtime.choices.hydra/sweeper", "basic", IN_PROCESS),
    ("job.env_set", {}, "set environment variables in the shell"),
    ("job.env_copy", [], "set environment variables in the shell"),
    ("job.chdir", False, "a run never changes the working directory"),
)


def vet_override(text: str, key: str, value: Any, schema: Schema) -> None:
    """Refuses one `key=value` before Hydra acts on it. Errors: ConfigError."""
    bad = REFUSED_KEYS & {*key.replace("/", ".").split("."), *_keys(value)}
    if bad:
        raise ConfigError(f"{text}: {min(bad)} is refused: a config holds values, it never names code")
    open_keys = (*OPEN_HYDRA_KEYS, "hydra/launcher", "hydra.launcher.") if schema.launchers else OPEN_HYDRA_KEYS
    if key == "hydra" or (key.startswith(("hydra.", "hydra/")) and not key.startswith(open_keys)):
        names = ", ".join(k.rstrip(".") for k in open_keys)
        raise ConfigError(f"{text}: this part of Hydra's own config is fixed; open are {names}")


def vet_config(job: dict[str, Any], hydra: dict[str, Any], schema: Schema) -> None:
    """Refuses what files brought in: keys that the schema lacks, changes to `FIXED_HYDRA`. Errors: ConfigError."""
    for key, only, why in FIXED_HYDRA:
        value: Any = hydra
        for part in key.split("."):
            value = value[part]
        if value != only:
            raise ConfigError(f"hydra.{key} cannot be changed: {why}")
    plugins = {name: dict(hydra[name]) for name in BASIC}
    known, chosen = dict(BASIC), hydra["runtime"]["choices"]["hydra/launcher"]
    if schema.launchers and chosen in LAUNCHERS:
        known["launcher"] = LAUNCHERS[chosen].target
    elif chosen != "basic":
        raise ConfigError(f"hydra/launcher={chosen} is not known; {launchers_told(schema)}")
    for name, plugin in plugins.items():
        if plugin.pop("_target_", None) != known[name]:
            raise ConfigError(f"hydra.{name} names another class than its own: a config never names code")
    bad = REFUSED_KEYS & set(_keys([job, *plugins.values()]))
    if bad:
        raise ConfigError(f"{min(bad)} is refused: a config holds values, it never names code")
    _refuse_unknown(job, schema.kind, schema.kind, "")


def launchers_told(schema: Schema) -> str:
    """Which launchers a command has. Pure."""
    others = f"; in processes of their own: {', '.join(LAUNCHERS)}" if schema.launchers else ""
    return f"there is basic (one point after another, in this process, the model loaded once){others}"


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
