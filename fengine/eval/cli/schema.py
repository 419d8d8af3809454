"""What a command composes: the schema of its config, and the points that come of it. No torch, no Hydra."""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from fengine.config import EngineConfig


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

    def __post_init__(self) -> None:
        """The class gets a name in `kind`, so that processes of a launcher find it there."""
        engine = [f for f in fields(EngineConfig) if f.name != "random_seed"]
        own = [f for f in fields(self.kind) if f.name != "engine"]
        keys = make_dataclass("Keys", [(f.name, f.type, _default(f)) for f in [*engine, *own]], frozen=True)
        keys.__module__, keys.__qualname__ = self.kind.__module__, f"{self.kind.__qualname__}.Keys"
        self.kind.Keys = keys  # type: ignore[attr-defined]

    @property
    def keys(self) -> type:
        return self.kind.Keys  # type: ignore[attr-defined]

    def assemble(self, values: dict[str, Any]) -> Any:
        """The config of these values of `keys`. Pure."""
        names = {f.name for f in fields(EngineConfig)}
        engine = EngineConfig(**{name: value for name, value in values.items() if name in names})
        return self.kind(engine=engine, **{name: value for name, value in values.items() if name not in names})


def _default(f: Field) -> Any:
    return field(default=f.default) if f.default is not MISSING else field(default_factory=f.default_factory)  # type: ignore[arg-type]


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
    return dict(_flatten(nested(config), ""))


def _flatten(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
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
