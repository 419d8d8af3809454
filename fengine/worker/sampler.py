"""From logits to one drawn token per row. Pure."""

from torch import Tensor

from fengine.models.kv_state import SamplingBatch, StepOut
from fengine.ops.sampling import draw


def sample(logits_RV: Tensor, sampling: SamplingBatch) -> StepOut:
    """Gumbel-max draw from softmax(logits / temperature) over the kept set (top-k, top-p, min-p). Pure.

    The noise is counter-based, keyed by (request seed, position, vocabulary id), so a draw depends on its own row only.
    Source: Gumbel 1954 (the max trick); Salmon et al. 2011 (Philox).
    """
    token_R, logprob_R = draw(
        logits_RV,
        sampling.temperature_R,
        sampling.top_k_R,
        sampling.top_p_R,
        sampling.min_p_R,
        sampling.seed_R,
        sampling.pos_R,
    )
    return StepOut(token_R, logprob_R)
