"""What a model's chat template teaches of its outputs: how calls and thoughts are written. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fengine.errors import FengineError
from fengine.server.errors import unsupported
from fengine.server.output_parser import THINKING, OutputParser, Thought
from fengine.server.tool_calls import Format, format_of

OPENED = 8  # tokens at a prompt's end in which <think> is looked for


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a chat template teaches. `hidden`: calls, or thoughts, are written with special tokens. `thinks`: the words
    around thoughts, if there are any."""

    form: Format | None = None
    hidden: bool = False
    thinks: Thought | None = None

    @property
    def channels(self) -> Format | None:
        """Harmony, where thoughts are a channel."""
        return self.form if self.form is not None and self.form.name == "harmony" else None

    def opened(self, tokenizer: Any, ids: Sequence[int]) -> bool:
        """Whether a prompt ends in an open thought. Pure."""
        said = tokenizer.decode(list(ids[-OPENED:]), False).rstrip() if self.thinks else ""
        return self.thinks is not None and said.endswith(self.thinks.think_start_token)


class ThoughtLimit(NamedTuple):
    """Most tokens of a thought between the ids `begin` and `end`. `opened`: the prompt ends with the first."""

    most: int
    begin: int | None
    end: int
    opened: bool

    def reached(self, drawn: list[int]) -> bool:
        """Whether these ids are such a thought, all of it but its end. Pure."""
        inside = drawn if self.opened else drawn[1:] if drawn[:1] == [self.begin] else None
        return inside is not None and len(inside) == self.most and self.end not in inside


class ThoughtTokens:
    """Counts the tokens of one output up to its </think>, or the thought's own end, which is a token here. `opened`: as
    the parser's. Modifies: itself."""

    def __init__(self, tokenizer: Any, opened: bool, thought: Thought | None = None) -> None:
        self.begin, self.end = map(tokenizer.backend.token_to_id, (thought or Thought())[:2])
        self.opened = opened
        self._open = True if opened else None  # None: not known yet
        self.count: int | None = None if self.end is None else 0

    def feed(self, ids: Sequence[int]) -> None:
        if self._open is None and ids:
            self._open = ids[0] == self.begin
        if self._open and self.count is not None:
            self._open = self.end not in ids
            self.count += len(ids) if self._open else ids.index(self.end) + 1


def thought_limit(most: int | None, thoughts: Sequence[ThoughtTokens]) -> ThoughtLimit | None:
    """Of each of the outputs. Pure. Errors: ApiError where no token ends a thought."""
    if most is None:
        return None
    if not thoughts or thoughts[0].end is None:
        told = "thinking_token_budget: this model's chat template knows no thought that a token ends; leave it out: "
        raise unsupported("thinking_token_budget", f"{told}max_completion_tokens counts all that is drawn.")
    return ThoughtLimit(most, thoughts[0].begin, thoughts[0].end, thoughts[0].opened)


def template_facts(tokenizer: Any, tools: bool, form: Format | None = None) -> TemplateFacts:
    """Of the template that is used with or without tools, but for a `form` that is given. Errors: InvalidRequestError,
    ChatTemplateError."""
    source = tokenizer.template_of(tools)[0]
    form = form or format_of(source)
    ends = {one: one.think_end_token[2:] for one in THINKING.values()}  # for a template may name <think> alone
    thinks = next((one for one, end in ends.items() if end in source), None)
    calls = form is not None and (tools or form.name == "harmony")
    words = {form.begin if form is not None and calls else None, *(thinks or ())[:2]}
    added = tokenizer.backend.get_added_tokens_decoder().values() if words != {None} else ()
    return TemplateFacts(form, any(token.special and token.content in words for token in added), thinks)


def thought_facts(tokenizer: Any) -> TemplateFacts:
    """As `template_facts`; a model without a template has no thoughts of its own. Pure."""
    try:
        return template_facts(tokenizer, False)
    except FengineError:
        return TemplateFacts()


def parser_of(tokenizer: Any, ids: Sequence[int]) -> OutputParser:
    """What tells the thoughts of the answer to a chat, the ids of which are given, from the rest. Pure."""
    facts = thought_facts(tokenizer)
    if facts.channels is not None:
        return OutputParser(facts.channels)
    opened = facts.opened(tokenizer, ids)
    return OutputParser(None, thinks=facts.thinks is not None, opened=opened, thought=facts.thinks)
