"""A `SchedulerOutput` becomes the arrays of a step, in tables and buffers that are written in place.

Row tables are indexed by row slot and change only when a request is admitted or gets a page; a step gathers the
rows it needs. Everything is numpy, so the cost per row is a few array operations, not Python.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from fengine.core.scheduler_output import NewRow, SchedulerOutput
from fengine.worker.wants import RowState, Wants, wants_of

HOTTEST = 1e20  # above it logits are equally likely anyway; and a banned one must stay unlikely
NO_INTS = np.zeros(0, np.int32)


class Staged(NamedTuple):
    """One step's inputs on the host, unpadded (T tokens, R rows): the fields of StepBatch, SamplingBatch, Feed and
    AdapterBatch.

    R counts draws: behind the step's rows comes one without tokens for each draft, which draws behind that draft.
    """

    token_T: np.ndarray
    pos_T: np.ndarray
    slot_T: np.ndarray
    q_start_B: np.ndarray
    kv_len_R: np.ndarray
    page_table_RN: np.ndarray
    logit_index_R: np.ndarray
    temperature_R: np.ndarray
    top_k_R: np.ndarray
    top_p_R: np.ndarray
    min_p_R: np.ndarray
    seed_R: np.ndarray
    sample_pos_R: np.ndarray
    feed_index_T: np.ndarray
    feed_from_T: np.ndarray
    adapter_token_A: np.ndarray = NO_INTS  # both empty where no row has an adapter
    adapter_start_S: np.ndarray = NO_INTS


class ExtendedStaged(NamedTuple):
    """A step in which some request wants more than a drawn token."""

    plain: Staged
    wants: Wants


class RowTables:
    """Per row slot: page table and sampling parameters of the request that runs there. Modifies: itself, and through
    `write_adapter` (slot, number of the load) the slots of LoRA adapters."""

    def __init__(
        self, rows: int, width: int, page_size: int, adapter_slots: int = 0,
        write_adapter: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        self.page_size, self.adapter_slots, self.write_adapter = page_size, adapter_slots, write_adapter
        self.adapter = np.full(rows, adapter_slots, np.int32)  # slot of its adapter; behind the last: none
        self.page_table = np.zeros((rows, width), np.int32)
        self.temperature = np.ones(rows, np.float32)
        self.top_k = np.ones(rows, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.seed = np.zeros(rows, np.int64)
        self.last_index = np.zeros(rows, np.int32)  # index of the row in the step before, for fed tokens
        self.extended: dict[int, RowState] = {}  # rows that want more than a drawn token

    def admit(self, new: NewRow) -> None:
        """Writes the sampling parameters of a request that has just got its row."""
        row, params = new.row, new.params
        self.temperature[row] = min(params.temperature, HOTTEST)
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = new.seed
        self.adapter[row] = self.adapter_slots if new.adapter_slot is None else new.adapter_slot
        if not params.bare:
            self.extended[row] = RowState(new)

    def release(self, rows: Iterable[int]) -> None:
        """The requests in these slots have ended, or were preempted: nothing of them is kept."""
        for row in rows if self.extended else ():
            self.extended.pop(row, None)

    def stage(self, output: SchedulerOutput) -> Staged | ExtendedStaged:
        """The arrays of one step. Modifies: the tables (new pages, new rows), adapter slots."""
        for slot, number in output.adapters:
            assert self.write_adapter is not None
            self.write_adapter(slot, number)
        self.release(output.released)
        for new in output.new_rows:
            self.admit(new)
        for row, first, pages in output.new_pages:
            self.page_table[row, first : first + len(pages)] = pages
        staged = self._arrays(output)
        if self.extended:
            wants = wants_of(output, self.extended, staged.q_start_B, staged.feed_index_T)
            return staged if wants is None else ExtendedStaged(staged, wants)
        return staged

    def _arrays(self, output: SchedulerOutput) -> Staged:
        size, count = self.page_size, len(output.rows)
        rows, starts, counts = output.rows, output.starts, output.counts
        if output.drafts:
            behind = [i for i, draft in output.drafts for _ in draft]  # the row of each draw behind a draft
            none = [0] * len(behind)
            rows, starts, counts = rows + [rows[i] for i in behind], starts + none, counts + none
        row_R = np.array(rows, np.int32)
        start_R = np.array(starts, np.int32)
        count_R = np.array(counts, np.int32)
        kv_len_R = start_R + count_R
        q_start_B = np.zeros(len(rows) + 1, np.int32)
        np.add.accumulate(count_R, out=q_start_B[1:])
        if int(q_start_B[-1]) == count:  # one token a row: no expansion needed
            pos_T, row_T = start_R, row_R
        else:
            pos_T = np.arange(q_start_B[-1], dtype=np.int32) + np.repeat(start_R - q_start_B[:-1], count_R)
            row_T = np.repeat(row_R, count_R)
        width = -(-int(kv_len_R.max()) // size)
        token_T = np.array(output.token_ids, np.int32)
        feed_index_T, feed_from_T = np.zeros(len(token_T), np.int32), np.zeros(len(token_T), np.bool_)
        if output.fed:
            fed = np.array(output.fed)
            feed_index_T[fed], feed_from_T[fed] = self.last_index[row_T[fed]], True
        self.last_index.put(row_R[:count], np.arange(count, dtype=np.int32))
        logit_index_R, sample_pos_R = q_start_B[1:] - 1, kv_len_R
        if output.drafts:
            logit_index_R = draw_index(logit_index_R, output)
            sample_pos_R = pos_T[logit_index_R] + 1
        return Staged(
            token_T=token_T,
            pos_T=pos_T,
            slot_T=self.page_table[row_T, pos_T // size] * size + pos_T % size,
            q_start_B=q_start_B,
            kv_len_R=kv_len_R,
            page_table_RN=self.page_table[row_R, :width],
            logit_index_R=logit_index_R,
            temperature_R=self.temperature.take(row_R),
            top_k_R=self.top_k.take(row_R),
            top_p_R=self.top_p.take(row_R),
            min_p_R=self.min_p.take(row_R),
            seed_R=self.seed.take(row_R),
            sample_pos_R=sample_pos_R,
            feed_index_T=feed_index_T,
            feed_from_T=feed_from_T,
            **self._adapters(row_T),
        )

    def _adapters(self, row_T: np.ndarray) -> dict[str, np.ndarray]:
        """The tokens of rows with an adapter, by slot; nothing if there are none."""
        if not self.adapter_slots:
            return {}
        slot_T = self.adapter[row_T]
        token_A = np.flatnonzero(slot_T < self.adapter_slots)
        if not len(token_A):
            return {}
        token_A = token_A[np.argsort(slot_T[token_A], kind="stable")]
        start_S = np.searchsorted(slot_T[token_A], np.arange(self.adapter_slots + 1))
        return {"adapter_token_A": token_A.astype(np.int32), "adapter_start_S": start_S.astype(np.int32)}


def draw_index(last_R: np.ndarray, output: SchedulerOutput) -> np.ndarray:
    """The token that each draw stands behind: of a row with drafts the one in front of them, then each draft.

    `last_R`: the last token of each of the step's rows, behind them one entry for each draft. Pure.
    """
    index = last_R.tolist()
    at = len(output.rows)
    for i, draft in output.drafts:
        count, last = len(draft), index[i]
        index[i] = last - count
        index[at : at + count] = range(last - count + 1, last + 1)
        at += count
    return np.array(index, np.int32)


def warm_staged(tokens: int, rows: int, width: int, adapter_slots: int = 0) -> Staged:
    """A harmless step for warm-up: `rows` rows of token 0 that write to the null page and see one key each.

    With `adapter_slots` every token has one of these adapters, whatever lies there.
    """
    adapters = {
        "adapter_token_A": np.arange(tokens, dtype=np.int32),
        "adapter_start_S": np.linspace(0, tokens, adapter_slots + 1).astype(np.int32),
    }
    per_row = np.full(rows, tokens // rows, np.int32)
    per_row[: tokens % rows] += 1
    q_start = np.zeros(rows + 1, np.int32)
    np.cumsum(per_row, out=q_start[1:])
    zeros_T = np.zeros(tokens, np.int32)
    ones_R = np.ones(rows, np.int32)
    return Staged(
        token_T=zeros_T,
        pos_T=zeros_T,
        slot_T=zeros_T,
        q_start_B=q_start,
        kv_len_R=per_row,
        page_table_RN=np.zeros((rows, width), np.int32),
        logit_index_R=q_start[1:] - 1,
        temperature_R=ones_R.astype(np.float32),
        top_k_R=ones_R,
        top_p_R=ones_R.astype(np.float32),
        min_p_R=np.zeros(rows, np.float32),
        seed_R=np.zeros(rows, np.int64),
        sample_pos_R=per_row,
        feed_index_T=zeros_T,
        feed_from_T=np.zeros(tokens, np.bool_),
        **(adapters if adapter_slots else {}),
    )
