"""The Triton kernels of lora.py: x A^T by chunks of K, and what is added of it times B^T."""
# pyright: reportInvalidTypeForm=false

from fengine.ops.registration import begin, tl, triton, wait


@triton.jit
def find_block(start_ptr, slots, BM: tl.constexpr, SLOTS: tl.constexpr):
    """(slot, first, end) of this program's block of at most BM tokens of one slot; behind the last, slot >= `slots`."""
    block = tl.program_id(0)
    s = tl.arange(0, SLOTS)
    first = tl.load(start_ptr + s, mask=s < slots, other=0)
    end = tl.load(start_ptr + s + 1, mask=s < slots, other=0)
    blocks = (end - first + BM - 1) // BM
    behind = tl.cumsum(blocks, 0)
    slot = tl.sum((behind <= block).to(tl.int32), 0)
    mine = s == slot
    return (
        slot,
        tl.sum(tl.where(mine, first + (block - behind + blocks) * BM, 0), 0),
        tl.sum(tl.where(mine, end, 0), 0),
    )


@triton.jit(do_not_specialize=["T"])
def shrink_kernel(x_ptr, a_ptr, rank_ptr, token_ptr, start_ptr, h_ptr, T, K, slots, a_stride, rank_stride,
                  P: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr,
                  BR: tl.constexpr, BK: tl.constexpr, SLOTS: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """h[chunk, i, part, r] of BM tokens and BR ranks: CHUNKS chunks of K, summed left to right, by each program."""
    slot, first, end = find_block(start_ptr, slots, BM, SLOTS)
    part = tl.program_id(1) // (R // BR)
    first_r = tl.program_id(1) % (R // BR) * BR
    rank = tl.load(rank_ptr + slot * rank_stride + part, mask=slot < slots, other=0)
    i = first + tl.arange(0, BM)
    token = tl.load(token_ptr + i, mask=i < end, other=0).to(tl.int64)
    r = first_r + tl.arange(0, BR)
    start = tl.program_id(2) * CHUNKS * CHUNK
    a_rows = a_ptr + slot.to(tl.int64) * a_stride + (part * R + r).to(tl.int64) * K + start
    if first_r >= rank:
        return
    k = start + tl.arange(0, BK)
    x_tile = x_ptr + token[:, None] * K + k[None, :]
    a_tile = a_rows[:, None] + tl.arange(0, BK)[None, :]
    total = tl.zeros((BM, BR), tl.float32)
    for _ in range(CHUNKS):
        acc = tl.zeros((BM, BR), tl.float32)
        for _ in range(0, CHUNK, BK):
            if EVEN:
                x = tl.load(x_tile, mask=(i < end)[:, None], other=0.0)
                a = tl.load(a_tile)
            else:
                x = tl.load(x_tile, mask=(i < end)[:, None] & (k < K)[None, :], other=0.0)
                a = tl.load(a_tile, mask=(k < K)[None, :], other=0.0)
            acc = tl.dot(x, a.T, acc, input_precision="ieee")
            x_tile += BK
            a_tile += BK
            k += BK
        total += acc
    h_tile = h_ptr + ((tl.program_id(2).to(tl.int64) * T + i[:, None]) * P + part) * R + r[None, :]
    tl.store(h_tile, total, mask=(i < end)[:, None])


@triton.jit(do_not_specialize=["T"])
def expand_kernel(y_ptr, h_ptr, b_ptr, scale_ptr, rank_ptr, token_ptr, start_ptr, T, N, slots, b_stride, scale_stride,
                  rank_stride, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
                  CHUNKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, SLOTS: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """y += scale * h B^T for BM tokens and BN columns of one part; the parts have W0, W1 and W2 columns."""
    begin(PDL)
    slot, first, end = find_block(start_ptr, slots, BM, SLOTS)
    tile = tl.program_id(1)
    part = (tile >= tl.cdiv(W0, BN)).to(tl.int32) + (tile >= tl.cdiv(W0, BN) + tl.cdiv(W1, BN)).to(tl.int32)
    if part > 0:
        tile -= tl.cdiv(W0, BN)
    if part > 1:
        tile -= tl.cdiv(W1, BN)
    before = tl.where(part > 1, W0 + W1, tl.where(part > 0, W0, 0))
    width = tl.where(part > 1, W2, tl.where(part > 0, W1, W0))
    live = slot < slots
    rank = tl.load(rank_ptr + slot * rank_stride + part, mask=live, other=0)
    scale = tl.load(scale_ptr + slot * scale_stride + part, mask=live, other=0.0)
    i = first + tl.arange(0, BM)
    token = tl.load(token_ptr + i, mask=i < end, other=0).to(tl.int64)
    n = tile * BN + tl.arange(0, BN)
    r = tl.arange(0, BR)
    b_tile = b_ptr + slot.to(tl.int64) * b_stride + (before + n).to(tl.int64)[:, None] * R + r[None, :]
    inside = (n < width)[:, None]
    b = tl.load(b_tile, mask=inside & (r < rank)[None, :], other=0.0)
    wait(PDL)
    if rank == 0:
        return
    y_tile = y_ptr + token[:, None] * N + (before + n)[None, :]
    y_mask = (i < end)[:, None] & (n < width)[None, :]
    y = tl.load(y_tile, mask=y_mask, other=0.0).to(tl.float32)
    acc = tl.zeros((BM, BN), tl.float32)
    for block in tl.static_range(R // BR):
        h = tl.zeros((BM, BR), tl.float32)
        h_tile = h_ptr + (i.to(tl.int64)[:, None] * P + part) * R + block * BR + r[None, :]
        mask = (i < end)[:, None] & (block * BR + r < rank)[None, :]
        for chunk in tl.static_range(CHUNKS):
            h += tl.load(h_tile + tl.cast(chunk, tl.int64) * T * P * R, mask=mask, other=0.0)
        if block > 0:
            b = tl.load(b_tile + block * BR, mask=inside & (block * BR + r < rank)[None, :], other=0.0)
        acc = tl.dot((h * scale).to(b.dtype), b.T, acc, input_precision="ieee")
    tl.store(y_tile, (y + acc).to(y_ptr.dtype.element_ty), mask=y_mask)
