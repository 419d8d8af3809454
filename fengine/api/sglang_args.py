"""SGLang's settings that fengine has not, and its ways to write those that it has.

`sglang_args.json` holds names and defaults (0.5.23 and older releases) by the reason why they have no effect here:
*harmless* ones are accepted whatever their value, *refused* ones only where they are off, which is their default, None
or a value of `also_off`.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fengine.errors import ConfigError, UnsupportedFeatureError

logger = logging.getLogger("fengine")
_DATA = json.loads((Path(__file__).parent / "sglang_args.json").read_text())
HARMLESS: Mapping[str, Mapping[str, Any]] = _DATA["harmless"]  # defaults by name, by reason
REFUSED: Mapping[str, Mapping[str, Any]] = _DATA["refused"]
ALSO_OFF: Mapping[str, list[Any]] = _DATA["also_off"]
FOREIGN = {
    name: default for groups in (HARMLESS, REFUSED) for group in groups.values() for name, default in group.items()
}
_LORA_KEYS = {"lora_name", "lora_path", "pinned"}


def refuse_foreign(values: Mapping[str, Any]) -> None:
    """Reports everything not built that is not off, all at once. Errors: UnsupportedFeatureError."""
    bad = [
        f"{name}={values[name]!r:.80} ({reason})"
        for reason, group in REFUSED.items()
        for name, default in group.items()
        if values[name] is not None and not any(_same(values[name], off) for off in (default, *ALSO_OFF.get(name, ())))
    ]
    if (algorithm := values["speculative_algorithm"]) is not None and algorithm.upper() != "NGRAM":
        bad.append(f"speculative_algorithm={algorithm!r:.80} (of speculation only NGRAM is built)")
    if bad:
        raise UnsupportedFeatureError(f"not built: {', '.join(bad)}. Leave these arguments out.")


def log_harmless(values: Mapping[str, Any]) -> None:
    """Logs, in one line at level info, the harmless settings that were given, and why they have no effect."""
    given = [
        f"{name}={values[name]!r:.80} ({reason})"
        for reason, group in HARMLESS.items()
        for name, default in group.items()
        if values[name] is not None and not _same(values[name], default)
    ]
    if values["grammar_backend"] in ("xgrammar", "outlines"):
        given.append(f"grammar_backend={values['grammar_backend']!r} (grammars are llguidance's)")
    if given:
        logger.info("accepted without effect: %s", "; ".join(given))


def _same(a: Any, b: Any) -> bool:
    a, b = (list(x) if isinstance(x, tuple) else x for x in (a, b))
    kinds = {type(a), type(b)}
    return (len(kinds) == 1 or kinds == {int, float}) and a == b


def adapter_paths(given: Any) -> tuple[dict[str, str], tuple[str, ...]]:
    """`lora_paths`: (path by name, the names that are pinned). Pure. Errors: ConfigError."""
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
