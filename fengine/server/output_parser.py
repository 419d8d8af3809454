"""A model's output, piece by piece, to reasoning, content and tool calls. No torch.

A piece adds what the parts of the whole text so far have more than before; what may still change is held back.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fengine.errors import FengineError
from fengine.server.tool_calls import PYTHON_TAG, Format, ToolCall, call_of, format_of, read_bare, read_forced

OPENED = 8  # tokens at a prompt's end in which <think> is looked for
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")  # of a message of harmony
Read = Callable[[], list[ToolCall]]  # one block of calls that is complete


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece adds."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


def _cut(text: str, at: int, markers: Sequence[str], last: bool) -> tuple[str, str, int]:
    """(text from `at` to the first marker, the marker or "", where it ends); before the last piece without what may
    begin one. Pure."""
    if found := re.compile("|".join(map(re.escape, markers))).search(text, at):
        return text[at : found.start()], found[0], found.end()
    piece = text[at:]
    heads = () if last else (n for marker in markers for n in range(1, len(marker)) if piece.endswith(marker[:n]))
    return piece[: len(piece) - max(heads, default=0)], "", len(text)


# -- (reasoning, content, blocks of calls) of a text so far, which only grow with it -----------------------------------


def _plain(text: str, last: bool) -> tuple[str, str, list[Read]]:
    return "", text, []


def _blocks(form: Format, text: str, last: bool) -> tuple[str, str, list[Read]]:
    """Calls between markers, content around them; white space around calls is no content."""
    content, marker, at = _cut(text, 0, (form.begin,), last)
    leads, calls, inside = not content.strip(), list[Read](), bool(marker)
    while marker:
        body, marker, at = _cut(text, at, (form.end or form.begin,), last)
        if not marker and not last:
            break
        calls.append(partial(_read_block, form, body, marker if form.end else ""))
        if marker and form.end:
            more, marker, at = _cut(text, at, (form.begin,), last)
            content += more
    content = content.lstrip() if leads and inside else content
    return "", content if last and not calls else content.rstrip(), calls


def _read_block(form: Format, body: str, end: str) -> list[ToolCall]:
    """The calls of a block; one with all of its text, if any cannot be read. Pure."""
    assert form.read is not None, "a format with markers has a reader"
    found = form.read(body)
    problem = next((call.problem for call in found if call.problem), None)
    return found if problem is None else [ToolCall(found[0].name, {}, f"{form.begin}{body}{end}", problem)]


def _bare(text: str, last: bool) -> tuple[str, str, list[Read]]:
    """A text that is calls and nothing else, or content."""
    head = text.lstrip()
    if head.startswith(("{", PYTHON_TAG)) or not last and PYTHON_TAG.startswith(head):
        calls = read_bare(text) if last else []
        return "", text if last and not calls else "", [lambda: calls] if calls else []
    return "", text, []


def _forced(text: str, last: bool) -> tuple[str, str, list[Read]]:
    """JSON of `forced_schema`; content, if it was cut off in the first call."""
    calls = read_forced(text) if last else []
    if any(call.problem for call in calls):
        calls = []
    return "", text if last and not calls else "", [lambda: calls] if calls else []


def _harmony(text: str, last: bool) -> tuple[str, str, list[Read]]:
    """gpt-oss's channels: analysis is reasoning, final and commentary are content, messages to functions are calls."""
    head, calls, name, at = text.lstrip(), list[Read](), "", 0
    parts, kind = {"reasoning": "", "content": ""}, "header" if head.startswith(("<|", "to=")) else "content"
    marker = "" if not last and len(head) < 2 else " "  # a text without channels is content
    while marker:
        body, marker, at = _cut(text, at, ("<|message|>",) if kind == "header" else _ENDS, last)
        if kind == "header":
            recipient, channel = _RECIPIENT.search(body), _CHANNEL.search(body)
            analysis, name = channel is not None and channel[1] == "analysis", recipient[1] if recipient else ""
            kind = "call" if recipient else "reasoning" if analysis else "content"
            continue
        if kind in parts:
            parts[kind] += body
        elif marker or last:
            calls.append(partial(lambda *call: [call_of(*call)], {"name": name, "arguments": body}, body))
        kind = "header"
    return parts["reasoning"], parts["content"], calls


