"""`fengine verify RUN`: the rows of a run computed again under other schedules, and compared bit for bit."""

import math
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fengine.errors import ConfigError, EngineClosedError, EngineDeadError, FengineError, ResumeMismatchError
from fengine.eval.cli import command
from fengine.eval.cli.command import DIFFERS, OK
from fengine.eval.cli.engines import EngineCache, model_directory
from fengine.eval.cli.recompose import restore
from fengine.eval.cli.schema import flat
from fengine.eval.cli.view import clean, clock, count, place, say
from fengine.eval.commands import layouts
from fengine.eval.commands.layouts import LAYOUTS, Found, Layout, LayoutVerdict
from fengine.eval.commands.replay import Case, replay
from fengine.eval.commands.rerun import base_of
from fengine.eval.runs import manifest, provenance
from fengine.eval.runs.compare import row_lines
from fengine.eval.runs.config import EVAL, EvalConfig
from fengine.eval.runs.folder import check_writable, write_file
from fengine.eval.runs.manifest import now
from fengine.eval.runs.records import Records, runs_of, timings
from fengine.eval.runs.run import render_of
from fengine.eval.tasks.kinds import open_task

USAGE = f"""
Usage: fengine verify RUN [verify.fraction=1] [verify.seed=0] [verify.layouts=[NAME,...]] [model.path=DIR] [out=FILE]

Computes the rows of a run again under other schedules and compares tokens and every bit of every logprob with what the
run recorded. The verdict and its counts are shown and written to verify.json in the run's folder, of which nothing else
is touched; of a sweep, every run is verified. Layouts:

{chr(10).join(f"  {name:<10} {kind.what}" for name, kind in LAYOUTS.items())}

  verify.fraction=F   a part of the rows, drawn by verify.seed
  verify.layouts=L    only these layouts
  model.path=DIR      where the run's checkpoint is now (its files are compared by SHA-256); model.tokenizer_path,
                      lora.paths, speculation.draft, task.data (whose images), task.examples and model.device likewise;
                      parallel.tp_size=1: in one process what ran in several
  out=FILE            another place for verify.json

Re-scoring reads prompt and answer as one prompt, whose logprobs are at temperature 1: answers drawn at temperature 0 or
1 are compared token by token; of others the second half is drawn again behind the first half, read; answers drawn under
penalties, grammars or min_new_tokens are left out and counted. Layouts from "warm" on run without torch.compile.

Exit codes:  0 identical   1 it differs, or could not be computed   2 usage, or another checkpoint   130 interrupted
"""
OPTIONS = {
    "verify.fraction": command.number(0, 1, above=True),
    "verify.seed": command.whole(0, 2**63 - 1),
    "verify.layouts": command.names(list(LAYOUTS)),
    "out": Path,
}
# Where things are, and in how many processes; not what they are.
CHANGES = ("model.path", "model.tokenizer_path", "lora.paths", "speculation.draft", "task.data", "task.examples",
           "model.device", "parallel.tp_size", "parallel.dp_size")  # fmt: skip
LEGITIMATE = "not the run's, so that bits may differ legitimately"


def work(argv: Sequence[str]) -> int:
    """The exit code. Errors: FengineError."""
    words = command.parse(argv, OPTIONS, overrides=True)
    if len(words.places) != 1:
        raise ConfigError(f"fengine verify takes one run folder, got {len(words.places)}; see fengine verify --help")
    strange = [word for word in words.overrides if word.partition("=")[0] not in CHANGES]
    if strange:
        raise ConfigError(command.unknown(strange[0], [*OPTIONS, *CHANGES]))
    folders = runs_of(Path(words.places[0]))
    if len(folders) > 1 and "out" in words.options:
        raise ConfigError("out=FILE is for one run; those of a sweep have their verify.json in their own folders")
    with EngineCache() as engines:

        def verify(folder: Path) -> int:
            with Records(folder) as records:
                return Verification(records, words, engines).run()

        return command.each(folders, verify, engines.close)


