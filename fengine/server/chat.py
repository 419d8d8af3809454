"""`/v1/chat/completions`: a chat to token ids, outputs to choices with content, reasoning and tool calls."""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fengine.api.chat_images import without_images
from fengine.api.engine import Engine
from fengine.api.outputs import Output
from fengine.core.sampling_params import GRAMMARS
from fengine.server.answers import finish_reason, stopped_by
from fengine.server.chat_body import ChatOptions
from fengine.server.errors import invalid, unsupported
from fengine.server.openai_body import OpenAIRequest
from fengine.server.output_parser import OutputParser, TemplateFacts
from fengine.server.token_text import TokenNames, hidden_states, prompt_logprobs
from fengine.server.tool_calls import Format, ToolCall, forced_schema, strict_tag
from fengine.tokenizer.tokenizer import Tokenizer


def prepare(
    request: OpenAIRequest, chat: ChatOptions, engine: Engine, facts: TemplateFacts
) -> tuple[dict[str, Any], "ChatForm"]:
    """(fields of GenerateReqInput, how the outputs read). Errors: those of `Engine.chat_ids`; ApiError."""
    tokenizer, context, sampling = engine.tokenizer, engine._parts.context_length, request.arguments["sampling_params"]
    if type(most := sampling["max_new_tokens"]) is int and most > context:
        said = f"max_completion_tokens is too large: {most}. This model supports at most {context} completion tokens."
        raise invalid(request.words["max_new_tokens"], said)
    images = without_images(chat.messages)[1]
    if images and engine._parts.images is None:
        raise invalid("messages", "the messages have images, but this model takes none; leave them out.")
    ids = chat_ids(engine, chat, _template_values(chat, facts), request.add_special_tokens)
    ids = request.truncation.of(ids, context) if request.truncation else ids
    constrained = bool(chat.forced) or any(name in sampling for name in GRAMMARS)
    form = _form_read(chat, facts, constrained)
    thinks = facts.thinks and chat.separate_reasoning and not constrained
    opened = thinks and facts.opened(tokenizer, ids)

    def new_parser() -> OutputParser | None:
        if not (form or thinks or chat.forced):
            return None
        return OutputParser(form, thinks=thinks, opened=opened, forced=bool(chat.forced))

    sampling = _held(chat, facts, form, constrained) | sampling
    arguments = request.arguments | {"input_ids": ids, "sampling_params": sampling}
    arguments |= {"image_data": images} if images else {}
    return arguments, ChatForm(tokenizer, request, chat, new_parser, [ids])


def _held(chat: ChatOptions, facts: TemplateFacts, form: Format | None, constrained: bool) -> dict[str, Any]:
    """Sampling parameters by which calls can be read, or are held to their schemas. Pure."""
    if chat.forced:
        return {"json_schema": json.dumps(forced_schema(chat.forced, chat.parallel))}
    shown = {"skip_special_tokens": False} if form is not None and facts.hidden else {}
    tag = None if form is None or constrained else strict_tag(form, chat.callable)
    return shown if tag is None else shown | {"structural_tag": json.dumps(tag)}


def chat_ids(engine: Engine, chat: ChatOptions, values: dict[str, Any], add_special_tokens: bool) -> list[int]:
    """The ids of a chat, the last message left open where it goes on. Errors: those of `Engine.chat_ids`."""
    ids = engine.chat_ids(
        chat.messages, chat.tools, chat.add_generation_prompt, values, continue_final_message=chat.continue_final
    )
    return engine.tokenizer.with_special_tokens(ids) if add_special_tokens else ids


def _form_read(chat: ChatOptions, facts: TemplateFacts, constrained: bool) -> Format | None:
    """The form of calls that outputs are searched for: with tools that none forces, and harmony's channels. Pure."""
    channels = facts.channels is not None and not constrained
    return facts.form if channels or (chat.tools is not None and not chat.forced) else None


def _template_values(chat: ChatOptions, facts: TemplateFacts) -> dict[str, Any]:
    """What the template is given. Errors: ApiError."""
    values, effort = dict(chat.template_values), chat.reasoning_effort
    switches = {"reasoning_effort": effort, "enable_thinking": effort != "none", "thinking": effort != "none"}
    name = next((name for name in switches if name in facts.variables), None)
    if effort is not None and name is None:
        raise unsupported("reasoning_effort", "reasoning_effort: this model's chat template knows none. Leave it out.")
    if effort is not None and name is not None:
        values.setdefault(name, switches[name])
    return values


