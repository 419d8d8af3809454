"""`Extras`: what rows want of steps that takes more than a drawn token which arithmetic has edited."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fengine.core.request import Request
from fengine.core.scheduler_output import SchedulerOutput, Span
from fengine.worker.chunks import Chunk
from fengine.worker.logits.logprobs import ASKED, asked_ids, prompt_rows
from fengine.worker.step_input import Arrays, StepInput

BY_ROW = frozenset({"processor", "logprobs", "input logprobs", "hidden states"})  # tables know all of others


class Extras:
    """The requests of row slots that ask for one of BY_ROW. Modifies: itself."""

    def __init__(self) -> None:
        self.rows: dict[int, Request] = {}  # as told; their token_ids are kept up to date where none is fed
        self.drafted: dict[int, tuple[int, list[int]]] = {}  # what was guessed in their last steps, behind where

    def release(self, row: int) -> None:
        self.rows.pop(row, None)
        self.drafted.pop(row, None)

    def add_to(self, step: StepInput, output: SchedulerOutput, draws_R: np.ndarray, asked: Counter[str]) -> None:
        """Adds what its rows want, of which so many ask for what. Modifies: step; draws_R, where a draw is not used."""
        chunks = self._chunks(step, output)
        if asked["hidden states"]:
            step.hidden, step.hidden_H = hidden_wanted(chunks)
            step.pooled = [chunk.row for chunk in chunks if chunk.draws and chunk.new.params.pool is not None]
            draws_R[step.pooled] = False
        step.draws, step.chunks = bool(draws_R.any()), [c for c in chunks if draws_R[c.row]]
        if asked["input logprobs"]:
            step.prompts = prompt_rows(chunks)
        if asked["logprobs"] and step.draws:
            wanted = [c for c in step.chunks if c.new.params.top_logprobs or c.new.params.logprob_ids]
            if wanted:
                step.top = max(c.new.params.top_logprobs for c in wanted)
                step.arrays[ASKED.name] = asked_ids(wanted, step.rows)

    def _chunks(self, step: StepInput, output: SchedulerOutput) -> list[Chunk]:
        """What the step computes of the rows that want more. Modifies: them; they take in drawn tokens that the host
        has come to know."""
        chunks, drafts, fed_tokens, at = [], dict(output.drafts), set(output.fed), 0
        draft_rows, draw, fed_rows = {}, len(output.rows), step.arrays["feed_index_T"]
        for i, draft in output.drafts:
            draft_rows[i], draw = draw, draw + len(draft)
        for i, (row, start, count) in enumerate(zip(output.rows, output.starts, output.counts, strict=True)):
            if (new := self.rows.get(row)) is not None:
                draft = drafts.get(i, [])
                end = start + count - len(draft)
                last = at + end - start - 1
                token, fed = output.token_ids[last], int(fed_rows[last]) if last in fed_tokens else None
                kept = self._kept(new, end) if self.drafted else ()
                if draft:
                    self.drafted[row] = (end, draft)
                behind = (kept, draft, draft_rows.get(i, 0))
                chunks.append(Chunk(i, new, start, end, at, output.samples[i], token, fed, *behind))
                if fed is None and end == len(new.token_ids) + 1:
                    new.token_ids.append(token)
            at += count
        return chunks

    def _kept(self, new: Request, end: int) -> Sequence[int]:
        """Drafts of the row's last step that were drawn, if it now goes on up to `end`. Modifies: new.token_ids."""
        at, draft = self.drafted.pop(new.slot, (end, []))
        kept = draft[: max(end - 1 - at, 0)]
        if len(new.token_ids) == at:
            new.token_ids.extend(kept)
        return kept


def draw_index(last_R: np.ndarray, output: SchedulerOutput) -> np.ndarray:
    """The token that each draw stands behind: of a row with drafts the one in front of them, then each draft. `last_R`:
    the last token of each of the step's rows, behind them one entry for each draft. Pure."""
    index = last_R.tolist()
    at = len(output.rows)
    for i, draft in output.drafts:
        count, last = len(draft), index[i]
        index[i] = last - count
        index[at : at + count] = range(last - count + 1, last + 1)
        at += count
    return np.array(index, np.int32)


def adapter_fields(slot_T: np.ndarray, slots: int) -> Arrays:
    """Tokens of rows with an adapter, by slot, of so many; nothing if there are none. Pure."""
    token_A = np.flatnonzero(slot_T < slots)
    if not len(token_A):
        return {}
    token_A = token_A[np.argsort(slot_T[token_A], kind="stable")]
    start_S = np.searchsorted(slot_T[token_A], np.arange(slots + 1))
    return {"token_A": token_A.astype(np.int32), "start_S": start_S.astype(np.int32)}


def hidden_wanted(chunks: Sequence[Chunk]) -> tuple[list[Span], np.ndarray | None]:
    """The spans of hidden states that chunks want, and their tokens of the step. Pure."""
    spans, index, at = [], [np.zeros(0, np.int64)], 0
    for chunk in chunks:
        for first, last in _due(chunk):
            index.append(np.arange(first, last) - chunk.start + chunk.at)
            spans.append(Span(chunk.row, first, last - first, at))
            at += last - first
    return spans, np.concatenate(index).astype(np.int32) if at else None


def _due(chunk: Chunk) -> list[tuple[int, int]]:
    """Ranges of positions whose hidden states are wanted of this chunk. Pure."""
    new, params, start, end = chunk.new, chunk.new.params, chunk.start, chunk.end
    if params.hidden is None and params.pool is None:
        return []
    last = [(end - 1, end)] if chunk.draws else []
    if params.hidden == "last" or params.pool == "last":
        return last
    if params.pool == "cls":
        return [(0, 1)] if start == 0 == new.num_seen else []
    first, behind = max(start, new.num_seen), min(end, new.prompt_len)
    return ([(first, behind)] if first < behind else []) + (last if params.hidden and end > behind else [])
