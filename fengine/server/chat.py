"""`/v1/chat/completions`: a chat to token ids, outputs to choices with content, reasoning and tool calls."""

import json
import secrets
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fengine.api.chat_images import without_images
from fengine.api.engine import Engine
from fengine.api.outputs import Output
from fengine.core.sampling_params import GRAMMARS
from fengine.server.answers import Writer, finish_reason
from fengine.server.chat_body import ChatOptions
from fengine.server.choices import ChoiceWriter, finite, hidden_states
from fengine.server.errors import invalid, unsupported
from fengine.server.openai_body import OpenAIRequest
from fengine.server.output_parser import OutputParser, Thought
from fengine.server.template_facts import TemplateFacts, ThoughtTokens, thought_limit
from fengine.server.tool_calls import Format, ToolCall, forced_schema, new_call_id, strict_tag
from fengine.tokenizer.tokenizer import Tokenizer


def _held(chat: ChatOptions, facts: TemplateFacts, form: Format | None, constrained: bool) -> dict[str, Any]:
    """Sampling parameters by which calls can be read, or are held to their schemas. Pure."""
    if chat.forced:
        return {"json_schema": json.dumps(forced_schema(chat.forced, chat.parallel))}
    read = form is not None or facts.thinks and not constrained
    shown = {"skip_special_tokens": False} if read and facts.hidden else {}
    tag = None if form is None or constrained else strict_tag(form, chat.callable)
    return shown if tag is None else shown | {"structural_tag": json.dumps(tag)}


def chat_prompt(engine: Engine, chat: ChatOptions, add_special_tokens: bool) -> tuple[list[int], Any]:
    """(the ids of a chat, every placeholder of its images in place, and these as they were read), the last message left
    open where it goes on. Errors: those of `Engine.chat_ids`; ApiError, InvalidRequestError for images."""
    reader, given = engine._parts.images, without_images(chat.messages)[1]
    if given and reader is None:
        raise invalid("messages", "the messages have images, but this model takes none; leave them out.")
    ids = engine.chat_ids(
        chat.messages, chat.tools, chat.add_generation_prompt, _template_values(chat, engine.tokenizer),
        continue_final_message=chat.continue_final,
    )  # fmt: skip
    ids = engine.tokenizer.with_special_tokens(ids) if add_special_tokens else ids
    if reader is None or not given:
        return ids, []
    images = reader.read_all(given, inside=True)
    return reader.prompt(ids, images).ids, images


