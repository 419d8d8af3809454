"""How `sampling.py` draws on CUDA: behind the blocks of all rows come coarse thresholds and candidates of the filtered
ones, and the draw of each row."""
# pyright: reportInvalidTypeForm=false

from typing import Any

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.registration import begin, dependent_launch, plain, tl, triton, wait
from fengine.ops.sampling_kernels import BLOCK, best_of, block_kernel, gumbel, is_filtered, join, scaled

LEVELS = 16  # coarse thresholds that narrow a filtered row down before the exact search
MOST = 16384  # candidates of a row that have room in its list; a row with more is searched whole
PROGRAMS = 1024  # of a kernel that only filtered rows need: where there are more blocks, a program takes several
ROW_BLOCK = 1024  # ids that the exact search takes at a time: of most rows all, which stay in registers


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
            best = tl.load(max_ptr + row * BLOCKS + block)
            id = block * BLOCK + tl.arange(0, BLOCK)
            z = scaled(logits_ptr + row.to(tl.int64) * V, id, V, temperature)
            both = masses(z, log_sum) + (tl.full((), 1, tl.int64) << 44)
            for j in range(LEVELS):
                bound = level(top, tl.full((), 0, tl.int32) + j)
                reached = tl.full((), 0, tl.int64)
                if best >= bound:
                    reached = tl.sum(tl.where((id < V) & (z >= bound), both, 0), 0)
                tl.store(level_ptr + (row * LEVELS + j) * BLOCKS + block, reached)


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
            if tl.load(max_ptr + row * BLOCKS + block) >= cut:
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
def weighed(z, id, V, log_sum, MASS: tl.constexpr):
    """Keys of the ids in the order of z, 0 behind V, and what each counts for: its mass, or 1."""
    return tl.where(id < V, ordered(z), 0), masses(z, log_sum) if MASS else tl.where(id < V, 1, 0)


@triton.jit
def threshold(first_z, first_id, logits_ptr, candidate_ptr, held, limit, V, temperature, log_sum, wanted,
              MASS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The largest key t with (count or mass of the ids with key >= t) >= wanted, 0 if none: two bits of t a pass. The
    first BLOCK of the ids are at hand, mostly all."""
    first_key, first_weight = weighed(first_z, first_id, V, log_sum, MASS)
    t = tl.full((), 0, tl.uint32)
    one = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        sum1 = tl.where(first_key >= t + one, first_weight, 0)
        sum2 = tl.where(first_key >= t + 2 * one, first_weight, 0)
        sum3 = tl.where(first_key >= t + 3 * one, first_weight, 0)
        for start in range(BLOCK, limit, BLOCK):
            id = listed(candidate_ptr, start, held, limit, BLOCK)
            key, weight = weighed(scaled(logits_ptr, id, V, temperature), id, V, log_sum, MASS)
            sum1 += tl.where(key >= t + one, weight, 0)
            sum2 += tl.where(key >= t + 2 * one, weight, 0)
            sum3 += tl.where(key >= t + 3 * one, weight, 0)
        digit = tl.where(tl.sum(sum1, 0) >= wanted, one, 0) + tl.where(tl.sum(sum2, 0) >= wanted, one, 0)
        t += digit + tl.where(tl.sum(sum3, 0) >= wanted, one, 0)
        one = one >> 2
    return t


@triton.jit
def best_kept(z, id, V, low, least, log_sum, seed, position):
    """The draw among the ids whose key is `low` or more and whose probability is `least` or more."""
    kept = (id < V) & (ordered(z) >= low) & (tl.exp(z - log_sum) >= least)
    return best_of(tl.where(kept, z + gumbel(id, seed, position), float("-inf")), id)


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
        id = listed(candidate_ptr, 0, held, limit, BLOCK)
        z = scaled(logits_ptr, id, V, temperature)
        low = tl.full((), 0, tl.uint32)
        if top_k < V:
            low = threshold(z, id, logits_ptr, candidate_ptr, held, limit, V, temperature, log_sum, top_k, False, BLOCK)
        if top_p < 1.0:
            wanted = wanted_mass(top_p)
            found = threshold(z, id, logits_ptr, candidate_ptr, held, limit, V, temperature, log_sum, wanted, True,
                              BLOCK)  # fmt: skip
            low = tl.maximum(low, found)
        least = min_p * tl.exp(top - log_sum)
        seed, position = tl.load(seed_ptr + row), tl.load(pos_ptr + row)
        score, token = best_kept(z, id, V, low, least, log_sum, seed, position)
        for start in range(BLOCK, limit, BLOCK):
            id = listed(candidate_ptr, start, held, limit, BLOCK)
            z = scaled(logits_ptr, id, V, temperature)
            here, best = best_kept(z, id, V, low, least, log_sum, seed, position)
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
