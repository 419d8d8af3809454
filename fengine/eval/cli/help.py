"""What `--help` says beside each key: the comments of the schemas, and the values that a key may have. No torch."""

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from fengine.config import EngineConfig
from fengine.core.sampling_params import PARAMETERS
from fengine.errors import ConfigError
from fengine.eval.cli.schema import Schema, flat

WIDTH = 120
_FIELD = re.compile(r"^    (\w+): [^\n]*?  # ([^\n]*)$", re.MULTILINE)
_KEY = re.compile(r"( *)(\w+):( .*)?")


def annotated(text: str, schema: Schema) -> str:
    """A help text with a word on every key of its configuration. Pure but for the sources of the schemas."""
    notes = _notes(schema.keys, "", inspect.getsource(schema.kind) + inspect.getsource(EngineConfig))
    head, mark, rest = text.partition("\nConfiguration (")  # before it there are the groups and their options
    lines, path = [], list[str]()
    for line in rest.splitlines():
        if (found := _KEY.fullmatch(line)) is not None:
            path = [*path[: len(found[1]) // 2], found[2]]
            if note := notes.get(".".join(path)):
                line = f"{line:<34}  # {note}"
                line = line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"
        lines.append(line)
    return head + mark + "\n".join(lines)


def keys_of(word: str, schemas: Sequence[Schema]) -> str:
    """Every key whose name holds a word, with its default and what it is. Errors: ConfigError if there is none."""
    found: dict[str, str] = {}
    for schema in schemas:
        notes = _notes(schema.keys, "", inspect.getsource(schema.kind) + inspect.getsource(EngineConfig))
        defaults = flat(schema.kind())
        found |= {f"{key}={_shown(value)}": notes.get(key, "") for key, value in defaults.items() if word in key}
    if not found:
        raise ConfigError(f"no key has {word!r:.80} in its name; fengine --help lists all")
    return "\n".join(f"{name:<34}  # {note}" if note else name for name, note in found.items())


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _notes(section: Any, prefix: str, source: str) -> dict[str, str]:
    """By key: its comment in the source or its line of the parameter table, and what it may be; of a section the first
    sentence of its docstring."""
    comments, notes = dict(_FIELD.findall(source)), {}
    for f in fields(section):
        name, kind = f"{prefix}{f.name}", f.type
        if is_dataclass(kind):
            notes[name] = re.split(r"[.:]\s", " ".join((kind.__doc__ or "").split()) + " ")[0]
            notes |= _notes(kind, f"{name}.", inspect.getsource(kind))  # type: ignore[arg-type]
            continue
        choices = " | ".join(one.value for one in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ""
        doc = PARAMETERS[f.name].doc if prefix == "sampling." else comments.get(f.name, "")
        notes[name] = "; ".join(filter(None, (choices, doc)))
    return notes
