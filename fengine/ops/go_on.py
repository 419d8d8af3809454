"""What stands between two guesses of a chain: the one is noted, and is the input of the next. No sums."""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.registration import begin, dependent_launch, register, tl, triton, wait

BLOCK = 1024


@triton.jit(do_not_specialize=["R", "N", "K", "step", "last_pos", "behind"])
def go_on_kernel(token_ptr, logprob_ptr, end_ptr, table_ptr, guess_ptr, next_ptr, R, N, K, stride, step, size, last_pos,
                 behind, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    begin(PDL)
    wait(PDL)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + r, mask=r < R, other=0)
    logprob = tl.load(logprob_ptr + r, mask=r < R, other=0.0)
    token = tl.where(logprob == logprob, token, -1)
    tl.store(guess_ptr + r * K + step, token, mask=r < R)
    end = tl.load(end_ptr + r, mask=r < R, other=0) + step
    pos = tl.minimum(end, last_pos)
    page = tl.load(table_ptr + r * N + pos // size, mask=r < R, other=0)
    tl.store(next_ptr + r, tl.maximum(token, 0), mask=r < R)
    tl.store(next_ptr + stride + r, pos, mask=r < R)
    tl.store(next_ptr + 2 * stride + r, page * size + pos % size, mask=r < R)
    tl.store(next_ptr + 3 * stride + r, end + 1, mask=r < R)
    tl.store(next_ptr + 4 * stride + r, end + 1 + behind, mask=r < R)


def launch(
    token_R: Tensor, logprob_R: Tensor, end_R: Tensor, page_table_RN: Tensor, guess_RK: Tensor, next_5R: Tensor,
    step: int, size: int, last_pos: int, behind: int,
) -> None:  # fmt: skip
    (rows, width), most = page_table_RN.shape, guess_RK.shape[1]
    launcher(go_on_kernel, (triton.cdiv(rows, BLOCK),))(
        token_R, logprob_R, end_R, page_table_RN, guess_RK, next_5R, rows, width, most, next_5R.stride(0), step, size,
        last_pos, behind, BLOCK, **dependent_launch(token_R.device.index)
    )  # fmt: skip


def on_cpu(
    token_R: Tensor, logprob_R: Tensor, end_R: Tensor, page_table_RN: Tensor, guess_RK: Tensor, next_5R: Tensor,
    step: int, size: int, last_pos: int, behind: int,
) -> None:  # fmt: skip
    token_R, pos_R = torch.where(logprob_R.isnan(), -1, token_R), (end_R + step).clamp(max=last_pos)
    page_R = page_table_RN.gather(1, (pos_R // size).long()[:, None])[:, 0]
    guess_RK[:, step] = token_R
    slot_R, seen_R = page_R * size + pos_R % size, end_R + (step + 1)
    next_5R.copy_(torch.stack((token_R.clamp(min=0), pos_R, slot_R, seen_R, seen_R + behind)))


_op = register(
    "go_on_(Tensor token, Tensor logprob, Tensor end, Tensor page_table, Tensor(a!) guess, Tensor(b!) next, int step, "
    "int size, int last_pos, int behind) -> ()", launch, on_cpu,
)  # fmt: skip


def go_on(
    token_R: Tensor, logprob_R: Tensor, end_R: Tensor, page_table_RN: Tensor, guess_RK: Tensor, next_5R: Tensor,
    step: int, size: int, last_pos: int, behind: int,
) -> None:  # fmt: skip
    """Notes guess `step` behind the first end_R positions in its column of guess_RK, -1 where the logprob is NaN, and
    in next_5R, for the guess behind it: token (0 for -1), position, slot in pages of `size`, keys seen, and the
    position drawn for, which is `behind` further. No position is behind `last_pos`. Modifies: guess_RK, next_5R."""
    _op(token_R, logprob_R, end_R, page_table_RN, guess_RK, next_5R, step, size, last_pos, behind)
