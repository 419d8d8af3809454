"""A draft model guesses what a request will draw: a small model of the same vocabulary, run behind the known tokens.

    known tokens --catch up--> draft's KV --guess--> draw with the target's own noise --guess--> draw ...

A guess is drawn from the draft's logits with the request's parameters, seed and position, by the op that draws from the
target's. So the two agree as often as their logits allow, and no bit depends on the draft: what is wrong is not kept.
Its KV lies under the target's page ids, in pages of its own memory; guesses beyond a row's pages go to a page that
every row slot has for them. Rows wait for their tokens, because a guess needs all of them.
Source: Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fengine import models
from fengine.config import Algorithm, EngineConfig
from fengine.core.speculation import Ask, Speculation
from fengine.errors import ConfigError
from fengine.models import eagle3
from fengine.models.kv_state import KVHandle, KVState, Params, StepBatch, init_kv
from fengine.models.spec import Config, ModelSpec
from fengine.ops.edges import take
from fengine.ops.sampling import draw
from fengine.speculative.eagle import EagleHead
from fengine.speculative.ngram import Trust, ngram_proposer
from fengine.worker.device import device_of
from fengine.worker.hub import resolve_model
from fengine.worker.input_batch import HOTTEST
from fengine.worker.kv_pool import kv_bytes_per_token
from fengine.worker.loader import load_params, read_config, spec_from_config

CATCH_UP = 2048  # tokens computed in one go: a long prompt must not hold up the loop


@dataclass(slots=True)
class Memo:
    """What the draft knows of a request. Modifies: itself."""

    trust: Trust
    done: int = 0  # tokens whose KV is written
    guesses: list[int] = field(default_factory=list)  # behind the `known` tokens of the last try
    known: int = 0
    room: int = 0  # tokens that the request's own pages held then
    tries: int = 0  # learnt from

    def learn(self, ask: Ask, behind: int) -> None:
        """Takes what became of the last try: guesses that were drawn are computed already, but for a draft that has
        gone on from its own stream where the target's is known now."""
        ids, drafting = ask.request.token_ids, ask.drafting
        if drafting.tries > self.tries:
            self.tries, size = drafting.tries, self.trust.size
            self.trust.learn(drafting.tried, drafting.right, len(ids))
            self.trust.size = size  # a guess costs little beside the step: only what is always wrong is tried less
        pairs = zip(self.guesses[:-1], ids[self.known :], strict=False)  # the last one was not computed
        right = 0 if behind else sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        done = max(self.done, min(self.known - behind + right, self.room))
        self.done, self.guesses = min(done, len(ids) - behind - 1), []  # what the last token gives is needed


class Head(Protocol):
    """The model that guesses."""

    spec: ModelSpec
    behind: int  # so many tokens behind a position stands the one that it has

    def fuse(self, feature_TX: Tensor) -> Tensor:
        """What it goes on from where the target's streams are known."""
        ...

    def run(self, kv: KVState, batch: StepBatch, stream_TD: Tensor | None) -> tuple[KVState, Tensor, Tensor | None]:
        """(KV state, logits_RV, what row's next guess goes on from). Modifies: the storage of `kv`."""
        ...


class SmallModel:
    """A model of its own, that reads the tokens alone. Immutable."""

    behind = 0

    def __init__(self, directory: Path, config: Config, target: ModelSpec, settings: EngineConfig) -> None:
        """Errors: ConfigError if it has another vocabulary; ModelLoadError and its kinds."""
        self.spec = replace(spec_from_config(config), exact=False)  # no bit depends on it
        if not self.spec.generates or not self.spec.causal or self.spec.vocab_size != target.vocab_size:
            raise ConfigError(
                f"speculation.draft_model {str(directory)!r} is {self.spec.architecture} with a vocabulary of "
                f"{self.spec.vocab_size}; a draft generates text from the target's, of {target.vocab_size}"
            )
        self.params = load_params(directory, self.spec, dtype=settings.model.dtype, device=device_of(settings))
        self.model = models.lookup(self.spec.architecture)

    def fuse(self, feature_TX: Tensor) -> Tensor:
        return feature_TX

    def run(self, kv: KVState, batch: StepBatch, stream_TD: Tensor | None) -> tuple[KVState, Tensor, Tensor | None]:
        """(KV state, logits_RV, None) behind each row. Modifies: the storage of `kv`, which is dead then."""
        kv, hidden_TD = self.model.forward(self.params, self.spec, kv, batch)
        return kv, self.model.unembed(self.params, self.spec, take(hidden_TD, batch.logit_index_R)), None


