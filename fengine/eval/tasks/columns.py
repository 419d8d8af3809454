"""A row's columns: what a task reads of them, and templates that they fill. Pure; no torch."""

import json
import re
from typing import Any

from fengine.core.sampling_params import PARAMETERS
from fengine.errors import InputFileError
from fengine.eval.tasks.task import Row, Scores

# Columns that can only be meant as sampling parameters, and their names there.
BARE = {name: name for name, row in PARAMETERS.items() if name not in ("n", "stop", "regex", "ebnf", "custom_params")}
BARE |= {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


def grouped(scores: Scores) -> Scores:
    """Scores under their own names, and under those of the row's group. Pure."""
    numbers: Scores = {name: value for name, value in scores.items() if not isinstance(value, str)}
    return numbers | {f"{name} [{scores.get('group')}]": value for name, value in numbers.items()}


def refuse_bare(row: Row) -> None:
    """A row that is a request: what it asks for outside `sampling` would be ignored. Errors: InputFileError."""
    bare = [name for name in BARE if row.data.get(name) is not None]
    if bare:
        name, value = BARE[bare[0]], json.dumps(row.data[bare[0]])
        raise problem(row, f'{bare[0]!r} is not read as a column; write "sampling": {{"{name}": {value:.80}}}')


def problem(row: Row, what: str) -> InputFileError:
    return InputFileError(f"row {row.id!r}: {what}")


def column(name: str, row: Row) -> Any:
    """The value of a column; `a.b` reaches into an object where there is no column of that very name. Pure.

    Errors: InputFileError if there is none, or if it is null.
    """
    value: Any = row.data
    for part in [name] if name in row.data else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        known = ", ".join(map(repr, list(row.data)[:12]))
        raise problem(row, f"has no column {name!r}; it has {known or 'none'}")
    return value


def filled(template: str, row: Row) -> str:
    """`template` with {column} replaced by texts and numbers; {{ and }} are braces. Pure. Errors: InputFileError."""

    def put(match: re.Match[str]) -> str:
        if match.group() in ("{{", "}}"):
            return match.group()[0]
        value = column(match.group(1), row)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise problem(row, f"task.prompt takes texts and numbers; {match.group(1)!r} is {type(value).__name__}")
        return str(value)

    return _FIELD.sub(put, template)
