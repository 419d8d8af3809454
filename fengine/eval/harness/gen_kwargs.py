"""lm-eval's generation arguments as sampling parameters, and what becomes of the text. No torch.

The words are those of transformers' `generate`, in which lm-eval's tasks are written, beside fengine's own.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
    """The arguments of one request, checked as far as no engine is needed for it. Pure.

    Without `do_sample`, a temperature above 0 means sampling; with `do_sample=False` it is greedy whatever is said.
    Errors: InvalidRequestError, UnsupportedFeatureError.
    """
    if not isinstance(gen_kwargs, dict):
        raise InvalidRequestError(f"generation arguments must be a dict, got {type(gen_kwargs).__name__}")
    given = {key: value for key, value in gen_kwargs.items() if value is not None}
    until = _until([*_listed(given.pop("until", [])), *_listed(given.pop("stop", []))], eos)
    longest = [given.pop(name) for name in LENGTHS if name in given]
    most = integer("max_gen_toks", longest[0] if longest else default_max)
    if most < 1:
        raise InvalidRequestError(f"max_gen_toks must be at least 1, got {most}")
    if "max_length" in given:
        raise UnsupportedFeatureError("max_length counts the prompt, too, and is not built; give max_gen_toks")
    for name, value in ONLY.items():
        if given.pop(name, value) != value:
            raise UnsupportedFeatureError(f"{name} other than {value} is not built; leave it out")
    shown = flag("skip_special_tokens", given.pop("skip_special_tokens", True))
    sampling = {SAME.get(name) or name: value for name, value in given.items() if name not in WITHOUT_EFFECT}
    do_sample = sampling.pop("do_sample", None)
    if do_sample is not None:
        do_sample = flag("do_sample", do_sample)
    elif "temperature" in sampling:
        do_sample = number("temperature", sampling["temperature"]) > 0
    if not do_sample:
        sampling["temperature"] = 0.0
    if sampling.get("top_k") == 0:  # transformers' word for off
        del sampling["top_k"]
    return Generation(sampling, until, most, shown)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _until(texts: list[Any], eos: str | None) -> tuple[str, ...]:
    if any(not isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"until must be a string or a list of strings, got {texts!r:.200}")
    return tuple(dict.fromkeys(text for text in [*texts, *([eos] if eos else [])] if text))


def seeds(requests: Sequence[tuple[str, Any]], run_seed: int) -> Iterator[int]:
    """A seed for each (context, generation arguments): a function of both, of the run's seed, and of how many equal
    requests stand before it. So it depends on no batch, no order of tasks and no cache. Pure.

    A `seed` among the arguments is the first one's own, and the others' derive from it.
    """
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