class OutputParser:
    """The parts of one output. `thinks`: it may begin with <think>; `opened`: the prompt ended with that.

    `forced`: it is JSON of `tool_calls.forced_schema`, and begins with no thought. Modifies: itself.
    """

    def __init__(
        self, form: Format | None, *, thinks: bool = False, opened: bool = False, forced: bool = False
    ) -> None:
        self._thinks, self._opened = thinks and not forced, opened and not forced
        self._parts: Callable[[str, bool], tuple[str, str, list[Read]]] = _plain
        if forced:
            self._parts = _forced
        elif form is not None:
            own = {"harmony": _harmony, "llama": _bare}
            self._parts = own.get(form.name) or partial(_blocks, form)
        self._text, self._told = "", (0, 0, 0)  # how much of reasoning, content and calls

    def feed(self, text: str, last: bool = False) -> Delta:
        self._text += text
        thought, answer = self._thought(last)
        reasoning, content, calls = self._parts(answer, last)
        (a, b, c), reasoning = self._told, thought + reasoning
        self._told = len(reasoning), len(content), len(calls)
        return Delta(reasoning[a:], content[b:], tuple(call for read in calls[c:] for call in read()))

    def _thought(self, last: bool) -> tuple[str, str]:
        """(the thought that the text begins with, the answer behind it), as far as they are known. Pure."""
        if not (self._thinks or self._opened):
            return "", self._text
        head = self._text.lstrip()
        if not head.startswith("<think>"):  # which may stand behind an opened one, too
            if not last and "<think>".startswith(head):
                return "", ""
            if not self._opened:
                return "", self._text
        text = head.removeprefix("<think>")
        thought, _, end = _cut(text, 0, ("</think>",), last)
        return thought.strip(), text[end:].lstrip()


def parse_output(text: str, form: Format | None, *, thinks: bool = False, opened: bool = False) -> Delta:
    """All parts of a whole text. Pure."""
    return OutputParser(form, thinks=thinks, opened=opened).feed(text, last=True)


# -- what a chat template teaches --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a chat template reads and teaches. `hidden`: calls, or thoughts, are written with special tokens."""

    variables: frozenset[str] = frozenset()
    form: Format | None = None
    hidden: bool = False
    thinks: bool = False

    @property
    def channels(self) -> Format | None:
        """Harmony, where thoughts are a channel."""
        return self.form if self.form is not None and self.form.name == "harmony" else None

    def opened(self, tokenizer: Any, ids: Sequence[int]) -> bool:
        """Whether a prompt ends in an open thought. Pure."""
        return self.thinks and tokenizer.decode(list(ids[-OPENED:]), False).rstrip().endswith("<think>")


class ThoughtTokens:
    """Counts the tokens of one output up to its </think>, which is a token here. `opened`: as the parser's. Modifies:
    itself."""

    def __init__(self, tokenizer: Any, opened: bool) -> None:
        self._begin, self._end = (tokenizer.backend.token_to_id(word) for word in ("<think>", "</think>"))
        self._open = True if opened else None  # None: not known yet
        self.count: int | None = None if self._end is None else 0

    def feed(self, ids: Sequence[int]) -> None:
        if self._open is None and ids:
            self._open = ids[0] == self._begin
        if self._open and self.count is not None:
            self._open = self._end not in ids
            self.count += len(ids) if self._open else ids.index(self._end) + 1


def template_facts(tokenizer: Any, tools: bool) -> TemplateFacts:
    """Of the template that is used with or without tools. Errors: InvalidRequestError, ChatTemplateError."""
    source, variables = tokenizer.template_of(tools)
    form = format_of(source)
    added = tokenizer.backend.get_added_tokens_decoder().values() if form is not None else ()
    hidden = form is not None and any(token.special and token.content == form.begin for token in added)
    return TemplateFacts(variables, form, hidden, "<think>" in source)


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
    return OutputParser(None, thinks=facts.thinks, opened=facts.opened(tokenizer, ids))
