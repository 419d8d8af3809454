"""One `Ask` to calls of the engine, and their results back to one `Answer`. No torch."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fengine.errors import ContextLengthError, InvalidRequestError
from fengine.eval.tasks.task import Answer, Ask, Pair

NO_NEW_TOKENS = {"max_new_tokens": 0, "temperature": 0.0}


@dataclass(frozen=True)
class Scored:
    """Ids to be read, of which those from `start` (at least 1) on are scored."""

    ids: list[int]
    start: int


class Asker:
    """Asks one engine. `max_input` is the longest prompt that it takes, in tokens; `top_logprobs`, how many of the
    likeliest tokens are wanted beside each one; `adapter`, the LoRA adapter of all asks."""

    def __init__(
        self, engine: Any, top_logprobs: int = 0, max_input: int | None = None, adapter: str | None = None
    ) -> None:
        """`max_input` None: the engine's."""
        self.engine, self.tokenizer = engine, engine.tokenizer
        self._options: dict[str, Any] = {"return_logprob": True} | (
            {"top_logprobs_num": top_logprobs} if top_logprobs else {}
        )
        if adapter is not None:
            self._options["lora_path"] = adapter
        self._max_input = max_input

    async def ask(
        self, ask: Ask, sampling: dict[str, Any], seen: Callable[[str], None] | None = None
    ) -> tuple[Answer, list[dict[str, Any]]]:
        """The answer, and the `meta_info` of the calls that it took; `seen` gets a text as it grows.

        Errors: those of `Engine.async_generate`.
        """
        if ask.kind == "generate":
            return await self._generate(ask, sampling, seen)
        if ask.continuation is None:
            raise InvalidRequestError(f"an ask of kind {ask.kind} needs a continuation")
        parts = [self._joined(ask)] if ask.kind == "loglikelihood" else self._windows(ask)
        outputs = await asyncio.gather(*(self.read(part) for part in parts))
        ids = [token for part in parts for token in part.ids[part.start :]]
        logprobs = [entry[0] for out in outputs for entry in out["meta_info"]["input_token_logprobs"][1:]]
        assert len(logprobs) == len(ids)
        text = ask.continuation if isinstance(ask.continuation, str) else ""
        metas = [out["meta_info"] for out in outputs]
        tops = [out["meta_info"].get("input_top_logprobs", [None])[1:] for out in outputs]
        return Answer(
            text, ids, logprobs, metas[-1]["finish_reason"], _pairs(top for part in tops for top in part)
        ), metas

    async def _generate(
        self, ask: Ask, sampling: dict[str, Any], seen: Callable[[str], None] | None
    ) -> tuple[Answer, list[dict[str, Any]]]:
        prompt = {"prompt": ask.prompt} if isinstance(ask.prompt, str) else {"input_ids": ask.prompt}
        call: dict[str, Any] = {"sampling_params": sampling, **self._options, **prompt}
        if seen is None:
            output = await self.engine.async_generate(**call)
        else:
            output = {}
            async for output in await self.engine.async_generate(**call, stream=True):
                seen(output.get("text", ""))
        meta = output["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]][: len(output["output_ids"])]
        top = _pairs(meta.get("output_top_logprobs", [])[: len(logprobs)])
        return Answer(output.get("text", ""), output["output_ids"], logprobs, meta["finish_reason"], top), [meta]

    async def read(self, part: Scored) -> dict[str, Any]:
        """The engine's output for ids that are only read; those scored are `input_token_logprobs` from its second."""
        return await self.engine.async_generate(
            input_ids=part.ids, sampling_params=NO_NEW_TOKENS, logprob_start_len=part.start - 1, **self._options
        )

    def _joined(self, ask: Ask) -> Scored:
        """Prompt and continuation as the ids of the joined text; scored from the first id that the prompt lacks."""
        prompt, after = ask.prompt, ask.continuation
        assert after is not None
        if isinstance(prompt, str) and isinstance(after, str):
            before, whole = self.tokenizer.encode(prompt), self.tokenizer.encode(prompt + after)
            start = common(before, whole)
        else:
            before = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            whole = [*before, *self._bare(after)]
            start = len(before)
        if start == 0:
            whole, start = [self._first(), *whole], 1
        if start >= len(whole):
            raise InvalidRequestError("the continuation has no tokens of its own behind the prompt")
        return Scored(whole, start)

    def _windows(self, ask: Ask) -> list[Scored]:
        """A document in parts that the context holds: each begins with a token that an earlier one has scored, or with
        the one that begins texts, and looks back as far as it can."""
        assert ask.continuation is not None
        if ask.prompt:
            raise InvalidRequestError("an ask of kind rolling takes no prompt")
        ids = [self._first(), *self._bare(ask.continuation)]
        if len(ids) < 2:
            raise InvalidRequestError("the document has no tokens")
        limit, parts, done = self.max_input, [], 1
        if limit < 2:
            raise ContextLengthError(f"the context holds {limit} tokens; scoring a document needs at least 2")
        while done < len(ids):
            end = min(len(ids), limit if done == 1 else done + limit - 1)
            begin = max(0, end - limit)
            parts.append(Scored(ids[begin:end], done - begin))
            done = end
        return parts

    def ids_of(self, prompt: str | list[int]) -> list[int]:
        """A prompt's ids, as the engine has them."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return ids or [self._first()]

    @property
    def max_input(self) -> int:
        if self._max_input is None:
            self._max_input = int(self.engine.get_server_info()["max_req_input_len"])
        return self._max_input

    def _bare(self, text: str | list[int]) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else list(text)

    def _first(self) -> int:
        """The id that stands before a text's first: the tokenizer's bos, else its first eos."""
        if self.tokenizer.bos_id is not None:
            return self.tokenizer.bos_id
        if not self.tokenizer.eos_ids:
            raise InvalidRequestError("the tokenizer has neither bos nor eos to stand before a text's first token")
        return min(self.tokenizer.eos_ids)


def _pairs(tops: Iterable[Sequence[Sequence[Any]] | None]) -> list[list[Pair]] | None:
    """The engine's (logprob, id, text) of the likeliest tokens at each place, without texts; None if there are none."""
    return [[(entry[0], entry[1]) for entry in top or ()] for top in tops] or None


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids both begin with. Pure."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