class Verification:
    """One run under verification. Modified by `run`."""

    def __init__(self, records: Records, words: command.Arguments, engines: EngineCache) -> None:
        """Errors: FengineError for what cannot be verified, before an engine is opened."""
        options = words.options
        self.records, self.engines = records, engines
        self.out: Path = options.get("out", records.folder / "verify.json")
        check_writable(self.out)
        self.config: EvalConfig = restore(records.identity["config"], words.overrides, EVAL)
        self.names = [name for name in LAYOUTS if name in options.get("verify.layouts", LAYOUTS)]
        self.fraction, self.seed = options.get("verify.fraction", 1.0), options.get("verify.seed", 0)
        self.numbers = drawn(len(records), self.fraction, self.seed)
        own = any(word.startswith("task.") for word in words.overrides)
        self.base = Path.cwd() if own else base_of(records.manifest.get("origin") or {}, ())
        self.in_force: dict[str, Any] = records.manifest.get("in_force") or {}
        self.notes = [*records.notes, *self._other_code()]
        self.verdicts: list[LayoutVerdict] = []
        self.case: Case | None = None
        self.longest = self.prompt = 0  # tokens, once a layout has measured them

    def run(self) -> int:
        """Every layout; shows and writes the verdict. Returns the exit code. Errors: FengineError."""
        part = "" if len(self.numbers) == len(self.records) else f" of {len(self.records):,}, drawn by verify.seed"
        say(f"{place(str(self.records.folder))}: {count(len(self.numbers), 'row')}{part}")
        say(*(f"note: {note}" for note in self.notes))
        started, console = now(), Console(highlight=False, markup=False, emoji=False)
        tell(console, [layouts.HEAD], "bold")
        for name in self.names:
            with console.status(Text(self._progress(name), style="dim")) if console.is_terminal else nullcontext():
                verdict = self._layout(name)
            self.verdicts.append(verdict)
            first, ink = verdict.found.first, {"✓": "green", "✗": "red"}.get(verdict.lines[0][0], "yellow")
            tell(console, verdict.lines, ink, "dim")
            if first is not None:
                say(*row_lines(first, ("recorded", "computed")))
        verdict, good = layouts.whole(self.verdicts, self.records.damaged)
        write_file(self.out, self.as_dict(verdict, good, started))
        say(f"verdict: {verdict}; in {place(str(self.out))}")
        return OK if good else DIFFERS

    def _progress(self, name: str) -> str:
        """What runs, and how long the rest takes at the pace so far. Pure."""
        done, seconds = len(self.verdicts), sum(one.seconds for one in self.verdicts)
        left = f", about {clock(seconds / done * (len(self.names) - done))} left" if done else ""
        return f"{name}: {done + 1} of {len(self.names)} layouts{left}"

    def as_dict(self, verdict: str, good: bool, started: str) -> dict[str, Any]:
        """The content of verify.json."""
        return {
            "fengine_verify": 1,
            "run_id": (self.records.manifest.get("origin") or {}).get("run_id"),
            "outputs_sha256": self.records.result.get("outputs_sha256"),
            "verdict": verdict,
            "identical": good,
            "sample": {
                "fraction": self.fraction, "seed": self.seed, "rows": len(self.numbers), "of": len(self.records)
            },
            "notes": self.notes,
            "layouts": [one.as_dict() for one in self.verdicts],
            "environment": {"versions": manifest.versions(), "git": provenance.checkout(), "cpu": manifest.cpu_name()},
            "started": started,
            "ended": now(),
        }  # fmt: skip

    def _layout(self, name: str) -> LayoutVerdict:
        """Errors: EngineDeadError, EngineClosedError, StorageError; whatever opening the run's own engine raises."""
        known = self.records.result.get("prompt_tokens")
        prompt = self.prompt or (known if type(known) is int else 0) // max(1, len(self.records))
        sizes = layouts.sizes_of(self.in_force, len(self.numbers), prompt, self.longest or self._longest_recorded())
        one, begun = layouts.layout(name, self.config.engine, sizes), time.perf_counter()
        found, counted = Found(), dict.fromkeys(layouts.COUNTERS, 0)
        try:
            engine = self.engines.get(one.config)
            found, counted = self._compute(one, engine, self.case or self._meet(engine))
        except (EngineDeadError, EngineClosedError, ResumeMismatchError):
            raise
        except FengineError as error:
            if one.config == self.config.engine:
                raise
            found.failed, found.error = len(self.numbers), f"{type(error).__name__}: {error}"
        return layouts.judged(one, found, counted, time.perf_counter() - begun)

    def _longest_recorded(self) -> int:
        """Tokens of the longest row, as far as timings.jsonl tells; a row may be several requests."""
        most = 0
        for one in timings(self.records.folder):
            counts: list[Any] = [one.get(key) for key in ("prompt_tokens", "completion_tokens")]
            if all(type(value) is int and 0 <= value < 1 << 31 for value in counts):
                most = max(most, sum(counts))
        return most or 512

    def _compute(self, one: Layout, engine: Any, case: Case) -> tuple[Found, dict[str, int]]:
        """What the last pass of a layout found, and what its engine counted."""
        task = open_task(self.config.task, self.base, render_of(engine, self.config.chat))
        before, found = engine.stats(), Found()
        for number in range(one.passes):
            order = self.numbers * one.copies
            random.Random(f"{one.name} {self.seed} {number}").shuffle(order)
            found = replay(case, order, engine, task, one.rescore)
        if found.requests:
            self.longest, self.prompt = max(self.longest, found.longest), found.prompt_tokens // found.requests
        after = engine.stats()
        return found, {name: after.get(name, 0) - before.get(name, 0) for name in layouts.COUNTERS}

    # -- what the run depended on --------------------------------------------------------------------------------------

    def _other_code(self) -> list[str]:
        """Versions and code that are not the run's. Errors: ResumeMismatchError for another checkpoint."""
        old, notes = self.records.identity, []
        known, new = old.get("model") or {}, provenance.model_digests(self.config.engine.model)
        for key, part in (("model.path", "files"), ("model.tokenizer_path", "tokenizer_files")):
            self._refuse(key, manifest.differences(known.get(part), new.get(part), part), part in known)
        lines = manifest.differences(
            old.get("adapters"), provenance.adapter_digests(self.config.engine.lora), "adapters"
        )
        self._refuse("lora.paths", [line for line in lines if ".path: " not in line], "adapters" in old)
        if self.config.task.shots:
            shown = provenance.canonical(getattr(open_task(self.config.task, self.base), "shown", ""))
            self._refuse("task.examples", manifest.differences(old.get("examples_sha256"), shown, "SHA-256"))
        for name, value in (("versions", manifest.versions()), ("code_sha256", manifest.code_digest())):
            notes += [f"{line}: {LEGITIMATE}" for line in manifest.differences(old.get(name), value, name)]
        if self.config.engine.numerics.value != "exact":
            notes.append(f"numerics={self.config.engine.numerics.value} makes no promise: bits may differ legitimately")
        return notes

    def _refuse(self, key: str, lines: list[str], known: bool = True) -> None:
        if lines and known:
            raise ResumeMismatchError(
                f"{key}={flat(self.config)[key]} is not that of {self.records.folder} (recorded → now):\n"
                f"{manifest.listed(lines)}\nput it back, or name the place where it is now with {key}=…"
            )

    def _meet(self, engine: Any) -> Case:
        """The first engine: which machine it runs on, how long its inputs may be. Errors: ResumeMismatchError."""
        files = self.in_force.get("model_files")
        if files is not None:
            found = provenance.file_digests(model_directory(self.config.engine.model))
            self._refuse("model.path", manifest.differences(files, found))
        here = manifest.in_force(engine)
        lines = manifest.differences(self.in_force.get("hardware"), here["hardware"], "hardware")
        for line in lines if self.in_force else ():
            self.notes.append(f"{line}: {LEGITIMATE}")
            say(f"note: {self.notes[-1]}")
        known = self.in_force.get("max_input")
        self.case = Case(self.records, self.config, known if type(known) is int else here["max_input"])
        return self.case


def tell(console: Console, lines: Sequence[str], first: str, rest: str = "") -> None:
    """Lines in these styles; where they are piped they are not wrapped."""
    for number, line in enumerate(lines):
        text = Text(clean(line), style=rest if number else first)
        console.print(text, soft_wrap=not console.is_terminal)


def drawn(count: int, fraction: float, seed: int) -> list[int]:
    """Which rows are verified, in order: a part of them, at least one, without replacement. Pure."""
    if fraction >= 1:
        return list(range(count))
    part = min(count, max(1, math.ceil(fraction * count)))
    return sorted(random.Random(f"verify {seed}").sample(range(count), part))
