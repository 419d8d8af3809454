"""Errors of Hydra, OmegaConf and YAML -> the few lines that a user can act on. No torch."""

import difflib

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from fengine.eval.runs.config import RUN, Schema
from fengine.eval.runs.vet import LAUNCHERS, launchers_told, unknown


def explain(error: BaseException, schema: Schema = RUN) -> str:
    """One to five lines a user can act on, from an error of Hydra, OmegaConf or YAML. Pure."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    first = str(cause).split("\n    full_key", 1)[0].strip()
    if isinstance(error, MissingConfigException):
        return _missing_option(error, schema)
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the override {getattr(error, 'override', '')}\n"
            """write key=value, and quote a value with spaces or commas: prompts='["Hello, you"]'"""
        )
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and key:
        return unknown(key, schema.kind)
    if isinstance(cause, MissingMandatoryValue):
        return f"{key or first}: this config leaves it open (???); set it: {key or 'key'}=VALUE"
    lines = [line.rstrip() for line in first.splitlines() if line.strip()][:4]
    return f"{key}: {' '.join(lines)}" if key else "\n".join(lines) or type(error).__name__


def _missing_option(error: MissingConfigException, schema: Schema) -> str:
    """Names the group's options."""
    group, _, option = str(error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or ())
    if group == "hydra/launcher":
        return _missing_launcher(option, schema)
    if not options:
        return str(error).splitlines()[0]
    near = difflib.get_close_matches(option, options, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"no option {option!r} in group {group!r}{hint}\noptions: {', '.join(options)}"


def _missing_launcher(name: str, schema: Schema) -> str:
    if name in LAUNCHERS:
        return f"hydra/launcher={name} needs a package that is not installed: {LAUNCHERS[name].remedy}"
    return f"no launcher {name!r}; {launchers_told(schema)}"
