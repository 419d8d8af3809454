"""How attention may be computed, by shapes alone: tiles, warps, splits. The bits are those of attention.py's tree."""

from typing import NamedTuple

import torch
from torch import Tensor

from fengine.ops import attention_hopper, kv_fp8
from fengine.ops.registration import shared_memory, triton


def block_of(width: int) -> int:
    """Keys of a block, for heads of `width`: part of the tree. Pure."""
    return 128 if width <= 64 else 64


class Bounds(NamedTuple):
    """Which keys a token sees, and how large scores may get. The kernels for Hopper know the default alone."""

    causal: bool = True
    window: int = 0  # 0: none
    cap: float = 0.0  # 0: none
    sinks: bool = False
    reach: bool = False  # each token has a last key of its own


CAUSAL = Bounds()


class Rows(NamedTuple):
    """How `rows_kernel` computes: rows of few tokens, or all rows."""

    tile: int  # rows of the MMA: tokens times padded query heads per kv head
    warps: int
    stages: int
    splits: int  # programs that share the chunks of a tile; 1 merges in registers


class Tiles(NamedTuple):
    """How `tiles_kernel`, or the kernel for Hopper, computes: rows of more tokens than fit a tile of `rows_kernel`."""

    hopper: bool
    tile: int
    warps: int
    stages: int


class Schedule(NamedTuple):
    """How the tree is computed; free to differ per call, because the bits do not depend on it."""

    rows: Rows
    tiles: Tiles | None  # None: `rows_kernel` computes every row


MOST_COPIED = 2 << 30  # bytes of keys and values in few bits that are decoded for the Hopper kernel
HOPPER = Tiles(True, attention_hopper.BM, 12, attention_hopper.STAGES)


def padded_heads(q_THK: Tensor, k_PSGK: Tensor) -> int:
    """Rows of the MMA that one token takes in the Triton kernels. Pure."""
    return triton.next_power_of_2(q_THK.shape[1] // k_PSGK.shape[2])


def stages_for(q_THK: Tensor, tile: int, stages: int) -> int:
    """At most `stages`, as many as shared memory holds: loads run ahead half as far. Pure."""
    if q_THK.dtype == torch.float32:
        return 1
    if not q_THK.is_cuda:
        return stages
    line = triton.next_power_of_2(q_THK.shape[2]) * q_THK.element_size()
    room = shared_memory(q_THK.device.index) - tile * line - 4096
    return max(1, min(stages, 2 * (room // (2 * block_of(q_THK.shape[2]) * line)) - 1))


def reference_schedule(q_THK: Tensor, k_PSGK: Tensor) -> Schedule:
    """The schedule that the others are compared with. Pure."""
    tile = max(16, padded_heads(q_THK, k_PSGK))
    warps = 2 if block_of(q_THK.shape[2]) == 64 and q_THK.dtype != torch.float32 else 4
    return Schedule(Rows(tile, warps, stages_for(q_THK, tile, 5), 1), None)


def schedules(
    q_THK: Tensor, k_PSGK: Tensor, rows: int, keys: int, processors: int, chunk: int, bounds: Bounds = CAUSAL
) -> list[Schedule]:
    """Schedules in order of speed, by shapes alone; `keys` is the longest context the page table can name. Pure."""
    tokens, groups = q_THK.shape[0], k_PSGK.shape[2]
    alone = reference_schedule(q_THK, k_PSGK).rows
    chunks = triton.cdiv(keys, chunk)
    splits = max(1, 2 * processors // (rows * groups))  # two programs a multiprocessor: more would wait for room
    splits = chunks if splits >= 0.9 * chunks else splits  # nobody takes two chunks while others take one
    few = alone._replace(warps=4, splits=splits)  # ragged rows end 2 % earlier than with 2 warps
    if rows * groups >= 4 * processors and q_THK.element_size() == 2:  # small programs, which hide each other's waits
        few = alone._replace(warps=2, stages=stages_for(q_THK, alone.tile, 2))
    if tokens <= rows:
        return [Schedule(few, None), Schedule(alone, None)]
    tile = max(16 if q_THK.dtype == torch.float32 else 64, padded_heads(q_THK, k_PSGK))
    many = [Tiles(False, tile, 4, stages_for(q_THK, tile, 5))]
    copied = rows * keys * groups * q_THK.shape[2] * 2 * q_THK.element_size() if kv_fp8.is_few(k_PSGK) else 0
    if bounds == CAUSAL and attention_hopper.usable(q_THK, k_PSGK) and copied <= MOST_COPIED:
        many.insert(0, HOPPER)
    return [Schedule(r, t) for t in many for r in dict.fromkeys((few, alone))] + [Schedule(alone, None)]
