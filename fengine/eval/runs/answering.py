"""One row asked, answered and scored: a task's `Ask`s as calls of the engine, and the row's record. No torch."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fengine.api.generate_input import NOTHING_DRAWN
from fengine.core.request import derive_seed
from fengine.core.sampling_params import RECOMMENDED
from fengine.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    InputFileError,
    InvalidRequestError,
    StorageError,
)
from fengine.eval.runs.config import EvalConfig, RunConfig, SamplingConfig
from fengine.eval.runs.journal import MAX_LINE
from fengine.eval.runs.manifest import row_seed
from fengine.eval.runs.record import Record, common, line_of, row_record
from fengine.eval.tasks.task import DRAWN, Answer, Ask, Pair, Row, Task, judging
from fengine.eval.tasks.task_config import Format
from fengine.server.template_facts import TemplateFacts, parser_of, thought_facts

UNSET = SamplingConfig()
MAX_RECORD = MAX_LINE - 1024  # bytes; beside it there is the head
FATAL = (EngineDeadError, EngineClosedError, StorageError)  # not a row's own
Watcher = Callable[[str], None]  # gets a text as it grows


def given_sampling(config: RunConfig | EvalConfig) -> dict[str, Any]:
    """The sampling parameters that a config demands. Pure."""
    open_ = {"max_new_tokens", *(RECOMMENDED if config.engine.model.sampling_defaults == "model" else ())}
    params = config.sampling.as_dict()
    return {name: value for name, value in params.items() if name not in open_ or value != getattr(UNSET, name)}


def sampling_of(config: EvalConfig, ask: Ask, row_id: str, sample: int) -> dict[str, Any]:
    """The sampling parameters of one ask: the run's, the ask's over them, and the seed; a judge's are its own. Pure.
    Defaults are left to the engine where it has its own: max_new_tokens, which it then fits to the context, and what
    the model recommends. Another value is a demand."""
    params = ask.sampling.copy() if ask.kind == "judge" else given_sampling(config) | ask.sampling
    own, plain = params.get("sampling_seed"), config.task.format is Format.prompts  # as Engine(random_seed=seed) does
    if own is None:
        own = derive_seed(config.seed, int(row_id)) if plain else row_seed(config.seed, row_id, sample)
    elif sample and ask.kind != "judge":  # as the samples of one request
        own = derive_seed(own, sample)
    return params | {"sampling_seed": own}


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
        self.engine, self.tokenizer, self._max_input = engine, engine.tokenizer, max_input
        options = {"top_logprobs_num": top_logprobs or None, "lora_path": adapter}
        self._options = {"return_logprob": True} | {name: v for name, v in options.items() if v is not None}

    async def ask(
        self, ask: Ask, sampling: dict[str, Any], watcher: Watcher | None = None
    ) -> tuple[Answer, list[dict[str, Any]]]:
        """The answer, and the `meta_info` of the calls that it took; `watcher` gets a text as it grows. Errors: those
        of `Engine.async_generate`."""
        if ask.kind in DRAWN:
            return await self._generate(ask, sampling, watcher)
        if ask.continuation is None:
            raise InvalidRequestError(f"an ask of kind {ask.kind} needs a continuation")
        parts = [self._joined(ask)] if ask.kind == "loglikelihood" else self._windows(ask)
        outputs = await asyncio.gather(*(self.read(part) for part in parts))
        ids = [token for part in parts for token in part.ids[part.start :]]
        logprobs = [entry[0] for out in outputs for entry in out["meta_info"]["input_token_logprobs"][1:]]
        assert len(logprobs) == len(ids)
        text = ask.continuation if isinstance(ask.continuation, str) else ""
        metas = [out["meta_info"] for out in outputs]
        tops = _pairs(top for meta in metas for top in meta.get("input_top_logprobs", [None])[1:])
        return Answer(text, ids, logprobs, metas[-1]["finish_reason"], tops), metas

    async def _generate(
        self, ask: Ask, sampling: dict[str, Any], watcher: Watcher | None
    ) -> tuple[Answer, list[dict[str, Any]]]:
        if sampling.get("n") not in (None, 1):
            told = "an ask has one answer; fengine eval task.samples=N draws several"
            raise InvalidRequestError(f"n={sampling['n']!r:.80}: {told}")
        prompt = {"prompt": ask.prompt} if isinstance(ask.prompt, str) else {"input_ids": ask.prompt}
        call: dict[str, Any] = {"sampling_params": sampling, **self._options, **prompt}
        call |= {"lora_path": ask.adapter} if ask.kind == "judge" else {}
        call |= {"image_data": list(ask.images)} if ask.images else {}
        if watcher is None:
            output = await self.engine.async_generate(**call)
        else:
            output = {}
            async for output in await self.engine.async_generate(**call, stream=True):
                watcher(output.get("text", ""))
        meta = output["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]][: len(output["output_ids"])]
        top = _pairs(meta.get("output_top_logprobs", [])[: len(logprobs)])
        shown = meta.get("pixels_sha256")
        return Answer(output.get("text", ""), output["output_ids"], logprobs, meta["finish_reason"], top, shown), [meta]

    async def read(self, part: Scored, ask: Ask | None = None) -> dict[str, Any]:
        """The engine's output for ids that are only read; those scored are the last of `input_token_logprobs`. `ask`:
        whose prompt they begin with, its images in it; a judge's adapter reads them in place of the run's."""
        options = self._options | ({"lora_path": ask.adapter} if ask and ask.kind == "judge" else {})
        options |= {"image_data": list(ask.images)} if ask and ask.images else {}
        return await self.engine.async_generate(
            input_ids=part.ids, sampling_params=NOTHING_DRAWN, logprob_start_len=part.start - 1, **options
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
            end = min(len(ids), done + limit - 1)
            begin = max(0, end - limit)
            parts.append(Scored(ids[begin:end], done - begin))
            done = end
        return parts

    def marked(self, ask: Ask, sampling: dict[str, Any]) -> dict[str, Any]:
        """The sampling parameters of an answer in which `without_thoughts` finds thoughts by special tokens. Pure."""
        facts = self._thoughts_of(ask)
        return sampling | {"skip_special_tokens": False} if facts.channels or facts.hidden else sampling

    def without_thoughts(self, ask: Ask, answer: Answer) -> Answer:
        """The answer that is scored: of a chat with a thinking model what follows the thoughts. Pure."""
        facts = self._thoughts_of(ask)
        if isinstance(ask.prompt, str) or not (facts.thinks or facts.channels):
            return answer
        return replace(answer, text=parser_of(self.tokenizer, ask.prompt).feed(answer.text, last=True).content)

    def _thoughts_of(self, ask: Ask) -> TemplateFacts:
        """How the answer may hold thoughts: to a chat, which is ids here, as the template says. Pure."""
        return TemplateFacts() if ask.kind not in DRAWN or isinstance(ask.prompt, str) else self._template

    @cached_property
    def _template(self) -> TemplateFacts:
        return TemplateFacts() if self.tokenizer is None else thought_facts(self.tokenizer)

    def ids_of(self, prompt: str | list[int]) -> list[int]:
        """A prompt's ids, as the engine has them."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return ids or [self._first()]

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The sampling parameters that hold where a request gives none: the model's, if the engine goes by them."""
        told = self.engine.config.model.sampling_defaults
        return {"temperature": 1.0} | (json.loads(told) if told.startswith("{") else {})

    @cached_property
    def max_input(self) -> int:
        return self._max_input or int(self.engine.get_server_info()["max_req_input_len"])

    def _bare(self, text: str | list[int]) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else list(text)

    def _first(self) -> int:
        """The id that stands before a text's first: the tokenizer's bos, else its first eos."""
        if self.tokenizer.bos_id is not None:
            return self.tokenizer.bos_id
        if not self.tokenizer.eos_ids:
            raise InvalidRequestError("the tokenizer has neither bos nor eos to stand before a text's first token")
        return min(self.tokenizer.eos_ids)


