"""Where a thinking model's answer begins: told from its chat template and from the end of its prompt. No torch."""

from collections.abc import Sequence
from typing import Any

from fengine.errors import FengineError
from fengine.server.output_parser import OutputParser
from fengine.server.tool_calls import Format, format_of

OPENED = 8  # tokens at a prompt's end in which <think> is looked for


def is_opened(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether a prompt ends in an open thought. Pure."""
    return tokenizer.decode(list(ids[-OPENED:]), False).rstrip().endswith("<think>")


def shows_special(tokenizer: Any) -> bool:
    """Whether thoughts are told by special tokens, which a text must keep then (`skip_special_tokens`). Pure."""
    return _channels(_source(tokenizer)) is not None


def thinks(tokenizer: Any) -> bool:
    """Whether the chat template knows thoughts. Pure."""
    return "<think>" in (source := _source(tokenizer)) or _channels(source) is not None


def parser_of(tokenizer: Any, ids: Sequence[int]) -> OutputParser:
    """What tells the thoughts of the answer to a chat, the ids of which are given, from the rest. Pure."""
    source = _source(tokenizer)
    if (form := _channels(source)) is not None:
        return OutputParser(form)
    marked = "<think>" in source
    return OutputParser(None, thinks=marked, opened=marked and is_opened(tokenizer, ids))


def _source(tokenizer: Any) -> str:
    """The chat template; "" of a model without one, which has no thoughts of its own. Pure."""
    try:
        return tokenizer.template_of(False)[0]
    except FengineError:
        return ""


def _channels(source: str) -> Format | None:
    form = format_of(source)
    return form if form is not None and form.name == "harmony" else None
