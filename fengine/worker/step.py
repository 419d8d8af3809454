"""The step of the device column, as two pure functions: the forward pass to hidden_TD, and from there to what it gives.

    forward:  tokens -> hidden_TD            sample:  hidden_TD -> logits_RV -> stages -> draw -> logprobs

On CUDA each is a captured graph; between them the host computes the masks of grammars, if there are any.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fengine.core.scheduler_output import Scores, StepOutput
from fengine.models import lookup
from fengine.models.kv_state import AdapterBatch, KVState, Params, SamplingBatch, StepBatch
from fengine.models.layers import decoder
from fengine.models.modernbert import EPS as HEAD_EPS
from fengine.models.spec import ModelSpec
from fengine.ops import edges
from fengine.ops.columns import Group, share
from fengine.ops.layer_norm import layer_norm
from fengine.ops.linear import linear
from fengine.ops.silu_mul import activate
from fengine.worker.compiled import compiled_layers
from fengine.worker.fields import Arrays, Tensors, built
from fengine.worker.input_batch import StepInput
from fengine.worker.logits.logprobs import put, score_prompts, to_host
from fengine.worker.logits.masks import Drawn
from fengine.worker.logits.stage import LogitsStage
from fengine.worker.logits.structured import StructuredOutput
from fengine.worker.sampler import Sampled, sample

ForwardFn = Callable[[Params, KVState, StepBatch, "Feed"], tuple[KVState, Tensor]]
UnembedFn = Callable[[Params, Tensor], Tensor]
Result = Callable[[], StepOutput]  # waits for the step


class Feed(NamedTuple):
    """Tokens that only the device knows yet: rows whose last token was drawn by the step before this one.

    Where feed_from_T[t] is true, token t of the batch is last_token_R[feed_index_T[t]] instead of what the host staged.
    """

    last_token_R: Tensor  # int32, the tokens drawn by the step before, which had its own R
    feed_index_T: Tensor  # int32
    feed_from_T: Tensor  # bool


def batches(tensors: Tensors, last_token_R: Tensor) -> tuple[StepBatch, Feed]:
    """What the forward pass takes, from tensors by name. Pure."""
    batch = built(StepBatch, tensors)
    if "token_A" in tensors:
        batch = batch._replace(adapters=built(AdapterBatch, tensors))
    return batch, built(Feed, {**tensors, "last_token_R": last_token_R})


def make_forward(spec: ModelSpec, *, compiled: bool = False) -> ForwardFn:
    """The forward pass with `spec` closed over, fed tokens filled in; its layers under torch.compile if asked.

    It modifies the storage of the KV state, which is dead after the call; the returned state is the only live one.
    """
    model = lookup(spec.architecture)
    forward = decoder(compiled_layers(model.layer)) if compiled and model.layer is not None else model.forward

    def run(params: Params, kv: KVState, batch: StepBatch, feed: Feed) -> tuple[KVState, Tensor]:
        token_T = edges.feed(batch.token_T, feed.last_token_R, feed.feed_index_T, feed.feed_from_T)
        return forward(params, spec, kv, batch._replace(token_T=token_T))

    return run


def make_unembed(spec: ModelSpec) -> UnembedFn:
    """From hidden states to logits, with `spec` closed over. Pure."""
    unembed = lookup(spec.architecture).unembed
    return lambda params, hidden_RD: unembed(params, spec, hidden_RD)


def sample_rows(
    params: Params, unembed: UnembedFn, hidden_TD: Tensor, tensors: Tensors, stages: Sequence[LogitsStage],
    top: int | None,
) -> Sampled:  # fmt: skip
    """Draws a token for each row, behind its `logit_index_R`. Modifies: the stages' tables."""
    logits_RV = unembed(params, edges.take(hidden_TD, tensors["logit_index_R"]))
    return sample(logits_RV, built(SamplingBatch, tensors), tensors, stages, top)


SampleFn = Callable[..., Sampled]  # as `sample_rows`


