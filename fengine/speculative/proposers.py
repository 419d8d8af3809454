"""Who proposes drafts, as a configuration says: n-grams, a model, or a model where n-grams have nothing."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fengine.config import Algorithm, EngineConfig
from fengine.core.request import Drafting
from fengine.core.speculation import Ask, Proposer, Speculation, settle
from fengine.errors import ConfigError
from fengine.models import eagle3
from fengine.models.kv_state import Params
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import param_bytes
from fengine.speculative.chain import Head
from fengine.speculative.draft import DraftModel
from fengine.speculative.heads import EagleHead, SmallModel
from fengine.speculative.ngram import ngram_proposer
from fengine.speculative.pace import WAIT, Cost, Pace
from fengine.worker.device import device_of
from fengine.worker.hub import resolve_model
from fengine.worker.kv_pool import kv_bytes_per_token
from fengine.worker.safetensors_file import read_config

logger = logging.getLogger("fengine")
LONG_COPY = 4  # tokens: what follows a shorter one a model knows better
VERIFY = {"cuda": 0.04, "cpu": 0.2}  # what one more token adds to a short step, in steps of one token
EXPERTS = 0.5  # so does one that reads experts of its own
EXPERT_ROWS = 8  # beyond it rows of experts have no drafts
HOST = 0.45  # milliseconds of the host in a try, for which the device waits
TOLL, CROWD = 2.0, 0.05  # of the wait: what a try takes of each row beside others, and more for each of them
DEAR = 0.5  # of a step: the most that a guess is held to take
LEAST_GUESS = 0.02  # of a step, however small the draft is
STEP, LAYER, GUESS = 0.11, 0.03, 0.06  # milliseconds on one H200: of a step beside its layers, of one, of a guess
RATE = 4.3e9  # bytes of weights in a millisecond there


class Memo(NamedTuple):
    """A request's record with each proposer, and in `last` that of whose drafts are in flight."""

    ngram: Drafting
    model: Drafting
    last: list[Drafting]


def first_of(ngram: Proposer, model: Proposer) -> Proposer:
    """What n-grams propose, else what the model does. Modifies: `Drafting.memo`, a `Memo`."""

    def propose(asks: Sequence[Ask]) -> list[list[int]]:
        for ask in asks:
            drafting = ask.drafting
            if drafting.memo is None:
                drafting.memo = Memo(Drafting(), Drafting(gain=drafting.gain), [])
            elif drafting.last is not None and drafting.memo.last:
                settle(drafting.memo.last[0], *drafting.last)
            drafting.last = None
        memos: list[Memo] = [ask.drafting.memo for ask in asks]
        found = [list(p) for p in ngram([a._replace(drafting=m.ngram) for a, m in zip(asks, memos, strict=True)])]
        left = [i for i, proposal in enumerate(found) if not proposal]
        more = model([asks[i]._replace(drafting=memos[i].model) for i in left]) if left else []
        for i, proposal in zip(left, more, strict=True):
            found[i] = list(proposal)
        for i, (ask, memo) in enumerate(zip(asks, memos, strict=True)):
            memo.last[:] = [memo.model if i in left else memo.ngram]
            told = memo.model
            ask.drafting.try_from, ask.drafting.gain, ask.drafting.hope_from = told.try_from, told.gain, told.hope_from
            ask.drafting.rest_until = min(memo.ngram.rest_until, memo.model.rest_until)
        return found

    return propose


