"""Sets of characters as sorted ranges of code points, and how they are written for the matcher. No torch.

Character classes have two readings: `\\d`, `\\w`, `\\s` and `.` mean more in Python (Unicode) than in ASCII, and other
things in JavaScript. What is allowed here is what all readings allow, so whoever checks an output finds it right.
"""

import re
from functools import cache

Ranges = tuple[tuple[int, int], ...]  # inclusive, in order, apart from one another
LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # no text that can be encoded holds them
SURROGATE = "a lone surrogate, which no UTF-8 text can hold"  # in messages
LINE_ENDS = "\n\r\u2028\u2029"  # that `.` leaves out, here or there
_ASCII = {"DIGIT": "0123456789", "SPACE": " \t\n\r\f\v", "WORD": "0123456789_abcdefghijklmnopqrstuvwxyz"}


def of(characters: str) -> Ranges:
    """These characters. Pure."""
    return union(*(((ord(c), ord(c)),) for c in characters))


def union(*sets: Ranges) -> Ranges:
    """Pure."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return tuple(out)


def complement(ranges: Ranges) -> Ranges:
    """All characters but these. Pure."""
    out, start = [], 0
    for low, high in union(ranges, (SURROGATES,)):
        if start < low:
            out.append((start, low - 1))
        start = high + 1
    return (*out, (start, LAST)) if start <= LAST else tuple(out)


def common(a: Ranges, b: Ranges) -> Ranges:
    """What is in both. Pure."""
    return complement(union(complement(a), complement(b)))


def without_surrogates(ranges: Ranges) -> Ranges:
    """Pure."""
    if len(ranges) == 1 and (ranges[0][1] < SURROGATES[0] or ranges[0][0] > SURROGATES[1]):
        return ranges
    return complement(complement(ranges))


def category(name: str, *, most: bool = False) -> Ranges:
    """What DIGIT, SPACE, WORD or NOT_… of them means in every reading; with `most`, what it means in any. Pure."""
    if name.startswith("NOT_"):
        return complement(category(name.removeprefix("NOT_"), most=not most))
    narrow = of(_ASCII[name] + (_ASCII[name].upper() if name == "WORD" else ""))
    return union(narrow, _unicode(f"\\{name[0].lower()}"), of("\ufeff")) if most else narrow


def folded(ranges: Ranges, test: re.Pattern[str]) -> Ranges:
    """What `test` (a pattern for one character, with re.IGNORECASE) matches; without the flag it would match `ranges`.

    Only characters that have cases make a difference. Pure.
    """
    return union(common(ranges, complement(of(_cased()))), of("".join(test.findall(_cased()))))


PLANES = 0x40000  # further up there is no letter, digit or space


@cache
def _cased() -> str:
    return "".join(c for c in map(chr, range(PLANES)) if c.lower() != c or c.upper() != c)


@cache
def _unicode(source: str) -> Ranges:
    """All characters that a class like `\\w` holds in Python, by asking `re`. Pure."""
    everything = "".join(map(chr, range(PLANES)))
    return tuple((ord(run[0][0]), ord(run[0][-1])) for run in re.finditer(f"{source}+", everything))


def written(ranges: Ranges) -> str:
    """A regular expression for one of these characters. Pure."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _escaped(ranges[0][0])
    inside = (_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in ranges)
    return f"[{''.join(inside)}]"


def _escaped(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:x}}}"
