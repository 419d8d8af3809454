"""A model's output, piece by piece, to reasoning, content and tool calls. No torch. A piece adds what the parts of the
text so far have more than before; what may still change is held back."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from fengine.server.tool_calls import PYTHON_TAGS, Format, ToolCall, call_of, read_bare, read_forced, read_pythonic


class Thought(NamedTuple):
    """The words around thoughts. `silent`: around the answer, no part of it."""

    think_start_token: str = "<think>"
    think_end_token: str = "</think>"
    silent: tuple[str, ...] = ()


THINKING = {  # by SGLang's names; the first whose end a template names is the one that it teaches
    "mistral": Thought("[THINK]", "[/THINK]"),  # Magistral
    "cohere_command4": Thought("<|START_THINKING|>", "<|END_THINKING|>",  # and Command R7B, A
                               ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")),
    "qwen3": Thought(),
}  # fmt: skip
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?!(?:python|browser|container|assistant|user|all)\b)(?:functions\.)?([\w.-]+)")
_HEADS = ("<|", "to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")  # of a message of harmony


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece adds. Calls that cannot be read are among the calls, with a problem, and are content, too."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()

    @property
    def beside_calls(self) -> str:
        """The content without any call. Pure."""
        text = self.content
        for unread in (call.text for call in self.calls if call.problem):
            text = text.replace(unread, "", 1).strip()
        return text


def _cut(text: str, at: int, markers: Sequence[str], last: bool) -> tuple[str, str, int]:
    """(text from `at` to the first marker, the marker or "", where it ends); before the last piece without what may
    begin one. Pure."""
    if found := re.compile("|".join(map(re.escape, markers))).search(text, at):
        return text[at : found.start()], found[0], found.end()
    piece = text[at:]
    heads = () if last else (n for marker in markers for n in range(1, len(marker)) if piece.endswith(marker[:n]))
    return piece[: len(piece) - max(heads, default=0)], "", len(text)


def _without(markers: Sequence[str], text: str, last: bool) -> tuple[str, str]:
    """(the text without any of the markers, an end of it that may begin one). Pure."""
    told, at, marker = "", 0, " "
    while marker and markers:
        more, marker, end = _cut(text, at, markers, last)
        told, at = told + more, end if marker else at + len(more)
    return (told, text[at:]) if markers else (text, "")


# -- (reasoning, content, calls) of a text so far, which only grow with it ---------------------------------------------

Parts = tuple[str, str, list[ToolCall]]


@dataclass(slots=True)
class _Walk:
    """The parts of what is complete, which is the text before `at`: it is read once, however many pieces follow.
    `unread`: what could not be read of the last block. `kind` and `name`: what harmony's next message is, and calls."""

    at: int = 0
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    unread: str = ""
    kind: str = ""
    name: str = ""


def _plain(text: str, last: bool) -> Parts:
    return "", text, []


def _blocks(form: Format, walk: _Walk, text: str, last: bool) -> Parts:
    """Calls between markers, content around them; white space before the first call that was read, and behind the last
    one, is no content. Modifies: walk, but not for the last piece."""
    at, content, calls, unread = walk.at, walk.content, walk.calls[:] if last else walk.calls, walk.unread
    while True:
        more, marker, start = _cut(text, at, form.begins, last)
        content = content + more if at == 0 or unread or content.strip() else more.lstrip()
        body, end, stop = _cut(text, start, form.ends, last)
        if not marker or not (end or last):
            return "", content if last and (unread or not calls) else content.rstrip(), calls
        found = _read_block(form, marker + body, end)
        unread = _unread(found)
        calls += [replace(call, at=len(content.rstrip())) for call in found]
        content += unread
        at = stop if form.end else stop - len(end)
        if not last:
            walk.at, walk.content, walk.unread = at, content, unread


def _unread(calls: Sequence[ToolCall]) -> str:
    """The text of those that cannot be read. Pure."""
    return "".join(call.text for call in calls if call.problem)


def _read_block(form: Format, block: str, end: str) -> list[ToolCall]:
    """The calls of a block, and its `end`; one with all of its text, if any cannot be read, or there is none. Where no
    end is written, text may follow the calls. Pure."""
    assert form.read is not None, "a format with markers has a reader"
    body, end = block.removeprefix(form.begin), end if form.end else ""  # which is the next one's begin
    cut = not (end or body.rstrip().endswith(form.closes))
    said = f"{'the tool call is cut off' if cut else 'there is no tool call'}: {body.strip()!r:.200}"
    found = (not cut and form.read(body)) or [ToolCall("", {}, body, said)]
    problem = next((call.problem for call in found if call.problem), None)
    whole = problem is None or not form.end and found[0].problem is None
    return found if whole else [ToolCall(found[0].name, {}, block + end, problem)]


def _bare(opening: str, read: Callable[[str], list[ToolCall]], text: str, last: bool) -> Parts:
    """A text that begins with calls, or content."""
    head = text.lstrip()
    if head.startswith((opening, *PYTHON_TAGS)) or not last and any(tag.startswith(head) for tag in PYTHON_TAGS):
        calls = read(text) if last else []
        return "", text if last and not calls else _unread(calls), calls
    return "", text, []


_LLAMA, _PYTHONIC = partial(_bare, "{", read_bare), partial(_bare, "[", read_pythonic)


def _forced(text: str, last: bool) -> Parts:
    """JSON of `forced_schema`; content, if it was cut off in the first call."""
    calls = read_forced(text) if last else []
    return "", text if last and not calls else "", calls


