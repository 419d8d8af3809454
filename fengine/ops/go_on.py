"""What stands between two guesses of a chain, where the one is noted and is the input of the next; and between the
draws of a step and the guesses behind them, which so need not wait for the host. No sums."""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.registration import begin, dependent_launch, op, tl, triton, wait

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


@triton.jit(do_not_specialize=["R", "B", "N", "K", "stride"])
def catch_up_kernel(drawn_ptr, guess_ptr, slot_ptr, try_ptr, table_ptr, token_ptr, pos_ptr, place_ptr, start_ptr,
                    last_ptr, seen_ptr, next_ptr, R, B, N, K, stride, size, behind, BLOCK: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    begin(PDL)
    wait(PDL)
    r = tl.arange(0, BLOCK)
    row = r < R
    known = tl.load(try_ptr + r, mask=row, other=0)
    tried = tl.load(try_ptr + stride + r, mask=row, other=0)
    token = tl.load(drawn_ptr + tl.load(try_ptr + 2 * stride + r, mask=row, other=0), mask=row, other=0)
    draws = tl.load(try_ptr + 3 * stride + r, mask=row, other=0)
    kept = tl.load(try_ptr + 4 * stride + r, mask=row, other=0)
    room = tl.load(try_ptr + 5 * stride + r, mask=row, other=0)
    before = tl.load(try_ptr + 6 * stride + r, mask=row, other=0)
    guess_ptr += tl.load(slot_ptr + r, mask=row, other=0) * K
    right = tl.zeros((BLOCK,), tl.int32)
    for k in range(K):
        there = row & (k < tried)
        guess = tl.load(guess_ptr + k, mask=there, other=-1)
        drawn = tl.load(drawn_ptr + draws + k, mask=there, other=-1)
        same = there & (right == k) & (guess == token) & (drawn >= 0)
        token = tl.where(same, drawn, token)
        right += same.to(tl.int32)
    seen = known + right + 1 - behind
    first = tl.minimum(known - behind + tl.minimum(right, kept), room)
    count = tl.where(row, seen - first, 0)
    stop = tl.cumsum(count, 0)
    tl.store(start_ptr + r, stop - count, mask=r < B)
    tl.store(last_ptr + r, stop - 1, mask=row)
    tl.store(seen_ptr + r, seen, mask=row)
    tl.store(next_ptr + r, seen + behind, mask=row)
    for i in range(K + 2):
        there, pos = row & (i < count), first + i
        at = pos + behind - known
        guess = tl.load(guess_ptr + at, mask=there & (at >= 0) & (at < right), other=0)
        value = tl.where(at < 0, before, tl.where(at < right, guess, tl.maximum(token, 0)))
        page = tl.load(table_ptr + r * N + pos // size, mask=there, other=0)
        to = stop - count + i
        tl.store(token_ptr + to, value, mask=there)
        tl.store(pos_ptr + to, pos, mask=there)
        tl.store(place_ptr + to, page * size + pos % size, mask=there)


def catch_up_launch(
    drawn_R: Tensor, guess_S: Tensor, slot_R: Tensor, try_7R: Tensor, page_table_RN: Tensor, token_T: Tensor,
    pos_T: Tensor, slot_T: Tensor, start_B: Tensor, last_R: Tensor, seen_R: Tensor, next_R: Tensor, rows: int,
    most: int, size: int, behind: int,
) -> None:  # fmt: skip
    launcher(catch_up_kernel, (1,))(
        drawn_R, guess_S, slot_R, try_7R, page_table_RN, token_T, pos_T, slot_T, start_B, last_R, seen_R, next_R, rows,
        len(start_B), page_table_RN.shape[1], most, try_7R.stride(0), size, behind,
        max(triton.next_power_of_2(len(start_B)), 128), **dependent_launch(drawn_R.device.index),
    )  # fmt: skip


@op(launch, mutates=("guess_RK", "next_5R"), name="go_on_")
def go_on(
    token_R: Tensor, logprob_R: Tensor, end_R: Tensor, page_table_RN: Tensor, guess_RK: Tensor, next_5R: Tensor,
    step: int, size: int, last_pos: int, behind: int,
) -> None:  # fmt: skip
    """Notes guess `step` behind the first end_R positions in its column of guess_RK, -1 where the logprob is NaN, and
    in next_5R, for the guess behind it: token (0 for -1), position, slot in pages of `size`, keys seen, and the
    position drawn for, which is `behind` further. No position is behind `last_pos`. Modifies: guess_RK, next_5R."""
    token_R, pos_R = torch.where(logprob_R.isnan(), -1, token_R), (end_R + step).clamp(max=last_pos)
    page_R = page_table_RN.gather(1, (pos_R // size).long()[:, None])[:, 0]
    guess_RK[:, step] = token_R
    slot_R, seen_R = page_R * size + pos_R % size, end_R + (step + 1)
    next_5R.copy_(torch.stack((token_R.clamp(min=0), pos_R, slot_R, seen_R, seen_R + behind)))


WRITTEN = ("token_T", "pos_T", "slot_T", "start_B", "last_R", "seen_R", "next_R")


@op(catch_up_launch, mutates=WRITTEN, name="catch_up_")
def catch_up(
    drawn_R: Tensor, guess_S: Tensor, slot_R: Tensor, try_7R: Tensor, page_table_RN: Tensor, token_T: Tensor,
    pos_T: Tensor, slot_T: Tensor, start_B: Tensor, last_R: Tensor, seen_R: Tensor, next_R: Tensor, rows: int,
    most: int, size: int, behind: int,
) -> None:  # fmt: skip
    """Writes what a chain catches up with behind a step in which its guesses were tried. All int32.

    drawn_R: the step's draws. guess_S: by row slot `most` guesses. try_7R, of each of `rows` rows: tokens known in
    front of the step, how many guesses it tried, where its own draw lies, where those behind its guesses begin, how
    many right guesses need not be computed again, the first position that must be, and the last known token.

    A guess is right where it was drawn and something was drawn behind it. To token_T, pos_T and slot_T go the tokens
    that are not computed yet, of one row behind the other, row r's from start_B[r] on and up to last_R[r]; seen_R: keys
    seen with them; next_R: the position drawn for, `behind` further. Modifies: these."""
    drawn, end = drawn_R.tolist(), 0
    for row, (known, tried, own, draws, kept, room, before) in enumerate(try_7R[:, :rows].T.tolist()):
        slot, ids, right = int(slot_R[row]), [before, drawn[own]], 0
        for guess, token in zip(guess_S[slot * most :][:tried].tolist(), drawn[draws:], strict=False):
            if guess != ids[-1] or token < 0:
                break
            ids.append(token)
            right += 1
        seen, start = known + right + 1 - behind, end
        first = min(known - behind + min(right, kept), room)
        start_B[row], end = start, start + seen - first
        last_R[row], seen_R[row], next_R[row] = end - 1, seen, seen + behind
        for at, pos in enumerate(range(first, seen), start):
            token_T[at], pos_T[at] = max(ids[pos + behind - known + 1], 0), pos
            slot_T[at] = page_table_RN[row, pos // size] * size + pos % size
    start_B[rows:] = end
