"""Bridge 1: a scheduler's plan becomes the arrays of a step, in tables and buffers that are written in place.

Row tables are indexed by `Request.row` and change only when a request is admitted or gets a page; a step gathers the
rows it needs. Everything is numpy, so the cost per row is a few array operations, not Python.
"""

from typing import NamedTuple

import numpy as np

from fengine.host.plan import Plan
from fengine.request import Request
from fengine.wants import Wants, wants_of

HOTTEST = 1e20  # above it logits are equally likely anyway; and a banned one must stay unlikely


class Staged(NamedTuple):
    """One step's inputs on the host: the fields of StepBatch, SamplingBatch and Feed, unpadded (T tokens, R rows).

    R counts draws: behind the plan's rows comes one without tokens for each draft, which draws behind that draft.
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


class ExtendedStaged(NamedTuple):
    """A step in which some request wants more than a drawn token."""

    plain: Staged
    wants: Wants


class RowTables:
    """Per row slot: page table and sampling parameters of the request that runs there. Modifies: itself."""

    def __init__(self, rows: int, width: int, page_size: int) -> None:
        self.page_size = page_size
        self.page_table = np.zeros((rows, width), np.int32)
        self.temperature = np.ones(rows, np.float32)
        self.top_k = np.ones(rows, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.seed = np.zeros(rows, np.int64)
        self.last_index = np.zeros(rows, np.int32)  # index of the row in the step before, for fed tokens
        self.extended: dict[int, Request] = {}  # rows whose requests have extras

    def admit(self, request: Request) -> None:
        """Writes the sampling parameters of a request that has just got its row."""
        row, params = request.row, request.params
        assert row is not None
        self.temperature[row] = min(params.temperature, HOTTEST)
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = request.seed
        self.extended.pop(row, None)
        if request.extras is not None and request.extras.in_step:
            self.extended[row] = request

    def forget(self, request: Request) -> None:
        """The request has ended: nothing keeps its record any longer."""
        if self.extended and request.extras is not None:
            self.extended = {row: other for row, other in self.extended.items() if other is not request}

    def stage(self, plan: Plan) -> Staged | ExtendedStaged:
        """The arrays of one step. Modifies: the tables (new pages, new rows)."""
        for request, first in plan.new_pages:
            if first == 0:
                self.admit(request)
            self.page_table[request.row, first : len(request.pages)] = request.pages[first:]
        staged = self._arrays(plan)
        if self.extended:
            wants = wants_of(plan, staged.q_start_B)
            return staged if wants is None else ExtendedStaged(staged, wants)
        return staged

    def _arrays(self, plan: Plan) -> Staged:
        size, requests, starts = self.page_size, plan.requests, plan.starts
        row_R = np.array([r.row for r in requests], np.int32)
        start_R = np.array(starts, np.int32)
        count_R = np.array(plan.counts, np.int32)
        kv_len_R = start_R + count_R
        q_start_B = np.zeros(len(requests) + 1, np.int32)
        np.cumsum(count_R, out=q_start_B[1:])
        if int(q_start_B[-1]) == len(requests):  # one token a row: no expansion needed
            pos_T, row_T = start_R, row_R
        else:
            pos_T = np.arange(q_start_B[-1], dtype=np.int32) + np.repeat(start_R - q_start_B[:-1], count_R)
            row_T = np.repeat(row_R, count_R)
        width = -(-int(kv_len_R.max()) // size)
        feed_index_T, feed_from_T, token_T = self._tokens(plan, q_start_B)
        self.last_index[row_R] = np.arange(len(requests), dtype=np.int32)
        staged = Staged(
            token_T=token_T,
            pos_T=pos_T,
            slot_T=self.page_table[row_T, pos_T // size] * size + pos_T % size,
            q_start_B=q_start_B,
            kv_len_R=kv_len_R,
            page_table_RN=self.page_table[row_R, :width],
            logit_index_R=q_start_B[1:] - 1,
            temperature_R=self.temperature[row_R],
            top_k_R=self.top_k[row_R],
            top_p_R=self.top_p[row_R],
            min_p_R=self.min_p[row_R],
            seed_R=self.seed[row_R],
            sample_pos_R=kv_len_R,
            feed_index_T=feed_index_T,
            feed_from_T=feed_from_T,
        )
        return with_drafts(staged, plan) if plan.drafts else staged

    def _tokens(self, plan: Plan, q_start_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids the host knows, and where the one token it does not know yet is fed on the device."""
        total = int(q_start_B[-1])
        feed_index_T = np.zeros(total, np.int32)
        feed_from_T = np.zeros(total, np.bool_)
        tokens: list[int] = []
        drafts = dict(plan.drafts)
        for i, (request, start, count) in enumerate(zip(plan.requests, plan.starts, plan.counts, strict=True)):
            ids = request.token_ids
            if start + count <= len(ids):
                if count == 1:
                    tokens.append(ids[start])
                else:
                    tokens += ids[start : start + count]
            else:
                draft = drafts.get(i, [])
                tokens += ids[start:]
                at = int(q_start_B[i + 1]) - 1 - len(draft)
                if start + count - len(draft) > len(ids):
                    tokens.append(0)
                    feed_index_T[at] = self.last_index[request.row]
                    feed_from_T[at] = True
                tokens += draft
        return feed_index_T, feed_from_T, np.array(tokens, np.int32)


def with_drafts(staged: Staged, plan: Plan) -> Staged:
    """The step with a draw in front of each row's drafts, and one behind each draft. Pure."""
    count_R = np.zeros(len(plan.requests), np.int32)
    for row, draft in plan.drafts:
        count_R[row] = len(draft)
    row_D = np.repeat([row for row, _ in plan.drafts], [len(draft) for _, draft in plan.drafts])
    first_R = staged.logit_index_R - count_R
    nth_D = np.concatenate([np.arange(1, len(draft) + 1, dtype=np.int32) for _, draft in plan.drafts])
    logit_index_R = np.concatenate((first_R, first_R[row_D] + nth_D))
    same = ("temperature_R", "top_k_R", "top_p_R", "min_p_R", "seed_R")
    extra = len(row_D)
    return staged._replace(
        q_start_B=np.pad(staged.q_start_B, (0, extra), mode="edge"),
        kv_len_R=np.pad(staged.kv_len_R, (0, extra)),
        page_table_RN=np.pad(staged.page_table_RN, ((0, extra), (0, 0))),
        logit_index_R=logit_index_R,
        sample_pos_R=staged.pos_T[logit_index_R] + 1,
        **{name: np.concatenate((getattr(staged, name), getattr(staged, name)[row_D])) for name in same},
    )
