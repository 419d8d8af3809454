"""Ids and words that a body bars from being drawn, as a logit processor of the server's own. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fengine.core.sampling_params import GRAMMARS
from fengine.errors import InvalidRequestError
from fengine.server.errors import NO_FORMAT
from fengine.server.fields import GRAMMAR_FIELDS
from fengine.server.template_facts import ThoughtLimit


@dataclass(frozen=True, slots=True, eq=False)
class DrawLimits:
    """A logit processor: draws no id but the `allowed` ones (None: any), and none that ends one of the `barred` lists
    of ids, whose others have been drawn just before; the end of a `thought` where its limit is reached. `names`: what a
    body calls these, and what else in it bars tokens."""

    allowed: list[int] | None
    barred: Sequence[list[int]]
    thought: ThoughtLimit | None = None
    names: Sequence[str] = ()

    def __call__(self, logits: Any, params: Sequence[Mapping[str, Any]]) -> Any:
        """`logits` [1, V], which it writes to."""
        drawn = params[0]["__req__"].output_ids
        if self.thought is not None and self.thought.reached(drawn):
            logits.fill_(-math.inf)
            logits[:, self.thought.end] = 0.0
            return logits
        if self.allowed is not None:
            kept = logits[:, self.allowed].clone()
            logits.fill_(-math.inf)
            logits[:, self.allowed] = kept
        for ids in self.barred:
            if drawn[len(drawn) - len(ids) + 1 :] == ids[:-1]:
                logits[:, ids[-1]] = -math.inf
        return logits

    def nothing_left(self) -> InvalidRequestError:
        """Where, with the rest of the body, they leave no token to draw. Pure."""
        told = f"{' and '.join(self.names)} leave no token that may be drawn, taken together"
        return InvalidRequestError(f"{told}; allow more tokens, or leave one of them out.")


def also_barring(body: Mapping[str, Any], sampling: Mapping[str, Any]) -> list[str]:
    """The fields of a body that bar tokens by themselves: what its grammar, if `sampling` has one, is from, and others.
    Pure."""
    words = (*GRAMMARS, *GRAMMAR_FIELDS, "tool_choice", "function_call", "tools")
    asked = [name for name in words if body.get(name) not in (None, "auto", "none", NO_FORMAT)]
    grammar = asked[:1] if any(name in sampling for name in GRAMMARS) else []
    return grammar + [name for name in ("bad_words", "logit_bias", "min_tokens") if body.get(name)]
