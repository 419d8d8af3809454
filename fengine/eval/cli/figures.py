"""The values that a view renders, and how numbers and texts look. No rich, no torch."""

import os
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
