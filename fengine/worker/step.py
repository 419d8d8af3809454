"""The step of the device column, as two pure functions: the forward pass to hidden_TD, and from there to what it gives.

    forward:  tokens -> hidden_TD            sample:  hidden_TD -> logits_RV -> stages -> draw -> logprobs

`CpuRunner` runs them in the calling thread. On CUDA (`cuda_runner.py`) each is a captured graph; between them the host
computes the masks of grammars, if there are any. A launch does not wait for the device: its `Result` does. A runner
never touches requests; the loop never touches tensors."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from fengine.core.scheduler_output import Scores, StepOutput
from fengine.models import lookup
from fengine.models.kv_state import KVState, Params, Tensors
from fengine.models.layers import decoder
from fengine.models.spec import ModelSpec
from fengine.ops import edges
from fengine.ops.sampling import draw
from fengine.worker.compiled import compiled_layers
from fengine.worker.logits.logprobs import Likeliest, put, score, score_prompts, scores_of, to_host
from fengine.worker.step_input import Arrays, LogitsStage, StepInput
from fengine.worker.warm_up import warm_step

DRAW = ("temperature_R", "top_k_R", "top_p_R", "min_p_R", "seed_R", "pos_R")  # what `ops.sampling.draw` takes


# One drawn token per row, int32; its logprob under softmax(logits / temperature), float32, NaN where the row's logits
# were not finite; and logprobs of other ids, where some row wants them.
Sampled = tuple[Tensor, Tensor, Likeliest | None]
ForwardFn = Callable[[Params, KVState, Tensors], tuple[KVState, Tensor]]
UnembedFn = Callable[[Params, Tensor], Tensor]
SampleFn = Callable[..., Sampled]  # as `sample_rows`
Drawn = Callable[[], Sequence[int]]  # waits for the tokens that a step has drawn
Result = Callable[[], StepOutput]  # waits for the step


def batch_of(tensors: Tensors, last_token_R: Tensor) -> Tensors:
    """What the forward pass takes, from tensors by name; tokens that only the device knows yet are filled in from
    those that the step before has drawn. Pure."""
    token_T = edges.feed(tensors["token_T"], last_token_R, tensors["feed_index_T"], tensors["feed_from_T"])
    return {**tensors, "token_T": token_T}


def make_forward(spec: ModelSpec, *, compiled: bool = False) -> ForwardFn:
    """The forward pass with `spec` closed over; its layers under torch.compile if asked. It modifies the storage of the
    KV state, which is dead after the call; the returned state is the only live one."""
    model = lookup(spec.architecture)
    forward = decoder(compiled_layers(model.layer)) if compiled and model.layer is not None else model.forward
    return lambda params, kv, batch: forward(params, spec, kv, batch)


def make_unembed(spec: ModelSpec) -> UnembedFn:
    """From hidden states to logits, with `spec` closed over. Pure."""
    unembed = lookup(spec.architecture).unembed
    return lambda params, hidden_RD: unembed(params, spec, hidden_RD)


def sample(logits_RV: Tensor, tensors: Tensors, stages: Sequence[LogitsStage] = (), top: int | None = None) -> Sampled:
    """Gumbel-max draw from softmax(logits / temperature) over the kept set (top-k, top-p, min-p), behind the stages.

    `tensors`: the fields of INPUTS that have an R alone, and those of the stages. `top`: how many of each row's
    likeliest ids are told; None: no logprobs but those of the draws.

    The noise is counter-based, keyed by (request seed, position, vocabulary id), so a draw depends on its own row only.
    Modifies: logits_RV and the stages' tables, where there are stages.
    Source: Gumbel 1954 (the max trick); Salmon et al. 2011 (Philox)."""
    for stage in stages:
        logits_RV = stage.apply(logits_RV, tensors)
    token_R, logprob_R = draw(logits_RV, *(tensors[name] for name in DRAW))
    for stage in stages:
        stage.drawn(logits_RV, token_R, tensors)
    likeliest = None if top is None else score(logits_RV, tensors["temperature_R"], tensors["asked_RK"], top)
    return token_R, logprob_R, likeliest


def sample_rows(
    params: Params, unembed: UnembedFn, hidden_TD: Tensor, tensors: Tensors, stages: Sequence[LogitsStage],
    top: int | None,
) -> Sampled:  # fmt: skip
    """Draws a token for each row, behind its `logit_index_R`. Modifies: the stages' tables."""
    logits_RV = unembed(params, edges.take(hidden_TD, tensors["logit_index_R"]))
    return sample(logits_RV, tensors, stages, top)


