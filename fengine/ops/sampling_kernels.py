"""The four kernels of `sampling.py`, on CUDA: blocks of a row, coarse thresholds, candidates, the draw of each row."""
# pyright: reportInvalidTypeForm=false

from typing import Any

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.fp8_kernels import INTERPRETED
from fengine.ops.registration import begin, dependent_launch, plain, tl, triton, wait

BLOCK = 4096  # ids per block of the tree
LEVELS = 16  # coarse thresholds that narrow a filtered row down before the exact search
MOST = 16384  # candidates of a row that have room in its list; a row with more is searched whole
PROGRAMS = 1024  # of a kernel that only filtered rows need: where there are more blocks, a program takes several
ROW_BLOCK = 2048  # ids that the exact search takes at a time
EXP2, LOG2_E = tl.constexpr("ex2.approx.ftz.f32 $0, $1;"), tl.constexpr(1.4426950408889634)


@triton.jit
def divided(logits_ptr, id, V, temperature):
    """z of the ids; -inf behind V."""
    z = tl.load(logits_ptr + id, mask=id < V, other=float("-inf"))
    if temperature != 1.0:  # greedy rows have 1, and a division takes longer than the read
        z = tl.div_rn(z, temperature)
    return z


@triton.jit
def scaled(logits_ptr, id, V, temperature):
    """z of the ids; -inf behind V. Zero has one sign, so that equal values have equal bits."""
    z = divided(logits_ptr, id, V, temperature)
    return tl.where(z == 0.0, 0.0, z)


@triton.jit
def exp_of(x):
    """exp, and 0 where that is not a normal number: on a device the instruction alone."""
    return tl.exp(x) if INTERPRETED else tl.inline_asm_elementwise(EXP2, "=f,f", [x * LOG2_E], tl.float32, True, 1)


@triton.jit
def gumbel(id, seed, position):
    """-log(-log1p(-u)) for u = (x + 0.5) 2^-32, with no loss near u = 0 (a series) or u = 1 (the complement of x)."""
    x, _, _, _ = tl.philox(seed, id, position, 0, 0)
    u = (x.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((x ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = 1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7 + u * (1 / 8)))))))
    return -tl.log(tl.where(u < 0.125, u * series, -tl.log(rest)))


@triton.jit
def ordered(z):
    """Unsigned integers in the order of the floats z."""
    bits = z.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def masses(z, log_sum):
    """Probabilities as integers of 2^-40."""
    return (tl.exp(z - log_sum) * 1099511627776.0 + 0.5).to(tl.int64)


@triton.jit
def wanted_mass(top_p):
    """The mass that the nucleus must reach."""
    return tl.ceil(top_p * 1099511627776.0).to(tl.int64)


@triton.jit
def first_of(score, top, id):
    """The lowest id whose score is `top`."""
    return tl.min(tl.where(score == top, id, 2147483647), 0)


@triton.jit
def best_of(score, id):
    """(largest score, lowest id that has it)."""
    top = tl.max(score, 0)
    return top, first_of(score, top, id)


