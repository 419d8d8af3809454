"""Log-probabilities of given ids, and the likeliest ids, of rows of logits. logprob = z - log(sum of exp z), z = logits
/ temperature, by the reduction tree of `draw` (see sampling.py): the logprob of the id that `draw` drew has the bits
that `draw` returned. A row with a non-finite logit gives NaN, and a banned id (see edit_logits.py) -inf."""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.cpu import contiguous, integers, schedule
from fengine.ops.edit_logits import BAN
from fengine.ops.registration import dependent_launch, op, plain, register, tl, triton
from fengine.ops.sampling_kernels import BLOCK, block_kernel, join

IDS = 256  # of one program
TOP_ROWS = 16  # rows whose ids are ordered at once: the keys of a row of 128k ids take 1 MiB
MOST_TOP = 64  # more are not put in order one by one


def reference(logits_RV: Tensor, temperature_R: Tensor, id_RK: Tensor) -> Tensor:
    """The math. Pure."""
    finite_R = logits_RV.isfinite().all(-1)
    z_RV = torch.where(finite_R[:, None], logits_RV / temperature_R[:, None], 0.0)
    found_RK = z_RV.log_softmax(-1).gather(1, id_RK.long())
    found_RK = torch.where(logits_RV.gather(1, id_RK.long()) <= -BAN, -torch.inf, found_RK)
    return torch.where(finite_R[:, None], found_RK, torch.nan)


@triton.jit(do_not_specialize=["K"])
def gather_kernel(logits_ptr, temperature_ptr, max_ptr, sum_ptr, id_ptr, out_ptr, K, V, BLOCKS: tl.constexpr,
                  BLOCKS_P: tl.constexpr, IDS: tl.constexpr):  # fmt: skip
    """Joins the blocks of one row as `draw` does, and takes its log-sum from z of the ids."""
    row = tl.program_id(0)
    _, log_sum, finite = join(max_ptr, sum_ptr, row, BLOCKS, BLOCKS_P)
    k = tl.program_id(1) * IDS + tl.arange(0, IDS)
    id = tl.load(id_ptr + row * K + k, mask=k < K, other=0)
    x = tl.load(logits_ptr + row.to(tl.int64) * V + id)
    logprob = tl.div_rn(x, tl.load(temperature_ptr + row)) - log_sum
    logprob = tl.where(x <= -1e30, float("-inf"), logprob)
    tl.store(out_ptr + row * K + k, tl.where(finite, logprob, float("nan")), mask=k < K)


def launch(logits_RV: Tensor, temperature_R: Tensor, id_RK: Tensor) -> Tensor:
    """The first kernel of `draw`, as `draw` runs it, told that every row is greedy; and one that gathers."""
    z, t, id_RK = plain(logits_RV), temperature_R, id_RK.contiguous()
    (rows, vocab), count = z.shape, id_RK.shape[1]
    out_RK = fake(logits_RV, temperature_R, id_RK)
    if rows == 0 or count == 0:
        return out_RK
    blocks = triton.cdiv(vocab, BLOCK)
    greedy_R, zero_R = torch.ones_like(t, dtype=torch.int32), torch.zeros_like(t)
    seed_R, pos_R = torch.zeros_like(t, dtype=torch.int64), torch.zeros_like(t, dtype=torch.int32)
    max_RB, sum_RB, score_RB = (z.new_empty((rows, blocks)) for _ in range(3))
    id_RB, count_R = z.new_empty((rows, blocks), dtype=torch.int32), z.new_empty((rows,), dtype=torch.int32)
    launcher(block_kernel, (rows, blocks))(
        z, t, greedy_R, t, zero_R, seed_R, pos_R, max_RB, sum_RB, score_RB, id_RB, count_R, vocab, blocks, BLOCK,
        num_warps=8, **dependent_launch(z.device.index),
    )  # fmt: skip
    launcher(gather_kernel, (rows, triton.cdiv(count, IDS)))(
        z, t, max_RB, sum_RB, id_RK, out_RK, count, vocab, blocks, triton.next_power_of_2(blocks), IDS, num_warps=8
    )
    return out_RK


def fake(logits_RV: Tensor, temperature_R: Tensor, id_RK: Tensor) -> Tensor:
    return logits_RV.new_empty(id_RK.shape, dtype=torch.float32)


