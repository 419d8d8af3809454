"""The two edges of a step: which tokens enter it, which rows leave it, and how what was drawn is handed on. No sums.
Where a step is a chain of short kernels, what stands between the last of one step and the first of the next counts:
each of these is one small kernel on CUDA, launched as the kernels beside it are."""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.cpu import contiguous, integers, schedule
from fengine.ops.registration import begin, dependent_launch, op, plain, tl, triton, wait

BLOCK = 1024


@triton.jit(do_not_specialize=["T"])
def feed_kernel(token_ptr, last_ptr, index_ptr, from_ptr, out_ptr, T, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    wait(PDL)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    fed = tl.load(from_ptr + t, mask=t < T, other=0) != 0
    token = tl.load(token_ptr + t, mask=t < T, other=0)
    index = tl.load(index_ptr + t, mask=fed & (t < T), other=0)
    last = tl.load(last_ptr + index, mask=fed & (t < T), other=0)
    tl.store(out_ptr + t, tl.where(fed, last, token), mask=t < T)


def feed_launch(token_T: Tensor, last_token_R: Tensor, index_T: Tensor, from_T: Tensor) -> Tensor:
    out_T = torch.empty_like(token_T)
    tokens = len(token_T)
    if tokens:
        launcher(feed_kernel, (triton.cdiv(tokens, BLOCK),))(
            token_T, last_token_R, index_T, from_T, out_T, tokens, BLOCK, **dependent_launch(token_T.device.index)
        )
    return out_T


@triton.jit
def take_kernel(x_ptr, index_ptr, out_ptr, D, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    wait(PDL)
    row = tl.load(index_ptr + tl.program_id(0)).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * D + d, tl.load(x_ptr + row * D + d, mask=d < D), mask=d < D)


def take_launch(x_TD: Tensor, index_R: Tensor) -> Tensor:
    x_TD = plain(x_TD)
    out_RD = x_TD.new_empty((len(index_R), x_TD.shape[1]))
    if len(index_R):
        launcher(take_kernel, (len(index_R), triton.cdiv(x_TD.shape[1], BLOCK)))(
            x_TD, index_R, out_RD, x_TD.shape[1], BLOCK, **dependent_launch(x_TD.device.index)
        )
    return out_RD


@triton.jit(do_not_specialize=["R"])
def hand_on_kernel(token_ptr, logprob_ptr, last_ptr, out_ptr, R, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    wait(PDL)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ptr + r, mask=r < R)
    tl.store(last_ptr + r, token, mask=r < R)
    tl.store(out_ptr + r, token, mask=r < R)
    tl.store(out_ptr + R + r, tl.load(logprob_ptr + r, mask=r < R).to(tl.int32, bitcast=True), mask=r < R)


def hand_on_launch(token_R: Tensor, logprob_R: Tensor, last_token_R: Tensor, out_2R: Tensor) -> None:
    rows = len(token_R)
    launcher(hand_on_kernel, (triton.cdiv(rows, BLOCK),))(
        token_R, logprob_R, last_token_R, out_2R, rows, BLOCK, **dependent_launch(token_R.device.index)
    )


@op(feed_launch)
def feed(token_T: Tensor, last_token_R: Tensor, index_T: Tensor, from_T: Tensor) -> Tensor:
    """token_T with last_token_R[index_T[t]] where from_T[t] is true: int32 [T]. Pure."""
    token_T, last_token_R = integers(token_T, "token"), integers(last_token_R, "last_token")
    index_T, from_T = integers(index_T, "index"), contiguous(from_T, "from_", torch.bool)
    out, tokens = torch.empty_like(token_T), token_T.shape[0]
    schedule(tokens)[0].fengine_feed(
        token_T.data_ptr(), last_token_R.data_ptr(), index_T.data_ptr(), from_T.data_ptr(), out.data_ptr(), tokens
    )
    return out


@op(take_launch, lambda x, index: x.new_empty((index.shape[0], x.shape[1])))
def take(x_TD: Tensor, index_R: Tensor) -> Tensor:
    """Rows index_R (int32) of x as [R, D]. Pure."""
    x_TD, index_R = contiguous(x_TD, "take's x"), integers(index_R, "index")
    rows, d = index_R.shape[0], x_TD.shape[1]
    out = x_TD.new_empty((rows, d))
    schedule(rows * d)[0].fengine_take(x_TD.data_ptr(), index_R.data_ptr(), out.data_ptr(), rows, d)
    return out


@op(hand_on_launch, mutates=("last_token_R", "out_2R"), name="hand_on_")
def hand_on(token_R: Tensor, logprob_R: Tensor, last_token_R: Tensor, out_2R: Tensor) -> None:
    """Gives the draws to the next step and to the host. Modifies: last_token_R, its first R, and out_2R (int32): the
    tokens, then the bits of the logprobs."""
    last_token_R[: token_R.shape[0]] = token_R
    out_2R.copy_(torch.stack((token_R, logprob_R.view(torch.int32))))
