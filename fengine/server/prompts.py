"""Fields that hold prompts, and how these become ids: special tokens, truncation. No torch, and no tokenizers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fengine.server.errors import invalid, missing
from fengine.server.fields import Fields, flag, one_of, whole

TRUNCATION: Fields = {
    "truncate_prompt_tokens": whole("Most tokens of the prompt; -1: as many as the context takes.", -1, 2**31 - 1),
    "truncation_side": one_of("The side that is cut off.", "left", "right", default="left"),
}
ADD_SPECIAL: Fields = {"add_special_tokens": flag("The tokenizer adds its special tokens to texts.", True)}
MAX_TEXTS = 65536  # prompts of one body


def texts_or_ids(body: Mapping[str, Any], name: str) -> tuple[str, Any, int]:
    """What a field that holds prompts holds: ("text" or "input_ids", its value, how many), a list of one as such.

    Texts, or token ids that the engine checks. Errors: ApiError (empty, mixed, or neither).
    """
    value = body.get(name)
    if value is None:
        raise missing(name)
    if isinstance(value, str):
        return "text", value, 1
    if not isinstance(value, list) or not value:
        raise invalid(name, f"{name} must be a string, a list of strings, or token ids; got {value!r:.80}.")
    kinds = {type(part) for part in value}
    if kinds == {int}:
        return "input_ids", value, 1
    if kinds not in ({str}, {list}):
        raise invalid(name, f"{name} must hold strings only, token ids only, or lists of token ids only.")
    if len(value) > MAX_TEXTS:
        raise invalid(name, f"{name} may hold at most {MAX_TEXTS} prompts, got {len(value)}.")
    for i, part in enumerate(value):
        if isinstance(part, list) and {type(token) for token in part} != {int}:
            raise invalid(name, f"{name}[{i}] must be a list of token ids that is not empty, got {part!r:.80}.")
    return ("text" if kinds == {str} else "input_ids"), value, len(value)


@dataclass(frozen=True, slots=True)
class Truncation:
    """At most `tokens` of a prompt (-1: as many as fit), cut on a `side`."""

    tokens: int
    side: str

    def of(self, ids: list[int], context: int) -> list[int]:
        """Pure. Errors: ApiError."""
        if self.tokens > context:
            raise invalid("truncate_prompt_tokens", f"truncate_prompt_tokens value is greater than max_model_len "
                          f"({context}). Please, select a smaller truncation size.")  # fmt: skip
        most = context - 1 if self.tokens == -1 else self.tokens
        return ids[:most] if self.side == "right" else ids[-most:]


def truncation_of(given: Mapping[str, Any]) -> Truncation | None:
    """Of the fields of TRUNCATION, taken. Pure. Errors: ApiError."""
    most = given["truncate_prompt_tokens"]
    if most == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, got 0.")
    return None if most is None else Truncation(most, given["truncation_side"])


def prompt_ids(
    tokenizer: Any, kind: str, prompts: Any, add_special: bool, cut: Truncation | None, context: int
) -> list[list[int]]:
    """The ids of each of the prompts that `texts_or_ids` read. Errors: InvalidRequestError and its kinds; ApiError."""
    if kind == "text":
        rows = tokenizer.encode_batch(
            [prompts] if isinstance(prompts, str) else prompts, add_special_tokens=add_special
        )
    else:
        rows = prompts if isinstance(prompts[0], list) else [prompts]
    return [cut.of(row, context) for row in rows] if cut else rows