async def answer_row(
    asker: Asker, config: EvalConfig, task: Task, row: Row, metas: list[dict[str, Any]], watcher: Watcher | None = None
) -> tuple[Record, bytes]:
    """The row's record, asked and scored, and its line; `watcher` gets the first answer's text while it grows.
    Modifies: metas, to the `meta_info` of every call. Errors: those of the engine, and whatever the task makes of
    it."""
    asks, answers, seeds, scored = list[Ask](), list[Answer](), list[int](), list[Answer]()
    wanted = task.asks(row)
    for again in (True, False):  # what is asked, then what is asked about the answers
        params = [sampling_of(config, ask, row.id, i) for i, ask in enumerate(wanted, len(asks))]
        if config.task.format is not Format.prompts:  # of which nothing is scored
            params = list(map(asker.marked, wanted, params))
        watched = [None if asks else watcher, *[None] * len(wanted)][: len(wanted)]
        results = await asyncio.gather(*map(asker.ask, wanted, params, watched))
        metas += [meta for _, several in results for meta in several]
        asks += wanted
        answers += [answer for answer, _ in results]
        seeds += [one["sampling_seed"] for one in params]
        scored = list(map(asker.without_thoughts, asks, answers))
        wanted = judging(task, row, scored) if again else []
    record = row_record(row, asks, answers, seeds, task.score(row, scored))
    line = line_of(record)  # a score that is no JSON is the row's failure
    if len(line) > MAX_RECORD:
        raise InputFileError(
            f"the row's record would have {len(line):,} bytes, at most {MAX_RECORD:,} are kept; ask for less"
        )
    return record, line


def _pairs(tops: Iterable[Sequence[Sequence[Any]] | None]) -> list[list[Pair]] | None:
    """The engine's (logprob, id, text) of the likeliest tokens at each place, without texts; None if there are none."""
    return [[(entry[0], entry[1]) for entry in top or ()] for top in tops] or None