@op(launch, fake)
def logprobs(logits_RV: Tensor, temperature_R: Tensor, id_RK: Tensor) -> Tensor:
    """logprob_RK float32 of ids [R, K] (int32, in [0, V)). Row r depends on row r of the arguments alone. Pure."""
    logits_RV, temperature_R = contiguous(logits_RV, "logits"), contiguous(temperature_R, "temperature")
    id_RK = integers(id_RK, "id")
    (rows, vocab), count = logits_RV.shape, id_RK.shape[1]
    out = logits_RV.new_empty((rows, count))
    library, threads = schedule(16 * rows * vocab)
    library.fengine_logprobs(
        logits_RV.data_ptr(), temperature_R.data_ptr(), id_RK.data_ptr(), out.data_ptr(), rows, vocab, count, threads
    )
    return out


def top_keys(logits_RV: Tensor, count: int) -> Tensor:
    """`top_ids` by one integer key for each id, logit above id: no two are equal, so all searches agree. Pure."""
    rows, vocab = logits_RV.shape
    found_RX = top_fake(logits_RV, count)
    low32 = 0xFFFFFFFF
    behind_V = low32 - torch.arange(vocab, device=logits_RV.device)
    for start in range(0, rows if count else 0, TOP_ROWS):
        bits_RV = (logits_RV[start : start + TOP_ROWS] + 0.0).view(torch.int32)  # zero has one sign
        bits_RV = torch.where(bits_RV < 0, bits_RV ^ 0x7FFFFFFF, bits_RV)  # in the order of the floats
        key_RV = bits_RV.long().mul_(1 << 32).add_(behind_V)
        found_RX[start : start + TOP_ROWS] = (low32 - (key_RV.topk(count).values & low32)).int()
    return found_RX


@triton.jit
def top_block_kernel(logits_ptr, key_ptr, V, BLOCKS, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The best keys of one block of one row, as `top_keys` makes them."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    id = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * V + id, mask=id < V, other=0.0) + 0.0
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 2147483647, bits)
    key = (bits.to(tl.int64) << 32) + (4294967295 - id.to(tl.int64))
    key = tl.where(id < V, key, -9223372036854775808)
    for k in range(COUNT):
        best = tl.max(key, 0)
        tl.store(key_ptr + (row * BLOCKS + block) * COUNT + k, best)
        key = tl.where(key == best, -9223372036854775808, key)


@triton.jit
def top_row_kernel(key_ptr, id_ptr, HELD, COUNT: tl.constexpr, HELD_P: tl.constexpr):
    """The best of the keys that the blocks of one row hold, as ids."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HELD_P)
    key = tl.load(key_ptr + row * HELD + i, mask=i < HELD, other=-9223372036854775808)
    for k in range(COUNT):
        best = tl.max(key, 0)
        tl.store(id_ptr + row * COUNT + k, (4294967295 - (best & 4294967295)).to(tl.int32))
        key = tl.where(key == best, -9223372036854775808, key)


def top_launch(logits_RV: Tensor, count: int) -> Tensor:
    """Two kernels where `count` is small: the best of each block, and of those."""
    z = plain(logits_RV)
    rows, vocab = z.shape
    if not 0 < count <= MOST_TOP or rows == 0:
        return top_keys(z, count)
    blocks, found_RX = triton.cdiv(vocab, BLOCK), top_fake(z, count)
    key_RBX = z.new_empty((rows, blocks, count), dtype=torch.int64)
    launcher(top_block_kernel, (rows, blocks))(z, key_RBX, vocab, blocks, count, BLOCK, num_warps=8)
    held = blocks * count
    launcher(top_row_kernel, (rows,))(key_RBX, found_RX, held, count, triton.next_power_of_2(held), num_warps=8)
    return found_RX


def top_on_cpu(logits: Tensor, count: int) -> Tensor:
    logits = contiguous(logits, "logits")
    rows, vocab = logits.shape
    id = top_fake(logits, count)
    library, threads = schedule(rows * vocab)
    library.fengine_top_ids(logits.data_ptr(), id.data_ptr(), rows, vocab, count, threads)
    return id


def top_fake(logits_RV: Tensor, count: int) -> Tensor:
    return logits_RV.new_empty((logits_RV.shape[0], count), dtype=torch.int32)


_top_op = register("top_ids", top_launch, top_on_cpu, top_fake)


def top_ids(logits_RV: Tensor, count: int) -> Tensor:
    """The `count` ids (V at most) with the largest logits, best first, the lowest id among equals: int32 [R, X]. Pure.
    In a row with a logit that is not finite they are any ids."""
    count = min(count, logits_RV.shape[1])
    many = count > MOST_TOP and not logits_RV.is_cuda
    return top_keys(logits_RV, count) if many else _top_op(logits_RV, count)