@dataclass(slots=True)
class ChatForm:
    """How outputs read as choices. `new_parser`: for one choice; it gives None where all is content."""

    tokenizer: Tokenizer
    request: OpenAIRequest
    chat: ChatOptions
    new_parser: Callable[[], OutputParser | None]
    prompt_ids: list[list[int]] | None
    parsers: dict[int, OutputParser | None] = field(default_factory=dict)
    called: dict[int, int] = field(default_factory=dict)  # calls of a choice so far
    id_prefix: str = "chatcmpl"
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        parts = self.parts(index, output, streamed=False)
        content = parts.pop("content", None if parts.keys() & {"tool_calls", "function_call"} else "")
        content = self._echo + (content or "") if self._echo else content
        message = {"role": "assistant", "content": content, "refusal": None, **parts}
        choice = self._choice(index, output, {"message": message}) | hidden_states(output)
        choice.setdefault("token_ids", None)
        return choice | ({"prompt_token_ids": self._prompt} if self.request.return_prompt_ids else {})

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": self._echo}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        new = self.parts(index, output, streamed=True)
        choice = self._choice(index, output, {"delta": new or {"content": ""}})  # SGLang's clients look for a content
        if choice["finish_reason"]:
            choice["delta"] |= hidden_states(output)
        asked = self.request.logprobs is not None or self.request.return_token_ids
        return choice if new or choice["finish_reason"] or asked else None

    def beside(self, outputs: list[Output]) -> dict[str, Any]:
        """vLLM puts them here: a chat has one prompt."""
        ids, most = self._prompt if self.request.return_token_ids else None, self.request.prompt_logprobs
        if not outputs:
            return {} if ids is None else {"prompt_token_ids": ids}
        names = TokenNames(self.tokenizer, self.request.tokens_as_ids)
        told = None if most is None else prompt_logprobs(names, outputs[0], most)
        return {"prompt_logprobs": told, "prompt_token_ids": ids}

    @property
    def _prompt(self) -> list[int] | None:
        return None if self.prompt_ids is None else self.prompt_ids[0]

    @property
    def _echo(self) -> str:
        last = self.chat.messages[-1]
        echoed = self.request.echo and last.get("role") == "assistant" and isinstance(last.get("content"), str)
        return last["content"] if echoed else ""

    def parts(self, index: int, output: Output, streamed: bool) -> dict[str, Any]:
        """What is new: content, reasoning_content and calls, as far as there is any."""
        if index not in self.parsers:
            self.parsers[index] = self.new_parser()
        parser, text = self.parsers[index], output["text"]
        if parser is None:
            return {"content": text} if text else {}
        found = parser.feed(text, last=finish_reason(output) is not None)
        content = found.content + "".join(call.text for call in found.calls if call.problem)
        named = {"reasoning_content": found.reasoning, "content": content}
        if not self.chat.separate_reasoning:
            named = {"content": found.reasoning + content}
        return {k: v for k, v in named.items() if v} | self._calls(index, found.calls, streamed)

    def _calls(self, index: int, calls: tuple[ToolCall, ...], streamed: bool) -> dict[str, Any]:
        chat, begun = self.chat, self.called.get(index, 0)
        good = [call for call in calls if not call.problem]
        if not chat.parallel:
            good = good[: 1 - begun]
        self.called[index] = begun + len(good)
        told = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in good]
        if not told:
            return {}
        if chat.legacy:
            return {"function_call": told[0]}
        return {
            "tool_calls": [
                ({"index": begun + i} if streamed else {})
                | {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
                for i, function in enumerate(told)
            ]
        }

    def _choice(self, index: int, output: Output, said: dict[str, Any]) -> dict[str, Any]:
        finish = finish_reason(output)
        if finish == "stop" and self.called.get(index):
            finish = "function_call" if self.chat.legacy else "tool_calls"
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish}
        if finish is not None:
            choice |= stopped_by(output, self.tokenizer.eos_ids)
        if self.request.logprobs is not None:
            choice["logprobs"] = {"content": self.logprobs(output), "refusal": None}
        if self.request.return_token_ids:
            choice["token_ids"] = output["output_ids"]
        return choice

    def logprobs(self, output: Output) -> list[dict[str, Any]]:
        """Of what is new, as OpenAI tells them."""
        meta, count = output["meta_info"], len(output["output_ids"])
        names, most = TokenNames(self.tokenizer, self.request.tokens_as_ids), self.request.logprobs or 0
        tops = meta.get("output_top_logprobs", [[]] * count)
        pairs = zip(meta["output_token_logprobs"][:count], tops[:count], strict=True)
        return [
            names.entry(token, logprob) | {"top_logprobs": [names.entry(t, p) for p, t, _ in top[:most]]}
            for (logprob, token, _), top in pairs
        ]
