"""A draft model guesses what a request will draw: a small model of the same vocabulary, run behind the known tokens.

    known tokens --catch up--> draft's KV --guess--> draw with the target's own noise --guess--> draw ...

A guess is drawn from the draft's logits with the request's parameters, edits, mask, seed and position, by the op that
draws from the target's. So the two agree as often as their logits allow, and no bit depends on the draft: what is wrong
is not kept. Its KV lies under the target's page ids, in pages of its own memory; guesses beyond a row's pages go to a
page that every row slot has for them. Rows wait for their tokens while they are tried, because a guess needs all of
them; a request whose guesses do not pay rests, and runs as any other. On CUDA the device goes on to the next guesses
behind a step that the host has not read (`go_ahead`).
Source: Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding".
"""

import logging
from collections.abc import Sequence
from itertools import accumulate, chain, takewhile
from math import fsum  # Pythons differ in how they sum floats
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fengine.core.masks import Filled
from fengine.core.request import Request
from fengine.core.scheduler_output import Drafts, SchedulerOutput
from fengine.core.speculation import Ask, Late, gain_of, tolls
from fengine.models.kv_pages import init_kv
from fengine.models.kv_state import KVState
from fengine.speculative.chain import SLOTS, TRY, Chain, Guide, Head
from fengine.speculative.memo import Ahead, Chained, Memo, hopes_at, tries_of
from fengine.speculative.pace import ALL, SCOUTS, Cost, Pace
from fengine.worker.input_batch import InputBatch
from fengine.worker.logits.bias import LogitBias
from fengine.worker.logits.penalties import Penalties
from fengine.worker.logits.structured import cursor_of
from fengine.worker.step_input import Arrays, StepInput

logger = logging.getLogger("fengine")
CATCH_UP = 4096  # tokens computed in one go: long prompts must not hold up the loop, nor take its memory