def speculation_of(config: EngineConfig, target: ModelSpec, params: Params) -> Speculation | None:
    """What a resolved configuration asks for; None: no drafts. Loads the draft, if there is one.

    `params`: the target's. Errors: ConfigError, ModelLoadError and its kinds.
    """
    drafts = config.speculation
    if drafts.algorithm is Algorithm.none:
        return None
    assert drafts.num_draft_tokens is not None and drafts.step_tokens is not None, "`resolve` has run"
    most, tokens = drafts.num_draft_tokens - 1, drafts.step_tokens
    ngram = ngram_proposer(drafts.ngram_min_match, drafts.ngram_max_match)
    if drafts.algorithm is Algorithm.ngram:
        return Speculation(ngram, most, tokens, target.vocab_size)
    head = _head(config, target, params)
    layers = head.feature_layers
    kv_dtype = params["final_norm_D"].dtype  # on a CPU float32
    cost = _cost(config, head, target, params, most)
    hope = Pace(most, cost)
    if not hope.size:
        return Speculation(ngram, most, tokens, target.vocab_size, 1 << 30 if drafts.ngram_first else 0)
    rows = max(min(tokens // 2, EXPERT_ROWS if target.experts else tokens), 1)
    model = DraftModel(
        head, kv_dtype, config.cache.page, most, cost, rows,
        config.compile.cuda_graph and device_of(config) != "cpu",
    )  # fmt: skip
    least = max(drafts.ngram_min_match, LONG_COPY)
    both = first_of(ngram_proposer(least, max(drafts.ngram_max_match, least)), model)
    return Speculation(
        both if drafts.ngram_first else model, most, tokens, target.vocab_size, rows + 1,
        waits=True, mixed=drafts.ngram_first, hope=hope.gain, toll=cost.toll, crowd=cost.crowd, open=model.open,
        warm_up=model.warm_up, release=model.release, reveal=None if drafts.ngram_first else model.reveal,
        go_ahead=model.go_ahead, feature_layers=layers,
        kv_bytes=kv_bytes_per_token(head.spec, kv_dtype) + len(layers) * target.hidden_size * kv_dtype.itemsize,
    )  # fmt: skip


def _cost(config: EngineConfig, head: Head, target: ModelSpec, params: Params, most: int) -> Cost:
    """Of a try: by bytes that are read and layers, so that it is the same at every start. On a CPU a draft that is too
    dear for any guess to pay was asked for all the same: it goes on where it is right, and rests where it is not."""
    if not config.speculation.adaptive:
        return Cost()
    kind = "cpu" if device_of(config) == "cpu" else "cuda"
    step, guess = times_of(kind, (head.bytes, head.spec.num_layers), (param_bytes(params), target.num_layers))
    guess = max(guess / step, LEAST_GUESS)
    wait = WAIT if kind == "cpu" else max(WAIT, HOST / step)
    cost = Cost(guess + (EXPERTS if target.experts else VERIFY[kind]), wait, TOLL * wait + guess, CROWD * wait)
    if Pace(most, cost).size:
        return cost
    logger.warning(
        "a guess of speculation.draft takes %.2f of a step here, and a try %.2f more: more than they can bring; "
        "speculation.adaptive=false tries it all the same", cost.guess, wait,
    )  # fmt: skip
    return cost if target.experts or kind == "cuda" else Cost(DEAR)


def times_of(kind: str, draft: tuple[int, int], target: tuple[int, int]) -> tuple[float, float]:
    """What a step and a guess take, in milliseconds or, on a CPU, bytes: by bytes of weights and layers of both. Pure.
    On CUDA small layers wait for their launches, not for bytes."""
    if kind == "cpu":
        return max(target[0], 1), draft[0]
    step, guess = (max(LAYER * layers, size / RATE) for size, layers in (target, (draft[0], draft[1] - 1)))
    return STEP + step, GUESS + guess


def _head(config: EngineConfig, target: ModelSpec, params: Params) -> Head:
    drafts = config.speculation
    assert drafts.draft is not None, "`check` has run"
    directory: Path = resolve_model(drafts.draft, cache_dir=config.model.download_dir)
    hf_config: Config = eagle3.flat(read_config(directory))
    eagle = eagle3.is_head(hf_config)
    if eagle != (drafts.algorithm is Algorithm.eagle3):
        raise ConfigError(
            f"speculation.draft {drafts.draft!r} has architectures {hf_config.get('architectures')!r}: "
            f"use speculation.algorithm={'eagle3' if eagle else 'standalone'}"
        )
    return (
        EagleHead(directory, hf_config, target, params) if eagle else SmallModel(directory, hf_config, target, config)
    )
