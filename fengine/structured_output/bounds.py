"""Bounds of numbers in a JSON schema: what the matcher reads in another way than a validator, rewritten or refused.

- Between a whole number and a fraction behind it, 9 < x <= 9.99, it lets the 9 through: such a 9 becomes the next
  number of 15 digits.
- It reads numbers as floats, and where integers are asked for as integers of 64 bits: a bound that these cannot hold is
  refused, if they would let more through, and so is a const that would be another one. No torch."""

import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from fengine.errors import GrammarError
from fengine.structured_output import keywords

LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LEAST, MOST = -(2**63), 2**63 - 1
UNHELD = "too large, or has too many digits, to be held exactly"


def fractions(objects: Iterable[dict[str, Any]]) -> set[float]:
    """The bounds that are no whole numbers: wherever they stand, they may meet any other bound. Pure."""
    values = [node.get(key) for node in objects for key in LOWER + UPPER]
    return {value for value in values if isinstance(value, float) and not value.is_integer()}


def hold(node: dict[str, Any], among: set[float], at: str) -> None:
    """`among`: the document's `fractions`. Modifies: node. Errors: GrammarError."""
    for key in LOWER + UPPER:
        if key in node and not _is_held(node[key], key in LOWER, node.get("type")):
            raise GrammarError(f"json_schema: {key} at {at} is {UNHELD}")
    for key in ("const", "enum"):  # to the matcher, a number is a range of one
        if key in node and not all(map(_is_exact, filter(keywords.is_number, keywords.parts(node[key])))):
            raise GrammarError(f"json_schema: a number of {key} at {at} is {UNHELD}")
    for sign, (bound, key), tighter in ((1, LOWER, max), (-1, UPPER, min)):
        value = node.get(key)
        if value is None or sign * value < 0 or value != int(value):
            continue
        whole = sign * int(value)
        if any(whole < sign * fraction < whole + 1 for fraction in among):
            if whole >= 10**13:
                raise GrammarError(f"json_schema: an exclusive bound at {at} is {UNHELD}")
            del node[key]  # the next number of 15 digits, which every reader of decimals reads alike
            behind = sign * float(f"{whole}.{'0' * (14 - len(str(whole)))}1")
            node[bound] = tighter(node.get(bound, value), behind)


def _is_exact(value: float) -> bool:
    """Whether the matcher, which reads decimals with small errors, reads a number as what it is. Pure."""
    if not abs(value) < MOST:
        return False
    if value == int(value):
        return float(value) == int(value)
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    return int("".join(map(str, digits))) < 2**53 and int(exponent) >= -22


def _is_held(value: float, lower: bool, kind: Any) -> bool:
    """Whether the matcher lets no more through than this bound does. Pure."""
    kinds = {kind} if isinstance(kind, str) else set(kind or ())
    try:
        seen = float(value)
    except OverflowError:
        return False
    if not math.isfinite(seen):
        return False
    whole, either = kinds & {"integer", "number"} == {"integer"}, "integer" in kinds or not kinds
    if lower:
        return (min(seen, MOST) if either else seen) >= value
    seen = max(seen, LEAST) if either else seen
    return (min(seen, MOST) if whole else seen) <= value
