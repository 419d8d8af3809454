"""Runs steps on a CPU, in the calling thread; `cuda_runner.py` does so on CUDA.

    StepInput --forward--> hidden_TD --sample--> draws --> StepOutput
                  |           `--------> prompt logprobs, hidden states
                  `- meanwhile the host computes the masks of grammars

A launch does not wait for the device: its `Result` does. The runner never touches requests; the loop never touches
tensors.
"""

from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from fengine.models.kv_state import KVState, Params
from fengine.worker.fields import Arrays
from fengine.worker.logits.logprobs import scores_of
from fengine.worker.step import Drawn, ForwardFn, Result, SampleFn, UnembedFn, batch_of, read_out, sample_rows
from fengine.worker.step_input import StepInput
from fengine.worker.warm_up import warm_step


class CpuRunner:
    """Runs steps in the calling thread, without padding: if compiled, sizes are dynamic in the one graph."""

    def __init__(
        self, params: Params, forward: ForwardFn, unembed: UnembedFn, adapter_slots: int,
        sampler: SampleFn = sample_rows, images: str = "", grouped: bool = False,
    ) -> None:  # fmt: skip
        """`images`: letters of the fields of IMAGES. `grouped`: windowed layers have pages of their own."""
        self.params, self.forward, self.unembed, self.adapter_slots = params, forward, unembed, adapter_slots
        self.sampler, self.images, self.grouped = sampler, images, grouped
        self.last_token_R = torch.zeros(1, dtype=torch.int32)  # drawn by the step before
        self.drawn: Drawn = list  # gives the tokens of the step before

    def warm_up(self, kv: KVState, page_size: int) -> KVState:
        """Compiles the forward pass before the first request, without adapters and with; every later size reuses it."""
        for (tokens, rows, width), slots in product(((5, 3, 2), (1, 1, 1), (4, 1, 1), (2, 2, 1)),
                                                    sorted({0, self.adapter_slots})):  # fmt: skip
            sizes = {"T": tokens, "R": rows, "B": rows + 1, "N": max(width, -(-tokens // page_size))}
            sizes |= {"U": tokens, "Y": sizes["N"]} if self.grouped else {}
            sizes |= dict.fromkeys(self.images, tokens)
            step = warm_step(tokens, sizes | ({"A": tokens, "S": slots + 1} if slots else {}))
            kv, _ = self.forward(self.params, kv, batch_of(on_cpu(step.arrays), self.last_token_R))
        return kv

    def launch(self, kv: KVState, step: StepInput) -> tuple[KVState, Result]:
        """The step, done. Modifies: the storage of `kv`, which is dead after the call."""
        for write in step.writes:
            write()
        late = step.begin(self.drawn)
        tensors = on_cpu(step.arrays)
        kv, hidden_TD = self.forward(self.params, kv, batch_of(tensors, self.last_token_R))
        draw_2R, likeliest = np.zeros((2, step.rows), np.int32), None
        if step.draws:
            tensors |= on_cpu(late())
            token_R, logprob_R, scored = self.sampler(
                self.params, self.unembed, hidden_TD, tensors, step.stages, step.top
            )
            self.last_token_R, self.drawn = token_R, token_R.tolist
            draw_2R = torch.stack((token_R, logprob_R.view(torch.int32))).numpy()
            likeliest = scored and partial(scores_of, *(x.numpy() for x in scored), rows=step.rows)
        return kv, read_out(self.params, self.unembed, hidden_TD, step, lambda: draw_2R, likeliest)


def on_cpu(arrays: Arrays) -> dict[str, Tensor]:
    """The arrays as CPU tensors, without copies. Pure."""
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
