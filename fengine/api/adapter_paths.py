"""`lora_paths`: the ways in which SGLang lets adapters be named."""

import os
from typing import Any

from fengine.errors import ConfigError

_LORA_KEYS = {"lora_name", "lora_path", "pinned"}


def adapter_paths(given: Any) -> tuple[dict[str, str], tuple[str, ...]]:
    """(path by name, the names that are pinned). Pure. Errors: ConfigError."""
    paths: dict[str, str] = {}
    pinned = []
    if isinstance(given, dict):
        given = [{"lora_name": name, "lora_path": path} for name, path in given.items()]
    for item in given or ():
        if isinstance(item, str):  # a path alone is its own name
            name, equals, path = item.partition("=")
            item = {"lora_name": name, "lora_path": path if equals else name}
        values = item if isinstance(item, dict) else {}
        name, path = values.get("lora_name"), values.get("lora_path")
        path = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not (isinstance(name, str) and name and isinstance(path, str) and path and values.keys() <= _LORA_KEYS):
            raise ConfigError(
                f'lora_paths must hold "name=path", paths, or dicts of lora_name, lora_path, pinned; got {item!r:.80}'
            )
        if "=" in name:
            raise ConfigError(f"lora_paths: a name must not contain '=', got {name!r:.80}")
        if name in paths:
            raise ConfigError(f"lora_paths has two adapters of the name {name!r:.80}")
        paths[name] = path
        if values.get("pinned", False) is True:
            pinned.append(name)
        elif values.get("pinned", False) is not False:
            raise ConfigError(f"lora_paths: pinned must be True or False, got {values['pinned']!r:.80}")
    return paths, tuple(pinned)
