"""What a command composes: the schema of its config, what `--help` says of each key, and the points that come of it. No
torch, no Hydra."""

import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, make_dataclass
from enum import Enum
from pathlib import Path
from textwrap import fill
from typing import Any

import fengine
from fengine.config import EngineConfig
from fengine.core.sampling_params import PARAMETERS
from fengine.errors import ConfigError

_FIELD = re.compile(r"^    (\w+): [^\n]*?  # ([^\n]*)$", re.MULTILINE)
_KEY = re.compile(r"( *)(\w+):( .*)?")


def conf_dir() -> Path:
    """Our YAML files: inside the package when installed, beside it in a checkout."""
    package = Path(fengine.__file__).resolve().parent
    for path in (package / "conf", package.parent / "conf"):
        if (path / "config.yaml").is_file():
            return path
    raise ConfigError(f"the configuration files are missing: no conf/config.yaml in {package} or beside it; reinstall")


@dataclass(frozen=True)
class Schema:
    """What a command composes. `keys` is `kind` as users write it: the engine's sections stand at the top."""

    kind: type  # has a field `engine: EngineConfig`
    primary: str  # the primary YAML
    store: str  # the name by which it has the dataclass in its defaults
    check: Callable[[Any], list[str]]
    program: str = "fengine"
    one_file: bool = True  # `out` names one file, which several points of a sweep cannot share
    launchers: bool = False  # whether Hydra's launchers may run the points of a sweep
    sweeps: bool = True  # whether it may have several configurations

    def __post_init__(self) -> None:
        """The class gets a name in `kind`, so that processes of a launcher find it there."""
        engine = [f for f in fields(EngineConfig) if f.name != "random_seed"]
        own = [f for f in fields(self.kind) if f.name != "engine"]
        found: Any = [
            (f.name, f.type, field(default=f.default, default_factory=f.default_factory))  # one of the two is MISSING
            for f in [*engine, *own]
        ]
        keys = make_dataclass("Keys", found, frozen=True)
        keys.__module__, keys.__qualname__ = self.kind.__module__, f"{self.kind.__qualname__}.Keys"
        self.kind.Keys = keys  # type: ignore[attr-defined]

    @property
    def keys(self) -> type:
        return self.kind.Keys  # type: ignore[attr-defined]

    def assemble(self, values: dict[str, Any]) -> Any:
        """The config of these values of `keys`, checked. Pure. Errors: ConfigError with every problem."""
        names = {f.name for f in fields(EngineConfig)}
        engine = EngineConfig(**{name: value for name, value in values.items() if name in names})
        config = self.kind(engine=engine, **{name: value for name, value in values.items() if name not in names})
        if problems := self.check(config):
            raise ConfigError("\n".join(problems))
        return config


def names_of(section: Any, prefix: str = "") -> dict[str, Any]:
    """Every section and key with its type. Pure."""
    found = {}
    for f in fields(section):
        found[prefix + f.name] = f.type
        if is_dataclass(f.type):
            found |= names_of(f.type, f"{prefix}{f.name}.")
    return found


def leaves(section: Any) -> dict[str, Any]:
    """Every "section.key" that has a value, with its type. Pure."""
    return {name: kind for name, kind in names_of(section).items() if not is_dataclass(kind)}


def nested(config: Any) -> dict[str, Any]:
    """A config dataclass as mappings of plain JSON values; the engine's sections stand at the top. Pure."""
    values = asdict(config)
    if isinstance(engine := values.pop("engine", None), dict):
        values = {name: value for name, value in engine.items() if name != "random_seed"} | values
    return _plain(values)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value


def flat(config: Any) -> dict[str, Any]:
    """A config dataclass as {"section.key": plain JSON value}; the engine's sections stand at the top. Pure."""
    return dict(flattened(nested(config)))