class DraftModel:
    """Proposes by a second model. For the loop's thread. Modifies: its KV state, and `Drafting.memo`, a `Memo`."""

    def __init__(self, config: EngineConfig, head: Head, kv_dtype: torch.dtype) -> None:
        """Errors: ConfigError."""
        assert config.speculation.num_draft_tokens is not None, "`resolve` has run"
        self.head, self.spec, self.kv_dtype, self.device = head, head.spec, kv_dtype, torch.device(device_of(config))
        self.pages = 0  # of the target; behind them lie those of row slots
        self.kv: KVHandle
        self.feature_PSX: Tensor | None = None  # the target's streams
        self.most = config.speculation.num_draft_tokens - 1
        self.page_size = config.cache.page_size or 16
        if self.most >= self.page_size:
            raise ConfigError(
                f"speculation.num_draft_tokens ({self.most + 1}) with a draft model must be at most cache.page_size "
                f"({self.page_size})"
            )

    def open(self, target: KVState, rows: int) -> None:
        """Makes the draft's KV: the target's pages, and one for each row slot."""
        self.pages, self.feature_PSX = target.num_pages, next(iter(target.feature_PSX), None)
        self.kv = KVHandle(init_kv(self.spec, self.pages + rows, self.page_size, self.kv_dtype, self.device))

    def __call__(self, asks: Sequence[Ask]) -> list[list[int]]:
        """One proposal for each ask; none where the draft has to catch up, or has been wrong."""
        sizes: dict[int, int] = {}  # of the asks that get a proposal, by their index
        for i, ask in enumerate(asks):
            known, drafting = len(ask.request.token_ids), ask.drafting
            if drafting.memo is None:
                drafting.memo = Memo(Trust(self.most), tries=drafting.tries)
            drafting.memo.learn(ask, self.head.behind)
            size = min(self.most, ask.most, self.spec.max_position - known)
            if (
                ask.skip == 0
                and known > self.head.behind
                and size >= ask.least
                and known >= drafting.memo.trust.resume_at
            ):
                sizes[i] = size
        if not sizes:
            return [[] for _ in asks]
        with torch.inference_mode():
            found = self._propose([asks[i] for i in sizes], max(sizes.values()))
        proposals = dict(zip(sizes, found, strict=True))
        return [proposals.get(i, [])[: sizes.get(i)] for i in range(len(asks))]

    def _propose(self, asks: list[Ask], count: int) -> list[list[int]]:
        """`count` guesses for each, none where the draft has to catch up. Modifies: the KV state, the memos."""
        rows, behind = [(ask, ask.drafting.memo) for ask in asks], self.head.behind
        chunks = [ask.request.token_ids[memo.done + behind :][:CATCH_UP] for ask, memo in rows]
        starts = [memo.done for _, memo in rows]
        for (_, memo), chunk in zip(rows, chunks, strict=True):
            memo.done += len(chunk)
        ends = np.array([memo.done for _, memo in rows], np.int32)
        table = self._table(asks, int(ends.max()) + count)
        sampling = self._sampling(asks)
        token_R, stream_RD = self._guess(table, chunks, starts, sampling)
        guesses = [token_R]
        for step in range(1, count):
            tokens = [[max(int(token), 0)] for token in guesses[-1]]
            token_R, stream_RD = self._guess(table, tokens, (ends + step - 1).tolist(), sampling, stream_RD)
            guesses.append(token_R)
        for i, (ask, memo) in enumerate(rows):
            if memo.done + behind < len(ask.request.token_ids):
                continue  # it has not caught up
            memo.known, memo.room = len(ask.request.token_ids), len(ask.request.pages) * self.page_size
            memo.guesses = [int(token) for token in takewhile(lambda token: token >= 0, (step[i] for step in guesses))]
        return [list(memo.guesses) for _, memo in rows]

    def _guess(
        self, table: np.ndarray, tokens: list[list[int]], starts: list[int], sampling: dict[str, Tensor],
        stream_TD: Tensor | None = None,
    ) -> tuple[np.ndarray, Tensor | None]:  # fmt: skip
        """(the token that each row draws behind these, -1 where its logits are not finite; what the next goes on from).

        `stream_TD` None: the target's streams are known."""
        counts = np.array([len(chunk) for chunk in tokens])
        ends = np.cumsum(counts)
        row_T = np.repeat(np.arange(len(tokens)), counts)
        pos_T = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        slot_T = table[row_T, pos_T // self.page_size] * self.page_size + pos_T % self.page_size
        fields = ([t for chunk in tokens for t in chunk], pos_T, slot_T, [0, *ends], starts + counts, table, ends - 1)
        batch = StepBatch._make([*(self._put(np.array(values, np.int32)) for values in fields), None, None, None])
        if stream_TD is None and self.feature_PSX is not None:
            stream_TD = self.head.fuse(self.feature_PSX.flatten(0, 1).index_select(0, batch.slot_T))
        kv, logits_RV, stream_RD = self.head.run(self.kv.take(), batch, stream_TD)
        self.kv = KVHandle(kv)
        token_R, logprob_R = draw(logits_RV, **sampling, pos_R=batch.kv_len_R + self.head.behind)
        return torch.where(logprob_R.isnan(), -1, token_R).cpu().numpy(), stream_RD

    def _table(self, asks: list[Ask], longest: int) -> np.ndarray:
        """Page tables [R, N], with the row slot's own page behind those of its request."""
        table = np.zeros((len(asks), -(-longest // self.page_size)), np.int32)
        for row, ask in zip(table, asks, strict=True):
            pages = ask.request.pages[: len(row)]
            row[: len(pages)] = pages
            row[len(pages) :] = self.pages + (ask.request.row or 0)
        return table

    def _sampling(self, asks: list[Ask]) -> dict[str, Tensor]:
        """What `draw` takes, but for the position."""
        params = [ask.request.params for ask in asks]
        return {
            "temperature_R": self._put(np.array([min(p.temperature, HOTTEST) for p in params], np.float32)),
            "top_k_R": self._put(np.array([p.top_k for p in params], np.int32)),
            "top_p_R": self._put(np.array([p.top_p for p in params], np.float32)),
            "min_p_R": self._put(np.array([p.min_p for p in params], np.float32)),
            "seed_R": self._put(np.array([ask.request.seed for ask in asks], np.int64)),
        }

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def speculation_of(config: EngineConfig, target: ModelSpec, params: Params) -> Speculation | None:
    """What a resolved configuration asks for; None: no drafts. Loads the draft, if there is one.

    `params`: the target's. Errors: ConfigError, ModelLoadError and its kinds.
    """
    drafts = config.speculation
    if drafts.algorithm is Algorithm.none:
        return None
    assert drafts.num_draft_tokens is not None and drafts.step_tokens is not None, "`resolve` has run"
    sizes = (drafts.num_draft_tokens - 1, drafts.step_tokens, target.vocab_size)
    if drafts.algorithm is Algorithm.ngram:
        return Speculation(ngram_proposer(drafts.ngram_min_match, drafts.ngram_max_match), *sizes)
    assert drafts.draft_model is not None, "`check` has run"
    directory, kv_dtype = resolve_model(drafts.draft_model), params["final_norm_D"].dtype  # on a CPU float32
    hf_config = read_config(directory)
    eagle = hf_config.get("architectures") in [[name] for name in eagle3.ARCHITECTURES]
    if eagle != (drafts.algorithm is Algorithm.eagle3):
        raise ConfigError(
            f"speculation.draft_model {drafts.draft_model!r} has architectures {hf_config.get('architectures')!r}: "
            f"use speculation.algorithm={'eagle3' if eagle else 'standalone'}"
        )
    if drafts.algorithm is Algorithm.standalone:
        head: Head = SmallModel(directory, hf_config, target, config)
        layers: tuple[int, ...] = ()
    else:
        head = EagleHead(directory, hf_config, target, params)
        layers = head.feature_layers
    model = DraftModel(config, head, kv_dtype)
    kv_bytes = kv_bytes_per_token(head.spec, kv_dtype) + len(layers) * target.hidden_size * kv_dtype.itemsize
    return Speculation(model, *sizes, waits=True, kv_bytes=kv_bytes, open=model.open, feature_layers=layers)
