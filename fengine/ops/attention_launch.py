"""How attention.py's kernels run on CUDA: tiles, warps and splits, by shapes alone, and which of them are proved."""

import math
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fengine.ops import (
    attention_few_hopper,
    attention_hopper,
    attention_many,
    attention_rows_hopper,
    attention_whole_hopper,
    kv_fp8,
)
from fengine.ops.ahead import launcher
from fengine.ops.attention_kernels import rows_kernel
from fengine.ops.kv_fp8_whole import MOST, copies
from fengine.ops.proof import proved, same_bits
from fengine.ops.registration import EARLY, MIDDLE, dependent_launch, multiprocessors, plain, shared_memory, triton

CHUNK = 1024  # keys: part of the tree
MERGE_AHEAD = 4  # chunk results loaded together by the merge
MAX_PARTIALS = 1 << 26  # float32 values of workspace that a split may take
AT_ONCE = 16  # programs, each chunk's aside, up to which several blocks are attended at once
ARRIVALS = 1 << 13  # counters of a KV pool: a split must do with so many tiles


def block_of(width: int) -> int:
    """Keys of a block, for heads of `width`: part of the tree. Pure."""
    return 128 if width <= 64 else 64


class Bounds(NamedTuple):
    """Which keys a token sees, and how large scores may get."""

    causal: bool = True
    window: int = 0  # 0: none
    cap: float = 0.0  # 0: none
    sinks: bool = False
    reach: bool = False  # each token has a last key of its own


CAUSAL, WHOLE = Bounds(), Bounds(causal=False)


class Rows(NamedTuple):
    """How `rows_kernel` computes: rows of few tokens, or all rows."""

    tile: int  # rows of the MMA: tokens times padded query heads per kv head
    warps: int
    stages: int
    splits: int  # programs that share the chunks of a tile; 1 merges in registers
    ahead: int = 0  # blocks in shared memory of the kernel for FP8 on Hopper; 0: Triton's kernel
    short: int = 0  # keys up to which one loop attends to all; 0: edges have loops without loads ahead
    at_once: int = 0  # blocks that attention_few_hopper.py attends at once; 0: another kernel
    parts: int = 1  # programs there that share the columns of the values


class Tiles(NamedTuple):
    """How `tiles_kernel`, or the kernel for Hopper, computes: rows of more tokens than fit a tile of `rows_kernel`."""

    hopper: bool
    tile: int
    warps: int
    stages: int
    short: int = 0  # as of Rows


class Schedule(NamedTuple):
    """How the tree is computed; free to differ per call, because the bits do not depend on it."""

    rows: Rows
    tiles: Tiles | None  # None: `rows_kernel` computes every row


HOPPER = Tiles(True, attention_hopper.BM, 12, 0)  # its rings follow from the width
WHOLE_HOPPER = Tiles(True, attention_whole_hopper.BM, 12, attention_whole_hopper.STAGES)


