"""The values that a view renders, and how numbers and texts look. No rich, no torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

# What a terminal would obey is shown, not sent: C0 and C1 controls but tab and newline, and DEL.
_CONTROLS = {i: f"\\x{i:02x}" for i in [*range(32), *range(127, 160)] if i not in (9, 10)}


@dataclass(frozen=True)
class Shown:
    """One row for the eye. `error` is None for a row that finished."""

    number: int
    prompt: str
    text: str = ""
    note: str = ""  # tokens and finish
    error: str | None = None


@dataclass(frozen=True)
class Progress:
    """A moment of a job. Rates are tokens per second over the last moments."""

    done: int = 0
    total: int | None = None
    failed: int = 0
    running: int = 0
    waiting: int = 0
    in_rate: float = 0.0
    out_rate: float = 0.0
    pages_used: int = 0
    pages_total: int = 0
    seconds: float = 0.0
    growing: tuple[Shown, ...] = ()


@dataclass(frozen=True)
class Summary:
    """A job's figures. Seconds are wall clock; `first_token` is the median over rows, in seconds."""

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    first_token: float | None = None
    preemptions: int = 0
    steps: int = 0
    compiles: int = 0
    compile_seconds: float = 0.0
    start_seconds: float = 0.0
    reused: bool = False  # the engine was there already
    ended: str = ""  # why the job ended early
    out: str = ""

    @property
    def in_rate(self) -> float:
        return self.prompt_tokens / self.seconds if self.seconds else 0.0

    @property
    def out_rate(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0


def clean(text: str) -> str:
    """Text that a terminal cannot mistake for commands. Pure."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    return " ".join(clean(text).split())


def tail(text: str, room: int) -> str:
    """The end of a text, with an ellipsis where it was cut. Pure."""
    return text if len(text) <= room else "…" + text[len(text) - room + 1 :]


def clock(seconds: float) -> str:
    """0:07, 12:34, 1:02:03. Pure."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def place(path: str) -> str:
    """A path as one would type it here: relative where it lies below the working directory."""
    here = os.path.relpath(path)
    return path if here.startswith("..") else here


def common_place(paths: Sequence[str]) -> str:
    """The directory that holds all of these files, at whatever depth. Pure."""
    return os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else "."


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """(label, figures) pairs, the same for every view. Pure."""
    cut = f"{summary.ended}: " if summary.ended else ""
    cached = f" ({summary.cached_tokens:,} from the prefix cache)"
    engine = f"start {duration(summary.start_seconds)}, of it compile {duration(summary.compile_seconds)}"
    if summary.reused:
        engine = "reused, nothing loaded or compiled" + (f" ({summary.compiles} compiles!)" if summary.compiles else "")
    first = "-" if summary.first_token is None else f"median {duration(summary.first_token)}"
    failed = f", {summary.failed:,} failed" if summary.failed else ""
    return [
        ("requests", f"{cut}{count(summary.rows, 'row')}{failed} in {duration(summary.seconds)}"),
        ("tokens", f"{summary.prompt_tokens:,} in{cached}, {summary.output_tokens:,} out"),
        ("speed", f"{summary.in_rate:,.0f} tok/s in, {summary.out_rate:,.0f} tok/s out"),
        ("first token", first),
        ("engine", f"{engine}; {count(summary.steps, 'step')}, {count(summary.preemptions, 'preemption')}"),
        ("output", place(summary.out)),
    ]
