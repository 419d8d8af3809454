"""Guesses in a chain, each behind the one before: on CUDA a graph for each of so many rows.

    catch up: tokens the draft has not seen --head--> logits --edits--> draw --> guess 0 --head--> ... --> guess K-1

Tokens, positions and pages of all but the first guess are computed on the device, so the host waits once, for all of
them, or not before they are verified. Those of the first are computed there, too, where a run goes on behind a step
whose draws the host has not read. Where grammars mask guesses it computes each mask behind the guess before, and
waits for each.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fengine.core.masks import Filled
from fengine.models.kv_state import KVState, Tensors
from fengine.models.spec import ModelSpec
from fengine.ops.edit_logits import apply_bitmask
from fengine.ops.go_on import catch_up, go_on
from fengine.ops.sampling import draw
from fengine.worker.cuda_graphs import Graphs, decode_sizes
from fengine.worker.cuda_runner import edit_sizes
from fengine.worker.device import enter
from fengine.worker.logits.bias import LogitBias
from fengine.worker.logits.penalties import Penalties
from fengine.worker.static_buffers import StaticBuffers
from fengine.worker.step import DRAW, on_cpu
from fengine.worker.step_input import INPUTS, Arrays, Field, LogitsStage, Sizes
from fengine.worker.warm_up import warm_step

NULL = {"page_table_RN": 0, "kv_len_R": 1}  # rows of padding go on in the null page
FIELDS = tuple(
    field._replace(pad=NULL.get(field.name, field.pad)) for field in INPUTS if not field.name.startswith("feed_")
)
GUESSES, SLOTS = Field("guess_RK", torch.int32), Field("guess_slot_R", torch.int32)  # row slots
TRY = Field("try_7R", torch.int32)  # what `catch_up` is told of the step before
HELD = (64, 256, 1024)  # tokens to catch up with, of which there are graphs besides
PIECE = 512  # more of them are padded to multiples of it, and run
Guide = Callable[[np.ndarray | None], Filled | None]  # masks behind the guesses before [R]; None: behind what is known


class Head(Protocol):
    """The model that guesses."""

    spec: ModelSpec
    behind: int  # so many tokens behind a position stands the one that it has
    bytes: int  # that a guess reads of its weights
    feature_layers: tuple[int, ...]  # of the target, in front of which the streams lie that it goes on from

    def fuse(self, feature_TX: Tensor) -> Tensor:
        """What it goes on from where the target's streams are known."""
        ...

    def run(self, kv: KVState, batch: Tensors, stream_TD: Tensor | None) -> tuple[KVState, Tensor, Tensor | None]:
        """(KV state, logits_RV, what row's next guess goes on from). Modifies: the storage of `kv`."""
        ...


