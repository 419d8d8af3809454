"""`InputBatch`: a scheduler's step becomes the arrays of the device's step, by name.

Row tables are indexed by row slot and change only when a request is admitted or gets a page; a step gathers the rows it
needs. Everything is numpy, so the cost per row is a few array operations, not Python. Only steps of rows that want more
than a drawn token look further: at stages, and in `extras`."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fengine.core.request import Request
from fengine.core.scheduler_output import SchedulerOutput
from fengine.worker.extras import BY_ROW, Extras, adapter_fields, draw_index
from fengine.worker.images import ImageInputs
from fengine.worker.step_input import Arrays, LogitsStage, StepInput, Write

HOTTEST = 1e20  # above it logits are equally likely anyway; and a banned one must stay unlikely


class InputBatch:
    """Per row slot: page table, sampling parameters and what was told of the request that runs there. Modifies: itself,
    the stages' tables, and through `write_adapter` (slot, number of the load) the slots of LoRA adapters."""

    def __init__(
        self, rows: int, width: int, page_size: int, stages: Sequence[LogitsStage] = (), adapter_slots: int = 0,
        write_adapter: Callable[[int, int], None] | None = None, images: ImageInputs | None = None,
        grouped: bool = False, guesses: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        """`grouped`: windowed layers have pages of their own. `guesses`: index of the first in `last_token_R`, and how
        many each row slot has there."""
        self.guesses = guesses
        self.images = images
        self.page_size, self.adapter_slots, self.write_adapter = page_size, adapter_slots, write_adapter
        self.adapter = np.full(rows, adapter_slots, np.int32)  # slot of its adapter; behind the last: none
        self.page_table = np.zeros((rows, width), np.int32)
        self.window_table = np.zeros((rows, width), np.int32) if grouped else None
        ones_S, zeros_S = np.ones(rows, np.float32), np.zeros(rows, np.float32)
        self.sampling = {
            "temperature_R": ones_S.copy(), "top_k_R": np.ones(rows, np.int32), "top_p_R": ones_S, "min_p_R": zeros_S,
            "seed_R": np.zeros(rows, np.int64),
        }  # fmt: skip
        self.gathered_rows: list[int] = []  # row slots of the step before
        self.slot_R, self.gathered = np.zeros(0, np.int32), {}  # and what was gathered for them
        self.last_index = np.zeros(rows, np.int32)  # index of the row in the step before, for fed tokens
        self.stages = {stage.name: stage for stage in stages}  # in the order that bits depend on
        self.asking: dict[int, Request] = {}  # by row slot, those that want more than a drawn token
        self.asked = Counter[str]()  # how many of them want what
        self.writes: list[Write] = []  # to the stages' tables, that the next step makes
        self.extras = Extras()

    def admit(self, new: Request) -> None:
        """Writes what a request that has just got its row slot keeps there."""
        row, params = new.slot, new.params
        self.release([row])  # of whoever had it: only the first of several ranks hears that an engine is idle
        values = (min(params.temperature, HOTTEST), params.top_k, params.top_p, params.min_p, new.seed)
        for table, value in zip(self.sampling.values(), values, strict=True):
            table[row] = value
        self.gathered_rows = []
        self.adapter[row] = self.adapter_slots if new.adapter_slot is None else new.adapter_slot
        if self.images is not None:
            self.images.admit(new)
        if params.bare:
            return
        self.asking[row], asks = new, params.asks
        for name in asks:
            self.asked[name] += 1
            if name in self.stages:
                self.writes += self.stages[name].admit(row, new)
        if not BY_ROW.isdisjoint(asks):
            self.extras.rows[row] = new

    def release(self, rows: Iterable[int]) -> None:
        """The requests in these slots have ended, or were preempted: nothing of them is kept."""
        if self.images is not None:
            self.images.release(rows)
        for row in rows if self.asking else ():
            if (told := self.asking.pop(row, None)) is not None:
                if row in self.extras.rows:
                    self.extras.release(row)
                for name in told.params.asks:
                    self.asked[name] -= 1
                    if name in self.stages:
                        self.stages[name].release(row)

    def stage(self, output: SchedulerOutput) -> StepInput:
        """The input of one step. Modifies: the tables (new pages, new rows), adapter slots."""
        for slot, number in output.adapters:
            assert self.write_adapter is not None
            self.write_adapter(slot, number)
        for encode in output.encodes:
            assert self.images is not None
            self.images.write(encode)
        self.release(output.released)
        for new in output.new_rows:
            self.admit(new)
        for row, first, pages, windows in output.new_pages:
            self.page_table[row, first : first + len(pages)] = pages
            if self.window_table is not None:
                self.window_table[row, first : first + len(pages)] = windows
        arrays = self._arrays(output)
        step = StepInput(arrays, self.slot_R, any(output.samples), output.drafts)
        if self.asking:
            self._ask(step, output)
        return step

    def _ask(self, step: StepInput, output: SchedulerOutput) -> None:
        """Adds to a step what its rows want beside drawn tokens. Modifies: step."""
        step.writes, self.writes = self.writes, []
        draws_R = np.array(output.samples + [True] * (step.rows - len(output.samples)))
        if self.extras.rows:
            self.extras.add_to(step, output, draws_R, self.asked)
        if step.draws:
            found = [stage.stage(step, draws_R) for name, stage in self.stages.items() if self.asked[name]]
            step.stages = tuple(stage for stage in found if stage is not None)

    def _arrays(self, output: SchedulerOutput) -> Arrays:
        """The fields of INPUTS, ADAPTERS and IMAGES."""
        size, count = self.page_size, len(output.rows)
        rows, starts, counts = output.rows, output.starts, output.counts
        if output.drafts:
            behind = [i for i, draft in output.drafts for _ in draft]  # the row of each draw behind a draft
            none = [0] * len(behind)
            rows, starts, counts = rows + [rows[i] for i in behind], starts + none, counts + none
        sampling = self._sampling(rows)
        slot_R, start_R = self.slot_R, np.array(starts, np.int32)
        if len(output.token_ids) == count:  # one token a row: no expansion needed
            kv_len_R, q_start_B = start_R + 1, np.arange(count + 1, dtype=np.int32)
            pos_T, row_T = start_R, slot_R
        else:
            count_R = np.array(counts, np.int32)
            kv_len_R, q_start_B = start_R + count_R, np.zeros(len(rows) + 1, np.int32)
            np.add.accumulate(count_R, out=q_start_B[1:])
            pos_T = np.arange(q_start_B[-1], dtype=np.int32) + np.repeat(start_R - q_start_B[:-1], count_R)
            row_T = np.repeat(slot_R, count_R)
        arrays: Arrays = {
            "token_T": np.array(output.token_ids, np.int32),
            "pos_T": pos_T,
            "q_start_B": q_start_B,
            "kv_len_R": kv_len_R,
            "logit_index_R": q_start_B[1:] - 1,
            "pos_R": kv_len_R,
            **sampling,
            **self._pages(pos_T, row_T, -(-int(kv_len_R.max()) // size)),
            **self._feed(output, row_T, slot_R[:count]),
        }
        if output.drafts:
            arrays["logit_index_R"] = index_R = draw_index(arrays["logit_index_R"], output)
            arrays["pos_R"] = pos_T[index_R] + 1
        if self.adapter_slots:
            arrays |= adapter_fields(self.adapter[row_T], self.adapter_slots)
        return arrays if self.images is None else arrays | self.images.fields(output, pos_T, row_T)

    def _sampling(self, rows: list[int]) -> Arrays:
        """Sampling parameters of these row slots, gathered anew only if they are others, or of another request."""
        if rows != self.gathered_rows:
            self.gathered_rows, self.slot_R = rows, np.array(rows, np.int32)
            self.gathered = {name: table.take(self.slot_R) for name, table in self.sampling.items()}
        return self.gathered

    def _feed(self, output: SchedulerOutput, row_T: np.ndarray, slot_R: np.ndarray) -> Arrays:
        """Which tokens the step before has drawn, and in which of its rows; and which are guesses, and where they lie.
        Modifies: the rows of the step before."""
        index_T, from_T = np.zeros(len(row_T), np.int32), np.zeros(len(row_T), np.bool_)
        if output.fed:
            fed = np.array(output.fed)
            from_T[fed] = True
            index_T[fed] = self.last_index[row_T[fed]]
        if output.guessed:
            (first, most), end_R = self.guesses, np.add.accumulate(output.counts)
            for i, draft in output.drafts:
                guess_T = slice(end_R[i] - len(draft), end_R[i])
                from_T[guess_T] = True
                index_T[guess_T] = np.arange(len(draft)) + (first + output.rows[i] * most)
        self.last_index[slot_R] = np.arange(len(slot_R), dtype=np.int32)
        return {"feed_index_T": index_T, "feed_from_T": from_T}

    def _pages(self, pos_T: np.ndarray, row_T: np.ndarray, held: int) -> Arrays:
        """Where the tokens' keys and values go, and the first `held` pages of each row; of windowed layers, too, where
        these have pages of their own."""
        page_T, offset_T = np.divmod(pos_T, self.page_size)
        entry_T = row_T.astype(np.int64) * self.page_table.shape[1] + page_T
        slot_T = self.page_table.take(entry_T) * self.page_size + offset_T
        pages: Arrays = {"slot_T": slot_T, "page_table_RN": self.page_table[self.slot_R, :held]}
        if (table := self.window_table) is not None:
            slot_U = table.take(entry_T) * self.page_size + offset_T
            pages |= {"window_slot_U": slot_U, "window_table_RY": table[self.slot_R, :held]}
        return pages
