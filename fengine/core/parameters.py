"""`Parameter`: how one sampling parameter is declared and validated. No torch.

`core/sampling_params.py` declares each parameter once, beside its field; `PARAMETERS` there is the table. HTTP fields,
the reader of OpenAI bodies, harness mappings, the Hydra schema and the documentation derive from it.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from fengine.core.parameter_kinds import CHECKS
from fengine.core.scalars import flag, integer, number, told
from fengine.errors import InvalidRequestError

SCALARS = {"number": number, "integer": integer, "flag": flag}


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers low .. high; with `low_open` without low. `also` is one more, `words` replaces the derived text."""

    low: float
    high: float = math.inf
    low_open: bool = False
    also: int | None = None
    words: str | None = None

    def __contains__(self, value: float) -> bool:
        inside = self.low < value if self.low_open else self.low <= value
        return (inside and value <= self.high and not math.isinf(value)) or value == self.also

    def __str__(self) -> str:
        if self.words is not None:
            return self.words
        if self.high == math.inf:
            return f"at least {self.low}"
        return f"in {'(' if self.low_open else '['}{self.low}, {self.high}]"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row of the table.

    `kind` names its check in SCALARS or CHECKS. `default` is written as a caller writes it. `stage` is the part of a
    request that heeds it. `openai` is the field of OpenAI's body, or vLLM's; `null`: None is a value of its own.
    """

    name: str
    kind: str
    default: Any
    stage: str
    doc: str
    range: Range | None = None
    openai: str | None = None
    null: bool = False

    def checked(self, value: Any, vocab_size: int | None = None) -> Any:
        """The value in its normal form, a copy. Errors: InvalidRequestError and its kinds."""
        if value is None and self.null:
            return None
        if self.kind not in SCALARS:
            return CHECKS[self.kind](self.name, value, vocab_size)
        found = SCALARS[self.kind](self.name, value)
        if self.range is not None and found not in self.range:
            raise InvalidRequestError(f"{self.name} must be {self.range}, got {told(found)}.")
        return found


def declare(
    default: Any, kind: str, stage: str, doc: str, range: Range | None = None, *, openai: str | None = None,
    null: bool = False, written: Any = None,
) -> Any:  # fmt: skip
    """A field of `SamplingParams` with its row of the table. `written`: the default in a caller's words."""
    row = Parameter("", kind, default if written is None else written, stage, doc, range, openai, null)
    return field(default=default, metadata={"parameter": row})