class Chain:
    """Runs a head over its own KV state, and the target's streams if it goes on from these. Modifies: the KV state."""

    def __init__(
        self, head: Head, kv: KVState, feature_PSX: Tensor | None, edits: Sequence[LogitsStage], width: int, rows: int,
        most: int, tokens: int, graphs: bool, drawn_R: Tensor, guess_token_S: Tensor,
    ) -> None:  # fmt: skip
        """`width` of page tables; at most `rows`, `most` guesses of each, and `tokens` to catch up with in a run.
        `drawn_R`: where steps leave their draws. `guess_token_S`: where graphs put guesses, by row slot, if
        anywhere."""
        self.head, self.kv, self.feature_PSX, self.edits = head, kv, feature_PSX, edits
        self.width, self.rows, self.most, self.device = width, rows, most, kv.k_PSGK[0].device
        self.seen = most + 1 if head.behind else 2  # tokens of a row that its last try can leave to be seen
        self.start_B = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        self.next_5R = torch.zeros(5, -(-rows // 16) * 16, dtype=torch.int32, device=self.device)
        self.stream_RD: Tensor | None = None  # what next guesses go on from
        self.graphs, self.drawn_R, self.guess_token_S = Graphs(self.device) if graphs else None, drawn_R, guess_token_S
        self.turn = 0  # of the two buffers on the host, for a run may begin before the last one's guesses are read
        if graphs:
            fields = (*FIELDS, SLOTS, TRY, *Penalties.fields, *LogitBias.fields)
            fields = sorted(fields, key=lambda field: "T" in field.letters)
            most_tokens = -(-max(tokens, rows * self.seen) // PIECE) * PIECE
            self.inputs = StaticBuffers(tuple(fields), self._sizes(rows, most_tokens), self.device)
            self.found = StaticBuffers((GUESSES,), {"R": rows, "K": most}, self.device)
            self.sent = [torch.cuda.Event() for _ in range(2)]  # what lay in this buffer is on the device

    def warm_up(self) -> None:
        """Captures the graphs without edits, the largest first; nothing on a CPU."""
        for rows in reversed(decode_sizes(self.rows)) if self.graphs else ():
            for tokens in reversed(self._held(rows)):
                arrays = warm_step(tokens, self._sizes(rows, tokens)).arrays
                self.run(arrays, (), self.most)()
                if self.feeds:
                    self.run_behind(arrays | {TRY.name: np.ones((7, rows), np.int32)}, tokens, 1)

    def release(self, kv: bool) -> None:
        """Drops the graphs, which name the target's weights; with `kv` the KV states, too, for good."""
        if self.graphs is not None:
            self.graphs.clear()
        if kv:
            self.kv, self.feature_PSX = KVState((), ()), None

    def run(
        self, arrays: Arrays, stages: tuple[LogitsStage, ...], count: int, guide: Guide | None = None
    ) -> Callable[[], np.ndarray]:
        """What waits for `count` guesses of each row: int32 [R, count], -1 where logits were not finite. It is called
        before the next run.

        `arrays` by FIELDS, SLOTS and the fields of `stages`: positions whose KV is to be written first, and how rows
        draw."""
        with torch.inference_mode():
            enter(self.device)
            if self.graphs is not None and guide is None:
                return self._replay(self.graphs, arrays, stages, count, len(arrays["token_T"]))
            tensors = {name: tensor.to(self.device) for name, tensor in on_cpu(arrays).items()}
            guess_RK = self.start_B.new_full((len(arrays["kv_len_R"]), count), -1)
            for step in range(count):
                self._guess(step, tensors, stages, guess_RK, guide)
            return guess_RK.cpu().numpy

    @property
    def feeds(self) -> bool:
        """Whether steps are fed with guesses that the host does not know."""
        return self.graphs is not None and len(self.guess_token_S) > 0

    def run_behind(self, arrays: Arrays, tokens: int, count: int) -> Callable[[], np.ndarray]:
        """As `run`, behind a step that is launched and fed with the last guesses: what it draws says what is to be
        caught up with, at most `tokens`. `arrays` by SLOTS, TRY, page_table_RN, kv_len_R of any values, and how rows
        draw. Only where it `feeds`."""
        assert self.graphs is not None
        with torch.inference_mode():
            enter(self.device)
            return self._replay(self.graphs, arrays, (), count, tokens)

    def _replay(
        self, graphs: Graphs, arrays: Arrays, stages: tuple[LogitsStage, ...], count: int, tokens: int
    ) -> Callable[[], np.ndarray]:
        rows, turn = len(arrays["kv_len_R"]), self.turn
        self.turn ^= 1
        bucket = next(size for size in decode_sizes(self.rows) if size >= rows)
        held = next((size for size in self._held(bucket) if size >= tokens), 0)
        sizes = self._sizes(bucket, held or -(-tokens // PIECE) * PIECE)
        self.sent[turn].synchronize()
        self.inputs.fill(arrays, sizes, turn)
        self.inputs.send(turn, 0, sizes)
        self.sent[turn].record(torch.cuda.current_stream(self.device.index))
        if TRY.name in arrays:
            self._catch_up(self.inputs.tensors(0, sizes), rows)
        edits = tuple(stage.name for stage in stages), sum(stage.version for stage in stages)
        for step in range(count):
            key = (bucket, step, 0 if step else held, *edits)
            if not graphs.replay(key):
                run = partial(self._into_buffers, sizes, stages, step)
                run()  # which also readies this thread's libraries
                if step or held:
                    graphs.capture_late(key, run)
        found, done = {"R": bucket, "K": self.most}, torch.cuda.Event()
        if self.feeds:
            slot_R = self.inputs.tensors(0, sizes)[SLOTS.name][:rows]
            guess_RK = self.found.tensors(0, found)[GUESSES.name][:rows]
            self.guess_token_S.view(-1, self.most)[slot_R] = guess_RK.clamp(min=0)
        self.found.fetch(turn, 0, found)
        done.record(torch.cuda.current_stream(self.device.index))

        def guesses() -> np.ndarray:
            done.synchronize()
            return self.found.arrays(turn, found)[GUESSES.name][:rows, :count].copy()

        return guesses

    def _catch_up(self, tensors: Tensors, rows: int) -> None:
        """Has the device fill in what the host cannot know yet. Modifies: the tensors."""
        catch_up(
            self.drawn_R, self.guess_token_S, tensors[SLOTS.name], tensors[TRY.name], tensors["page_table_RN"],
            tensors["token_T"], tensors["pos_T"], tensors["slot_T"], tensors["q_start_B"], tensors["logit_index_R"],
            tensors["kv_len_R"], tensors["pos_R"], rows, self.most, self.kv.page_size, self.head.behind,
        )  # fmt: skip

    def _into_buffers(self, sizes: Sizes, stages: tuple[LogitsStage, ...], step: int) -> None:
        guess_RK = self.found.tensors(0, {"R": sizes["R"], "K": self.most})["guess_RK"]
        if not step:
            guess_RK.fill_(-1)
        self._guess(step, self.inputs.tensors(0, sizes), stages, guess_RK, None)

    def _sizes(self, rows: int, tokens: int) -> Sizes:
        return {**edit_sizes(rows), "T": tokens, "B": rows + 1, "N": self.width}

    def _held(self, rows: int) -> list[int]:
        """Of so many tokens to catch up with there are graphs: what the last try leaves, rests, and short prompts."""
        least = rows * self.seen
        return [least, *(size for size in HELD if size > least)]

    def _guess(
        self, step: int, tensors: Tensors, stages: tuple[LogitsStage, ...], guess_RK: Tensor, guide: Guide | None
    ) -> None:
        """Guess `step` of each row, behind the ones before. Modifies: the KV state, guess_RK, what the next goes on
        from."""
        batch, rows = {**tensors, "guess_RK": guess_RK}, len(guess_RK)
        next_5R, stream_TD = self.next_5R[:, :rows], None
        if step:
            batch |= zip(("token_T", "pos_T", "slot_T", "kv_len_R", "pos_R"), next_5R, strict=True)
            batch |= {"q_start_B": self.start_B[: rows + 1], "logit_index_R": self.start_B[:rows]}
            stream_TD = None if self.stream_RD is None else self.stream_RD[:rows]
        elif self.feature_PSX is not None:
            stream_TD = self.head.fuse(self.feature_PSX.flatten(0, 1).index_select(0, batch["slot_T"]))
        self.kv, logits_RV, stream_RD = self.head.run(self.kv, batch, stream_TD)
        if stream_RD is not None:
            if self.stream_RD is None:
                self.stream_RD = stream_RD.new_zeros((self.rows, stream_RD.shape[1]))
            self.stream_RD[:rows] = stream_RD
        for stage in stages:
            logits_RV = stage.apply(logits_RV, batch)
        if guide is not None:
            filled = guide(next_5R[0].cpu().numpy() if step else None)
            if filled is not None:
                masks = (torch.from_numpy(np.ascontiguousarray(x)).to(self.device) for x in filled[:2])
                logits_RV = apply_bitmask(logits_RV, *masks)
        token_R, logprob_R = draw(logits_RV, *(batch[name] for name in DRAW))
        go_on(
            token_R, logprob_R, tensors["kv_len_R"], tensors["page_table_RN"], guess_RK, next_5R, step,
            self.kv.page_size, self.head.spec.max_position - 1, self.head.behind,
        )  # fmt: skip
