"""Launches staged steps on a device: the compiled step, and on CUDA one captured graph per bucket over static inputs.

A launch does not wait: `Flight.result()` does. The runner never touches requests; the driver never touches tensors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fengine.batching import ExtendedStaged, Staged
from fengine.extended import ExtendedFn
from fengine.records import Findings
from fengine.state import KVState, Params, SamplingBatch, StepBatch, StepOut
from fengine.step import Feed, StepFn, mark_sizes


class Flight(NamedTuple):
    """A step under way. `result` waits for it: (tokens, logprobs), one of each per draw of the plan.

    `findings`, of an extended step, gives after `result` what else was wanted.
    """

    result: Callable[[], tuple[list[int], list[float]]]
    findings: Callable[[], Findings] | None = None


def inputs(fields: list[Tensor], last_token_R: Tensor) -> tuple[StepBatch, SamplingBatch, Feed]:
    """The step's arguments from tensors in the order of Staged's fields. Pure."""
    batch, sampling = len(StepBatch._fields), len(StepBatch._fields) + len(SamplingBatch._fields)
    return StepBatch(*fields[:batch]), SamplingBatch(*fields[batch:sampling]), Feed(last_token_R, *fields[sampling:])


def on_cpu(staged: Staged) -> list[Tensor]:
    """The staged arrays as CPU tensors, without copies. Pure."""
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in staged]


def warm_staged(tokens: int, rows: int, width: int) -> Staged:
    """A harmless step for warm-up: `rows` rows of token 0 that write to the null page and see one key each."""
    per_row = np.full(rows, tokens // rows, np.int32)
    per_row[: tokens % rows] += 1
    q_start = np.zeros(rows + 1, np.int32)
    np.cumsum(per_row, out=q_start[1:])
    zeros_T = np.zeros(tokens, np.int32)
    ones_R = np.ones(rows, np.int32)
    return Staged(
        token_T=zeros_T,
        pos_T=zeros_T,
        slot_T=zeros_T,
        q_start_B=q_start,
        kv_len_R=per_row,
        page_table_RN=np.zeros((rows, width), np.int32),
        logit_index_R=q_start[1:] - 1,
        temperature_R=ones_R.astype(np.float32),
        top_k_R=ones_R,
        top_p_R=ones_R.astype(np.float32),
        min_p_R=np.zeros(rows, np.float32),
        seed_R=np.zeros(rows, np.int64),
        sample_pos_R=per_row,
        feed_index_T=zeros_T,
        feed_from_T=np.zeros(tokens, np.bool_),
    )


class CpuRunner:
    """Runs the step in the calling thread, without padding: sizes are dynamic in the one compiled graph."""

    def __init__(self, step: StepFn, params: Params, rows: int, extended: ExtendedFn) -> None:
        self.step, self.extended, self.params = step, extended, params
        self.last_token_R = torch.zeros(rows, dtype=torch.int32)

    def warm_up(self, kv: KVState, page_size: int) -> KVState:
        """Compiles the step before the first request; every later size reuses the graph."""
        for tokens, rows, width in ((5, 3, 2), (1, 1, 1), (4, 1, 1), (2, 2, 1)):
            width = max(width, -(-tokens // page_size))
            batch, sampling, feed = inputs(on_cpu(warm_staged(tokens, rows, width)), self.last_token_R)
            mark_sizes(batch, sampling, feed)
            kv, _ = self.step(self.params, kv, batch, sampling, feed)
        return kv

    def launch(self, kv: KVState, staged: Staged | ExtendedStaged) -> tuple[KVState, Flight]:
        findings = None
        if isinstance(staged, ExtendedStaged):
            arguments = inputs(on_cpu(staged.plain), self.last_token_R)
            kv, out, findings = self.extended(self.params, kv, *arguments, staged.wants)
        else:
            kv, out = self.step(self.params, kv, *inputs(on_cpu(staged), self.last_token_R))
        self.last_token_R[: out.token_R.shape[0]] = out.token_R
        return kv, Flight(lambda: (out.token_R.tolist(), out.logprob_R.tolist()), findings)


GRAPH_TOKENS = 8192  # larger steps gain nothing from a graph


class Bucket(NamedTuple):
    """A padded step size. `graph` says whether it is captured."""

    tokens: int
    rows: int
    graph: bool


def decode_buckets(rows: int) -> list[int]:
    """1, 2, 4, then multiples of 8 to 64, of 16 to 128, of 32 to 256, of 64 beyond; the last one is `rows`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 4096, 64)]
    return [s for s in sizes if s < rows] + [rows]


