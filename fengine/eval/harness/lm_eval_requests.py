"""lm-eval's requests as calls of the engine: generation arguments as sampling parameters, and log-likelihoods of
continuations as prompts that are read. No torch.

The words of generation arguments are those of transformers' `generate`, in which lm-eval's tasks are written, beside
fengine's own. Of a context and its continuation all but the last token is fed, at most a window of it; the last one's
logprob is asked by its id. Continuations that differ in their last token only, single-letter choices say, share one
read."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fengine.api.generate_input import NOTHING_DRAWN
from fengine.core.request import derive_seed
from fengine.core.sampling_params import PARAMETERS
from fengine.core.scalars import flag, integer, number
from fengine.errors import InvalidRequestError, UnsupportedFeatureError
from fengine.eval.runs.manifest import row_seed

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given holds
# Other backends' words for fengine's.
SAME = {"min_tokens": "min_new_tokens"} | {row.openai: name for name, row in PARAMETERS.items() if row.openai}
# Words of transformers without an effect on what is drawn, and those that only one value is built of.
WITHOUT_EFFECT = ("use_cache", "early_stopping", "pad_token_id", "length_penalty")
ONLY = {"num_beams": 1, "num_return_sequences": 1, "n": 1}
NO_CHUNKS = 1 << 30  # a stream_interval: nothing is told of a request before its end


@dataclass(frozen=True, slots=True)
class Generation:
    """`sampling` lacks the seed and the stop strings, which depend on what else is known."""

    sampling: dict[str, Any]
    until: tuple[str, ...]
    max_gen_toks: int
    skip_special_tokens: bool


def generation_of(gen_kwargs: Any, eos: str | None, default_max: int) -> Generation:
    """The arguments of one request, checked as far as no engine is needed for it. Pure. Without `do_sample`, a
    temperature above 0 means sampling; with `do_sample=False` it is greedy whatever is said. Errors:
    InvalidRequestError, UnsupportedFeatureError."""
    if not isinstance(gen_kwargs, dict):
        raise InvalidRequestError(f"generation arguments must be a dict, got {type(gen_kwargs).__name__}")
    given = {key: value for key, value in gen_kwargs.items() if value is not None}
    until = _until([*_listed(given.pop("until", [])), *_listed(given.pop("stop", []))], eos)
    most = integer("max_gen_toks", [*(given.pop(name) for name in LENGTHS if name in given), default_max][0])
    if most < 1:
        raise InvalidRequestError(f"max_gen_toks must be at least 1, got {most}")
    if "max_length" in given:
        raise UnsupportedFeatureError("max_length counts the prompt, too, and is not built; give max_gen_toks")
    for name, value in ONLY.items():
        if given.pop(name, value) != value:
            raise UnsupportedFeatureError(f"{name} other than {value} is not built; leave it out")
    shown = flag("skip_special_tokens", given.pop("skip_special_tokens", True))
    sampling = {SAME.get(name) or name: value for name, value in given.items() if name not in WITHOUT_EFFECT}
    if not _draws(sampling.pop("do_sample", None), sampling):
        sampling["temperature"] = 0.0
    if sampling.get("top_k") == 0:  # transformers' word for off
        del sampling["top_k"]
    return Generation(sampling, until, most, shown)


def _draws(do_sample: Any, sampling: dict[str, Any]) -> bool:
    """Whether `do_sample`, or else the temperature, says that texts are drawn. Pure. Errors: InvalidRequestError."""
    if do_sample is not None:
        return flag("do_sample", do_sample)
    return "temperature" in sampling and number("temperature", sampling["temperature"]) > 0


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _until(texts: list[Any], eos: str | None) -> tuple[str, ...]:
    if any(not isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"until must be a string or a list of strings, got {texts!r:.200}")
    return tuple(dict.fromkeys(text for text in [*texts, *([eos] if eos else [])] if text))


def seeds(requests: Sequence[tuple[str, Any]], run_seed: int) -> Iterator[int]:
    """A seed for each (context, generation arguments): a function of both, of the run's seed, and of how many equal
    requests stand before it. So it depends on no batch, no order of tasks and no cache. Pure. A `seed` among the
    arguments is the first one's own, and the others' derive from it."""
    seen: Counter[str] = Counter()
    for context, gen_kwargs in requests:
        text = json.dumps([context, gen_kwargs], sort_keys=True, default=str)
        count, seen[text] = seen[text], seen[text] + 1
        own = gen_kwargs.get("seed", gen_kwargs.get("sampling_seed"))
        if own is None:
            yield row_seed(run_seed, text, count)
        else:
            own = integer("seed", own)
            yield derive_seed(own, count) if count else own


def cut_text(text: str, until: Sequence[str], think_end: str | None = None) -> str:
    """`text` behind the last `think_end`, up to the first of the stop strings. Pure."""
    if think_end:
        text = text.split(think_end)[-1].lstrip()
    for stop in until:
        text = text.partition(stop)[0]
    return text


@dataclass(frozen=True, slots=True)
class Continuation:
    """The continuation of request `index`: the fed tokens from `start` on, and `last`."""

    index: int
    start: int
    last: int


@dataclass(slots=True)
class PromptRead:
    """Token ids to be fed, and whose continuations end behind them."""

    ids: tuple[int, ...]
    continuations: list[Continuation] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The first fed position whose logprob is wanted; the number of fed tokens if none is."""
        return min(one.start for one in self.continuations)

    @property
    def lasts(self) -> list[int]:
        return sorted({one.last for one in self.continuations})


