"""What a person sees of a run: a calm live view in a terminal, plain lines elsewhere. Rich stays in this file. Views
only render: they get `Progress`, `Shown` and texts, and hold nothing but the console."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fengine.eval.cli.lines import clean, say

STREAMED_ROWS = 6  # rows whose text is shown while it grows
PLAIN_SECONDS = 5.0  # between two plain progress lines


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
    """A moment of a job. Rates are tokens per second over the last moments; `remaining` seconds are an estimate."""

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
    remaining: float | None = None
    score: str = ""  # of the rows so far, with its name

    @property
    def rows(self) -> str:
        return f"{self.done:,}" + ("" if self.total is None else f"/{self.total:,}") + " rows"

    @property
    def time(self) -> str:
        return clock(self.seconds) + ("" if self.remaining is None else f", {clock(self.remaining)} left")


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


class QuietView:
    """Says nothing but what is wrong; errors are told by the command. The base of the others."""

    streams = False  # does the view show text while it grows?

    def headline(self, text: str) -> None: ...

    @contextmanager
    def opening(self, text: str) -> Iterator[None]:
        yield

    @contextmanager
    def job(self) -> Iterator[None]:
        yield

    def progress(self, progress: Progress) -> None: ...
    def row(self, row: Shown) -> None: ...
    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        """Something is not as it should be, and the run goes on."""
        say(f"fengine: {text}", stream=sys.stderr)

    def figures(self, lines: Sequence[tuple[str, str]]) -> None: ...


@dataclass
class PlainView(QuietView):
    """Lines without colour or cursor movement: results on `out`, progress on `err`."""

    out: Any = field(default_factory=lambda: sys.stdout)
    err: Any = field(default_factory=lambda: sys.stderr)
    shown_at: float = field(default_factory=time.perf_counter)

    def note(self, text: str) -> None:
        say(text, stream=self.err)

    headline = warn = note

    @contextmanager
    def opening(self, text: str) -> Iterator[None]:
        self.note(f"{text} ...")
        yield

    @contextmanager
    def job(self) -> Iterator[None]:
        self.shown_at = time.perf_counter()
        yield

    def progress(self, progress: Progress) -> None:
        if (now := time.perf_counter()) - self.shown_at < PLAIN_SECONDS:
            return
        self.shown_at, p = now, progress
        failed = (f", {p.failed:,} failed" if p.failed else "") + (f", {p.score}" if p.score else "")
        self.note(
            f"[{p.time}] {p.rows}{failed}, running {p.running:,}, waiting {p.waiting:,}, "
            f"in {p.in_rate:,.0f} tok/s, out {p.out_rate:,.0f} tok/s, pages {p.pages_used:,}/{p.pages_total:,}"
        )

    def row(self, row: Shown) -> None:
        body = row.text if row.error is None else f"error: {row.error}"
        head = f"--- {row.number}  {row.note}".rstrip()
        say(head, f"prompt: {row.prompt}", f"output: {body}", "", stream=self.out)

    def figures(self, lines: Sequence[tuple[str, str]]) -> None:
        width = max([13, *(len(label) + 2 for label, _ in lines)])
        say(*(f"{label + ':':<{width}}{value}" for label, value in lines), stream=self.out)


class LiveView(QuietView):
    """A terminal: finished rows scroll by in input order, below them the rows that grow and one status block."""

    streams = True

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live: Live | None = None

    def headline(self, text: str) -> None:
        self.console.print(Text(f"\n{clean(text)}\n", style="bold cyan"))

    @contextmanager
    def opening(self, text: str) -> Iterator[None]:
        with self.console.status(Text(clean(text), style="dim"), spinner="dots", spinner_style="cyan"):
            yield

    @contextmanager
    def job(self) -> Iterator[None]:
        with Live(console=self.console, auto_refresh=False, transient=True) as self.live:
            try:
                yield
            finally:
                self.live.update(Text(), refresh=True)
                self.live = None

    def progress(self, progress: Progress) -> None:
        if self.live is not None:
            self.live.update(live_block(progress, self.console.width), refresh=True)

    def row(self, row: Shown) -> None:
        self.console.print(row_block(row))

    def note(self, text: str) -> None:
        self.console.print(Text(f"{clean(text)}\n", style="dim"))

    warn = note

    def figures(self, lines: Sequence[tuple[str, str]]) -> None:
        table = grid({"style": "dim", "no_wrap": True}, {"overflow": "fold"}, expand=False, padding=2)
        for label, value in lines:
            bad = label == "rows" and ("failed" in value or ": " in value)
            table.add_row(label, Text(clean(value), style="red" if bad else "bold" if label == "output" else ""))
        self.console.print(table)


def grid(*columns: dict[str, Any], expand: bool = True, padding: int = 1) -> Table:
    table = Table.grid(expand=expand, padding=(0, padding))
    for column in columns:
        table.add_column(**column)
    return table


NUMBER: dict[str, Any] = {"width": 4, "justify": "right", "style": "dim"}


def row_block(row: Shown) -> RenderableType:
    """A finished row: its number, the prompt on one line with its figures, and below it the whole completion. Pure."""
    prompt = {"ratio": 1, "no_wrap": True, "overflow": "ellipsis", "style": "bold"}
    head = grid(NUMBER, prompt, {"no_wrap": True, "justify": "right", "style": "dim"})
    head.add_row(str(row.number), Text(one_line(row.prompt)), row.note)
    body = Text(clean(row.text).strip() or "(nothing)", style="" if row.text.strip() else "dim")
    if row.error is not None:
        body = Text(clean(row.error), style="red")
    return Group(head, Padding(body, (0, 0, 1, 5)))


def live_block(progress: Progress, width: int) -> RenderableType:
    """The rows that grow, then the bar and the figures. Its height depends on the job's size only: no jumping. Pure."""
    p = progress
    rows = STREAMED_ROWS if p.total is None else min(STREAMED_ROWS, p.total)
    third = max(12, width // 3)
    prompt = {"width": third, "no_wrap": True, "overflow": "ellipsis", "style": "dim"}
    growing = grid(NUMBER, prompt, {"ratio": 1, "no_wrap": True, "overflow": "crop"})
    room = width - 4 - third - 3
    for row in p.growing[:rows]:
        growing.add_row(str(row.number), Text(one_line(row.prompt)), Text(tail(one_line(row.text), room)))
    for _ in range(rows - len(p.growing)):
        growing.add_row("", "", "")
    return Group(growing, Text(), _bar(p), _figures(p))


def _bar(p: Progress) -> RenderableType:
    bar = grid({"ratio": 1}, *[{"no_wrap": True}] * 4)
    failed = Text(f"{p.failed:,} failed", style="red") if p.failed else Text()
    line = ProgressBar(total=p.total or None, completed=p.done, pulse=p.total is None, complete_style="cyan")
    rows = p.rows.rjust(2 * len(f"{p.total or 0:,}") + len("/ rows"))
    bar.add_row(Padding(line, (0, 0, 0, 5)), rows, failed, p.score, Text(p.time, style="dim"))
    return bar


def _figures(p: Progress) -> RenderableType:
    """Fixed widths, so that the figures change and nothing moves."""
    text = Text("     ")
    for value, unit in (
        (f"{p.running:>3,}", " running "),
        (f"{p.waiting:>3,}", " waiting "),
        (f"{p.in_rate:>7,.0f}", " in "),
        (f"{p.out_rate:>7,.0f}", " out tok/s "),
    ):
        text.append(value, "bold").append(unit, "dim")
    used = p.pages_used / p.pages_total if p.pages_total else 0.0
    text.append(f"  {100 * used:>3.0f}%", "bold").append(f" of {p.pages_total:,} pages", "dim")
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def choose(kind: Enum) -> QuietView:
    """The view for this process's standard output; `kind` is one of `config.View`."""
    if kind.value == "quiet":
        return QuietView()
    console = Console(highlight=False, markup=False, emoji=False)
    terminal = console.is_terminal and not console.is_dumb_terminal
    live = kind.value == "live" or kind.value == "auto" and terminal
    return LiveView(console) if live else PlainView()