def token_buckets(tokens: int) -> list[int]:
    """Steps with prompt chunks: from 256 on at most 1.25x apart, multiples of 16."""
    small = [16, 32, 64, 96, 128, 192]
    large = [base * eighths // 8 for base in (256, 512, 1024, 2048, 4096, 8192) for eighths in (8, 10, 12, 14)]
    return [s for s in (*small, *large, 16384) if s < tokens] + [tokens]


class Slot(NamedTuple):
    """One field's place in the packed input: offset and length in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


def packed_layout(tokens: int, rows: int, width: int) -> list[Slot]:
    """Where each field of Staged lies in one packed byte buffer; 16-byte aligned."""
    sizes = {"T": (tokens,), "R": (rows,), "B": (rows + 1,), "RN": (rows, width)}
    special = {"seed_R": torch.int64, "feed_from_T": torch.bool}
    special |= dict.fromkeys(("temperature_R", "top_p_R", "min_p_R"), torch.float32)
    slots, at = [], 0
    for name in Staged._fields:
        shape = sizes[name.rsplit("_", 1)[1]]
        dtype = special.get(name, torch.int32)
        size = int(np.prod(shape)) * dtype.itemsize
        slots.append(Slot(name, dtype, shape, at, size))
        at += -(-size // 16) * 16
    return slots


def views(buffer: Tensor, layout: list[Slot]) -> list[Tensor]:
    """Typed views of a packed byte buffer, one per field. Pure."""
    return [buffer[s.start : s.start + s.size].view(s.dtype).view(s.shape) for s in layout]


class CudaRunner:
    """Pads each step to a bucket, copies one packed buffer to the device and replays the bucket's graph.

    Static buffers: two pinned host inputs used in turn (the copy of step n may still run while n+1 is staged), one
    device input, and the device's `last_token_R`. Modifies: these buffers.
    """

    def __init__(
        self, step: StepFn, params: Params, *, rows: int, tokens: int, width: int, graphs: bool, device: str,
        extended: ExtendedFn,
    ) -> None:  # fmt: skip
        self.step, self.params, self.width, self.device = step, params, width, torch.device(device)
        self.extended = extended
        self.decode = decode_buckets(rows)
        self.mixed_rows = sorted({min(32, rows), rows})
        self.tokens = token_buckets(max(tokens, rows))
        self.graphs = graphs
        self.captured: dict[Bucket, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool: Any = None  # the memory pool that all graphs share
        self.side = torch.cuda.Stream(self.device)  # of captures: one, because cuBLAS keeps a workspace for each stream
        last = packed_layout(self.tokens[-1], rows, width)[-1]
        size = last.start + last.size + 64
        self.host = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.out = [torch.zeros(2 * rows, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self.input = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.last_token_R = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.turn = 0
        self.kv: list[KVState] = []  # the one state whose addresses the graphs hold

    def bucket(self, tokens: int, rows: int) -> Bucket:
        """The smallest bucket that holds a step. One token a row is a decode step."""
        if tokens == rows:
            size = next(s for s in self.decode if s >= rows)
            return Bucket(size, size, self.graphs)
        size = next(s for s in self.tokens if s >= tokens)
        return Bucket(size, next(r for r in self.mixed_rows if r >= rows), self.graphs and size <= GRAPH_TOKENS)

    def all_buckets(self) -> list[Bucket]:
        """Largest first, so that the graphs' shared pool is sized once."""
        decode = [Bucket(s, s, self.graphs) for s in self.decode]
        fewer = [0, *self.mixed_rows]  # a step with more rows than this has more tokens still
        mixed = [
            Bucket(s, r, self.graphs and s <= GRAPH_TOKENS)
            for s in self.tokens
            for least, r in zip(fewer, self.mixed_rows, strict=False)
            if s > least
        ]
        return sorted(decode + mixed, key=lambda b: (b.tokens, b.rows), reverse=True)

    def prepare(self, kv: KVState) -> int:
        """Runs every bucket with any small KV state: compiles and proves all kernels, which takes memory of its own.

        Returns the bytes that the largest step takes for its activations.
        """
        self.kv = [kv]
        buckets = self.all_buckets()
        before = 0
        for bucket in (*buckets, buckets[0]):
            torch.cuda.synchronize(self.device)  # the bucket before was staged in the same pinned buffer
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self._warm(bucket)
        torch.cuda.synchronize(self.device)
        most = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        return most

    def warm_up(self, kv: KVState, page_size: int) -> KVState:
        """Captures every bucket's graph over `kv`; `prepare` has run once before."""
        self.kv = [kv]
        if self.graphs and not self.captured:
            self.pool = torch.cuda.graph_pool_handle()  # a pool ends with the last of its graphs
        self._warm(self.all_buckets()[-1])  # what an op keeps for a KV state is made now, not in a capture
        torch.cuda.synchronize(self.device)
        for bucket in self.all_buckets():
            if bucket.graph:
                self._capture(bucket)
        return kv

    def _warm(self, bucket: Bucket) -> None:
        self._run(bucket, self._stage(warm_staged(bucket.tokens, bucket.rows, self.width), bucket))

    def _stage(self, staged: Staged, bucket: Bucket) -> list[Slot]:
        """Packs a step into this turn's pinned buffer, padded, and starts its copy to the device."""
        layout = packed_layout(bucket.tokens, bucket.rows, self.width)
        host = self.host[self.turn]
        for slot, target, source in zip(layout, views(host, layout), staged, strict=True):
            array = target.numpy()  # shares the pinned memory
            if slot.name == "page_table_RN":
                array[: source.shape[0], : source.shape[1]] = source
                continue
            array[: source.shape[0]] = source
            pad = {"q_start_B": staged.token_T.shape[0], "temperature_R": 1, "top_p_R": 1, "top_k_R": 1}
            array[source.shape[0] :] = pad.get(slot.name, 0)
        end = layout[-1].start + layout[-1].size
        self.input[:end].copy_(host[:end], non_blocking=True)
        return layout

    def _run(self, bucket: Bucket, layout: list[Slot]) -> Tensor:
        """One step over the static input; returns [2, R] int32: tokens, and the bits of the logprobs."""
        batch, sampling, feed = inputs(views(self.input, layout), self.last_token_R)
        mark_sizes(batch, sampling, feed)
        _, out = self.step(self.params, self.kv[0], batch, sampling, feed)
        return self._pack(out, bucket.rows)

    def _pack(self, out: StepOut, rows: int) -> Tensor:
        self.last_token_R[:rows].copy_(out.token_R)
        return torch.stack((out.token_R, out.logprob_R.view(torch.int32)))

    def _capture(self, bucket: Bucket) -> None:
        """Nothing runs: the graph reads whatever is staged when it is replayed."""
        layout, graph = packed_layout(bucket.tokens, bucket.rows, self.width), torch.cuda.CUDAGraph()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # not `torch.cuda.graph`, which collects garbage for each of many graphs
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            out = self._run(bucket, layout)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.side)
        self.captured[bucket] = (graph, out)

    def launch(self, kv: KVState, staged: Staged | ExtendedStaged) -> tuple[KVState, Flight]:
        """Starts a step. The state must be the one that the graphs were captured with: same storage, handed on."""
        assert kv is self.kv[0], "another KV state than the one whose addresses the graphs hold"
        wants, findings = None, None
        if isinstance(staged, ExtendedStaged):
            staged, wants = staged
        rows = staged.kv_len_R.shape[0]
        bucket = self.bucket(staged.token_T.shape[0], rows)
        layout = self._stage(staged, bucket)
        if wants is not None:
            arguments = inputs(views(self.input, layout), self.last_token_R)
            _, out, findings = self.extended(self.params, kv, *arguments, wants)
            out = self._pack(out, bucket.rows)
        elif bucket.graph:
            graph, out = self.captured[bucket]  # never captured here: the run before a capture would overwrite the feed
            graph.replay()
        else:
            out = self._run(bucket, layout)
        target = self.out[self.turn][: 2 * bucket.rows]
        target.copy_(out.view(-1), non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self.turn ^= 1

        def result() -> tuple[list[int], list[float]]:
            done.synchronize()
            tokens, bits = target.view(2, -1)[:, :rows]
            return tokens.tolist(), bits.view(torch.float32).tolist()

        return kv, Flight(result, findings)
