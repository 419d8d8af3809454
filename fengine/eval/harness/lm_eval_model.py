"""`FengineLM`: fengine as a model of lm-evaluation-harness. The one file that imports `lm_eval` at its top."""

# pyright: reportMissingImports=false

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fengine.api.engine import Engine
from fengine.core.scalars import integer
from fengine.errors import AbortedError, ConfigError, InvalidRequestError, MissingExtraError
from fengine.eval.harness import lm_eval_requests as reads
from fengine.eval.harness.engine import Texts, engine_facts, open_engine, template_digest
from fengine.eval.harness.lm_eval_requests import NO_CHUNKS, Generation, cut_text, generation_of, seeds

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise MissingExtraError.of("FengineLM", "lm_eval", "lm-eval") from error

logger = logging.getLogger(__name__)
MOST = 1 << 16  # requests handed to the engine at a time; it runs as many together as memory allows
SIDES = ("left", "right", "middle")
PARTIAL = ("incremental_streaming_output", "stream_output")  # of an engine: a stream's last chunk is no whole output


class FengineLM(TemplateLM):
    """`lm_eval --model fengine --model_args pretrained=PATH,…`, or an object for `simple_evaluate(model=…)`.

    `pretrained` is what `Engine` takes as model_path, or a running Engine, which stays the caller's. Arguments that are
    not named here are those of `Engine` (fields of ServerArgs); `adapter` names the one of its `lora_paths` that
    answers. Errors: ConfigError, ModelLoadError and kinds, at once.
    """

    def __init__(
        self, pretrained: str | Engine, batch_size: int | str = "auto", max_batch_size: int | None = None,
        max_length: int | None = None, max_model_len: int | None = None, max_gen_toks: int = 256,
        add_bos_token: bool | None = None, prefix_token_id: int | None = None, tokenizer: str | None = None,
        truncation_side: str = "left", seed: int | None = None, enable_thinking: bool | None = None,
        chat_template_args: dict[str, Any] | None = None, think_end_token: str | int | None = None,
        adapter: str | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        named = {"tokenizer_path": tokenizer, "random_seed": seed, "max_running_requests": max_batch_size}
        settings |= {name: value for name, value in named.items() if value is not None}
        self._batch = batch_of(batch_size)
        if None not in (max_length, max_model_len):
            raise ConfigError("max_length and max_model_len mean the same; give one of them")
        if truncation_side not in SIDES:
            raise ConfigError(f"truncation_side must be one of {', '.join(SIDES)}, got {truncation_side!r}")
        self.think_end_token = _think_end(think_end_token, bool(enable_thinking))
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.enable_thinking, self.truncation_side = enable_thinking, truncation_side
        self.max_gen_toks, self.adapter = integer("max_gen_toks", max_gen_toks), adapter
        self.engine = self._open(pretrained, settings)
        assert self.engine.tokenizer is not None
        defaults = self.engine.server_args.default_chat_template_kwargs or {}
        prefix, values = prefix_token_id, {**defaults, **(chat_template_args or {}), **thinking}
        prefix = None if prefix is None else integer("prefix_token_id", prefix)
        self.texts = Texts(self.engine.tokenizer, add_bos_token, prefix, values)
        self.tokenizer = self.engine.tokenizer_manager.tokenizer
        self.max_length = self._window(max_length if max_model_len is None else max_model_len)

    def _open(self, pretrained: str | Engine, settings: dict[str, Any]) -> Engine:
        if str(settings.get("device")).startswith("cuda") and not torch.cuda.is_available():
            logger.warning("lm-eval asks for a CUDA device, which is its default; there is none, so the CPU is used")
            settings = settings | {"device": None}
        engine = open_engine(pretrained, "lm-eval", settings, self.adapter)
        if engine is not pretrained:
            self._closer = weakref.finalize(self, engine.shutdown)  # at the latest when the process ends
        if partial := [name for name in PARTIAL if getattr(engine.server_args, name)]:
            self.close()
            raise ConfigError(f"{partial[0]}: here whole outputs are read as they end; leave it out")
        return engine

    def _window(self, asked: int | None) -> int:
        """How many tokens are fed at most."""
        pool = self.engine.get_server_info()["max_total_num_tokens"]
        limit = min(self.engine.tokenizer_manager.context_len, pool - 1)
        window = limit if asked is None else integer("max_length", asked)
        if not 1 < window <= limit:
            self.close()
            raise ConfigError(f"max_length must be in [2, {limit}], which context and page pool hold; got {window}")
        return window

    def close(self) -> None:
        """Shuts the engine down, unless it is the caller's. Idempotent."""
        if closer := getattr(self, "_closer", None):
            closer()

    @property
    def eot_token_id(self) -> int | None:  # type: ignore[override]
        return self.texts.eot

    @property
    def prefix_token_id(self) -> int:
        return self.texts.first()

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **_: Any
    ) -> list[int]:
        ids = self.texts.encode(string, add_special_tokens)
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    @property
    def tokenizer_name(self) -> str:
        """Of the tokenizer and its chat template: lm-eval's caches of rendered requests go by it."""
        args = self.engine.server_args
        name = str(args.tokenizer_path or args.model_path).replace("/", "__")
        return f"{name}__{template_digest(self.tokenizer.chat_template)}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.texts.template(chat_template)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.texts.chat(chat_history, add_generation_prompt)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        if self.enable_thinking:
            raise InvalidRequestError("enable_thinking=True is for tasks that generate; it cannot score continuations")
        for i, request in enumerate(requests):
            context, continuation = request.args
            if context == "" and not self.tok_encode(continuation, add_special_tokens=False):
                raise InvalidRequestError(f"request {i}: there is nothing to score in {continuation!r}")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        todo, cut = reads.plan([(context, continuation) for _, context, continuation in requests], self.max_length)
        if cut:
            logger.warning(
                f"{cut} of {len(requests)} requests are longer than max_length={self.max_length}; their contexts are "
                "cut from the left."
            )
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)  # of a continuation of no tokens
        for read, output in self._results("loglikelihood", todo, reads.arguments, disable_tqdm):
            for position, answer in reads.scores(read, output["meta_info"]):
                found[position] = answer
                if requests[position][0] is not None:  # a window of a document is cached with its document
                    self.cache_hook.add_partial("loglikelihood", requests[position][0], answer)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole documents, in lm-eval's own windows."""
        windows, ends = [], []
        for (document,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(self.tok_encode(document), self.prefix_token_id, self.max_length, 1)
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            ends.append(len(windows))
        scored = [score for score, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        found = []
        for request, start, end in zip(requests, [0, *ends], ends, strict=False):
            found.append(math.fsum(scored[start:end]))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts, each up to its first stop string. Errors: those of `Engine.generate`, before anything of a batch runs;
        AbortedError for a request that failed by itself."""
        eos = None if self.texts.eot is None else self.tok_decode([self.texts.eot], skip_special_tokens=False)
        asked = [generation_of(request.args[1], eos, self.max_gen_toks) for request in requests]
        prompts = [
            self._cut(self.tok_encode(request.args[0]), one) for request, one in zip(requests, asked, strict=True)
        ]
        drawn_with = list(seeds([request.args for request in requests], self.engine.config.random_seed))
        found = [""] * len(requests)

        def arguments(batch: Sequence[int]) -> dict[str, Any]:
            sampling = [self._sampling(asked[i], eos, drawn_with[i]) for i in batch]
            return {"input_ids": [prompts[i] for i in batch], "sampling_params": sampling}

        for i, output in self._results("generate_until", range(len(requests)), arguments, disable_tqdm):
            found[i] = self._text(output["output_ids"], asked[i])
            self.cache_hook.add_partial("generate_until", requests[i].args, found[i])
        return found

    def _cut(self, ids: list[int], asked: Generation) -> list[int]:
        """A prompt that leaves room for what is to be drawn."""
        room = self.max_length - asked.max_gen_toks
        if room < 1:
            raise InvalidRequestError(
                f"max_gen_toks={asked.max_gen_toks} leaves a prompt no room in max_length={self.max_length}; lower it"
            )
        if len(ids) <= room:
            return ids
        logger.warning(
            f"A prompt of {len(ids)} tokens and max_gen_toks={asked.max_gen_toks} exceed max_length={self.max_length}; "
            f"the prompt is cut to {room} tokens, side {self.truncation_side}."
        )
        if self.truncation_side == "middle":
            return ids[: room // 2] + ids[len(ids) - (room - room // 2) :]
        return ids[-room:] if self.truncation_side == "left" else ids[:room]

    def _sampling(self, asked: Generation, eos: str | None, seed: int) -> dict[str, Any]:
        """Special tokens are shown to the stop strings, which may be such. A task's stop strings often stand inside of
        thoughts; with `think_end_token` they cut the answer only."""
        stop = [text for text in asked.until if self.think_end_token is None or text == eos]
        own = {"max_new_tokens": asked.max_gen_toks, "stop": stop, "sampling_seed": seed}
        return asked.sampling | own | {"skip_special_tokens": False, "stream_interval": NO_CHUNKS}

    def _text(self, ids: list[int], asked: Generation) -> str:
        end = self.think_end_token
        if isinstance(end, int):
            behind = next((i + 1 for i in range(len(ids) - 1, -1, -1) if ids[i] == end), 0)
            text = self.tok_decode(ids[behind:], asked.skip_special_tokens).lstrip()
            return cut_text(text, asked.until)
        return cut_text(self.tok_decode(ids, asked.skip_special_tokens), asked.until, end)

    def _results(
        self, what: str, items: Sequence[Any], arguments: Callable[[Any], dict[str, Any]], disable_tqdm: bool
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """(item, output) of every item, as they finish, batch by batch; `arguments` asks for those of one."""
        with tqdm(total=len(items), disable=disable_tqdm, desc=f"Running {what} requests") as bar:
            for start in range(0, len(items), self._batch):
                batch = items[start : start + self._batch]
                chunks: Any = self.engine.generate(**arguments(batch), lora_path=self.adapter, stream=True)
                for output in chunks:
                    finish = output["meta_info"]["finish_reason"]
                    if finish is not None and finish["type"] == "abort":
                        raise AbortedError(f"request {output['index']} of the batch ended early: {finish['message']}")
                    if finish is not None:
                        yield batch[output["index"]], output
                        bar.update()

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside the results: model, weights and engine, which tell one run from another."""
        return engine_facts(self.engine, self.adapter)


def _think_end(token: str | int | None, needed: bool) -> str | int | None:
    """The token behind which the answer stands, as text or id. Pure. Errors: ConfigError if it is not given."""
    if needed and token is None:
        raise ConfigError("enable_thinking needs think_end_token, behind which the answer stands, such as </think>")
    return int(token) if isinstance(token, str) and token.isdecimal() else token


def batch_of(value: Any) -> int:
    """How many requests are handed over together. lm-eval's default of 1 means all, like "auto": no result depends on
    it. Pure. Errors: ConfigError."""
    if isinstance(value, str) and value.partition(":")[0] == "auto":
        return MOST
    size = int(value) if str(value).isdecimal() else 0
    if size < 1:
        raise ConfigError(f'batch_size must be "auto" or at least 1, got {value!r}')
    return MOST if size == 1 else size
