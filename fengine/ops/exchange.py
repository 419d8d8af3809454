"""The gather of `columns.py` between GPUs of one host: one kernel that stands in captured graphs. No host, no library.

Each rank has an inbox that all ranks may write to, in channels; a program of the kernel owns one. Per chunk of its part
it writes to the peers' inboxes, waits for theirs in its own, and copies these to the result. Small messages carry the
number of their use beside every word, large ones in a flag behind each chunk. A channel has two slots in turn: who has
the peer's chunk of use u knows that the peer has read that of use u - 1, so that use u + 1 may overwrite it.

A wait ends with the peer's words or with `stop`, which a host sets when a peer is gone; what is computed then is void.
"""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.copy_engines import Dock
from fengine.ops.registration import begin, dependent_launch, register, tl, triton, wait

CHANNELS = 256  # programs at most: all of them run at once
SMALL, LARGE = 512, 8192  # words of a slot: with the number of their use beside each, and with a flag behind all
MOST_SMALL = 1 << 17  # words of a part that goes in small chunks: one of each channel


class Mail:
    """What a rank exchanges through, once it is open. Modified by each use."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        """Of a group of so many ranks."""
        self.peer_P = torch.zeros(size, dtype=torch.int64, device=device)  # the addresses of all inboxes
        self.used_C = torch.zeros(CHANNELS, dtype=torch.int32, device=device)  # how often each channel was used
        self.stop = self.used_C.new_zeros(1)  # not 0: nobody is waited for
        self.open = False  # whether there are addresses
        self.dock: Dock | None = None  # for many rows, once it is open


def inbox_bytes(size: int) -> int:
    """Of one rank of so many: small chunks, large ones, and their flags. Pure."""
    return CHANNELS * 2 * size * (SMALL * 8 + LARGE * 4 + 4)


@triton.jit(do_not_specialize=["rows", "rank", "off"])
def exchange_kernel(
    x_ptr, out_ptr, peer_ptr, used_ptr, stop_ptr, rows, w, width, rank, off, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    SLOT: tl.constexpr, TAGGED: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of w words; the whole rows have `width`. `off`: bytes from an inbox's begin to its large slots."""
    begin(PDL)
    wait(PDL)
    channel = tl.program_id(0)
    use, n = tl.load(used_ptr + channel), rows * w  # of w is known by what it can be divided
    j = tl.arange(0, CHUNK)
    for chunk in range(channel, tl.cdiv(n, CHUNK), tl.num_programs(0)):
        use += 1
        slot = (channel * 2 + (use & 1)) * SIZE
        at = chunk * CHUNK + j
        inside = at < n
        word = tl.load(x_ptr + at, mask=inside, other=0)
        to = (at // w).to(tl.int64) * width
        column = at % w
        here = rank * w + column
        tl.store(out_ptr + to + here, word, mask=inside & (here < width))
        for step in tl.static_range(1, SIZE):
            inbox = tl.load(peer_ptr + (rank + step) % SIZE)
            if TAGGED:
                both = (word.to(tl.int64) & 0xFFFFFFFF) | (use.to(tl.int64) << 32)
                tl.store(tl.multiple_of(inbox.to(tl.pointer_type(tl.int64)), 16) + (slot + rank) * SLOT + j, both)
            else:
                large = tl.multiple_of((inbox + off).to(tl.pointer_type(tl.int32)), 16)
                tl.store(large + (slot + rank) * SLOT + j, word)  # all of the slot: by fours, without a mask
                tl.debug_barrier()  # all words are written before the flag is
                flag = large + CHANNELS * 2 * SIZE * SLOT + slot + rank
                tl.atomic_xchg(flag, use, sem="release", scope="sys")
        own = tl.load(peer_ptr + rank)
        for step in tl.static_range(1, SIZE):
            peer = (rank + step) % SIZE
            if TAGGED:
                source = tl.multiple_of(own.to(tl.pointer_type(tl.int64)), 16) + (slot + peer) * SLOT + j
                both = tl.load(source, volatile=True)
                missing = tl.sum(((both >> 32).to(tl.int32) != use).to(tl.int32))
                while (missing != 0) & (tl.load(stop_ptr, volatile=True) == 0):
                    both = tl.load(source, volatile=True)
                    missing = tl.sum(((both >> 32).to(tl.int32) != use).to(tl.int32))
                word = both.to(tl.int32)
            else:
                large = tl.multiple_of((own + off).to(tl.pointer_type(tl.int32)), 16)
                flag = large + CHANNELS * 2 * SIZE * SLOT + slot + peer
                found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                while (found != use) & (tl.load(stop_ptr, volatile=True) == 0):
                    found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                tl.debug_barrier()
                word = tl.load(large + (slot + peer) * SLOT + j, volatile=True)
            there = peer * w + column
            tl.store(out_ptr + to + there, word, mask=inside & (there < width))
        tl.debug_barrier()  # every thread has read the chunk before the next one tells the peer so
    tl.store(used_ptr + channel, use)


def words(x: Tensor) -> Tensor:
    """The same bits as int32, along the last dimension. Pure."""
    return x if x.dtype == torch.int32 else x.view(torch.int32)


def fits(x_TN: Tensor, width: int) -> bool:
    """Whether rows and parts of rows are whole words. Pure."""
    return x_TN.shape[1] * x_TN.element_size() % 4 == width * x_TN.element_size() % 4 == 0


def exchange(x_TN: Tensor, width: int, rank: int, peer_P: Tensor, used_C: Tensor, stop: Tensor) -> Tensor:
    size, tokens, scale = len(peer_P), x_TN.shape[0], 4 // x_TN.element_size()
    out_TN = x_TN.new_empty((tokens, width))
    n, w = x_TN.numel() // scale, x_TN.shape[1] // scale
    if n:
        tagged = n <= MOST_SMALL
        slot = SMALL if tagged else LARGE
        chunk = SMALL // 2 if n <= CHANNELS * SMALL // 2 else slot  # a wave of shorter programs is faster
        grid = (min(triton.cdiv(n, chunk), CHANNELS),)
        launcher(exchange_kernel, grid)(
            words(x_TN.contiguous()), words(out_TN), peer_P, used_C, stop, tokens, w, width // scale, rank,
            CHANNELS * 2 * size * SMALL * 8, size, chunk, slot, tagged, CHANNELS, num_warps=4 if tagged else 8,
            num_stages=1, **dependent_launch(x_TN.device.index),
        )  # fmt: skip
    return out_TN


_exchange = register(
    "exchange", exchange, exchange, lambda x_TN, width, *_: x_TN.new_empty((x_TN.shape[0], width)), mutates=("used_C",)
)


def gather(x_TN: Tensor, width: int, rank: int, mail: Mail) -> Tensor:
    """The columns of all ranks side by side, cut at `width`; `x_TN` is the part of `rank`. Modifies: the mail."""
    return _exchange(x_TN, width, rank, mail.peer_P, mail.used_C, mail.stop)
