"""The two edges of a step: which tokens enter it, which rows leave it, and how what was drawn is handed on. No sums.
Where a step is a chain of short kernels, what stands between the last of one step and the first of the next counts:
each of these is one small kernel on CUDA, launched as the kernels beside it are."""

import torch
from torch import Tensor

from fengine.ops.cpu import contiguous, integers, schedule
from fengine.ops.edges_kernels import feed_launch, hand_on_launch, take_launch
from fengine.ops.registration import op


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