def _header(text: str) -> tuple[str, str]:
    """(kind of a message of harmony, the function that it calls). Pure."""
    recipient, channel = _RECIPIENT.search(text), _CHANNEL.search(text)
    if recipient:
        return "call", recipient[1]
    return "reasoning" if channel and channel[1] == "analysis" else "content", ""


def _harmony(walk: _Walk, text: str, last: bool) -> Parts:
    """gpt-oss's channels: analysis is reasoning, final and commentary are content, messages to functions are calls.
    Modifies: walk."""
    if not walk.kind:
        head = text.lstrip()
        if not last and any(one.startswith(head) for one in _HEADS):
            return "", "", []
        walk.kind = "header" if head.startswith(_HEADS) else "content"  # without channels it is content
    parts, calls = {"reasoning": walk.reasoning, "content": walk.content}, walk.calls
    at, kind, name, marker = walk.at, walk.kind, walk.name, " "
    while marker:
        body, marker, at = _cut(text, at, ("<|message|>",) if kind == "header" else _ENDS, last)
        if kind == "header":
            kind, name = _header(body)
        else:
            if kind in parts:
                parts[kind] += body
            elif marker or last:
                calls.append(replace(call_of({"name": name, "arguments": body}, body), at=len(parts["content"])))
                parts["content"] += _unread(calls[-1:])
            kind = "header"
        if marker:
            walk.at, walk.kind, walk.name = at, kind, name
            walk.reasoning, walk.content = parts["reasoning"], parts["content"]
    return parts["reasoning"], parts["content"], calls


class OutputParser:
    """The parts of one output. `thinks`: it may begin with <think>, or as `thought` writes that; `opened`: the prompt
    ended with that. `forced`: it is JSON of `tool_calls.forced_schema`, and begins with no thought. `functions`: that
    may be called, whose schemas tell the types of arguments where a format does not. Modifies: itself."""

    def __init__(
        self, form: Format | None, *, thinks: bool = False, opened: bool = False, forced: bool = False,
        functions: Sequence[dict[str, Any]] = (), thought: Thought | None = None,
    ) -> None:  # fmt: skip
        self._functions = functions
        self._begin, self._end, self._silent = thought or Thought()
        self._opened = opened and not forced
        self._step = self._head if (thinks or opened) and not forced else self._answer
        self._parts: Callable[[str, bool], Parts] = _plain
        if forced:
            self._parts = _forced
        elif form is not None:
            walk = _Walk()
            own = {"harmony": partial(_harmony, walk), "llama": _LLAMA, "pythonic": _PYTHONIC}
            self._parts = own.get(form.name) or partial(_blocks, form, walk)
        self._channels = form is not None and form.name == "harmony"
        begins = form.begins if form is not None and not self._channels else ()
        self._begins = (*begins, *self._silent)
        self._held, self._thought = "", False  # what is no part yet; whether any of the thought is told
        self._text, self._told = "", (0, 0, 0)  # of the answer; how much of its reasoning, content and calls

    def feed(self, text: str, last: bool = False) -> Delta:
        self._held += text
        return self._step(last)

    def _head(self, last: bool) -> Delta:
        """White space, then perhaps <think>, which may stand behind an opened one, too."""
        head = self._held.lstrip()
        if not head.startswith(self._begin):
            if not last and self._begin.startswith(head):
                return Delta()
            if not self._opened:
                self._step = self._answer
                return self._answer(last)
        self._held, self._step = head.removeprefix(self._begin), self._thinking
        return self._thinking(last)

    def _thinking(self, last: bool) -> Delta:
        """White space around the thought is no part of it. A call ends it, too, if no </think> comes behind."""
        text = self._held if self._thought else self._held.lstrip()
        thought, marker, end = _cut(text, 0, (self._end, *self._begins), last)
        if marker in self._begins:
            whole, marker, end = _cut(text, 0, (self._end,), last)
            if marker or last and _unread(self._parts(text[len(thought) :], True)[2]):
                thought = whole
            elif last:
                marker, end = "the call", len(thought)
        told = thought.rstrip()
        self._thought = self._thought or bool(told)
        if not marker:
            self._held = text[len(told) :]
            return Delta(told)
        self._held, self._step = text[end:], self._behind
        found = self._behind(last)
        return replace(found, reasoning=told + found.reasoning)

    def _behind(self, last: bool) -> Delta:
        """White space between the thought and the answer is no part of either."""
        self._held = self._held.lstrip()
        if self._held or last:
            self._step = self._answer
            return self._answer(last)
        return Delta()

    def _answer(self, last: bool) -> Delta:
        said, self._held = _without(self._silent, self._held, last)
        self._text += said
        reasoning, content, calls = self._parts(self._text, last)
        a, b, c = self._told
        self._told = len(reasoning), len(content), len(calls)
        made = tuple(replace(call.typed(self._functions), at=max(0, call.at - b)) for call in calls[c:])
        found = Delta(reasoning[a:], content[b:], made)
        if content and not reasoning and not calls and not self._channels:
            self._settle(content)
        return found

    def _settle(self, content: str) -> None:
        """Forgets what begins the text and is content for good, so that no piece costs more than the first: all of it,
        or all but the last character, behind which calls may follow."""
        if self._parts in (_LLAMA, _PYTHONIC):  # which are calls and nothing else
            self._parts = _plain
        kept = 0 if self._parts is _plain else 1
        self._text, self._told = self._text[len(content) - kept :], (0, kept, 0)


def parse_output(text: str, form: Format | None, **how: Any) -> Delta:
    """All parts of a whole text. Pure."""
    return OutputParser(form, **how).feed(text, last=True)