def _template_values(chat: ChatOptions, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the template is given. Errors: ApiError."""
    if (effort := chat.reasoning_effort) is None:
        return chat.template_values
    switches = {"reasoning_effort": effort, "enable_thinking": effort != "none", "thinking": effort != "none"}
    variables = tokenizer.template_of(chat.tools is not None)[1]
    name = next((name for name in switches if name in variables), None)
    if name is None:
        raise unsupported("reasoning_effort", "reasoning_effort: this model's chat template knows none. Leave it out.")
    return {name: switches[name]} | chat.template_values


class ChatWriter(ChoiceWriter):
    """Answers to chats. Modifies: itself, in a stream."""

    names = ("chatcmpl-", "chat.completion", "chat.completion.chunk")

    def __init__(self, request: OpenAIRequest, engine: Engine, facts: TemplateFacts, head: Mapping[str, Any]) -> None:
        """Errors: those of `Engine.chat_ids`; ApiError."""
        self.chat = chat = request.chat_options
        tokenizer, context, given = engine.tokenizer, engine._parts.context_length, request.given
        ids, images = chat_prompt(engine, chat, given["add_special_tokens"])
        self.ids = given["truncation"].cut(ids, context, images) if given["truncation"] else ids
        sampling = request.arguments["sampling_params"]
        constrained = bool(chat.forced) or any(name in sampling for name in GRAMMARS)
        channels = facts.channels is not None and not constrained  # harmony's, which are read as calls are
        form = facts.form if channels or (chat.tools is not None and not chat.forced) else None
        held = _held(chat, facts, form, constrained)
        arguments = request.arguments | {"input_ids": self.ids, "sampling_params": held | sampling}
        arguments |= {"image_data": images} if images else {}
        super().__init__(request, arguments, tokenizer, head, [self.ids])
        self.form = facts.form  # of the calls that the template writes
        self.called = [0] * len(self._drawn)  # calls of a choice so far
        self.held = [""] * len(self._drawn)  # a thought that is told when it has ended
        self.places: list[int] = []  # of the last calls, in the content that was told with them
        last = chat.messages[-1]
        echoes = given["echo"] and last.get("role") == "assistant" and isinstance(last.get("content"), str)
        self.echo = last["content"] if echoes else ""
        self._expect(facts, form, constrained)

    def _expect(self, facts: TemplateFacts, form: Format | None, constrained: bool) -> None:
        """Makes the parsers of each choice, and what counts its thoughts, where it may think, and in no channel."""
        thought = None if constrained else facts.thinks
        begin, end, _ = thought or Thought()
        apart = self.chat.separate_reasoning or not self.chat.include_reasoning
        last = self.chat.messages[-1]["content"] if self.chat.continue_final else ""
        opened = bool(thought) and (facts.opened(self.tokenizer, self.ids) or begin in last.rpartition(end)[2])
        how: Any = {"thinks": bool(thought) and apart, "opened": opened and apart, "forced": bool(self.chat.forced)}
        how |= {"functions": self.chat.callable, "thought": thought}
        self.parsers = [OutputParser(form, **how) for _ in self._drawn]
        counted = self._drawn if thought and facts.channels is None else []
        self.thoughts = [ThoughtTokens(self.tokenizer, opened, thought) for _ in counted]
        if not constrained:  # a grammar leaves no thought
            self.limit = thought_limit(self.given["thinking_token_budget"], self.thoughts)

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        parts = self.parts(index, output, streamed=False)
        content = parts.pop("content", None if parts.keys() & {"tool_calls", "function_call"} else "")
        content = self.echo + (content or "") if self.echo else content
        none = dict.fromkeys(("refusal", "reasoning_content", "reasoning"))
        message = {"role": "assistant", "content": content, **none, **parts}
        choice = self._choice(index, output, {"message": message}, whole=True) | hidden_states(output)
        return choice | ({"prompt_token_ids": self.ids} if self.given["return_prompt_token_ids"] else {})

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": self.echo, "reasoning_content": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        new = self.parts(index, output, streamed=True)
        delta = {"reasoning_content": None, **(new or {"content": ""})}  # where SGLang's clients look
        choice = self._choice(index, output, {"delta": delta}, whole=False)
        if choice["finish_reason"]:
            choice["delta"] |= hidden_states(output)
        return choice if new or choice["finish_reason"] or self.of_each else None

    def beside(self, outputs: list[Output]) -> dict[str, Any]:
        """vLLM puts them here: a chat has one prompt."""
        ids = self.ids if self.given["return_prompt_token_ids"] else None
        if not outputs:
            return {} if ids is None else {"prompt_token_ids": ids}
        return {"prompt_logprobs": self.prompt_logprobs(outputs[0]), "prompt_token_ids": ids}

    def usage(self, outputs: list[Output]) -> dict[str, Any]:
        """With the tokens of thoughts, in SGLang's place and in OpenAI's, where they can be counted."""
        counts = [thought.count for thought in self.thoughts]
        if not counts or None in counts:
            return super().usage(outputs)
        count = {"reasoning_tokens": sum(one or 0 for one in counts)}
        return super().usage(outputs) | count | {"completion_tokens_details": count}

    def parts(self, index: int, output: Output, streamed: bool) -> dict[str, Any]:
        """What is new: content, reasoning_content and calls, as far as there is any."""
        found = self.parsers[index].feed(output["text"], last=(last := finish_reason(output) is not None))
        if self.thoughts:
            self.thoughts[index].feed(output["output_ids"])
        thought = self.held[index] + found.reasoning if self.chat.include_reasoning else ""
        tells = self.chat.stream_reasoning or found.content or found.calls or last
        thought, self.held[index] = (thought, "") if tells else ("", thought)
        named = {"reasoning_content": thought, "reasoning": thought, "content": found.content}  # vLLM has both
        before = "" if self.chat.separate_reasoning else thought
        named = named if self.chat.separate_reasoning else {"content": thought + found.content}
        self.places = [len(before) + call.at for call in found.calls if not call.problem]
        told = {k: v for k, v in named.items() if v}
        return told | self._calls(index, found.calls, streamed) if found.calls else told

    def _calls(self, index: int, calls: tuple[ToolCall, ...], streamed: bool) -> dict[str, Any]:
        begun, good = self.called[index], [call for call in calls if not call.problem]
        good = good if self.chat.parallel else good[: 1 - begun]
        self.called[index] += len(good)
        told = [{"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)} for call in good]
        if not told:
            return {}
        if self.chat.legacy:
            return {"function_call": told[0]}
        before = begun + sum(len(m.get("tool_calls") or ()) for m in self.chat.messages if m.get("role") == "assistant")
        ids = [new_call_id(self.form, one["name"], before + i, secrets.token_hex(12)) for i, one in enumerate(told)]
        named = [{"id": id, "type": "function", "function": one} for id, one in zip(ids, told, strict=True)]
        return {"tool_calls": [{"index": begun + i, **one} if streamed else one for i, one in enumerate(named)]}

    def _choice(self, index: int, output: Output, said: dict[str, Any], whole: bool) -> dict[str, Any]:
        asked = self.given["logprobs"] is not None
        logprobs = {"content": self.logprobs(output), "refusal": None} if asked else None
        choice = self.framed(index, output, said, logprobs, whole)
        if choice["finish_reason"] == "stop" and self.called[index]:
            choice["finish_reason"] = "function_call" if self.chat.legacy else "tool_calls"
        return choice

    def logprobs(self, output: Output) -> list[dict[str, Any]]:
        """Of what is new, as OpenAI tells them."""
        count, told = len(output["output_ids"]), list[dict[str, Any]]()
        drawn, tops = output["meta_info"]["output_token_logprobs"][:count], self.tops(output, "output", count)
        for (logprob, token, _), top in zip(drawn, tops, strict=True):
            others = {t: p for p, t, _ in top}
            if self.given["logprob_token_ids"] is not None:
                others = {token: logprob} | others
            told.append(self._entry(token, logprob) | {"top_logprobs": [self._entry(*one) for one in others.items()]})
        return told

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.decoding.data(token)
        name = self.shown(token) if self.given["return_tokens_as_token_ids"] else data.decode("utf-8", "replace")
        return {"token": name, "bytes": list(data), "logprob": finite(logprob), "token_id": token}


# -- a chat's output as blocks, as OpenAI's responses and Anthropic's messages tell it ---------------------------------

Kind = Literal["reasoning", "text", "call"]
Did = Literal["open", "delta", "close"]
Step = tuple[Did, "Block", str]


@dataclass(slots=True)
class Block:
    """One block: its place among the others, and what it says so far; of a call its JSON arguments. `status`: OpenAI's;
    one that a limit cuts off is incomplete."""

    kind: Kind
    index: int
    id: str = ""  # of a call
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    streamed: int = 0  # of these, in events so far
    status: str = "in_progress"


class BlockWriter(Writer):
    """An answer that tells the one choice of a chat as blocks. Modifies: itself, in a stream."""

    def __init__(self, chat: ChatWriter) -> None:
        self.chat, self.found = chat, list[Block]()
        self._open = False  # the last one
        self._early = list[dict[str, Any]]()  # logprobs from before there is any text

    @abstractmethod
    def answer(self, output: Output) -> dict[str, Any]:
        """The whole answer, once all blocks are found."""

    @abstractmethod
    def step(self, did: Did, block: Block, said: str) -> bytes:
        """The events of one step of a block."""

    @abstractmethod
    def ending(self, output: Output) -> bytes:
        """The events behind the last block."""

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        for _ in self._steps(outputs[0]):
            pass
        return self.answer(outputs[0])

    def piece(self, index: int, output: Output) -> bytes:
        return b"".join(self.step(*step) for step in self._steps(output))

    def last(self, outputs: list[Output]) -> bytes:
        return self.ending(outputs[0]) if outputs[0] else b""

    def _steps(self, output: Output) -> Iterator[Step]:
        """What a piece adds, or a whole output: calls where they stand in the text, however much comes at once."""
        parts = self.chat.parts(0, output, streamed=True)
        logprobs = self._early + ([] if self.chat.given["logprobs"] is None else self.chat.logprobs(output))
        texts = [block for block in self.found if block.kind == "text"]
        self._early = [] if texts or "content" in parts else logprobs
        if texts and "content" not in parts:
            texts[-1].logprobs += logprobs
        if thought := parts.get("reasoning_content"):
            yield from self._add(Block("reasoning", len(self.found)), thought)
        content, done = parts.get("content", ""), 0
        for call, at in zip(parts.get("tool_calls", ()), self.chat.places, strict=False):
            yield from self._said(content[done:at], logprobs)
            function, done, logprobs = call["function"], at, [] if at else logprobs
            yield from self._close()
            yield from self._add(Block("call", len(self.found), call["id"], function["name"]), function["arguments"])
            yield from self._close()
        yield from self._said(content[done:], logprobs)
        if finish_reason(output) is not None:
            if not self.found:
                yield from self._add(Block("text", 0), "", self._early)
            yield from self._close("completed" if finish_reason(output) == "stop" else "incomplete")

    def _said(self, text: str, logprobs: Iterable[dict[str, Any]]) -> Iterator[Step]:
        if text:
            yield from self._add(Block("text", len(self.found)), text, logprobs)

    def _add(self, block: Block, text: str, logprobs: Iterable[dict[str, Any]] = ()) -> Iterator[Step]:
        if not self._open or self.found[-1].kind != block.kind:
            yield from self._close()
            self.found.append(block)
            self._open = True
            yield "open", block, ""
        self.found[-1].text += text
        self.found[-1].logprobs += logprobs
        yield "delta", self.found[-1], text

    def _close(self, status: str = "completed") -> Iterator[Step]:
        if self._open:
            self._open, self.found[-1].status = False, status
            yield "close", self.found[-1], self.found[-1].text