@triton.jit
def join(max_ptr, sum_ptr, row, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr):
    """(max of z, log of the sum of exp z, whether all logits are finite) of a row, from its blocks."""
    block = tl.arange(0, BLOCKS_P)
    tops = tl.load(max_ptr + row * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
    sums = tl.load(sum_ptr + row * BLOCKS + block, mask=block < BLOCKS, other=0.0)
    top = tl.max(tops, 0)
    total = tl.sum(sums * tl.exp(tops - top), 0)
    return top, top + tl.log(total), total < float("inf")


@triton.jit
def is_filtered(top_k, top_p, min_p, V):
    return (top_k > 1) & ((top_k < V) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def block_kernel(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, pos_ptr, max_ptr, sum_ptr,
                 score_ptr, id_ptr, count_ptr, V, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """One block of one row: max and sum of exp (NaN if a logit is not finite); best id, noise only if unfiltered."""
    begin(PDL)
    wait(PDL)
    row = tl.program_id(0)
    block = tl.program_id(1)
    id = block * BLOCK + tl.arange(0, BLOCK)
    top_k = tl.load(top_k_ptr + row)  # what a row is drawn by, on its way together with the logits
    filtered = is_filtered(top_k, tl.load(top_p_ptr + row), tl.load(min_p_ptr + row), V)
    seed, position = tl.load(seed_ptr + row), tl.load(pos_ptr + row)
    z = divided(logits_ptr + row.to(tl.int64) * V, id, V, tl.load(temperature_ptr + row))
    top = tl.max(z, 0)
    # Infinity and NaN make the sum NaN by themselves, minus infinity does not.
    total = tl.sum(tl.where((z == float("-inf")) & (id < V), float("nan"), exp_of(z - top)), 0)
    at = row * BLOCKS + block
    if (top_k > 1) & (filtered == 0):
        score, best = best_of(z + gumbel(id, seed, position), id)
    else:
        score, best = top, first_of(z, top, id)
    tl.store(score_ptr + at, score)
    tl.store(id_ptr + at, best)
    tl.store(max_ptr + at, top)
    tl.store(sum_ptr + at, total)
    if block == 0:
        tl.store(count_ptr + row, 0)


@triton.jit
def level(top, j):
    """The j-th coarse threshold of z: 0.5 * 1.35^j below the top."""
    return tl.fma(tl.exp2(j.to(tl.float32) * 0.4329594), -0.5, top)


@triton.jit
def level_kernel(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, max_ptr, sum_ptr, level_ptr, V,
                 BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """For a filtered row: how many ids of a block reach each coarse threshold, and their mass: count << 44 | mass."""
    begin(PDL)
    wait(PDL)
    row = tl.program_id(0)
    if is_filtered(tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row), V):
        top, log_sum, _ = join(max_ptr, sum_ptr, row, BLOCKS, BLOCKS_P)
        temperature = tl.load(temperature_ptr + row)
        for block in range(tl.program_id(1), BLOCKS, tl.num_programs(1)):
            id = block * BLOCK + tl.arange(0, BLOCK)
            z = scaled(logits_ptr + row.to(tl.int64) * V, id, V, temperature)
            both = masses(z, log_sum) + (tl.full((), 1, tl.int64) << 44)
            for j in range(LEVELS):
                reached = (id < V) & (z >= level(top, tl.full((), 0, tl.int32) + j))
                tl.store(level_ptr + (row * LEVELS + j) * BLOCKS + block, tl.sum(tl.where(reached, both, 0), 0))


@triton.jit
def candidate_kernel(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, max_ptr, sum_ptr, level_ptr,
                     count_ptr, candidate_ptr, V, BLOCKS: tl.constexpr, BLOCKS_P: tl.constexpr, LEVELS: tl.constexpr,
                     MOST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """For a filtered row: lists the ids that reach the highest coarse threshold below which nothing can be kept."""
    begin(PDL)
    wait(PDL)
    row = tl.program_id(0)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if is_filtered(top_k, top_p, min_p, V):
        top, log_sum, _ = join(max_ptr, sum_ptr, row, BLOCKS, BLOCKS_P)
        j = tl.arange(0, LEVELS)
        column = tl.arange(0, BLOCKS_P)
        parts = tl.load(level_ptr + (row * LEVELS + j)[:, None] * BLOCKS + column[None, :],
                        mask=(column < BLOCKS)[None, :], other=0)  # fmt: skip
        both = tl.sum(parts, 1)
        count = tl.where(top_k < V, top_k, 0)
        mass = tl.where(top_p < 1.0, wanted_mass(top_p), 0)
        enough = ((both >> 44) >= count) & ((both & 17592186044415) >= mass)
        cut = tl.max(tl.where(enough, level(top, j), float("-inf")), 0)
        cut = tl.where((top_k < V) | (top_p < 1.0), cut, float("-inf"))
        temperature = tl.load(temperature_ptr + row)
        for block in range(tl.program_id(1), BLOCKS, tl.num_programs(1)):
            id = block * BLOCK + tl.arange(0, BLOCK)
            z = scaled(logits_ptr + row.to(tl.int64) * V, id, V, temperature)
            chosen = (id < V) & (z >= cut) & (tl.exp(z - log_sum) >= min_p * tl.exp(top - log_sum))
            here = chosen.to(tl.int32)
            # The order of the list depends on which block comes first; whatever reads it does not care.
            at = tl.atomic_add(count_ptr + row, tl.sum(here, 0)) + tl.cumsum(here, 0) - 1
            tl.store(candidate_ptr + row * MOST + at, id, mask=chosen & (at < MOST))


@triton.jit
def listed(candidate_ptr, start, held, limit, BLOCK: tl.constexpr):
    """Entries start .. start + BLOCK of the list of `held` ids, or of all ids if that is 0; 2^31 - 1 behind `limit`."""
    i = start + tl.arange(0, BLOCK)
    return tl.where(i < limit, tl.load(candidate_ptr + i, mask=i < held, other=i), 2147483647)


@triton.jit
def threshold(logits_ptr, candidate_ptr, held, limit, V, temperature, log_sum, wanted, MASS: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """The largest key t with (count or mass of the ids with key >= t) >= wanted, 0 if none: two bits of t a pass."""
    t = tl.full((), 0, tl.uint32)
    one = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        sum1 = tl.zeros((BLOCK,), tl.int64 if MASS else tl.int32)
        sum2 = tl.zeros((BLOCK,), tl.int64 if MASS else tl.int32)
        sum3 = tl.zeros((BLOCK,), tl.int64 if MASS else tl.int32)
        for start in range(0, limit, BLOCK):
            id = listed(candidate_ptr, start, held, limit, BLOCK)
            z = scaled(logits_ptr, id, V, temperature)
            key = tl.where(id < V, ordered(z), 0)
            weight = masses(z, log_sum) if MASS else tl.where(id < V, 1, 0)
            sum1 += tl.where(key >= t + one, weight, 0)
            sum2 += tl.where(key >= t + 2 * one, weight, 0)
            sum3 += tl.where(key >= t + 3 * one, weight, 0)
        digit = tl.where(tl.sum(sum1, 0) >= wanted, one, 0) + tl.where(tl.sum(sum2, 0) >= wanted, one, 0)
        t += digit + tl.where(tl.sum(sum3, 0) >= wanted, one, 0)
        one = one >> 2
    return t


@triton.jit
def row_kernel(logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, pos_ptr, max_ptr, sum_ptr,
               score_ptr, id_ptr, count_ptr, candidate_ptr, token_ptr, logprob_ptr, V, BLOCKS: tl.constexpr,
               BLOCKS_P: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Joins the blocks of one row; a filtered row finds its thresholds among its candidates and draws again."""
    begin(PDL)
    wait(PDL)
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * V
    candidate_ptr += row * MOST
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    top, log_sum, finite = join(max_ptr, sum_ptr, row, BLOCKS, BLOCKS_P)
    block = tl.arange(0, BLOCKS_P)
    score, token = best_of(tl.load(score_ptr + row * BLOCKS + block, mask=block < BLOCKS, other=float("-inf")),
                           tl.load(id_ptr + row * BLOCKS + block, mask=block < BLOCKS, other=2147483647))  # fmt: skip
    if finite & is_filtered(top_k, top_p, min_p, V):
        count = tl.load(count_ptr + row)
        held = tl.where(count <= MOST, count, 0)
        limit = tl.where(count <= MOST, count, V)
        low = tl.full((), 0, tl.uint32)
        if top_k < V:
            low = threshold(logits_ptr, candidate_ptr, held, limit, V, temperature, log_sum, top_k, False, BLOCK)
        if top_p < 1.0:
            wanted = wanted_mass(top_p)
            found = threshold(logits_ptr, candidate_ptr, held, limit, V, temperature, log_sum, wanted, True, BLOCK)
            low = tl.maximum(low, found)
        least = min_p * tl.exp(top - log_sum)
        seed, position = tl.load(seed_ptr + row), tl.load(pos_ptr + row)
        score = tl.full((), float("-inf"), tl.float32)
        token = tl.full((), 2147483647, tl.int32)
        for start in range(0, limit, BLOCK):
            id = listed(candidate_ptr, start, held, limit, BLOCK)
            z = scaled(logits_ptr, id, V, temperature)
            kept = (id < V) & (ordered(z) >= low) & (tl.exp(z - log_sum) >= least)
            here, best = best_of(tl.where(kept, z + gumbel(id, seed, position), float("-inf")), id)
            token = tl.where((here > score) | ((here == score) & (best < token)), best, token)
            score = tl.maximum(score, here)
    token = tl.where(finite, token, 0)
    z = tl.div_rn(tl.load(logits_ptr + token), temperature)
    tl.store(token_ptr + row, token)
    tl.store(logprob_ptr + row, tl.where(finite, z - log_sum, float("nan")))


def launch(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, seed_R: Tensor,
    pos_R: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Two kernels draw for greedy and unfiltered rows; the two between narrow a filtered row down and skip others."""
    z, t, k, p, m = plain(logits_RV), temperature_R, top_k_R, top_p_R, min_p_R
    rows, vocab = z.shape
    token_R, logprob_R = z.new_empty((rows,), dtype=torch.int32), z.new_empty((rows,))
    if rows == 0:
        return token_R, logprob_R
    blocks = triton.cdiv(vocab, BLOCK)
    padded = triton.next_power_of_2(blocks)
    max_RB, sum_RB, score_RB = (z.new_empty((rows, blocks)) for _ in range(3))
    id_RB, count_R = z.new_empty((rows, blocks), dtype=torch.int32), z.new_empty((rows,), dtype=torch.int32)
    level_RLB = z.new_empty((rows, LEVELS, blocks), dtype=torch.int64)
    candidate_RC = z.new_empty((rows, MOST), dtype=torch.int32)
    best = (max_RB, sum_RB, score_RB, id_RB, count_R)
    options: dict[str, Any] = {"num_warps": 8, **dependent_launch(z.device.index)}
    small = options | {"maxnreg": 64}  # four programs a multiprocessor
    launcher(block_kernel, (rows, blocks))(z, t, k, p, m, seed_R, pos_R, *best, vocab, blocks, BLOCK, **small)
    grid = (rows, min(blocks, max(4, PROGRAMS // rows)))
    launcher(level_kernel, grid)(
        z, t, k, p, m, max_RB, sum_RB, level_RLB, vocab, blocks, padded, LEVELS, BLOCK, **small
    )
    launcher(candidate_kernel, grid)(
        z, t, k, p, m, max_RB, sum_RB, level_RLB, count_R, candidate_RC, vocab, blocks, padded, LEVELS, MOST, BLOCK,
        **small
    )  # fmt: skip
    launcher(row_kernel, (rows,))(
        z, t, k, p, m, seed_R, pos_R, *best, candidate_RC, token_R, logprob_R, vocab, blocks, padded, MOST, ROW_BLOCK,
        **options
    )  # fmt: skip
    return token_R, logprob_R
