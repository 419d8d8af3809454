"""The YAML files that Hydra reads: where they are, each looked at before it is read. No torch."""

import copy
from pathlib import Path
from typing import Any

from hydra._internal.config_repository import ConfigRepository

import fengine
from fengine.errors import ConfigError
from fengine.eval.cli import guard


def conf_dir() -> Path:
    """Our YAML files: inside the package when installed, beside it in a checkout."""
    package = Path(fengine.__file__).resolve().parent
    for path in (package / "conf", package.parent / "conf"):
        if (path / "config.yaml").is_file():
            return path
    raise ConfigError(f"the configuration files are missing: no conf/config.yaml in {package} or beside it; reinstall")


class ConfigFiles(ConfigRepository):
    """The configs of a search path, each read once. Errors: ConfigError for a file that would not end."""

    def __init__(self, search_path: Any) -> None:
        super().__init__(search_path)
        self.known: dict[str, Any] = {}

    def __deepcopy__(self, _: Any) -> "ConfigFiles":
        return self  # Hydra copies what hydra.searchpath may change, and that is refused

    def load_config(self, config_path: str) -> Any:
        if config_path not in self.known:
            for source in self.sources:
                if source.scheme() == "file" and source.is_config(config_path):
                    guard.check_yaml(Path(source.path, f"{config_path.removesuffix('.yaml')}.yaml"))
            self.known[config_path] = super().load_config(config_path)
        return copy.deepcopy(self.known[config_path])
