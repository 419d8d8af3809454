"""Guesses in a chain, each behind the one before: on CUDA one graph for so many rows and guesses.

    catch up: tokens the draft has not seen --head--> logits --edits--> draw --> guess 0 --head--> ... --> guess K-1

Tokens, positions and pages of all but the first guess are computed on the device, so the host waits once, for all of
them. Where grammars mask guesses it computes each mask behind the guess before, and waits for each.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fengine.models.kv_state import KVState, Tensors
from fengine.models.spec import ModelSpec
from fengine.ops.edit_logits import apply_bitmask
from fengine.ops.sampling import draw
from fengine.worker.cuda_graphs import Graphs, decode_sizes
from fengine.worker.cuda_runner import edit_sizes
from fengine.worker.fields import INPUTS, Arrays, Field, Sizes, StaticBuffers
from fengine.worker.logits.bias import LogitBias
from fengine.worker.logits.masks import Filled
from fengine.worker.logits.penalties import Penalties
from fengine.worker.step import DRAW, on_cpu
from fengine.worker.step_input import LogitsStage
from fengine.worker.warm_up import warm_step

FIELDS = tuple(
    field._replace(pad=0) if field.name == "page_table_RN" else field  # rows of padding go on in the null page
    for field in INPUTS
    if not field.name.startswith("feed_")
)
GUESSES = Field("guess_RK", torch.int32)
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
        most: int, graphs: bool,
    ) -> None:  # fmt: skip
        """`width` of page tables; `rows`, and `most` guesses of each: what graphs are made for."""
        self.head, self.kv, self.feature_PSX, self.edits = head, kv, feature_PSX, edits
        self.width, self.rows, self.most, self.device = width, rows, most, kv.k_PSGK[0].device
        self.caught_up = most + 1 if head.behind else 2  # tokens of a row that its last try can leave to be seen
        self.graphs = Graphs(self.device) if graphs else None
        if graphs:
            self.inputs = StaticBuffers(FIELDS + Penalties.fields + LogitBias.fields, self._sizes(rows), self.device)
            self.found = StaticBuffers((GUESSES,), {"R": rows, "K": most}, self.device)

    def warm_up(self) -> None:
        """Captures the graphs of `most` guesses without edits, the largest first; nothing on a CPU."""
        for rows in reversed(decode_sizes(self.rows)) if self.graphs else ():
            sizes = self._sizes(rows)
            self.run(warm_step(sizes["T"], sizes).arrays, (), self.most)

    def run(
        self, arrays: Arrays, stages: tuple[LogitsStage, ...], count: int, guide: Guide | None = None
    ) -> np.ndarray:
        """`count` guesses for each row, int32 [R, count]; -1 where logits were not finite. Waits for them.

        `arrays` by FIELDS and the fields of `stages`: positions whose KV is to be written first, and how rows draw."""
        rows, tokens = len(arrays["kv_len_R"]), len(arrays["token_T"])
        with torch.inference_mode():
            if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
                torch.cuda.set_device(self.device)  # of the loop's thread: a logit processor may have chosen another
            small = rows <= self.rows and tokens <= rows * self.caught_up
            if self.graphs is None or guide is not None or not small:
                tensors = {name: tensor.to(self.device) for name, tensor in on_cpu(arrays).items()}
                return torch.stack([*self._guesses(tensors, stages, count, guide)], 1).cpu().numpy()
            return self._replay(self.graphs, arrays, stages, count)

    def _replay(self, graphs: Graphs, arrays: Arrays, stages: tuple[LogitsStage, ...], count: int) -> np.ndarray:
        rows = len(arrays["kv_len_R"])
        bucket = next(size for size in decode_sizes(self.rows) if size >= rows)
        sizes = self._sizes(bucket)
        self.inputs.fill(arrays, sizes, 0)
        self.inputs.send(0, 0, sizes)
        key = (bucket, count, tuple(stage.name for stage in stages), sum(stage.version for stage in stages))
        if not graphs.replay(key):
            run = partial(self._into_buffers, sizes, stages, count)
            run()  # which also readies this thread's libraries
            graphs.capture_late(key, run)
        found = {"R": bucket, "K": count}
        self.found.fetch(0, 0, found)
        torch.cuda.current_stream().synchronize()
        return self.found.arrays(0, found)["guess_RK"][:rows].copy()

    def _into_buffers(self, sizes: Sizes, stages: tuple[LogitsStage, ...], count: int) -> None:
        guesses = [*self._guesses(self.inputs.tensors(0, sizes), stages, count, None)]
        torch.stack(guesses, 1, out=self.found.tensors(0, {"R": sizes["R"], "K": count})["guess_RK"])

    def _sizes(self, rows: int) -> Sizes:
        return {**edit_sizes(rows), "T": rows * self.caught_up, "B": rows + 1, "N": self.width}

    def _guesses(
        self, tensors: Tensors, stages: tuple[LogitsStage, ...], count: int, guide: Guide | None
    ) -> Iterator[Tensor]:
        """Guess by guess, int32 [R], -1 where logits were not finite. Modifies: the KV state."""
        batch, size = tensors, self.kv.page_size
        temperature_R, top_k_R, top_p_R, min_p_R, seed_R = (tensors[name] for name in DRAW[:-1])
        end_R, rows, stream_TD, token_R = batch["kv_len_R"], len(batch["kv_len_R"]), None, None
        guess_RK = torch.full((rows, count), -1, dtype=torch.int32, device=self.device)
        if self.feature_PSX is not None:
            stream_TD = self.head.fuse(self.feature_PSX.flatten(0, 1).index_select(0, batch["slot_T"]))
        start_B = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        for step in range(count):
            if token_R is not None:
                pos_R = (end_R + (step - 1)).clamp(max=self.head.spec.max_position - 1)
                page_R = batch["page_table_RN"].gather(1, (pos_R // size).long()[:, None])[:, 0]
                batch = {
                    "token_T": token_R, "pos_T": pos_R, "slot_T": page_R * size + pos_R % size, "q_start_B": start_B,
                    "kv_len_R": end_R + step, "page_table_RN": batch["page_table_RN"], "logit_index_R": start_B[:-1],
                }  # fmt: skip
            self.kv, logits_RV, stream_TD = self.head.run(self.kv, batch, stream_TD)
            for stage in stages:
                logits_RV = stage.apply(logits_RV, {**tensors, "guess_RK": guess_RK})
            if guide is not None:
                filled = guide(None if token_R is None else token_R.cpu().numpy())
                masks = () if filled is None else [torch.from_numpy(x).to(self.device) for x in filled[:2]]
                logits_RV = apply_bitmask(logits_RV, *masks) if masks else logits_RV
            drawn_R, logprob_R = draw(
                logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seed_R, batch["kv_len_R"] + self.head.behind
            )
            found_R = torch.where(logprob_R.isnan(), -1, drawn_R)
            guess_RK[:, step] = found_R
            token_R = found_R.clamp(min=0)
            yield found_R
