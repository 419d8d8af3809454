"""What a config may hold, decided in one place: values of the schema, never the name of code. Besides, errors of Hydra,
OmegaConf and YAML as lines that a user can act on. No torch."""

import dataclasses
import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from fengine.errors import ConfigError
from fengine.eval.cli import mistakes
from fengine.eval.cli.schema import Schema, leaves, names_of

REFUSED_KEYS = frozenset({"_target_", "_partial_", "_recursive_", "_convert_"})
OPEN_HYDRA_KEYS = ("hydra.run.", "hydra.sweep.", "hydra.sweeper.params", "hydra.mode")
NO_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
BASIC = {
    "launcher": "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "sweeper": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
}
IN_PROCESS = "a sweep runs in this process, with the basic sweeper, so that the model is loaded once"


# Those of Hydra's launchers that `fengine eval -m` takes, by the name of their config: the class that this names, and
# what installs it. No other class is ever made.
LAUNCHERS = {
    "joblib": ("hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher", "'fengine[joblib]'"),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher", "'fengine[submitit]'"),
    "submitit_slurm": ("hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher", "'fengine[submitit]'"),
    "ray": ("hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher", "hydra-ray-launcher"),
}
# The parts of Hydra's own config by which a file could make Hydra import or call something: key, only value, reason.
FIXED_HYDRA: tuple[tuple[str, Any, str], ...] = (
    ("callbacks", {}, "callbacks are not supported"),
    (
        "job_logging",
        NO_LOGGING,
        "logging is fixed; a primary config of your own begins with defaults: [config, _self_]",
    ),
    ("hydra_logging", NO_LOGGING, "logging is fixed"),
    ("runtime.choices.hydra/sweeper", "basic", IN_PROCESS),
    ("job.env_set", {}, "set environment variables in the shell"),
    ("job.env_copy", [], "set environment variables in the shell"),
    ("job.chdir", False, "a run never changes the working directory"),
)


# Values that are texts: on the command line, whose grammar knows no escapes, \n and \t in them are the characters.
TEXT_KEYS = ("task.prompt", "task.stop", "task.delimiter", "sampling.stop", "prompts", "chat.system",
             "task.judge", "task.judge.prompt", "task.judge.system")  # fmt: skip
_ESCAPE = re.compile(r"(\\+)([nrt])")


def unescaped(value: Any) -> Any:
    """Texts, also in lists and objects, with \\n, \\r and \\t as characters; \\\\n is a backslash and an n. Pure."""
    if isinstance(value, str):
        return _ESCAPE.sub(_character, value)
    if isinstance(value, dict):
        return {key: unescaped(item) for key, item in value.items()}
    return [unescaped(item) for item in value] if isinstance(value, (list, tuple)) else value


def _character(match: re.Match[str]) -> str:
    kept, odd = divmod(len(match[1]), 2)
    return "\\" * kept + ({"n": "\n", "r": "\r", "t": "\t"}[match[2]] if odd else match[2])


def check_override(text: str, key: str, value: Any, schema: Schema) -> None:
    """Refuses one `key=value` before Hydra acts on it. Errors: ConfigError."""
    bad = REFUSED_KEYS & {*key.replace("/", ".").split("."), *_keys(value)}
    if bad:
        raise ConfigError(f"{text}: {min(bad)} is refused: a config holds values, it never names code")
    text = text if len(text) <= 500 else f"{text[:500]}..."
    if type(value) is int and value not in (0, 1) and names_of(schema.keys).get(key) is bool:
        raise ConfigError(f"{text}: must be true or false")
    open_keys = (*OPEN_HYDRA_KEYS, "hydra/launcher", "hydra.launcher.") if schema.launchers else OPEN_HYDRA_KEYS
    if key == "hydra" or (key.startswith(("hydra.", "hydra/")) and not key.startswith(open_keys)):
        names = ", ".join(k.rstrip(".") for k in open_keys)
        raise ConfigError(f"{text}: this part of Hydra's own config is fixed; open are {names}")


def check_config(job: Any, hydra: Any, schema: Schema) -> None:
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
        known["launcher"] = LAUNCHERS[chosen][0]
    elif chosen != "basic":
        raise ConfigError(f"hydra/launcher={chosen} is not known; {launchers_told(schema)}")
    for name, plugin in plugins.items():
        if plugin.pop("_target_", None) != known[name]:
            raise ConfigError(f"hydra.{name} names another class than its own: a config never names code")
    bad = REFUSED_KEYS & set(_keys([job, *plugins.values()]))
    if bad:
        raise ConfigError(f"{min(bad)} is refused: a config holds values, it never names code")
    _refuse_unknown(job, schema.keys, schema.keys, "")


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
    names, head = names_of(schema), key.partition(".")[0]
    if told := mistakes.WHOLE.get(key) or (head not in names and mistakes.ELSEWHERE.get(head)):
        return f"unknown key {_short(key)}; {told}"
    section, _, last = key.rpartition(".")
    own = [name for name in names if name.rpartition(".")[0] == section]
    tails = {name.rpartition(".")[2]: name for name in [*reversed(list(names)), *own]}  # the section's own count first
    told = None if last in tails else mistakes.other_name(last, list(names))
    if told is None and (near := difflib.get_close_matches(last, list(tails), 1, 0.6 if len(last) > 3 else 0.8)):
        told = f"did you mean {tails[near[0]]}?"
    inside = [name.rpartition(".")[2] for name in own] if section else []
    hint = f"{section} has {', '.join(inside)}" if inside else "`fengine --help` lists all keys"
    return f"unknown key {_short(key)}; {told or hint}"


