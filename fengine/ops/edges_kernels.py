"""The kernels of edges.py: a block of tokens, of a row or of rows is a program."""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.registration import begin, dependent_launch, plain, tl, triton, wait

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