def flattened(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("section.key", value) of every leaf of nested mappings. Pure."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True)
class Point:
    """One job: a checked config, and the directory that is its own (not made yet)."""

    config: Any  # of the command's schema
    directory: Path
    swept: tuple[str, ...] = ()  # the overrides that tell this point from its neighbours
    overrides: tuple[str, ...] = ()  # all that were given
    choices: tuple[tuple[str, str], ...] = ()  # (group, option chosen)
    search: tuple[Path, ...] = ()  # the directories of configs, in the order in which they are searched
    launcher: str = "basic"  # Hydra's launcher


@dataclass(frozen=True)
class BadPoint:
    """One point of a sweep whose config is refused."""

    swept: tuple[str, ...]
    message: str


def annotated(text: str, schema: Schema) -> str:
    """A help text with a word on every key of its configuration, and without the groups that its command does not take;
    their lists of options as wide as a terminal. Pure but for the sources of the schemas."""
    notes, groups = notes_of(schema), {f.name for f in fields(schema.keys)}
    groups |= {"experiment"} if "sampling" in groups else set()  # it chooses of all a run's groups

    def options(row: re.Match[str]) -> str:
        line = fill(row[0], 80, subsequent_indent="  ", break_on_hyphens=False)
        return f"{line}\n" if row[1] in groups else ""

    head, mark, rest = text.partition("\nConfiguration (")  # before it there are the groups and their options
    head = re.sub(r"(?m)^([a-z]+): .+\n", options, head)
    noted = ((line, notes.get(key)) for line, key in _keyed(rest))
    return head + mark + "\n".join(f"{line:<34}  # {note}" if note else line for line, note in noted)


def _keyed(text: str) -> Iterator[tuple[str, str]]:
    """(line, the key that stands in it, with its sections) of a YAML's text. Pure."""
    path: list[str] = []
    for line in text.splitlines():
        if (found := _KEY.fullmatch(line)) is not None:
            path = [*path[: len(found[1]) // 2], found[2]]
        yield line, "" if found is None else ".".join(path)


def notes_of(schema: Schema) -> dict[str, str]:
    """By key: what it is. Pure but for the sources of the schemas, and conf/."""
    source = "".join(map(inspect.getsource, (*schema.kind.__mro__[:-1], EngineConfig)))
    return _notes(schema.keys, "", source, _comments(schema))


def _comments(schema: Schema) -> dict[str, str]:
    """By key: its comment in conf/, in the primary config or the default of its group."""
    files = {f"{schema.primary}.yaml": ""} | {f"{f.name}/default.yaml": f"{f.name}." for f in fields(schema.keys)}
    found: dict[str, str] = {}
    for name, section in files.items():
        if (file := conf_dir() / name).is_file():
            lines = _keyed(file.read_text(encoding="utf-8"))
            found |= {section + key: line.partition(" # ")[2] for line, key in lines if key}
    return found


def keys_of(word: str, schemas: Sequence[Schema]) -> str:
    """Every key whose name holds a word, with its default and what it is. Errors: ConfigError if there is none."""
    found: dict[str, str] = {}
    for schema in schemas:
        notes, defaults = notes_of(schema), flat(schema.kind())
        of_word = {
            f"{k}={json.dumps(v, ensure_ascii=False)}": notes.get(k, "") for k, v in defaults.items() if word in k
        }
        found |= {name: found.get(name, note) for name, note in of_word.items()}
    if not found:
        names = {key.rpartition(".")[2] for schema in schemas for key in flat(schema.kind())}
        near = "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(word, names, 1))
        raise ConfigError(f"no key has {word!r:.80} in its name{near or '; fengine --help lists all'}")
    return "\n".join(f"{name:<34}  # {note}" if note else name for name, note in found.items())


def _notes(section: Any, prefix: str, source: str, others: dict[str, str]) -> dict[str, str]:
    """By key: its comment in the source, its line of the parameter table, or that of `others`, and what it may be; of a
    section the first sentence of its docstring."""
    comments, notes = dict(_FIELD.findall(source)), {}
    for f in fields(section):
        name, kind = f"{prefix}{f.name}", f.type
        if is_dataclass(kind):
            notes[name] = re.split(r"[.:]\s", " ".join((kind.__doc__ or "").split()) + " ")[0]
            notes |= _notes(kind, f"{name}.", inspect.getsource(kind), others)  # type: ignore[arg-type]
            continue
        choices = " | ".join(one.value for one in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ""
        doc = PARAMETERS[f.name].doc if prefix == "sampling." else comments.get(f.name) or others.get(name)
        notes[name] = "; ".join(filter(None, (choices, doc)))
    return notes