def bare(schema: Schema) -> str:
    """What to say of a primary config by which no key is known. Pure."""
    return f"the config has no schema: begin the defaults of your own primary config with `- {schema.primary}`"


def explained(error: BaseException, schema: Schema | None = None, word: str = "") -> str:
    """One to five lines a user can act on, from an error about the override `word` or a file. Pure."""
    if isinstance(error, FileNotFoundError) and error.filename is None:  # of os.getcwd
        raise error
    if isinstance(error, OSError) and error.strerror:  # of a name that is looked for as a file's
        return f"{error.strerror}: {str(error.filename).rpartition('/')[2]:.100}"
    if word or isinstance(error, OverrideParseException):
        return _of_word(error, schema, word or str(getattr(error, "override", "")))
    if schema is not None and isinstance(error, MissingConfigException):
        return _missing_option(error, schema)
    told = mistakes.as_written(_of_key(error, schema))
    file = re.match(r"In '([^']+)': \w+ raised", str(error))
    return f"{file[1]}.yaml: {told}" if file and not told.startswith("In ") else told


def _of_word(error: BaseException, schema: Schema | None, word: str) -> str:
    """Of one that cannot be read. Pure."""
    key, sign, _ = word.partition("=")
    if schema is not None and sign and "." in key and key not in leaves(schema.keys) and not key.startswith("hydra."):
        return unknown(key, schema.keys)
    first = "" if isinstance(error, OverrideParseException) else _cause(error)[1] or "nested too deeply"
    return mistakes.unreadable(_short(word), first and f" ({_short(first)})", names_of(schema.keys) if schema else ())


def _cause(error: BaseException) -> tuple[BaseException, str]:
    """(the error of OmegaConf that this is, or came of; its first lines). Pure."""
    known = (error.__cause__, None if isinstance(error, OmegaConfBaseException) else error.__context__)
    cause = next((one for one in known if isinstance(one, OmegaConfBaseException)), error)
    return cause, str(cause).split("\n    full_key", 1)[0].strip()


def _of_key(error: BaseException, schema: Schema | None) -> str:
    cause, first = _cause(error)
    key = getattr(cause, "full_key", None)
    is_unknown = key and isinstance(cause, (ConfigKeyError, ConfigAttributeError))
    whole = re.match(rf"Could not override '({re.escape(key or '')}\.?[^']*)'(\. No match)?", str(error))
    if schema is not None and (is_unknown or whole and whole[2]):
        name = whole[1] if whole else str(key)
        return bare(schema) if name in names_of(schema.keys) else unknown(name, schema.keys)
    return _of_value(error, cause, key, first)


def _of_value(error: BaseException, cause: BaseException, key: str | None, first: str) -> str:
    if key and "is not a ListConfig" in first:
        return f"""{key} must be a list: {key}='["one","two"]', or of numbers {key}=[1,2]"""
    if key and "'DictConfig' to string" in first:
        return f"{key} must be a text; in YAML and behind = one that begins with {{ or [ is quoted"
    if isinstance(cause, MissingMandatoryValue):
        return f"{key or first}: this config leaves it open (???); set it: {key or 'key'}=VALUE"
    lines = [_short(line.rstrip()) for line in (first or type(error).__name__).splitlines() if line.strip()][:4]
    return f"{key}: {' '.join(lines)}" if key else "\n".join(lines)


def _short(text: str) -> str:
    return text if len(text) <= 500 else f"{text[:500]}... ({len(text):,} characters)"


def _missing_option(error: MissingConfigException, schema: Schema) -> str:
    """Names the group's options."""
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or ())
    if group == "hydra/launcher":
        if option in LAUNCHERS:
            return f"hydra/launcher={option} needs a package that is not installed: pip install {LAUNCHERS[option][1]}"
        return f"no launcher {option!r}; {launchers_told(schema)}"
    if not options:
        return _short(str(error).splitlines()[0])
    kind, _, rest = group.partition("/")
    if kind == "model" and (rest or Path(option).exists()):
        given = f"{rest}/{option}".lstrip("/")[:200]
        return f"model={given} is no preset; a hub id or a directory is model.path={given}"
    near = difflib.get_close_matches(option, options, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    told = f"no option {_short(option)!r} in group {group!r}{hint}\noptions: {', '.join(options)}"
    return f"{told}\n{mistakes.OTHERS[group]}" if group in mistakes.OTHERS else told
