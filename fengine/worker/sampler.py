"""From logits to one drawn token per row, and what is told of the draw: stages, draw, logprobs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fengine.models.kv_state import Tensors
from fengine.ops.bitmask import apply_bitmask, words
from fengine.ops.edit_logits import add_at, count, penalize
from fengine.ops.sampling import draw
from fengine.worker.logits.edits import LogitBias, Penalties
from fengine.worker.logits.logprobs import MOST_ASKED, TOPS, Likeliest, score
from fengine.worker.logits.processors import Processors
from fengine.worker.logits.structured import StructuredOutput
from fengine.worker.step_input import LogitsStage


def logits_stages(rows: int, vocab: int, device: torch.device) -> tuple[LogitsStage, ...]:
    """Of an engine with so many row slots, in the order that bits depend on."""
    tables = (rows, vocab, device)
    return Penalties(*tables), LogitBias(*tables), Processors(), StructuredOutput(vocab)


DRAW = ("temperature_R", "top_k_R", "top_p_R", "min_p_R", "seed_R", "pos_R")  # what `ops.sampling.draw` takes


# One drawn token per row, int32; its logprob under softmax(logits / temperature), float32, NaN where the row's logits
# were not finite; and logprobs of other ids, where some row wants them.
Sampled = tuple[Tensor, Tensor, Likeliest | None]


def sample(logits_RV: Tensor, tensors: Tensors, stages: Sequence[LogitsStage] = (), top: int | None = None) -> Sampled:
    """Gumbel-max draw from softmax(logits / temperature) over the kept set (top-k, top-p, min-p), behind the stages.

    `tensors`: the fields of INPUTS that have an R alone, and those of the stages.

    The noise is counter-based, keyed by (request seed, position, vocabulary id), so a draw depends on its own row only.
    Modifies: logits_RV and the stages' tables, where there are stages.
    Source: Gumbel 1954 (the max trick); Salmon et al. 2011 (Philox).
    """
    for stage in stages:
        logits_RV = stage.apply(logits_RV, tensors)
    token_R, logprob_R = draw(logits_RV, *(tensors[name] for name in DRAW))
    for stage in stages:
        stage.drawn(logits_RV, token_R, tensors)
    likeliest = None if top is None else score(logits_RV, tensors["temperature_R"], tensors["asked_RK"], top)
    return token_R, logprob_R, likeliest


def warm_up(logits_RV: Tensor) -> None:
    """Has the kernels compiled that stages and logprobs need, by what edits no row. Pure."""
    rows, vocab = logits_RV.shape

    def blank(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=logits_RV.device)

    slot_R, one_R = blank(rows) - 1, blank(rows, dtype=torch.float32) + 1
    double_R, count_SV = blank(rows, dtype=torch.float64), blank(1, vocab)
    logits_RV = penalize(logits_RV, slot_R, double_R, double_R, one_R, count_SV)
    logits_RV = add_at(logits_RV, slot_R, blank(1, 16), blank(1, 16, dtype=torch.float32))
    logits_RV = apply_bitmask(logits_RV, slot_R, blank(rows, words(vocab)))
    count(count_SV, slot_R, blank(rows))
    for top in {0, *TOPS}:
        score(logits_RV, one_R, blank(rows, MOST_ASKED), min(top, vocab))