def step(
    params: Params, spec: ModelSpec, kv: KVState, batch: Tensors, tensors: Tensors, stages: Sequence[LogitsStage] = ()
) -> tuple[KVState, Sampled]:
    """Both in one, on tokens that are known: every token of `batch` through the model, and one drawn per row. Modifies:
    the storage of `kv`, which is dead after the call; the returned state is the only live one."""
    model = lookup(spec.architecture)
    kv, hidden_TD = model.forward(params, spec, kv, batch)
    logits_RV = model.unembed(params, spec, edges.take(hidden_TD, batch["logit_index_R"]))
    return kv, sample(logits_RV, tensors, stages)


def read_out(
    params: Params, unembed: UnembedFn, hidden_TD: Tensor, step: StepInput, draws: Callable[[], np.ndarray],
    likeliest: Callable[[], Scores] | None,
) -> Result:  # fmt: skip
    """Launches what is read from hidden_TD: prompt logprobs and wanted hidden states. The result waits for the step and
    gives its StepOutput. `draws` waits for tokens and the bits of their logprobs, int32 [2, R]; `likeliest` is called
    after it."""
    prompts = [(rows.spans, score_prompts(partial(unembed, params), hidden_TD, rows)) for rows in step.prompts]
    hidden_HD = None
    if step.hidden_H is not None:
        hidden_HD = to_host(hidden_TD.index_select(0, put(step.hidden_H, hidden_TD)).float())

    def result() -> StepOutput:
        draw_2R = draws()
        out = StepOutput(draw_2R[0].tolist(), draw_2R[1].view(np.float32).tolist(), step.errors())
        for row in out.errors:
            out.logprobs[row] = float("nan")
        out.outputs = None if likeliest is None else likeliest()
        out.prompts = [(spans, scores()) for spans, scores in prompts]
        out.hidden, out.pooled = step.hidden, step.pooled
        out.hidden_HD = None if hidden_HD is None else hidden_HD.numpy()
        return out

    return result


WARM = ((5, 3, 2), (1, 1, 1), (4, 1, 1), (2, 2, 1))  # tokens, rows, pages of a row: after these all sizes are dynamic


class CpuRunner:
    """Runs steps in the calling thread, without padding: if compiled, sizes are dynamic in the one graph."""

    def __init__(
        self, params: Params, forward: ForwardFn, unembed: UnembedFn, adapter_slots: int,
        sampler: SampleFn = sample_rows, images: str = "", grouped: bool = False, compiled: bool = True,
    ) -> None:  # fmt: skip
        """`images`: letters of the fields of IMAGES. `grouped`: windowed layers have pages of their own."""
        self.params, self.forward, self.unembed, self.adapter_slots = params, forward, unembed, adapter_slots
        self.sampler, self.images, self.grouped = sampler, images, grouped
        self.warm_sizes = WARM if compiled else WARM[:1]
        self.last_token_R = torch.zeros(1, dtype=torch.int32)  # drawn by the step before
        self.guess_token_S = self.last_token_R[:0]  # guesses are known when a step is launched
        self.drawn: Drawn = list  # gives the tokens of the step before

    def warm_up(self, kv: KVState, page_size: int) -> KVState:
        """Compiles the forward pass before the first request, without adapters and with; every later size reuses it.
        One that is not compiled is tried once."""
        for (tokens, rows, width), slots in product(self.warm_sizes, sorted({0, self.adapter_slots})):
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
        tensors = on_cpu(step.arrays)
        kv, hidden_TD = self.forward(self.params, kv, batch_of(tensors, self.last_token_R))
        draw_2R, likeliest = np.zeros((2, step.rows), np.int32), None
        if step.draws:
            tensors |= on_cpu(step.late_fields(self.drawn))
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
