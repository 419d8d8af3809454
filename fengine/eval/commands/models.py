"""`fengine models [WORD]`: the families that load, and the presets of conf/model. Imports torch."""

from collections.abc import Sequence

import yaml

from fengine.errors import ConfigError
from fengine.eval.cli.command import OK, run
from fengine.eval.cli.engines import model_families
from fengine.eval.cli.files import conf_dir

USAGE = """
Usage:  fengine models [WORD]

Prints the model families that load, each with its classes in Transformers, and the presets model=NAME; with WORD those
whose names hold it. A checkpoint loads if architectures in its config.json names one of the classes.
"""


def main(argv: Sequence[str]) -> int:
    """Runs `fengine models` with these arguments and returns the exit code."""
    return run(USAGE, argv, _work)


def _work(words: Sequence[str]) -> int:
    """Errors: ConfigError."""
    if len(words) > 1:
        raise ConfigError(f"fengine models takes one word, got {len(words)}")
    word = "".join(words).lower()
    families = {title: ", ".join(names) for title, names in model_families().items()}
    shown = [f"{title}\n    {names}" for title, names in families.items() if word in f"{title} {names}".lower()]
    presets = [f"{name:<24}{path}" for name, path in presets_of().items() if word in f"{name} {path}".lower()]
    if not shown and not presets:
        raise ConfigError(f"no family or preset has {word!r:.80} in its name; fengine models shows all")
    blocks = [*shown, *(["model=NAME loads:\n    " + "\n    ".join(presets)] if presets else [])]
    print("\n".join(blocks), flush=True)
    return OK


def presets_of() -> dict[str, str]:
    """What each preset loads: a hub id, or "box"."""
    files = sorted((conf_dir() / "model").glob("*.yaml"))
    return {file.stem: str(yaml.safe_load(file.read_text(encoding="utf-8"))["path"]) for file in files}
