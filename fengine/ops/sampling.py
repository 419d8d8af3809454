"""Draw one token per row by Gumbel-max, and its log-probability.

z = logits / temperature. logprob = log_softmax(z)[token]. top_k == 1 takes the argmax of z, the lowest id among equals.
Otherwise the token is the argmax of z + gumbel over the kept ids, where all filters look at the full distribution:
top-k keeps z >= the k-th largest z; top-p keeps an id iff the mass of strictly larger z is < p; min-p keeps
prob >= min_p * max prob. Noise: gumbel = -log(-log1p(-u)), u = (x + 0.5) 2^-32, x the first word of Philox4x32-10
(Salmon et al. 2011) with key = the row's seed and counter = (id, position, 0, 0): it knows no row and no step.
A row with a non-finite logit gets token 0 and logprob NaN.

Reduction tree: a row is cut into blocks of BLOCK ids; each gives (max, sum of exp(z - max)) in one fixed thread layout,
and the blocks are joined in one more. Top-p masses are integers (prob * 2^40 rounded), exact in any order; so is max.
"""

import torch
from torch import Tensor

from fengine.ops.cpu import contiguous, integers, schedule
from fengine.ops.registration import op
from fengine.ops.sampling_rows import launch

MASS_BITS = 40  # a probability of 1 is a mass of 2^40


def philox(seed_R: Tensor, pos_R: Tensor, vocab: int) -> Tensor:
    """First word of Philox4x32-10 for key = seed, counter = (id, pos, 0, 0): int64 [R, V] in [0, 2^32). Pure."""
    low32 = 0xFFFFFFFF
    c0 = torch.arange(vocab, device=seed_R.device)[None, :]
    c1 = pos_R.long()[:, None] & low32
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = (seed_R & low32)[:, None], (seed_R >> 32 & low32)[:, None]
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # int64 wraps; the bits are those of the unsigned product
        c0, c1, c2, c3 = (b >> 32 & low32) ^ c1 ^ k0, b & low32, (a >> 32 & low32) ^ c3 ^ k1, a & low32
        k0, k1 = (k0 + 0x9E3779B9) & low32, (k1 + 0xBB67AE85) & low32
    return c0


def keep(z_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Which ids pass all filters, bool [R, V]. Pure."""
    vocab = z_RV.shape[1]
    prob_RV = z_RV.softmax(-1)
    sorted_RV, order_RV = z_RV.sort(-1, descending=True)
    kth_R1 = sorted_RV.gather(1, (top_k_R.long().clamp(1, vocab) - 1)[:, None])
    mass_RV = (prob_RV.double() * 2.0**MASS_BITS).round().long()
    above_RV = torch.nn.functional.pad(mass_RV.gather(1, order_RV).cumsum(-1), (1, 0))
    larger_RV = torch.searchsorted(-sorted_RV, -z_RV)  # how many ids have a strictly larger z
    off_R1 = (top_p_R >= 1)[:, None]
    in_nucleus_RV = off_R1 | (above_RV.gather(1, larger_RV) < top_p_R.double()[:, None] * 2.0**MASS_BITS)
    likely_RV = prob_RV >= min_p_R[:, None] * prob_RV.amax(-1, keepdim=True)
    return (z_RV >= kth_R1) & in_nucleus_RV & likely_RV


def reference(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, seed_R: Tensor,
    pos_R: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The math, with float64 noise. Pure."""
    finite_R = logits_RV.isfinite().all(-1)
    z_RV = torch.where(finite_R[:, None], logits_RV / temperature_R[:, None], 0.0)
    u_RV = (philox(seed_R, pos_R, z_RV.shape[1]).double() + 0.5) * 2.0**-32
    noisy_RV = z_RV - torch.log(-torch.log1p(-u_RV))
    noisy_RV = noisy_RV.masked_fill(~keep(z_RV, top_k_R, top_p_R, min_p_R), -torch.inf)
    token_R = torch.where(top_k_R == 1, z_RV.argmax(-1), noisy_RV.argmax(-1))
    token_R = torch.where(finite_R, token_R, 0)
    logprob_R = z_RV.log_softmax(-1).gather(1, token_R[:, None])[:, 0]
    return token_R.int(), torch.where(finite_R, logprob_R, torch.nan)


@op(launch, lambda z, *_: (z.new_empty(z.shape[0], dtype=torch.int32), z.new_empty(z.shape[0])))
def draw(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, seed_R: Tensor,
    pos_R: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(token_R int32, logprob_R float32) for float32 logits. Row r depends on row r of the arguments alone. Pure.
    temperature, top_p, min_p float32; top_k, pos int32; seed int64. top_k >= V, top_p >= 1, min_p <= 0 mean off."""
    logits_RV, temperature_R = contiguous(logits_RV, "logits"), contiguous(temperature_R, "temperature")
    top_p_R, min_p_R = contiguous(top_p_R, "top_p"), contiguous(min_p_R, "min_p")
    top_k_R, pos_R = integers(top_k_R, "top_k"), integers(pos_R, "pos")
    seed_R = contiguous(seed_R, "seed", torch.int64)
    rows, vocab = logits_RV.shape
    token, logprob = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.float32)
    library, threads = schedule(32 * rows * vocab)
    library.fengine_draw(
        logits_RV.data_ptr(), temperature_R.data_ptr(), top_k_R.data_ptr(), top_p_R.data_ptr(), min_p_R.data_ptr(),
        seed_R.data_ptr(), pos_R.data_ptr(), token.data_ptr(), logprob.data_ptr(), rows, vocab, threads,
    )  # fmt: skip
    return token, logprob