def ranked_rows(group: Group) -> SampleFn:
    """`sample_rows` for a rank of a group: rank 0 draws, and all have what it drew. Errors: RuntimeError of torch if a
    rank is gone."""

    def run(
        params: Params, unembed: UnembedFn, hidden_TD: Tensor, tensors: Tensors, stages: Sequence[LogitsStage],
        top: int | None,
    ) -> Sampled:  # fmt: skip
        if group.rank == 0:
            sampled = sample_rows(params, unembed, hidden_TD, tensors, stages, top)
        else:
            logits_RV = unembed(params, edges.take(hidden_TD, tensors["logit_index_R"]))
            sampled = Sampled(torch.zeros_like(tensors["logit_index_R"]), torch.zeros_like(logits_RV[:, 0]))
        share(sampled.token_R, group)
        return sampled

    return run


def step(
    params: Params, spec: ModelSpec, kv: KVState, batch: StepBatch, sampling: SamplingBatch,
    stages: Sequence[LogitsStage] = (), tensors: Tensors | None = None,
) -> tuple[KVState, Sampled]:  # fmt: skip
    """Both in one, on tokens that are known: every token of `batch` through the model, and one drawn per row.

    Modifies: the storage of `kv`, which is dead after the call; the returned state is the only live one.
    """
    model = lookup(spec.architecture)
    kv, hidden_TD = model.forward(params, spec, kv, batch)
    logits_RV = model.unembed(params, spec, edges.take(hidden_TD, batch.logit_index_R))
    return kv, sample(logits_RV, sampling, tensors or {}, stages)


def start_masks(step: StepInput, drawn: Drawn, beside: bool) -> Callable[[], Arrays]:
    """What gives the fields of the masks of a step, none if there are no grammars. Where the forward pass takes the
    calling thread they are begun `beside` it; where it only launches that pass, they are computed in the call."""
    for stage in step.stages:
        if isinstance(stage, StructuredOutput):
            return stage.start(drawn, beside)
    return dict


def read_out(
    params: Params, unembed: UnembedFn, hidden_TD: Tensor, step: StepInput, draws: Callable[[], np.ndarray],
    likeliest: Callable[[], Scores] | None,
) -> Result:  # fmt: skip
    """Launches what a step brings from its hidden states; what it returns gives all that it found.

    `draws` waits for the step, and gives tokens and the bits of their logprobs, [2, R]; `likeliest` is called then.
    """
    errors = {row: error for stage in reversed(step.stages) for row, error in stage.errors().items()}
    prompts = [(rows.spans, score_prompts(partial(unembed, params), hidden_TD, rows)) for rows in step.prompts]
    hidden_HD = None
    if step.hidden_H is not None:
        hidden_HD = to_host(hidden_TD.index_select(0, put(step.hidden_H, hidden_TD)).float())

    def result() -> StepOutput:
        draw_2R = draws()
        out = StepOutput(draw_2R[0].tolist(), draw_2R[1].view(np.float32).tolist(), errors)
        for row in errors:
            out.logprobs[row] = float("nan")
        out.outputs = None if likeliest is None else likeliest()
        out.prompts = [(spans, scores()) for spans, scores in prompts]
        out.hidden, out.pooled = step.hidden, step.pooled
        out.hidden_HD = None if hidden_HD is None else hidden_HD.numpy()
        return out

    return result


def scores_of(logprob_RZ: np.ndarray, top_id_RX: np.ndarray, rows: int) -> Scores:
    """What `Likeliest` holds of the first rows, asked ids and likeliest apart. Pure."""
    logprob_RZ, top_id_RX = logprob_RZ[:rows], top_id_RX[:rows]
    asked = logprob_RZ.shape[1] - top_id_RX.shape[1]
    return Scores(logprob_RZ[:, :asked], logprob_RZ[:, asked:], top_id_RX)


def apply_head(params: Params, pooled_D: np.ndarray) -> np.ndarray:
    """The classification or reward head on one pooled hidden state: float32 [C]. Pure.

    Encoders have a dense layer in front of it: ModernBERT's is followed by gelu and a norm, the others' by tanh.
    """
    norm_D = params["final_norm_D"]  # of the activations' device and dtype
    x_1D = torch.from_numpy(pooled_D)[None].to(norm_D)
    if "score_dense" in params:
        x_1D = linear(x_1D, params["score_dense"], params.get("score_dense_bias_D"))
        if "score_norm_D" in params:
            x_1D = layer_norm(activate(x_1D, "gelu"), params["score_norm_D"], HEAD_EPS)
        else:
            x_1D = x_1D.tanh()
    y_1C = linear(x_1D, params["score"], params.get("score_bias_C"), out_dtype=torch.float32)
    return y_1C[0].cpu().numpy()
