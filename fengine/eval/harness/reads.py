"""Log-likelihoods of continuations as prompts that are read: what is fed, and what of the result is whose. No torch.

Of a context and its continuation all but the last token is fed, at most a window of it; the last one's logprob is asked
by its id. Continuations that differ in their last token only, single-letter choices say, share one read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fengine.errors import InvalidRequestError

NO_NEW_TOKENS = {"max_new_tokens": 0, "temperature": 0.0}


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
    """The reads that score each (context, continuation), in order, and how many contexts were cut from the left.

    At most `window` tokens are fed, as lm-eval's own backend for transformers does. A continuation of no tokens needs
    no read. Pure. Errors: InvalidRequestError (no context, a continuation that the window does not hold).
    """
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
        "sampling_params": dict(NO_NEW_TOKENS),
        "return_logprob": True,
        "logprob_start_len": [read.start - 1 if read.start < len(read.ids) else -1 for read in reads],
        "top_logprobs_num": 1,
        "token_ids_logprob": [read.lasts for read in reads],
    }


def scores(read: PromptRead, meta: dict[str, Any]) -> Iterator[tuple[int, tuple[float, bool]]]:
    """(index, (sum of the continuation's logprobs, whether greedy decoding gives it)) of a read's `meta_info`. Pure.

    A sum goes left to right in float64, so that it has the same bits in whatever company it was read.
    """
    inside = [logprob for logprob, _, _ in meta["input_token_logprobs"][1:]]
    likeliest = [top[0][1] for top in meta.get("input_top_logprobs", [])[1:]]
    behind = {token: logprob for logprob, token, _ in meta["output_token_ids_logprobs"][0]}
    drawn = meta["output_top_logprobs"][0][0][1]
    for one in read.continuations:
        skipped = one.start - read.start
        total = sum(inside[skipped:]) + behind[one.last]
        greedy = drawn == one.last and likeliest[skipped:] == list(read.ids[one.start :])
        yield one.index, (total, greedy)
