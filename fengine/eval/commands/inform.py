"""Commands that tell: `fengine env`, `models`, `replay` (steps that were recorded) and `report` (a page of a run)."""

import json
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fengine.core.recording import replay
from fengine.errors import ConfigError, FengineError
from fengine.eval.cli.command import OK, number, parse, whole
from fengine.eval.cli.engines import devices, model_families
from fengine.eval.cli.schema import conf_dir
from fengine.eval.cli.view import count, place, say
from fengine.eval.report.page import page, report_data
from fengine.eval.runs import manifest, provenance
from fengine.eval.runs.folder import write_file
from fengine.eval.runs.records import runs_of
from fengine.ops.compiler import find_compiler, private_cache_dir

ENV = """
Usage:  fengine env [--json]

Prints what results and speed depend on: versions, hardware, compiler, caches, environment. It has no names of users, no
keys and no values of other variables, so that it can be sent with a question.
"""
MODELS = """
Usage:  fengine models [WORD]

Prints the model families that load, each with its classes in Transformers, and the presets model=NAME; with WORD those
whose names hold it. A checkpoint loads if architectures in its config.json names one of the classes.
"""
REPLAY = """
fengine replay FILE: schedules the recorded steps of an engine again, and executes them on a simulated device.

    fengine prompts=a.jsonl scheduler.record=steps.jsonl     records them: ids as hashes, no texts
    fengine replay steps.jsonl                               every step must be the same, and read its own KV

Exit codes:  0 all are, 1 one is not, 2 usage.
"""
REPORT = """
Usage: fengine report RUN_OR_SWEEP [RUN_B] [out=FILE] [rows=1000] [megabytes=5]

Writes one HTML file that opens offline, wherever it is copied to: metrics with error bars, what the run depends on, its
rows with a heatmap of their tokens, the scheduler's steps and pages over time (of a run with trace=steps); of a sweep
its metrics with paired differences; of two runs where they differ and why. It also reads runs that have not come to
their end. The likeliest tokens beside each token are there if the run recorded them (top_logprobs=5).

  out=FILE      default: report.html in the folder, diff.html in the first one of two
  rows=N        how many rows the file holds at most; a third each for failed, wrong and other ones (default 1000)
  megabytes=M   about how large it may be (default 5); the largest rows are cut, to the same size

Exit codes:  0 written   2 usage, a folder that is no run's, or a file that cannot be written
"""
WANTED = ("torch triton numpy tokenizers transformers safetensors huggingface-hub hydra-core llguidance starlette "
          "uvicorn lm-eval inspect-ai").split()  # fmt: skip


def env(argv: Sequence[str]) -> int:
    """Imports torch. Errors: ConfigError."""
    words = parse(argv, flags=["--json"])
    if words.places:
        raise ConfigError(f"fengine env takes no {words.places[0]!r:.80}; see fengine env --help")
    found = facts()
    if "--json" in words.flags:
        print(json.dumps(found, indent=1), flush=True)
        return OK
    for name, value in found.items():
        told = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        say(f"{name + ':':<14}{'none' if told in (None, '', []) else told}")
    return OK


def facts() -> dict[str, Any]:
    """Facts about this machine by name, as JSON's values: what a manifest has."""
    there, around, seen = provenance.packages(), manifest.surroundings(), devices()
    checkout = provenance.checkout()
    return {
        "fengine": manifest.versions()["fengine"],
        "commit": checkout and checkout["commit"][:12] + (" and changes" if checkout["dirty"] else ""),
        "code": manifest.code_digest()[:16],
        "python": f"{around['python']} ({platform.python_implementation()})",
        "system": around["system"],
        "cpu": f"{manifest.cpu_name()}, {around['cpus']} cores",
        **seen,
        "compiler": _or_error(lambda: " ".join(map(str, (shutil.which(find_compiler()[0]), *find_compiler()[1:])))),
        "cache": _or_error(lambda: "a private directory" if private_cache_dir().is_dir() else None),
        "packages": {name: there[name][1] for name in WANTED if name in there},
        "environment": around["environment"],
    }


def _or_error(read: Any) -> Any:
    try:
        return read()
    except FengineError as error:
        return f"{type(error).__name__}: {error}"


def models(argv: Sequence[str]) -> int:
    """Imports torch. Errors: ConfigError."""
    if len(argv) > 1:
        raise ConfigError(f"fengine models takes one word, got {len(argv)}")
    word = "".join(argv).lower()
    families = {title: ", ".join(names) for title, names in model_families().items()}
    shown = [f"{title}\n    {names}" for title, names in families.items() if word in f"{title} {names}".lower()]
    presets = [f"{name:<24}{path}" for name, path in presets_of().items() if word in f"{name} {path}".lower()]
    if not shown and not presets:
        raise ConfigError(f"no family or preset has {word!r:.80} in its name; fengine models shows all")
    say(*shown, *(["model=NAME loads:\n    " + "\n    ".join(presets)] if presets else []))
    return OK


def presets_of() -> dict[str, str]:
    """What each preset loads: a hub id, or a model in the package."""
    files = sorted((conf_dir() / "model").glob("*.yaml"))
    return {file.stem: str(yaml.safe_load(file.read_text(encoding="utf-8"))["path"]) for file in files}


def replay_steps(argv: Sequence[str]) -> int:
    """Errors: ConfigError, InputFileError, InvariantError."""
    if len(argv) != 1:
        raise ConfigError(f"fengine replay takes one file, got {len(argv)} arguments; see fengine replay --help")
    requests, steps = replay(Path(argv[0]))
    say(f"{count(requests, 'request')}, {count(steps, 'step')}: each is scheduled as it was, and reads its own KV")
    return OK


def report(argv: Sequence[str]) -> int:
    """The exit code. Errors: FengineError."""
    options = {"out": _file, "rows": whole(0, 100_000), "megabytes": number(0.5, 500)}
    words = parse(argv, options)
    if len(words.places) not in (1, 2):
        raise ConfigError(f"fengine report takes one folder or two, got {len(words.places)}; see fengine report --help")
    folders = [Path(word) for word in words.places]
    name = "diff.html" if len(folders) == 2 else "report.html"
    folders = [folder if folder.is_dir() else runs_of(folder)[0] for folder in folders]  # that of an output file
    out: Path = words.options.get("out", folders[0] / name)
    given = words.options
    content = page(report_data(folders, most_rows=given.get("rows", 1000), megabytes=given.get("megabytes", 5.0)))
    write_file(out, content)
    say(f"{place(str(out))}: {len(content) / 1e6:.1f} MB; open it in a browser")
    return OK


def _file(text: str) -> Path:
    if not text.strip() or Path(text).is_dir():
        raise ValueError("must name a file")
    return Path(text)
