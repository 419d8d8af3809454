"""`fengine rerun RUN`: the run of a folder again, in a new one, by what its manifest tells. No torch at import."""

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any

from fengine.errors import ConfigError, ResumeMismatchError, StorageError
from fengine.eval.cli import command, view
from fengine.eval.cli.command import DIFFERS, OK
from fengine.eval.cli.engines import EngineCache
from fengine.eval.cli.recompose import restore
from fengine.eval.cli.schema import Point
from fengine.eval.cli.view import place, say
from fengine.eval.runs import manifest
from fengine.eval.runs.config import EVAL, parse_shard
from fengine.eval.runs.index import index_rows
from fengine.eval.runs.records import read_manifest, runs_of
from fengine.eval.runs.run import run_point
from fengine.eval.tasks.kinds import open_task

USAGE = """
Usage: fengine rerun RUN [key=value ...] [out=DIR] [rerun.changed=true]

Runs an evaluation again from the config that its manifest records, in a new folder, and says whether outputs.jsonl is
the same, byte for byte. What the results depend on is compared first: where the input or the checkpoint's files are no
longer those of the run, it is refused with their names; other versions, code or hardware are told.

  key=value            changes of the recorded config, single keys: sampling.temperature=0.7 model.path=DIR
                       task.data=FILE: where the rows are now
  out=DIR              the new folder (default: a new one below runs/); given again, an interrupted rerun goes on.
                       A sweep is run again point by point, each in its own folder in DIR
  rerun.changed=true   runs although input or checkpoint have changed

Exit codes:  0 the same bytes   1 other bytes, or the run could not go on   2 usage, input, or refused
130 interrupted   143 terminated
"""
# Parts of the identity without which it is another experiment; those excused by a change asked for in a section.
DECISIVE = ("input", "examples_sha256", "model", "adapters", "task")
EXCUSED = {"task": ("input", "examples_sha256", "task"), "model": ("model",), "lora": ("adapters",)}


def work(argv: Sequence[str]) -> int:
    """The exit code. Errors: FengineError."""
    words = command.parse(argv, {"rerun.changed": command.switch}, overrides=True)
    if len(words.places) != 1:
        raise ConfigError(f"fengine rerun takes one run folder, got {len(words.places)}; see fengine rerun --help")
    folders, home = runs_of(Path(words.places[0])), _home(words.overrides)
    with EngineCache() as engines:

        def again(folder: Path) -> int:
            return _again(folder, home if len(folders) == 1 else home / folder.name, words, engines, argv)

        return command.each(folders, again, engines.close)


def _home(overrides: Sequence[str]) -> Path:
    given = [word.partition("=")[2] for word in overrides if word.startswith("out=")]
    if given and given[0]:
        return Path(given[0]).absolute()
    now = datetime.now()
    return Path("runs", f"{now:%Y-%m-%d}", f"{now:%H-%M-%S-%f}_{os.getpid()}").absolute()


def _again(folder: Path, own: Path, words: command.Arguments, engines: EngineCache, argv: Sequence[str]) -> int:
    """One run. Errors: FengineError, with nothing computed."""
    if own.resolve() == folder.resolve():
        raise StorageError(f"out={own} is the run itself; choose another folder")
    old = read_manifest(folder)
    said = old.get("origin") or {}
    overrides, choices = said.get("overrides"), said.get("choices")
    overrides = tuple(map(str, overrides)) if isinstance(overrides, list) else ()
    choices = tuple((k, str(v)) for k, v in choices.items()) if isinstance(choices, dict) else ()
    config = restore(old["identity"]["config"], words.overrides, EVAL)
    point = Point(config, own, overrides=overrides, choices=choices)
    base = base_of(said, words.overrides)
    screen = view.choose(point.config.view)
    changed = _changes(point, base, old["identity"], folder, bool(words.options.get("rerun.changed")))
    if changed:
        screen.note(f"what this run depends on differs (recorded → now):\n{manifest.listed(changed)}")
    code, metrics = run_point(point, engines, screen, ["rerun", *argv], base)
    if metrics is None:
        screen.note(f"to go on, run the same command with out={quote(place(str(own)))}")
        return code
    return _verdict(old, read_manifest(own), folder, own)


def base_of(said: dict[str, Any], overrides: Sequence[str]) -> Path:
    """What a relative `task.data` is under: the working directory where the words give it, else the recorded one."""
    if any(word.startswith("task.data=") for word in overrides):
        return Path.cwd()
    base = said.get("base")
    if not isinstance(base, str) or not base or any("\ud800" <= c <= "\udbff" or c == "\0" for c in base):
        return Path.cwd()
    return Path(base)


def _changes(point: Point, base: Path, old: dict[str, Any], folder: Path, allowed: bool) -> list[str]:
    """What differs, as lines. Errors: ResumeMismatchError for what makes it another experiment, unless `allowed`."""
    task = open_task(point.config.task, base)
    rows = index_rows(task).shard(parse_shard(point.config.run.shard))
    now = manifest.identity(point.config, task, rows)
    asked = {line.partition(".")[0] for line in manifest.differences(old["config"], now["config"], "config")}
    excused = {part for section, parts in EXCUSED.items() if section in asked for part in parts}
    parts = [name for name in DECISIVE if name not in excused]
    decisive = [line for name in parts for line in manifest.differences(old.get(name), now.get(name), name)]
    if decisive and not allowed:
        raise ResumeMismatchError(
            f"{folder} depends on what is no longer so (recorded → now):\n{manifest.listed(decisive)}\n"
            "put that back, name the place where it is now (task.data=FILE, model.path=DIR), or run it all the same "
            "with rerun.changed=true"
        )
    return manifest.differences(old, now)


def _verdict(old: dict[str, Any], new: dict[str, Any], folder: Path, own: Path) -> int:
    wanted, got = (old.get("result") or {}).get("outputs_sha256"), new["result"]["outputs_sha256"]
    there, here = quote(place(str(folder))), quote(place(str(own)))
    if wanted == got:
        say(f"outputs.jsonl is byte-identical to that of {there} (sha256 {got})")
        return OK
    if wanted is None:
        say(f"{there} has not come to its end; fengine diff {there} {here} compares what it has")
    else:
        say(f"outputs.jsonl differs from that of {there}; see fengine diff {there} {here}")
    return DIFFERS
