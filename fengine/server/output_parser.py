"""A model's output, piece by piece, to reasoning, content and tool calls. No torch.

Whatever pieces a text comes in, the parts add up to the same.
"""

import re
from dataclasses import dataclass
from typing import Any

from fengine.server.tool_calls import Format, ToolCall, call_of, read_bare, read_forced

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_PYTHON_TAG = "<|python_tag|>"
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece adds."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class _Scan:
    """Looks for markers in pieces, and holds back what may begin one. Modifies: itself."""

    def __init__(self, *markers: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, markers)) or "(?!)")
        self._heads = {marker[:n] for marker in markers for n in range(1, len(marker))}
        self._longest = max((len(head) for head in self._heads), default=0)
        self._held = ""

    def feed(self, text: str, last: bool) -> tuple[str, str, str]:
        """(text before a marker, the marker or "", what follows it)."""
        text, self._held = self._held + text, ""
        if found := self._pattern.search(text):
            return text[: found.start()], found[0], text[found.end() :]
        if not last:
            for size in range(min(self._longest, len(text)), 0, -1):
                if text[-size:] in self._heads:
                    self._held = text[-size:]
                    return text[:-size], "", ""
        return text, "", ""


class _Edges:
    """Passes text on, but white space at its edges only if it is `kept` at that edge. Modifies: itself."""

    def __init__(self, keep_first: bool = False) -> None:
        self._begun, self._space = keep_first, ""

    def feed(self, text: str) -> str:
        text = self._space + text if self._begun else text.lstrip()
        core = text.rstrip()
        self._begun, self._space = self._begun or bool(core), text[len(core) :]
        return core

    def rest(self) -> str:
        """White space at the end that has not been passed on."""
        space, self._space = self._space, ""
        return space


class _Plain:
    """All is content."""

    def feed(self, text: str, last: bool) -> Delta:
        return Delta(content=text)