class DraftModel:
    """Proposes by a second model. For the loop's thread. Modifies: its KV state, and `Drafting.memo`, a `Memo`."""

    def __init__(
        self, head: Head, kv_dtype: torch.dtype, page_size: int, most: int, cost: Cost, rows: int, graphs: bool
    ) -> None:
        """`most` guesses, fewer than `page_size`, for each of at most `rows` rows."""
        self.head, self.spec, self.kv_dtype, self.page_size = head, head.spec, kv_dtype, page_size
        self.most, self.cost, self.rows, self.graphs = most, cost, rows, graphs
        self.hope = Pace(most, cost).gain
        self.chained: Chained | None = None  # whose guesses are not known yet
        self.ahead: Ahead | None = None  # the run that the next proposals may be of
        self.broken = False  # it was told that logits are not finite
        self.scouts: list[Pace] = []  # of the rows that were tried for others
        self.pages: int  # of the target; behind them lie those of row slots
        self.chain: Chain
        self.batch: InputBatch

    def open(self, target: KVState, batch: InputBatch, last_token_R: Tensor) -> None:
        """Makes the draft's KV: the target's pages, and one for each row slot. `last_token_R`: where steps leave their
        draws, and behind these the guesses that steps can be fed with, if they can."""
        self.pages, self.batch, self.ahead = target.num_pages, batch, None
        slots, width = batch.page_table.shape
        kv = init_kv(self.spec, self.pages + slots, self.page_size, self.kv_dtype, target.k_PSGK[0].device)
        edits = [stage for name, stage in batch.stages.items() if name in (Penalties.name, LogitBias.name)]
        streams = next(iter(target.feature_PSX), None)
        self.chain = Chain(
            self.head, kv, streams, edits, width + 1, min(self.rows, slots), self.most, CATCH_UP, self.graphs,
            last_token_R, last_token_R[batch.guesses[0] :],
        )  # fmt: skip

    def warm_up(self) -> None:
        self.chain.warm_up()

    def release(self, kv: bool) -> None:
        if self.ahead is not None:
            self.ahead.guesses()  # it reads what is released
        self.ahead = None
        self.chain.release(kv)

    def __call__(self, asks: Sequence[Ask]) -> list[list[int]]:
        """One proposal for each ask; none where the draft has to catch up, or has been wrong."""
        self.reveal()  # what a step was not fed with
        ahead, self.ahead = self.ahead, None
        for ask in asks:
            if ask.drafting.memo is None:
                ask.drafting.memo, ask.drafting.last = Memo(Pace(self.most, self.cost)), None
            ask.drafting.memo.learn(ask, self.head.behind)
        self._hear(asks)
        gain = fsum(gain_of(ask.drafting, len(ask.request.token_ids) - 1, self.hope) for ask in asks)
        if gain <= tolls(len(asks), self.cost.toll, self.cost.crowd):  # by what has just been learnt
            return [[] for _ in asks]
        sizes = self._sizes(asks)
        found = self._propose([asks[i] for i in sizes], max(sizes.values(), default=0), ahead)
        proposals = dict(zip(sizes, found, strict=True))
        kind = list if self.chained is None else Late
        return [kind(proposals.get(i, [])[: sizes.get(i)]) for i in range(len(asks))]

    def _sizes(self, asks: Sequence[Ask]) -> dict[int, int]:
        """Guesses of the asks that get a proposal, by their index. Modifies: the scouts."""
        sizes: dict[int, int] = {}
        for i, ask in enumerate(asks):
            known, pace = len(ask.request.token_ids), ask.drafting.memo.pace
            size = min(pace.size, ask.most, self.spec.max_position - known)
            if ask.tried and ask.skip == 0 and known >= pace.resume_at and size >= ask.least:
                sizes[i] = size
        return self._scouted(asks, sizes)

    def _scouted(self, asks: Sequence[Ask], sizes: dict[int, int]) -> dict[int, int]:
        """Of many new rows a few, which saves the others a try where nothing can be guessed. Modifies: the scouts."""
        new = {i: asks[i].drafting.memo for i in sizes if asks[i].drafting.memo.pace.new}
        sent = [i for i in new if new[i].pace in self.scouts]  # the draft catches up with them
        if self.cost.guess and len(new) > ALL and (sent or not self.scouts):
            unseen = {i: len(asks[i].request.token_ids) - new[i].done for i in new}
            sent = sent or sorted(new, key=lambda i: (new[i].pace.rest, unseen[i]))[:SCOUTS]
            self.scouts = [new[i].pace for i in sent]
            return {i: size for i, size in sizes.items() if i in sent or i not in new}
        self.scouts = []
        return sizes

    def _hear(self, asks: Sequence[Ask]) -> None:
        """Has new rows rest where those that were tried for them would not pay beside so many. Modifies: the scouts,
        the asks' drafting."""
        gain = fsum(pace.gain for pace in self.scouts) * len(asks)
        if self.scouts and gain <= tolls(len(asks), self.cost.toll, self.cost.crowd) * len(self.scouts):
            self.scouts = []
            for ask in asks:
                if ask.drafting.memo.pace.new and not ask.drafting.memo.pace.rest:
                    ask.drafting.try_from = ask.drafting.rest_until = hopes_at(ask)

    def reveal(self) -> dict[Request, list[int]]:
        """The guesses of the last run; waits for them. Modifies: the memos."""
        if self.chained is None:
            return {}
        (rows, guesses), self.chained = self.chained, None
        found_RK = guesses().tolist()
        for (ask, memo, seen), found in zip(rows, found_RK, strict=True):
            memo.guesses = list(takewhile(lambda token: token >= 0, found)) if seen else []
            if seen and not memo.guesses:
                if not self.broken:
                    logger.warning(
                        "speculation.draft: its logits are not finite for a request, for which it guesses no more; "
                        "see its weights"
                    )
                self.broken = True
                memo.pace.stop()
                memo.tell(ask)
        return {ask.request: found for (ask, _, _), found in zip(rows, found_RK, strict=True)}

    def go_ahead(self, output: SchedulerOutput) -> None:
        """Guesses what follows a step in flight, where all of its rows are going to want that. Modifies: the KV
        state."""
        if self.chained is None or not (tries := tries_of(self.chained, output, self.head.behind)):
            return
        memos, slots = [memo for _, memo, _ in self.chained.rows], [ask.request.slot for ask, *_ in self.chained.rows]
        count = max(memo.pace.size for memo in memos)
        longest = max(each.known + each.tried for each in tries) + 1 + count
        if longest > self.spec.max_position:
            return
        told = [-(-(each.known + each.tried) // self.page_size) for each in tries]
        arrays = self._sampled(slots) | {
            "kv_len_R": np.zeros(len(slots), np.int32), "page_table_RN": self._table(slots, told, longest),
            TRY.name: np.array(tries, np.int32).T,
        }  # fmt: skip
        tokens = sum(each.unseen(self.head.behind) for each in tries)
        self.ahead = Ahead(memos, count, self.chain.run_behind(arrays, tokens, count))

    def _propose(self, asks: list[Ask], count: int, ahead: Ahead | None) -> list[list[int]]:
        """`count` guesses for each, none where the draft has to catch up. Modifies: the KV state, the memos."""
        if ahead is not None and (taken := ahead.rows_of(asks)):
            for ask in asks:
                self._see(ask, ahead.count)
            self.chained = Chained([(ask, ask.drafting.memo, True) for ask in asks], lambda: ahead.guesses()[taken])
            return [list(ask.drafting.memo.guesses) for ask in asks]
        rows, chunks, left = [], [], CATCH_UP
        for ask in reversed(asks):  # the shortest first: so most begin soonest
            unseen = ask.request.token_ids[ask.drafting.memo.done + self.head.behind :][:left]
            left -= len(unseen)
            if unseen:
                rows.append(ask)
                chunks.append(unseen)
        if rows:
            self._guess(rows, chunks, count)
        return [list(ask.drafting.memo.guesses) for ask in asks]

    def _guess(self, asks: list[Ask], chunks: list[list[int]], count: int) -> None:
        """Has each draft see a chunk, and guess if that is all. Modifies: the KV state, the memos."""
        arrays = self._arrays(asks, chunks, count)
        slot_R = np.array([ask.request.row for ask in asks], np.int32)
        step = StepInput(arrays, slot_R, drafts=[Drafts(0, [])])  # edits are those of a step with guesses
        edits = [stage.stage(step, np.ones(len(asks), np.bool_)) for stage in self.chain.edits]
        stages = tuple(stage for stage in edits if stage is not None)
        guide = self._guide(asks) if any(ask.request.params.grammar is not None for ask in asks) else None
        rows = []
        for ask, chunk in zip(asks, chunks, strict=True):
            memo, known = ask.drafting.memo, len(ask.request.token_ids)
            memo.done += len(chunk)
            seen = memo.done + self.head.behind >= known
            rows.append((ask, memo, seen))
            if seen:
                self._see(ask, count)
        self.chained = Chained(rows, self.chain.run(arrays, stages, count, guide))
        if stages or guide is not None or not self.chain.feeds or not all(ask.late for ask in asks):
            self.reveal()

    def _see(self, ask: Ask, count: int) -> None:
        """Modifies: its memo."""
        ask.drafting.memo.see(len(ask.request.token_ids), self._told(ask) * self.page_size, self.head.behind, count)

    def _arrays(self, asks: list[Ask], chunks: list[list[int]], count: int) -> Arrays:
        """The chain's FIELDS: the chunk of each row behind what is done, and how it draws."""
        slots = [ask.request.slot for ask in asks]
        counts = [len(chunk) for chunk in chunks]
        ends = [ask.drafting.memo.done + n for ask, n in zip(asks, counts, strict=True)]
        table_RN = self._table(slots, [self._told(ask) for ask in asks], max(ends) + count)
        q_start_B, end_R = np.array([0, *accumulate(counts)], np.int32), np.array(ends, np.int32)
        last_R = q_start_B[1:] - 1
        row_T = np.repeat(np.arange(len(asks), dtype=np.int32), counts)
        pos_T = np.arange(len(row_T), dtype=np.int32) + (end_R - last_R - 1)[row_T]
        page_T, offset_T = np.divmod(pos_T, self.page_size)
        arrays = {
            "token_T": np.array([*chain.from_iterable(chunks)], np.int32), "pos_T": pos_T,
            "slot_T": table_RN[row_T, page_T] * self.page_size + offset_T, "q_start_B": q_start_B, "kv_len_R": end_R,
            "page_table_RN": table_RN, "logit_index_R": last_R, "pos_R": end_R + self.head.behind,
        }  # fmt: skip
        return arrays | self._sampled(slots)

    def _sampled(self, slots: list[int]) -> Arrays:
        """How rows draw, and SLOTS."""
        slot_R = np.array(slots, np.int32)
        return {SLOTS.name: slot_R} | {name: values.take(slot_R) for name, values in self.batch.sampling.items()}

    def _table(self, slots: list[int], told: list[int], longest: int) -> np.ndarray:
        """Page tables [R, N]; behind so many pages that were told, of what is computed, the row slot's own page."""
        width = -(-longest // self.page_size)
        table_RN = np.empty((len(slots), width), np.int32)
        for row, slot, pages in zip(table_RN, slots, told, strict=True):
            row[:pages] = self.batch.page_table[slot, : min(pages, width)]
            row[pages:] = self.pages + slot
        return table_RN

    def _told(self, ask: Ask) -> int:
        """Pages of all tokens but the last: those of the steps before this one."""
        return -(-(len(ask.request.token_ids) - 1) // self.page_size)

    def _guide(self, asks: list[Ask]) -> Guide:
        """Masks of the grammars of these rows, guess by guess. Modifies: the cursors of their memos."""
        live: list[tuple[int, Any]] = []  # rows, and their cursors
        for row, ask in enumerate(asks):
            request, memo = ask.request, ask.drafting.memo
            if request.params.grammar is None:
                continue
            memo.cursor = memo.cursor or cursor_of(request)
            memo.cursor.take(request.output_ids[len(memo.cursor.tokens) :])
            if memo.cursor.error is None:
                live.append((row, memo.cursor.fork()))

        def masks(token_R: np.ndarray | None) -> Filled | None:
            nonlocal live
            if token_R is not None:
                live = [(row, cursor) for row, cursor in live if cursor.advance(int(token_R[row]))]
            return live[0][1].grammar.masks(*zip(*live, strict=True)) if live else None

        return masks
