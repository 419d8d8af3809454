"""What a judge says, read as one of the choices or as a number of the scale. Pure, and for English words about either.

The last verdict counts. What only tells what could be said is none: a list of the choices, the scale and its ends. Nor
is what it denies: "not correct" is no "correct".
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from fengine.eval.tasks.scoring import NUMBER, numbers

_N, _ENDS = NUMBER.pattern, "best|worst|highest|lowest|greatest|perfect|top|max(?:imum)?|min(?:imum)?|excellent|ideal"
_ONE = rf"[*_`]{{0,3}}(?:{_N})[*_`]{{0,3}}"
_DENIED = (
    r"\b(?:not|never|hardly|cannot|\w+n['’]t)(?!\s+(?:only|just|merely)\b)\s+(?:(?:an?|the|be|at|all|\w+ly|really|quite|"
    r"so|say|that|it|is|this|seem|look|count|as|call(?:ed)?)\s+){0,4}?[\"'*]{0,3}"
)
_NUMBERS = re.compile(
    rf"""(?P<of_scale>\bscale\s+(?:of|from)\s*|\bfrom\s+|\bbetween\s+|\brange\s+(?:of|from|is)?\s*)?  # 1 to 10, 1-10
         (?P<low>{_ONE})(?:\s*\([^()]*\))?(?:\s*[-–—~]\s*|\s+to\s+|\s+through\s+|(?(of_scale)\s+and\s+|(?!)))
         (?P<high>{_ONE})(?!\d|\s*[/／⁄]\s*\d)
       | (?P<out_of>[/／⁄]|\bout\s+of\b|\bscale\s+(?:of|from|is)\b|\bpossible\b|\bmax(?:imum)?\b(?:\s+score\b)?
           |满分|満点|(?<=\d)[*_`]{{0,3}}\s+(?:of|von|van|sur|sobre|su|из)\b)
         (?:\s+(?:an?|the|of|possible|maximum|total|is))*[\s*:=_`]*(?P<limit>{_N})
       | (?P<points>{_N})(?=[-\s]points?\s+(?:\w+\s+)?scale|-point\b)
       | (?P<end>{_N})(?=\s*(?:[(=:]\s*)?(?:(?:is|being|means|meaning|stands\s+for)\s+)?(?:an?\s+|the\s+)?(?:{_ENDS})\b)
       | \b(?:{_ENDS})\b[\s:=]*(?:(?:is|being)\s+)?(?P<end_behind>{_N})(?!\d|\s*[/／⁄])
       | (?P<number>{_N})""",
    re.IGNORECASE | re.VERBOSE,
)
_SAID = re.compile(  # stands in front of a verdict, also where this is an end of the scale: Rating: 5 (excellent)
    r"(?:\b(?:rat(?:ing|ed?)|scored?|grade|verdict|mark|overall|total)[\s*_`]*(?:[:=]|\bis\b)"
    r"|\b(?:give|gave|deserve|award|earn)(?:s|n|d|ed)?\b)[^\d.;,\n]{0,24}$",
    re.IGNORECASE,
)
_DECIMAL_COMMA = re.compile(r"(?<![\w.,])(\d+),(?!\d{3}(?!\d))(\d+)(?![,.]?\d)")  # 7,5; not 1,000 nor 3,4,5


def pattern(word: str) -> str:
    """What finds a choice: words in any case, single letters as they are."""
    return re.escape(word) if len(word) == 1 else f"(?i:{re.escape(word)})"


@lru_cache(16)
def _choices(choices: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What finds a choice, as a group that has its place in its name, or one that is denied; what lists them."""
    longest_first = sorted(range(len(choices)), key=lambda i: -len(choices[i]))
    named = "|".join(f"(?P<c{i}>{pattern(choices[i])})" for i in longest_first)
    bare = "|".join(pattern(choices[i]) for i in longest_first)
    word, between = rf"(?<!\w)(?:{bare})(?!\w)", r"[\"'*]?\s*(?:[/|]|,?\s+or\s)\s*[\"'*]?"
    found = rf"(?<!\w)(?:{named})(?!\w)|(?i:{_DENIED})(?:{bare})(?!\w)"
    return re.compile(found), re.compile(rf"{word}(?:{between}{word})+")


def by_choice(text: str, choices: Sequence[str]) -> int | None:
    """The place of the last choice in the text; None: there is none."""
    found, listed = _choices(tuple(choices))
    told = [match.lastgroup for match in found.finditer(listed.sub(" ", text)) if match.lastgroup is not None]
    return int(told[-1][1:]) if told else None


def by_number(text: str, worst: float, best: float) -> float | None:
    """The last number that is a verdict; None: there is none on this scale. 8/10 and 8 out of 10 are 8 where 10 is the
    scale's greater end, 4/5 is no verdict there; nor is 7-8. 7,5 is 7.5."""
    value: float | None = None
    text = _DECIMAL_COMMA.sub(r"\1.\2", text.replace("−", "-"))
    for match in _NUMBERS.finditer(text):
        part = {name: numbers(told)[0] for name, told in match.groupdict().items() if told and numbers(told)}
        if "low" in part:
            value = value if {part["low"], part["high"]} == {worst, best} else None
        elif "limit" in part:
            ends = (worst, best) if match["out_of"].lower().startswith("scale") else (max(worst, best),)
            value = value if part["limit"] in ends else None
        elif "number" in part:
            value = part["number"]
        elif value is None or _SAID.search(text[max(match.start() - 48, 0) : match.start()]):
            value = next(iter(part.values()))
    return value if value is not None and min(worst, best) <= value <= max(worst, best) else None