def plan(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], window: int) -> tuple[list[PromptRead], int]:
    """The reads that score each (context, continuation), in order, and how many contexts were cut from the left. At
    most `window` tokens are fed, as lm-eval's own backend for transformers does. A continuation of no tokens needs no
    read. Pure. Errors: InvalidRequestError (no context, a continuation that the window does not hold)."""
    reads: dict[tuple[int, ...], PromptRead] = {}
    cut = 0
    for index, (context, continuation) in enumerate(pairs):
        if not continuation:
            continue
        if not context:
            raise InvalidRequestError(f"request {index}: a continuation needs at least one token of context before it")
        if len(continuation) > window:
            raise InvalidRequestError(
                f"request {index}: the continuation has {len(continuation)} tokens, more than max_length={window}; "
                "score it with loglikelihood_rolling, which cuts it into windows"
            )
        whole = (*context, *continuation)[-(window + 1) :]
        cut += len(whole) < len(context) + len(continuation)
        read = reads.setdefault(whole[:-1], PromptRead(whole[:-1]))
        read.continuations.append(Continuation(index, len(whole) - len(continuation), whole[-1]))
    return list(reads.values()), cut


def arguments(reads: Sequence[PromptRead]) -> dict[str, Any]:
    """What `Engine.generate` is called with. Pure."""
    return {
        "input_ids": [list(read.ids) for read in reads],
        "sampling_params": dict(NOTHING_DRAWN),
        "return_logprob": True,
        "logprob_start_len": [read.start - 1 if read.start < len(read.ids) else -1 for read in reads],
        "top_logprobs_num": 1,
        "token_ids_logprob": [read.lasts for read in reads],
    }


def scores(read: PromptRead, meta: dict[str, Any]) -> Iterator[tuple[int, tuple[float, bool]]]:
    """(index, (sum of the continuation's logprobs, whether greedy decoding gives it)) of a read's `meta_info`. Pure. A
    sum is rounded once, so that it has the same bits in whatever company it was read, and in any version of Python."""
    inside = [logprob for logprob, _, _ in meta["input_token_logprobs"][1:]]
    likeliest = [top[0][1] for top in meta.get("input_top_logprobs", [])[1:]]
    behind = {token: logprob for logprob, token, _ in meta["output_token_ids_logprobs"][0]}
    drawn = meta["output_top_logprobs"][0][0][1]
    for one in read.continuations:
        skipped = one.start - read.start
        total = math.fsum([*inside[skipped:], behind[one.last]])
        greedy = drawn == one.last and likeliest[skipped:] == list(read.ids[one.start :])
        yield one.index, (total, greedy)
