"""The YAML files of a configuration, each read once, if it has an end. No torch."""

import copy
from pathlib import Path
from typing import Any, ClassVar

import yaml
from hydra._internal.config_repository import ConfigRepository
from omegaconf import DictConfig, OmegaConf

from fengine.errors import ConfigError

MAX_FILE, MAX_NODES = 4 << 20, 200_000  # bytes of a YAML file; its values, each counted as often as aliases name it


class ConfigFiles(ConfigRepository):
    """The configs of a search path, each read once; of a process, too, while its files stay as they are. Errors:
    ConfigError for a file that would not end."""

    read: ClassVar[dict[Any, Any]] = {}

    def __init__(self, search_path: Any) -> None:
        super().__init__(search_path)
        self.known: dict[str, Any] = {}

    def __deepcopy__(self, _: Any) -> "ConfigFiles":
        return self  # Hydra copies what hydra.searchpath may change, and that is refused

    def load_config(self, config_path: str) -> Any:
        if config_path not in self.known:
            try:
                self.known[config_path] = self._read(config_path)
            except ConfigError:
                raise
            except (OSError, ValueError) as error:
                raise ConfigError(f"{config_path} cannot be read: {str(error):.500}") from error
        return copy.deepcopy(self.known[config_path])

    def _read(self, config_path: str) -> Any:
        having = [one for one in self.sources if one.scheme() == "file" and one.is_config(config_path)]
        files = [Path(one.path, f"{config_path.removesuffix('.yaml')}.yaml") for one in having]
        stamps = [(file, (stat := file.stat()).st_ino, stat.st_size, stat.st_mtime_ns) for file in files]
        key = (config_path, *(one.path for one in self.sources), *stamps)
        if not files:  # a dataclass, which a command brings
            return super().load_config(config_path)
        if key not in self.read:
            for file in files:
                check_yaml(file)
            self.read[key] = super().load_config(config_path)
        return self.read[key]


def check_yaml(path: Path) -> None:
    """Refuses a file that would not end: one that is no file, or whose aliases multiply. Errors: ConfigError."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file")
    if path.stat().st_size > MAX_FILE:
        raise ConfigError(f"{path} has {path.stat().st_size:,} bytes, at most {MAX_FILE:,} are read")
    try:
        root = yaml.compose(path.read_bytes().decode(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if root is not None and _values(root, {}) > MAX_NODES:
            raise ValueError(f"it has more than {MAX_NODES:,} values, each counted as often as aliases name it")
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error or type(error).__name__}") from error


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node has once its aliases are written out. A node within itself has no end. Modifies: known."""
    if id(node) not in known:
        known[id(node)] = MAX_NODES + 1
        inner = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
        total = 1 if isinstance(node, yaml.ScalarNode) else 1 + sum(_values(one, known) for one in inner)
        known[id(node)] = min(total, MAX_NODES + 1)
    return known[id(node)]


def writable(node: Any) -> Any:
    """OmegaConf makes the nodes of frozen dataclasses read-only, so that no override could be merged in."""
    OmegaConf.set_readonly(node, None)
    for key in node if isinstance(node, DictConfig) else ():
        child = node._get_node(key)
        if OmegaConf.is_config(child):
            writable(child)
    return node