def padded_heads(q_THK: Tensor, k_PSGK: Tensor) -> int:
    """Rows of the MMA that one token takes in the Triton kernels. Pure."""
    return triton.next_power_of_2(q_THK.shape[1] // k_PSGK.shape[2])


def stages_for(q_THK: Tensor, tile: int, stages: int) -> int:
    """At most `stages`, as many as shared memory holds: loads run ahead half as far. Pure."""
    if q_THK.dtype == torch.float32 or not q_THK.is_cuda:
        return 1 if q_THK.dtype == torch.float32 else stages
    line = triton.next_power_of_2(q_THK.shape[2]) * q_THK.element_size()
    room = shared_memory(q_THK.device.index) - tile * line - 4096
    return max(1, min(stages, 2 * (room // (2 * block_of(q_THK.shape[2]) * line)) - 1))


def reference_schedule(q_THK: Tensor, k_PSGK: Tensor) -> Schedule:
    """The schedule that the others are compared with. Pure."""
    tile = max(16, padded_heads(q_THK, k_PSGK))
    warps = 2 if block_of(q_THK.shape[2]) == 64 and q_THK.dtype != torch.float32 else 4
    return Schedule(Rows(tile, warps, stages_for(q_THK, tile, 5), 1), None)


def hopper_tiles(q_THK: Tensor, k_PSGK: Tensor, keys: int, bounds: Bounds) -> list[Tiles]:
    """The kernel for Hopper of rows of many tokens, if there is one for these. Pure."""
    if bounds.causal and not bounds.cap and not bounds.reach and attention_hopper.usable(q_THK, k_PSGK):
        return [HOPPER]
    return [WHOLE_HOPPER] if bounds == WHOLE and keys >= 512 and attention_whole_hopper.usable(q_THK, k_PSGK) else []


def plain_tiles(q_THK: Tensor, k_PSGK: Tensor, bounds: Bounds) -> Tiles:
    """How `tiles_kernel` is fastest on an H200. The sums of wide heads want the registers of eight warps. Pure."""
    exact, wide, line = q_THK.dtype == torch.float32, q_THK.shape[2] > 128, 2 * triton.next_power_of_2(q_THK.shape[2])
    wide &= not exact and (not q_THK.is_cuda or shared_memory(q_THK.device.index) >= (128 + 2 * 64) * line)
    tile = max(16 if exact else 128 if wide else 64, padded_heads(q_THK, k_PSGK))
    short = bounds.window + tile + block_of(q_THK.shape[2]) if 0 < bounds.window <= CHUNK else 0
    stages = (3 if wide else 2) if short else (2 if wide else 5)
    return Tiles(False, tile, 8 if wide else 4, stages_for(q_THK, tile, stages), short)


def at_once(q_THK: Tensor, k_PSGK: Tensor, rows: int, splits: int, bounds: Bounds) -> list[Rows]:
    """The schedule of attention_few_hopper.py, for few rows. Pure."""
    known = bounds.causal and not bounds.cap and not bounds.reach
    if rows * k_PSGK.shape[2] > AT_ONCE or not known or not attention_few_hopper.usable(q_THK, k_PSGK):
        return []
    return [Rows(16, 4, 0, splits, at_once=2 if q_THK.shape[2] == 128 else 1, parts=q_THK.shape[2] // 64)]


def schedules(
    q_THK: Tensor, k_PSGK: Tensor, rows: int, keys: int, processors: int, bounds: Bounds = CAUSAL
) -> list[Schedule]:
    """Schedules in order of speed, by shapes alone; `keys` is the longest context the page table can name. Pure."""
    tokens, groups = q_THK.shape[0], k_PSGK.shape[2]
    alone = reference_schedule(q_THK, k_PSGK).rows
    chunks = triton.cdiv(keys, CHUNK)
    splits = max(1, 2 * processors // (rows * groups))  # two programs a multiprocessor: more would wait for room
    splits = chunks if splits >= 0.9 * chunks else splits  # nobody takes two chunks while others take one
    few = alone._replace(warps=4, splits=splits)  # ragged rows end 2 % earlier than with 2 warps
    if rows * groups <= 2 * processors and q_THK.element_size() == 2:  # there is nobody else to run
        few = few._replace(short=512)
    if rows * groups >= 4 * processors and q_THK.element_size() == 2:  # small programs, which hide each other's waits
        few = alone._replace(warps=2, stages=stages_for(q_THK, alone.tile, 2))
    taken = [*at_once(q_THK, k_PSGK, rows, splits, bounds), few, alone]
    if bounds == CAUSAL and attention_rows_hopper.usable(q_THK, k_PSGK):
        taken.insert(0, Rows(alone.tile, 4, 0, min(chunks, max(1, 4 * processors // (rows * groups))), 2))
    if tokens <= rows:
        return [Schedule(r, None) for r in taken]
    many = [*hopper_tiles(q_THK, k_PSGK, keys, bounds), plain_tiles(q_THK, k_PSGK, bounds)]
    return [Schedule(r, t) for t in many for r in dict.fromkeys(taken)] + [Schedule(alone, None)]


@cache
def arrivals(device: int | None) -> dict[int, Tensor]:
    """Counters of the programs that have arrived, by address of the key pool: zero before and after every launch, so
    that launches on one pool, which follow each other as each reads what the step before wrote, may share them."""
    return {}


def counters(k_PSGK: Tensor) -> Tensor | None:
    """The counters of a pool; None in a capture, which must not make them. Modifies: `arrivals`."""
    known = arrivals(k_PSGK.device.index)
    found = known.get(k_PSGK.data_ptr())
    if found is None and not (k_PSGK.is_cuda and torch.cuda.is_current_stream_capturing()):
        found = known[k_PSGK.data_ptr()] = torch.zeros(ARRIVALS, dtype=torch.int32, device=k_PSGK.device)
    return found


class Paged(NamedTuple):
    """The tensors of one call; `sinks_H` and `last_T` where its bounds say so."""

    q_THK: Tensor
    k_PSGK: Tensor
    v_PSGK: Tensor
    q_start_B: Tensor
    kv_len_R: Tensor
    page_table_RN: Tensor
    sinks_H: Tensor | None = None
    last_T: Tensor | None = None


def run(call: Paged, scale: float, s: Schedule, bounds: Bounds = CAUSAL, most: int = MOST) -> Tensor:
    """Runs the kernels under `s`. A split that would take too much workspace is not made; `most`: bytes of copies."""
    o_THK = torch.empty_like(call.q_THK)
    limit = 0 if s.tiles is None else s.rows.tile // padded_heads(call.q_THK, call.k_PSGK)
    c = (1.0 if bounds.cap else scale) * math.log2(math.e)
    bound = (*bounds, scale if bounds.cap else 0.0, call.k_PSGK.shape[2] * kv_fp8.is_few(call.k_PSGK))
    _run_rows(call, o_THK, s.rows, c, limit, bound)
    if s.tiles is not None and s.tiles.hopper:
        block, kernel = block_of(o_THK.shape[2]), attention_hopper if bounds.causal else attention_whole_hopper
        more: Any = (bounds.window, call.sinks_H) if bounds.causal else ()
        k, v, table = copies(*call[:6], limit, most)
        kernel.launch(call.q_THK, k, v, *call[3:5], table, o_THK, c, limit, CHUNK, block, *more)
    if s.tiles is not None and (not s.tiles.hopper or kv_fp8.is_few(call.k_PSGK)):
        tiles = plain_tiles(call.q_THK, call.k_PSGK, bounds) if s.tiles.hopper else s.tiles
        attention_many.launch(call, o_THK, c, limit, _shape(call, tiles.tile), bound, tiles, most * s.tiles.hopper)
    return o_THK


def _shape(call: Paged, tile: int) -> tuple[int, ...]:
    """What both kernels are made for: heads, kv heads, width, padded width, slots, padded heads, tile, chunk, block."""
    (_, heads, width), (size, groups) = call.q_THK.shape, call.k_PSGK.shape[1:3]
    padded = padded_heads(call.q_THK, call.k_PSGK)
    return heads, groups, width, triton.next_power_of_2(width), size, padded, tile, CHUNK, block_of(width)


def _run_rows(call: Paged, o_THK: Tensor, s: Rows, c: float, limit: int, bound: tuple[float, ...]) -> None:
    """Rows of up to `limit` tokens; 0: all rows. Modifies: o_THK."""
    q_THK, (rows, table_width) = call.q_THK, call.page_table_RN.shape
    heads, groups, _, padded_width, size, padded, *_ = _shape(call, s.tile)
    tokens, per_tile, chunks = len(q_THK), s.tile // padded, triton.cdiv(table_width * size, CHUNK)
    lines = (rows * per_tile if limit else tokens) * heads * chunks
    fits = lines * (padded_width + 2) <= MAX_PARTIALS
    fits &= (rows + (0 if limit else tokens // per_tile)) * groups * s.parts <= ARRIVALS
    arrived = counters(call.k_PSGK) if fits and s.splits > 1 else None
    splits = s.splits if arrived is not None else 1
    parts = (q_THK.new_empty(lines * n if splits > 1 else 0, dtype=torch.float32) for n in (1, 1, padded_width))
    arrived = call.kv_len_R if arrived is None else arrived
    trigger = EARLY if rows <= 16 else MIDDLE
    if s.at_once:
        attention_few_hopper.launch(call, o_THK, (*parts, arrived), c, chunks, limit, _shape(call, s.tile), splits,
                                    MERGE_AHEAD, s.at_once, s.parts, int(bound[1]), trigger)  # fmt: skip
        return
    if s.ahead:
        attention_rows_hopper.launch(call[:6], o_THK, (*parts, arrived), c, chunks, limit, _shape(call, s.tile), splits,
                                     MERGE_AHEAD, s.warps, s.ahead, trigger)  # fmt: skip
        return
    launcher(rows_kernel, (groups, rows, splits))(
        *call[:6], o_THK, *parts, arrived, *call[6:], c, tokens, rows, table_width, chunks, limit,
        *_shape(call, s.tile), splits > 1, MERGE_AHEAD, *bound, s.short, num_warps=s.warps, num_stages=s.stages,
        **dependent_launch(q_THK.device.index, trigger),
    )  # fmt: skip


def is_proved(q_THK: Tensor, k_PSGK: Tensor, s: Schedule, bounds: Bounds = CAUSAL) -> bool:
    """Whether `s` gives the bits of the reference schedule for these heads and pages on this device; compared once."""
    if s == reference_schedule(q_THK, k_PSGK):
        return True
    (heads, width), (size, groups) = q_THK.shape[1:], k_PSGK.shape[1:3]
    rows = s.rows._replace(splits=s.rows.splits > 1)  # how many splits is the grid's business, not the kernel's
    key = f"attention {q_THK.dtype} {heads}/{groups}x{width} page {size} chunk {CHUNK} {rows} {s.tiles}"
    key += ("" if bounds == CAUSAL else f" {tuple(bounds)}") + (" few" if kv_fp8.is_few(k_PSGK) else "")
    return proved(q_THK.device, key, lambda: _compare(q_THK, k_PSGK, s, bounds))


def _compare(q_THK: Tensor, k_PSGK: Tensor, s: Schedule, bounds: Bounds) -> bool:
    """Random rows around the edges of blocks and chunks under both schedules, called as they are used: by themselves,
    and inside a captured graph. Slots that no row owns hold NaN."""
    size, width = k_PSGK.shape[1], q_THK.shape[2]
    left = min(bounds.window, 8 * CHUNK)  # so that there are keys in front of a window
    lengths, tokens = [CHUNK + 200, 700, 2 * CHUNK + 65 + left, 129, 64, 1, 2 * CHUNK], [1, 300, 200, 129, 1, 1, 2]
    pages = [triton.cdiv(length, size) for length in lengths]
    generator = torch.Generator(q_THK.device).manual_seed(width)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=q_THK.device, generator=generator).to(q_THK.dtype)

    q, shape = random(sum(tokens) + 3, *q_THK.shape[1:]), (sum(pages) + 1, *k_PSGK.shape[1:3], width)
    k, v = random(*shape), random(*shape)
    k[0] = v[0] = math.nan
    order = torch.randperm(sum(pages), device=q.device, generator=generator).int() + 1
    table = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int32, device=q.device)
    for r, own in enumerate(order.split(pages)):
        table[r, : len(own)] = own
        last = lengths[r] - (len(own) - 1) * size
        k[own[-1], last:] = v[own[-1], last:] = math.nan
    k, v = (kv_fp8.stored_as(k_PSGK, x) for x in (k, v))
    start, kv_len = (torch.tensor(x, device=q.device).int() for x in ([0, *accumulate(tokens)], lengths))
    sinks, last = random(q.shape[1]) if bounds.sinks else None, None
    if bounds.reach:  # the first half of a row's tokens see each other
        ends = [n - t + max(t // 2 - 1, at) for n, t in zip(lengths, tokens, strict=True) for at in range(t)]
        last = torch.tensor([*ends, 0, 0, 0], device=q.device).int()
    call = Paged(q, k, v, start, kv_len, table, sinks, last)
    k, v = (kv_fp8.values(x).to(q.dtype) for x in (k, v))  # where pages hold codes, what these stand for
    run_as = partial(run, call, width**-0.5, bounds=bounds)
    want = run(call._replace(k_PSGK=k, v_PSGK=v), width**-0.5, reference_schedule(q, k), bounds)
    same = same_bits(want, lambda: run_as(s), True) and bool(want.isfinite().all())
    return same and torch.equal(want, run_as(s, most=1))  # again: the counters are back at zero


def launch(
    q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, q_start_B: Tensor, kv_len_R: Tensor, page_table_RN: Tensor,
    scale: float, causal: bool = True, window: int = 0, cap: float = 0.0, sinks_H: Tensor | None = None,
    last_T: Tensor | None = None, chosen: Schedule | None = None,
) -> Tensor:  # fmt: skip
    """Runs `chosen`, by default the fastest schedule for these shapes that is proved."""
    assert k_PSGK.is_contiguous() and v_PSGK.is_contiguous()
    bounds = Bounds(causal, window, cap, sinks_H is not None, last_T is not None)
    q_THK, page_table_RN = plain(q_THK), page_table_RN.contiguous()
    if q_THK.shape[0] == 0:
        return torch.empty_like(q_THK)
    if chosen is None:
        rows, table_width = page_table_RN.shape
        processors = multiprocessors(q_THK.device.index) if q_THK.is_cuda else 1
        found = schedules(q_THK, k_PSGK, rows, table_width * k_PSGK.shape[1], processors, bounds)
        chosen = next((s for s in found if is_proved(q_THK, k_PSGK, s, bounds)), reference_schedule(q_THK, k_PSGK))
    call = Paged(q_THK, k_PSGK, v_PSGK, q_start_B, kv_len_R, page_table_RN, sinks_H, last_T)
    return run(call, scale, chosen, bounds)
