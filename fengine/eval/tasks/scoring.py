"""What an answer scores against its reference: pure functions of plain values. No torch, no I/O. acc, acc_norm, word
and byte perplexity and bits per byte are defined as in EleutherAI's lm-evaluation-harness 0.4, so that figures
compare."""

import math
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from string import punctuation
from typing import Any

import regex

from fengine.core.json_text import parse_json
from fengine.errors import InputFileError, InvalidRequestError
from fengine.eval.tasks.task import Answer

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
# Scores that say right or wrong, the first that is there.
PRIMARY = (*(f"{match}_match" for match in "exact prefix contains number regex json".split()), "acc", "judge")
TOLD = ("found", "judged")  # whether there was something to score: neither right nor wrong
NORMAL_FORMS: dict[str, Callable[[str], str]] = {
    "strip": str.strip,  # no white space around it
    "blanks": lambda text: " ".join(text.split()),  # any run of white space is one blank; none around
    "case": str.casefold,
    "punctuation": lambda text: "".join(c for c in text if unicodedata.category(c)[0] != "P" and c not in punctuation),
    "articles": lambda text: re.sub(r"\b(?:a|an|the)\b", " ", text),  # English; use "case" before, "blanks" after
    "nfkc": lambda text: unicodedata.normalize("NFKC", text),
}


def primary(scores: dict[str, Any]) -> str | None:
    """The score that says whether a row is right. Pure."""
    known = [name for name in PRIMARY if isinstance(scores.get(name), (bool, int, float))]
    others = (name for name, value in scores.items() if isinstance(value, bool) and name not in TOLD)
    return next(iter([*known, *others]), None)


def normal(text: str, forms: Iterable[str]) -> str:
    """`text` after each of `forms` (names in NORMAL_FORMS), in their order. Pure."""
    for name in forms:
        text = NORMAL_FORMS[name](text)
    return text


# Whether an answer in normal form is right by a reference, which is in normal form, too, unless it is AS_WRITTEN.
COMPARISONS: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda found, reference: found == reference,
    "prefix": lambda found, start: found.startswith(start) and not found[len(start) :][:1].isalnum(),  # no word goes on
    "contains": lambda found, reference: reference in found,
    "number": lambda found, reference: numbers(found)[-1:] == numbers(reference)[-1:] != [],  # 1,000 is 1000.0
    "regex": lambda found, pattern: Extractor(pattern).find(found) is not None,
}
AS_WRITTEN = ("number", "regex")


def matches(match: str, text: str, references: Iterable[str], forms: Sequence[str] = ("strip",)) -> bool:
    """Whether `text` is right by one of the references, by this one of COMPARISONS. Pure. Errors: as `Extractor`."""
    found, plain = normal(text, forms), () if match in AS_WRITTEN else forms
    return any(COMPARISONS[match](found, normal(reference, plain)) for reference in references)


def numbers(text: str) -> list[float]:
    """The numbers of a text, thousands written with commas or not, with a hyphen or a minus sign. Pure."""
    return [float(match.replace(",", "")) for match in NUMBER.findall(text.replace("−", "-"))]


def token_f1(text: str, references: Iterable[str], forms: Sequence[str] = ("strip",)) -> float:
    """The greatest F1 of words in common with a reference, both in normal form, as SQuAD has it. Pure."""
    found = Counter(normal(text, forms).split())

    def score(reference: str) -> float:
        wanted = Counter(normal(reference, forms).split())
        same, sizes = (found & wanted).total(), found.total() + wanted.total()
        return float(found == wanted) if not sizes else 2 * same / sizes

    return max(map(score, references))


MAX_PATTERN_BYTES = 1024
MAX_SECONDS = 2.0  # of one answer, over all its matches
_FUZZY = re.compile(r"(?<!\\)\{(\s*\d+\s*<=?)?\s*[deis]\s*(<=?\s*\d+\s*)?[},:+]")


