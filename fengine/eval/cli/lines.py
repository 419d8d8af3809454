"""Lines for readers. In a terminal they are as wide as it is: what is longer goes on between words, below where its
text begins. No torch, no Rich."""

import os
import re
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

_GAP = re.compile(r"(?<=\S)  +(?:# )?(?=\S)")  # between a word and what is told of it
# What a terminal would obey is shown, not sent: C0 and C1 controls but tab and newline, and DEL.
_CONTROLS = {i: f"\\x{i:02x}" for i in [*range(32), *range(127, 160)] if i not in (9, 10)}
WORDS = 0.6  # of the width, at most, stands before what is told


def clean(text: str) -> str:
    """Text that a terminal cannot mistake for commands. Pure."""
    return text.translate(_CONTROLS)


def say(*lines: str, stream: Any = None, prose: bool = False) -> None:
    """Lines for readers, folded where a terminal ends; `prose` is filled up there. What a terminal would obey, or an
    encoding lacks, is shown escaped."""
    stream = sys.stdout if stream is None else stream
    text, encoding = "\n".join(map(clean, lines)), getattr(stream, "encoding", None) or "utf-8"
    if (width := width_of(stream)) is not None:
        parts = text.split("\n")
        text = "\n".join(folded(line, width, 0 if prose else 2) for line in (joined(parts, width) if prose else parts))
    text += "\n"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def width_of(stream: Any) -> int | None:
    """Columns of the terminal behind a stream; None if there is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None
    except (AttributeError, OSError, ValueError):
        return None


def folded(line: str, width: int, deeper: int = 2) -> str:
    """One line as one or several, the others `deeper` where it is about no word. A word that is wider than a line stays
    whole. Pure."""
    if len(line) <= width:
        return line
    begins = hang_of(line, width)
    hang = begins if begins > _indent(line) else begins + deeper
    return "\n".join(
        textwrap.wrap(line, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False,
                      expand_tabs=False, replace_whitespace=False)
    )  # fmt: skip


def joined(lines: Iterable[str], width: int) -> list[str]:
    """Lines of prose that was written for a wider terminal: each that is too long with the one that goes on below it.
    Pure."""
    found: list[str] = []
    for line in lines:
        held = found[-1] if found else ""
        begins = hang_of(held, width)
        prose = begins > _indent(held) or not (begins or _GAP.search(held))  # indented words alone are an example
        if len(held) > width and line.strip() and not _GAP.search(line) and prose and _indent(line) == begins:
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
    return found


def hang_of(line: str, width: int) -> int:
    """The column in which a line's text begins, behind the word that it is about. Pure."""
    gap = _GAP.search(line)
    return gap.end() if gap and gap.end() <= WORDS * width else _indent(line)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
