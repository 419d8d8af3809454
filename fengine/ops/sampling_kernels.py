"""The first kernel of the draw, over blocks of a row, and what the other three (`sampling_rows.py`) share with it."""
# pyright: reportInvalidTypeForm=false

from fengine.ops.fp8_kernels import INTERPRETED
from fengine.ops.registration import begin, tl, triton, wait

BLOCK = 4096  # ids per block of the tree
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