class Extractor:
    """What a regular expression of Python's syntax finds in an answer, in bounded time whatever the pattern. Immutable.
    The library `regex` searches, as `re` would, and gives up after MAX_SECONDS."""

    def __init__(self, pattern: str) -> None:
        """Errors: InvalidRequestError (no regular expression, too long)."""
        size = len(pattern.encode("utf-8", "surrogatepass"))
        if size > MAX_PATTERN_BYTES:
            raise InvalidRequestError(f"the pattern is {size} bytes, over the {MAX_PATTERN_BYTES}-byte limit")
        try:
            re.compile(pattern)  # the syntax is Python's: what only the library knows is no part of it
            self._pattern = regex.compile(pattern, regex.V0)
        except (re.error, regex.error, OverflowError, RecursionError) as error:
            raise InvalidRequestError(f"{pattern!r:.200} is not a regular expression: {error}") from None
        if _FUZZY.search(pattern):
            raise InvalidRequestError(f"{pattern!r:.200} has a brace that could be a quantifier; write it as \\{{")

    def find(self, text: str, *, last: bool = False) -> str | None:
        """The first group that took part in the first (or last, of those that do not overlap) match, or without groups
        the match itself; None where nothing matches. Pure. Errors: InputFileError after MAX_SECONDS."""
        deadline, found = time.monotonic() + MAX_SECONDS, None
        try:
            for match in self._pattern.finditer(text, timeout=MAX_SECONDS, concurrent=True):
                found = match
                if not last:
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError
        except TimeoutError:
            raise InputFileError(
                f"extracting {self._pattern.pattern!r:.200} from an answer of {len(text)} characters took more than "
                f"{MAX_SECONDS:g} seconds; write a pattern with less to try"
            ) from None
        if found is None:
            return None
        return next((group for group in found.groups() if group is not None), found.group())


def pattern_problems(name: str, pattern: str | None) -> list[str]:
    """What is wrong with the regular expression of the setting `name`. Pure."""
    try:
        Extractor(pattern or "")
    except InvalidRequestError as error:
        return [f"{name}: {error}"]
    return []


def json_scores(text: str, reference: Any) -> dict[str, float | bool | str]:
    """`valid_json`; `fields`: the share of the reference's leaves that stand at the same place with the same value;
    `json_match`: the same value altogether, whatever the order of keys. Numbers compare by value, and no boolean is a
    number. Pure."""
    try:
        value = parse_json(text)
    except ValueError:
        return {"valid_json": False, "fields": 0.0, "json_match": False}
    found, wanted = dict(_leaves(value)), dict(_leaves(reference))
    same = sum(path in found and _same(found[path], leaf) for path, leaf in wanted.items())
    return {"valid_json": True, "fields": same / len(wanted), "json_match": same == len(wanted) == len(found)}


def _leaves(value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """(path, leaf) of every leaf; an empty object or list is one. Every value has at least one leaf. Pure."""
    todo: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, dict) and item:
            todo.extend(((*path, key), inner) for key, inner in item.items())
        elif isinstance(item, list) and item:
            todo.extend(((*path, index), inner) for index, inner in enumerate(item))
        else:
            yield path, item


def _same(a: Any, b: Any) -> bool:
    numbers = [isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b)]
    return a == b and (all(numbers) or type(a) is type(b))


def loglikelihood(answer: Answer) -> float:
    """The natural logarithm of the probability of all tokens, correctly rounded. Pure."""
    return math.fsum(answer.logprobs)


def choice_scores(sums: Sequence[float], choices: Sequence[str], right: int) -> dict[str, float | bool | str]:
    """`acc`: the choice of the greatest loglikelihood is `right`; `acc_norm`: likewise, each divided by the choice's
    length in characters; `picked`: the choice of `acc`. Of equals the first is taken. Pure."""
    per_length = [value / len(choice) for value, choice in zip(sums, choices, strict=True)]
    picked = sums.index(max(sums))
    return {"acc": picked == right, "acc_norm": per_length.index(max(per_length)) == right, "picked": choices[picked]}


def count_words(text: str) -> int:
    """Pieces between runs of white space; white space at an end makes an empty piece, which counts. Pure."""
    return len(re.split(r"\s+", text))


def perplexity_scores(total: float, text: str) -> dict[str, float | bool | str]:
    """What `statistics.perplexities` needs of one text: its loglikelihood, words, and bytes in UTF-8. Pure."""
    return {"loglikelihood": total, "words": count_words(text), "bytes": len(text.encode("utf-8", "surrogatepass"))}