class _Blocks:
    """Calls between markers, content around them."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self._scan, self._inside = _Scan(form.begin), False
        self._body: list[str] = []
        self._content, self._has_content, self._called = _Edges(keep_first=True), False, False

    def feed(self, text: str, last: bool) -> Delta:
        content, calls = "", []
        while True:
            before, marker, text = self._scan.feed(text, last)
            if self._inside:
                self._body.append(before)
                if marker or last:
                    calls += self._calls(marker)
            else:
                content += (shown := self._content.feed(before))
                self._has_content |= bool(shown)
            if not marker:
                break
            self._inside = not self._inside or marker == self._form.begin
            ends = (self._form.end,) if self._form.end else ()
            self._scan = _Scan(*(ends or (self._form.begin,))) if self._inside else _Scan(self._form.begin)
        if last and not self._called:
            content += self._content.rest()
        return Delta(content=content, calls=tuple(calls))

    def _calls(self, marker: str) -> list[ToolCall]:
        body, self._body, self._called = "".join(self._body), [], True
        if not self._has_content:
            self._content = _Edges()  # white space around calls is no content
        assert self._form.read is not None, "a format with markers has a reader"
        found = self._form.read(body)
        if any(call.problem for call in found):
            end = marker if marker == self._form.end else ""
            problem = next(call.problem for call in found if call.problem)
            return [ToolCall(found[0].name, {}, f"{self._form.begin}{body}{end}", problem)]
        return found


class _Whole:
    """A text that is calls and nothing else, or content."""

    def __init__(self, forced: bool) -> None:
        self._forced, self._held = forced, [""]
        self._kind = "calls" if forced else ""

    def feed(self, text: str, last: bool) -> Delta:
        self._held.append(text)
        if not self._kind:
            start = "".join(self._held).lstrip()
            if start.startswith(("{", _PYTHON_TAG)):
                self._kind = "calls"
            elif start and not _PYTHON_TAG.startswith(start):
                self._kind = "content"
        if not last and self._kind != "content":
            return Delta()
        whole, self._held = "".join(self._held), []
        calls = [] if self._kind != "calls" else read_forced(whole) if self._forced else read_bare(whole)
        if not calls or self._forced and any(call.problem for call in calls):  # it was cut off in the first one
            return Delta(content=whole)
        return Delta(calls=tuple(calls))


class _Harmony:
    """gpt-oss's channels: analysis is reasoning, final and commentary are content, messages to functions are calls."""

    def __init__(self) -> None:
        self._scan, self._header, self._body = _Scan(), "", [""]
        self._kind = "start"
        self._name = ""

    def feed(self, text: str, last: bool) -> Delta:
        if self._kind == "start":  # a text without channels is content
            self._body.append(text)
            text = "".join(self._body)
            if not last and len(text.lstrip()) < 2:
                return Delta()
            self._kind = "header" if text.lstrip().startswith(("<|", "to=")) else "content"
            self._body, self._scan = [], self._scanner()
        parts: dict[str, str] = {"reasoning": "", "content": ""}
        calls = []
        while True:
            before, marker, text = self._scan.feed(text, last)
            if self._kind in parts:
                parts[self._kind] += before
            else:
                self._body.append(before)
            if self._kind == "call" and (marker or last):
                body = "".join(self._body)
                calls.append(call_of({"name": self._name, "arguments": body}, body))
            if not marker:
                break
            self._turn("".join(self._body), marker)
        return Delta(parts["reasoning"], parts["content"], tuple(calls))

    def _turn(self, header: str, marker: str) -> None:
        if marker == "<|message|>" and self._kind == "header":
            recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
            self._name = recipient[1] if recipient else ""
            analysis = channel is not None and channel[1] == "analysis"
            self._kind = "call" if recipient else "reasoning" if analysis else "content"
        elif self._kind != "header":
            self._kind = "header"
        self._body, self._scan = [], self._scanner()

    def _scanner(self) -> _Scan:
        return (
            _Scan("<|message|>") if self._kind == "header" else _Scan("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        )


class OutputParser:
    """The parts of one output. `thinks`: it may begin with <think>; `opened`: the prompt ended with that.

    `forced`: it is JSON of `tool_calls.forced_schema`. Modifies: itself.
    """

    def __init__(
        self, form: Format | None, *, thinks: bool = False, opened: bool = False, forced: bool = False
    ) -> None:
        self._calls: Any = _Plain()
        if forced:
            self._calls = _Whole(forced=True)
        elif form is not None:
            self._calls = (
                _Harmony() if form.name == "harmony" else _Whole(False) if form.read is None else _Blocks(form)
            )
        self._state = "answer" if forced or not (thinks or opened) else "reasoning" if opened else "start"
        self._scan, self._start = _Scan("</think>"), ""
        self._reasoning, self._answer = _Edges(), _Edges()

    def feed(self, text: str, last: bool = False) -> Delta:
        reasoning = ""
        if self._state == "start":
            text, self._start = self._start + text, ""
            head = text.lstrip()
            if head.startswith("<think>"):
                self._state, text = "reasoning", head.removeprefix("<think>")
            elif "<think>".startswith(head) and not last:
                self._start = text
                return Delta()
            else:
                self._state = "answer"
        if self._state == "reasoning":
            before, marker, text = self._scan.feed(text, last)
            reasoning = self._reasoning.feed(before)
            if not marker and not last:
                return Delta(reasoning)
            self._state = "space" if marker else "answer"
        if self._state == "space" and (text := text.lstrip()):
            self._state = "answer"
        found = self._calls.feed(text, last)
        return Delta(reasoning + found.reasoning, found.content, found.calls)


def parse_output(text: str, form: Format | None, *, thinks: bool = False, opened: bool = False) -> Delta:
    """All parts of a whole text. Pure."""
    return OutputParser(form, thinks=thinks, opened=opened).feed(text, last=True)
