"""`Extras`: what rows want of steps beside a drawn token and its logprob."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from fengine.core.request import Request
from fengine.core.scheduler_output import SchedulerOutput
from fengine.worker.logits.hidden_states import hidden_wanted
from fengine.worker.logits.logprobs import ASKED, asked_ids, prompt_rows
from fengine.worker.step_input import Chunk, LogitsStage, StepInput, Write

BY_ROW = ("processor", "mask", "logprobs", "input logprobs", "hidden states")  # of others tables know all


class Extras:
    """Per row slot what was told of a request that wants more. Modifies: itself, the stages' tables."""

    def __init__(self, stages: Sequence[LogitsStage]) -> None:
        self.stages = {stage.name: stage for stage in stages}  # in the order that bits depend on
        self.rows: dict[int, Request] = {}  # by row slot; their token_ids are kept up to date as far as none is fed
        self.drafted: dict[int, tuple[int, list[int]]] = {}  # what was guessed in their last steps, behind where
        self.asked: Counter[str] = Counter()  # how many of them want what
        self.writes: list[Write] = []  # to the stages' tables, that the next step makes

    def admit(self, new: Request) -> None:
        """A request that wants more has got its row slot."""
        self.rows[new.slot] = replace(new, token_ids=list(new.token_ids))
        for name in new.params.asks:
            self.asked[name] += 1
            if name in self.stages:
                self.writes += self.stages[name].admit(new.slot, new)

    def release(self, rows: Iterable[int]) -> None:
        """The requests in these slots have ended, or were preempted: nothing of them is kept."""
        for row in rows:
            if (told := self.rows.pop(row, None)) is None:
                continue
            self.drafted.pop(row, None)
            for name in told.params.asks:
                self.asked[name] -= 1
                if name in self.stages:
                    self.stages[name].release(row)

    def add_to(self, step: StepInput, output: SchedulerOutput) -> None:
        """Adds to a step what its rows want. Modifies: step."""
        step.writes, self.writes = self.writes, []
        chunks = self._chunks(step, output) if any(self.asked[name] for name in BY_ROW) else []
        if self.asked["hidden states"]:
            _ask_hidden(step, chunks)
        draws_R = np.array(output.samples + [True] * (step.rows - len(output.samples)))
        draws_R[step.pooled] = False
        step.draws, step.chunks = bool(draws_R.any()), [c for c in chunks if draws_R[c.row]]
        if self.asked["input logprobs"]:
            step.prompts = prompt_rows(chunks)
        if step.draws:
            found = [stage.stage(step, draws_R) for name, stage in self.stages.items() if self.asked[name]]
            step.stages = tuple(stage for stage in found if stage is not None)
        if step.draws and self.asked["logprobs"]:
            self._ask_logprobs(step)

    def _ask_logprobs(self, step: StepInput) -> None:
        asked = [c for c in step.chunks if c.new.params.top_logprobs or c.new.params.logprob_ids]
        if asked:
            step.top = max(c.new.params.top_logprobs for c in asked)
            step.arrays[ASKED.name] = asked_ids(asked, step.rows)

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


def _ask_hidden(step: StepInput, chunks: Sequence[Chunk]) -> None:
    """Modifies: step."""
    step.hidden, step.hidden_H = hidden_wanted(chunks)
    step.pooled = [chunk.row for chunk in chunks if chunk.draws and chunk.new.params.pool is not None]
