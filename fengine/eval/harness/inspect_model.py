"""`FengineAPI`: fengine as a model provider of inspect-ai, `inspect eval task.py --model fengine/PATH`. Every call
awaits the engine, which batches what is under way, so `--max-connections` is how many run together; no bit of an output
depends on it. Fields of GenerateConfig that are not built are refused by name."""

# pyright: reportMissingImports=false

import asyncio
import json
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from fengine.api.engine import Engine
from fengine.errors import (
    AbortedError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    MissingExtraError,
    UnsupportedFeatureError,
)
from fengine.eval.harness import inspect_requests as reads
from fengine.eval.harness.engine import open_engine
from fengine.eval.runs.manifest import row_seed
from fengine.server.output_parser import Delta, parse_output
from fengine.server.template_facts import TemplateFacts, template_facts
from fengine.server.tool_calls import FORMATS, new_call_id

try:
    from inspect_ai import model as ai
    from inspect_ai.log._samples import sample_active
    from inspect_ai.tool import ToolCall, ToolChoice, ToolInfo
except ImportError as error:
    raise MissingExtraError.of("FengineAPI", "inspect_ai", "inspect-ai") from error

NAME_ONLY = "__model_info_lookup__"  # inspect-ai's api_key of a provider that is made for its name alone


class FengineAPI(ai.ModelAPI):
    """Model arguments (`-M name=value`): `use_chat_template=false` gives the text of a single user message to the model
    as it is; `chat_template_args` are variables of the template (`enable_thinking`, too); `adapter` names that of
    `lora_paths` which answers; the rest are the arguments of `fengine.Engine` (`context_length`, `random_seed`,
    `chat_template` …). Errors at construction: ConfigError, UnknownParameterError, ModelLoadError and kinds,
    UnsupportedFeatureError."""

    def __init__(
        self, model_name: str, base_url: str | None = None, api_key: str | None = None,
        config: ai.GenerateConfig | None = None, use_chat_template: bool = True,
        chat_template_args: dict[str, Any] | None = None, enable_thinking: bool | None = None,
        adapter: str | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        config = ai.GenerateConfig() if config is None else config
        super().__init__(model_name=model_name, base_url=base_url, api_key=api_key, config=config)
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.chat_values = {**(chat_template_args or {}), **thinking}
        self.use_chat_template, self.adapter = use_chat_template, adapter
        self._drawn: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
        self._drawn_elsewhere: Counter[str] = Counter()
        self._engine: Engine | None = None
        if api_key == NAME_ONLY:
            return
        if base_url is not None or api_key is not None:
            raise UnsupportedFeatureError("fengine runs in this process: leave base_url and api_key out")
        if not isinstance(use_chat_template, bool):
            raise ConfigError(f"use_chat_template must be true or false, got {use_chat_template!r}")
        reads.sampling_of(config)
        self._engine = open_engine(model_name, "inspect-ai", settings, adapter)
        self._closer = weakref.finalize(self, self._engine.shutdown)  # at the latest when the process ends
        if use_chat_template and not self.engine.tokenizer.chat_templates:  # type: ignore[union-attr]
            self.close()
            remedy = "give -M chat_template=FILE, or -M use_chat_template=false"
            raise ConfigError(f"{model_name} has no chat template: {remedy}")

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise EngineClosedError("this provider was made for its name alone and has no engine")
        return self._engine

    def close(self) -> None:
        """Shuts the engine down. Idempotent."""
        if self._engine is not None:
            self._closer()

    # -- what inspect-ai asks about a provider -------------------------------------------------------------------------

    def max_tokens(self) -> int | None:
        return reads.DEFAULT_MAX_TOKENS

    def max_connections(self) -> int:
        """Without adaptive connections: as many as the engine runs together."""
        return int(self.engine.config.scheduler.max_running_requests or super().max_connections())

    def connection_key(self) -> str:
        return self.model_name

    def collapse_user_messages(self) -> bool:
        return True

    async def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    async def count_text_tokens(self, text: str) -> int:
        return len(await self.tokenize(text))

    @property
    def _tokenizer(self) -> Any:
        return self.engine.tokenizer

    # -- generate ------------------------------------------------------------------------------------------------------

    async def generate(
        self, input: list[ai.ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: ai.GenerateConfig
    ) -> ai.ModelOutput:
        """One call. A prompt that the context does not hold ends with the stop reason model_length. Errors:
        InvalidRequestError and kinds, UnsupportedFeatureError; AbortedError."""
        tools = [] if tool_choice == "none" else tools
        sampling, facts = reads.sampling_of(config), self._facts(tools, tool_choice)
        form = facts.form if tools else facts.channels
        if facts.hidden and (form is not None or facts.thinks):
            sampling = {"skip_special_tokens": False} | sampling
        try:
            ids = self._prompt(input, tools, config)
            asked = reads.DEFAULT_MAX_TOKENS if config.max_tokens is None else config.max_tokens
            room = self.engine.tokenizer_manager.context_len - len(ids)
            sampling |= {"max_new_tokens": min(asked, max(room, 0))}
            outputs = await self._ask(ids, sampling | self._seed(ids, sampling), config)
        except ContextLengthError as error:
            return ai.ModelOutput.from_content(self.model_name, str(error), "model_length", str(error))
        opened = facts.opened(self._tokenizer, ids)
        calls_before = sum(len(m.tool_calls or []) for m in input if m.role == "assistant")
        functions = [tool["function"] for tool in reads.tool_schemas(tools)]
        how: Any = {"thinks": True, "opened": opened, "functions": functions, "thought": facts.thinks}
        read = partial(parse_output, form=form, **how)
        call_id = lambda name, i: new_call_id(form, name, calls_before + i, str(calls_before + i))  # noqa: E731
        choices = [self._choice(output, config, read, room < asked, call_id) for output in outputs]
        written = sum(output["meta_info"]["completion_tokens"] for output in outputs)
        # Prompt tokens that were found in the prefix cache are not told apart: that would depend on the neighbours.
        usage = ai.ModelUsage(input_tokens=len(ids), output_tokens=written, total_tokens=len(ids) + written)
        return ai.ModelOutput(model=self.model_name, choices=choices, usage=usage)

    def _facts(self, tools: list[ToolInfo], choice: ToolChoice) -> TemplateFacts:
        """What the template in use teaches of outputs, how it writes calls if there are tools. Errors:
        UnsupportedFeatureError."""
        if tools and choice != "auto":
            raise UnsupportedFeatureError(f"tool_choice={choice!r} is not built: only a grammar could force a call")
        if not self.use_chat_template:
            if tools:
                raise UnsupportedFeatureError("tools need the chat template, and use_chat_template=false is set")
            return TemplateFacts()
        facts = template_facts(self._tokenizer, bool(tools))
        if tools and facts.form is None:
            told = "tools: the model's chat template describes no tools, or in a form whose calls are not read here"
            raise UnsupportedFeatureError(f"{told}; read are those of {', '.join(one.name for one in FORMATS)}")
        return facts

    def _prompt(self, input: list[ai.ChatMessage], tools: list[ToolInfo], config: ai.GenerateConfig) -> list[int]:
        if not self.use_chat_template:
            prompt = reads.raw_prompt(input)
            ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            if not ids:
                raise InvalidRequestError("the prompt is empty and this model has no bos token to start from")
            return ids
        messages = [reads.template_message(one, f"messages[{i}]") for i, one in enumerate(input)]
        values = {**self.chat_values, **((config.extra_body or {}).get("chat_template_kwargs") or {})}
        return self.engine.chat_ids(messages, reads.tool_schemas(tools) or None, chat_template_kwargs=values)

    def _seed(self, ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """Where none is given: a function of the engine's seed, of sample and epoch, of the call, and of how many equal
        calls the sample made before. So it does not depend on what else runs."""
        if "sampling_seed" in sampling:
            return {}
        active = sample_active()
        of = None if active is None else [active.sample.id, active.epoch]
        text = json.dumps([of, ids, sampling], sort_keys=True, default=str)
        counter = self._drawn_elsewhere if active is None else self._drawn.setdefault(active, Counter())
        count, counter[text] = counter[text], counter[text] + 1
        return {"sampling_seed": row_seed(self.engine.config.random_seed, text, count)}

    async def _ask(self, ids: list[int], sampling: dict[str, Any], config: ai.GenerateConfig) -> list[dict[str, Any]]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise UnsupportedFeatureError("fengine needs asyncio; leave INSPECT_ASYNC_BACKEND=trio out") from None
        found: Any = await self.engine.async_generate(
            input_ids=ids, sampling_params=sampling, lora_path=self.adapter, **reads.logprob_arguments(config)
        )
        outputs = found if isinstance(found, list) else [found]
        for output in outputs:
            finish = output["meta_info"]["finish_reason"]
            if finish["type"] == "abort":
                raise AbortedError(f"the request ended early: {finish['message']}")
        return outputs

    # -- results -------------------------------------------------------------------------------------------------------

    def _choice(
        self, output: dict[str, Any], config: ai.GenerateConfig, read: Callable[[str], Delta], filled: bool,
        call_id: Callable[[str, int], str],
    ) -> ai.ChatCompletionChoice:  # fmt: skip
        """`filled`: the context held fewer tokens than were allowed. `call_id`: of a name, and its place here."""
        meta = output["meta_info"]
        parsed = read(output["text"])
        thoughts, text = parsed.reasoning, parsed.beside_calls
        stop = "stop" if meta["finish_reason"]["type"] == "stop" else "model_length" if filled else "max_tokens"
        made = [
            ToolCall(call_id(name := call.name or "unknown", i), name, call.arguments, parse_error=call.problem)
            for i, call in enumerate(parsed.calls)
        ]
        content = [ai.ContentReasoning(reasoning=thoughts), ai.ContentText(text=text)] if thoughts else text
        message = ai.ChatMessageAssistant(
            content=content, tool_calls=made or None, model=self.model_name, source="generate"
        )
        written = slice(0, len(output["output_ids"]))
        prompt, several = config.prompt_logprobs is not None, config.prompt_logprobs or 0
        several = several if several > 1 else 0  # 1 asks for the prompt's own tokens only
        return ai.ChatCompletionChoice(
            message=message,
            stop_reason="tool_calls" if parsed.calls and stop == "stop" else stop,
            logprobs=self._logprobs(meta, "output", written, config.top_logprobs or 0) if config.logprobs else None,
            prompt_logprobs=self._logprobs(meta, "input", slice(1, None), several) if prompt else None,
        )

    def _logprobs(self, meta: dict[str, Any], side: str, part: slice, top: int) -> ai.Logprobs:
        """Those of the prompt lack its first token's, before which there is nothing."""
        tokens = meta[f"{side}_token_logprobs"][part]
        tops: list[Any] = meta[f"{side}_top_logprobs"][part] if top else [None] * len(tokens)
        content = []
        for (logprob, token, _), some in zip(tokens, tops, strict=True):
            told = some and [ai.TopLogprob(logprob=one, **self._token(other)) for one, other, _ in some[:top]]
            content.append(ai.Logprob(logprob=logprob, top_logprobs=told, **self._token(token)))
        return ai.Logprobs(content=content)

    def _token(self, token: int) -> dict[str, Any]:
        """A token as text and as bytes."""
        found = self._tokenizer.decoding.data(token)
        return {"token": found.decode("utf-8", "replace"), "bytes": list(found)}
