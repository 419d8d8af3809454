"""Launches staged steps on a device: the compiled step, and on CUDA one captured graph per bucket over static inputs.

    plain step       one graph; all are captured at the start
    extended step    a graph up to hidden_TD, captured when its bucket is first used; the rest is launched op by op

A launch does not wait: `Flight.result()` does. The runner never touches requests; the driver never touches tensors.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fengine.models.kv_state import KVState, Params, StepBatch, StepOut, layer_kinds
from fengine.ops import edges
from fengine.worker.buckets import (
    FORWARD_TOKENS,
    GRAPH_TOKENS,
    PLAIN,
    Bucket,
    Slot,
    decode_buckets,
    inputs,
    packed_layout,
    short,
    token_buckets,
    views,
)
from fengine.worker.extended import ExtendedFn
from fengine.worker.input_batch import ExtendedStaged, Staged, warm_staged
from fengine.worker.records import Findings
from fengine.worker.step import Feed, ForwardFn, StepFn, mark_sizes


class Flight(NamedTuple):
    """A step under way. `result` waits for it: (tokens, logprobs), one of each per draw of the plan.

    `findings`, of an extended step, gives after `result` what else was wanted.
    """

    result: Callable[[], tuple[list[int], list[float]]]
    findings: Callable[[], Findings] | None = None


def on_cpu(staged: Staged) -> list[Tensor]:
    """The staged arrays as CPU tensors, without copies; the adapters' only where there are some. Pure."""
    arrays = staged if len(staged.adapter_start_S) else staged[:PLAIN]
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


class CpuRunner:
    """Runs the step in the calling thread, without padding: if compiled, its sizes are dynamic in the one graph."""

    def __init__(
        self, step: StepFn, params: Params, forward: ForwardFn, extended: ExtendedFn, adapter_slots: int
    ) -> None:
        self.step, self.params, self.adapter_slots = step, params, adapter_slots
        self.forward, self.extended = forward, extended
        self.last_token_R = torch.zeros(1, dtype=torch.int32)  # drawn by the step before
        self.before: Callable[[], list[int]] = list  # gives the tokens of the step before

    def warm_up(self, kv: KVState, page_size: int) -> KVState:
        """Compiles the step before the first request, without adapters and with; every later size reuses a graph."""
        sizes = ((5, 3, 2), (1, 1, 1), (4, 1, 1), (2, 2, 1))
        for (tokens, rows, width), slots in product(sizes, sorted({0, self.adapter_slots})):
            width = max(width, -(-tokens // page_size))
            batch, sampling, feed = inputs(on_cpu(warm_staged(tokens, rows, width, slots)), self.last_token_R)
            mark_sizes(batch, sampling, feed)
            kv, _ = self.step(self.params, kv, batch, sampling, feed)
        return kv

    def launch(self, kv: KVState, staged: Staged | ExtendedStaged) -> tuple[KVState, Flight]:
        findings = None
        if isinstance(staged, ExtendedStaged):
            arguments = inputs(on_cpu(staged.plain), self.last_token_R)
            kv, out, findings = self.extended(self.params, kv, *arguments, staged.wants, self.before, self.forward)
        else:
            kv, out = self.step(self.params, kv, *inputs(on_cpu(staged), self.last_token_R))
        self.last_token_R = out.token_R
        self.before = out.token_R.tolist
        return kv, Flight(lambda: (out.token_R.tolist(), out.logprob_R.tolist()), findings)


Key = tuple[Bucket, int, bool]  # of a graph: over which input and draws; whether of the forward pass alone
GRAPH_ROOM = 512 << 20  # bytes that a graph captured while requests run must leave free


class CudaRunner:
    """Pads each step to a bucket, copies one packed buffer to the device and replays the bucket's graph.

    Copies run on streams of their own: the input of a step comes in, and the draws of the one before go out, while
    another step runs. Static buffers: two inputs and two outputs, on the host (pinned) and on the device, and the
    device's `last_token_R` and `hidden_TD`. Modifies: these buffers. No graph's own memory is read from outside, as all
    share one pool.
    """

    def __init__(
        self, step: StepFn, params: Params, *, rows: int, tokens: int, width: int, graphs: bool, device: str,
        forward: ForwardFn, extended: ExtendedFn, adapter_slots: int,
    ) -> None:  # fmt: skip
        self.step, self.params, self.width, self.device = step, params, width, torch.device(device)
        self.forward, self.extended, self.adapter_slots = forward, extended, adapter_slots
        self.decode = decode_buckets(rows)
        self.mixed_rows = sorted({min(32, rows), rows})
        self.tokens = token_buckets(max(tokens, rows))
        self.graphs = graphs
        self.captured: dict[Key, torch.cuda.CUDAGraph] = {}
        self.room = True  # for graphs that are captured while requests run
        self.pool: Any = None  # the memory pool that all graphs share
        self.side = torch.cuda.Stream(self.device)  # of captures: one, because cuBLAS keeps a workspace for each stream
        self.coming, self.going = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        last = packed_layout(self.tokens[-1], rows, width, adapter_slots)[-1]
        size = last.start + last.size + 64
        self.host = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.out = [torch.zeros(2 * rows, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self.input = [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self.drawn = [torch.zeros(2 * rows, dtype=torch.int32, device=self.device) for _ in range(2)]
        self.ended = [torch.cuda.Event() for _ in range(2)]  # the last step over this input has
        self.sent = [torch.cuda.Event() for _ in range(2)]  # the draws are on the host
        self.last_token_R = torch.zeros(rows, dtype=torch.int32, device=self.device)
        most, norm_D = min(FORWARD_TOKENS, self.tokens[-1]) if graphs else 0, params["final_norm_D"]
        self.hidden_TD = norm_D.new_zeros((most, len(norm_D)))  # what a forward pass's graph leaves behind
        self.turn = 0
        self.before: Callable[[], list[int]] = list  # gives the tokens of the step before; may wait
        self.kv: list[KVState] = []  # the one state whose addresses the graphs hold

    def bucket(self, tokens: int, rows: int, adapters: bool = False) -> Bucket:
        """The smallest bucket that holds a step. One token a row is a decode step."""
        if tokens == rows:
            size = next(s for s in self.decode if s >= rows)
            return Bucket(size, size, self.graphs, adapters)
        size = next(s for s in self.tokens if s >= tokens)
        rows = next(r for r in self.mixed_rows if r >= rows)
        return Bucket(size, rows, self.graphs and size <= GRAPH_TOKENS, adapters)

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
        adapted = [b._replace(adapters=True) for b in decode + mixed if self.adapter_slots]
        return sorted(decode + mixed + adapted, key=lambda b: (b.tokens, b.rows, b.adapters), reverse=True)

    def prepare(self, kv: KVState) -> int:
        """Runs every bucket with any small KV state: compiles and proves all kernels, which takes memory of its own.

        One layer of each kind stands for all: those alike run the same kernels. Returns the bytes that the largest step
        takes for its activations.
        """
        whole, kinds = self.params, layer_kinds(self.params["layers"])
        self.params = whole | {"layers": [whole["layers"][index] for index in kinds]}
        self.kv = [KVState(*(tuple(pages[index] for index in kinds) for pages in kv))]
        buckets = self.all_buckets()
        before = 0
        for bucket in (*buckets, buckets[0]):
            torch.cuda.synchronize(self.device)  # the bucket before was staged in the same pinned buffer
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self._warm(bucket)
        torch.cuda.synchronize(self.device)
        most = torch.cuda.max_memory_allocated(self.device) - before
        self.params = whole
        torch.cuda.empty_cache()
        return most

    def warm_up(self, kv: KVState, page_size: int) -> KVState:
        """Captures every bucket's graph over `kv`; `prepare` has run once before."""
        self.kv, self.room = [kv], True
        if self.graphs and not self.captured:
            self.pool = torch.cuda.graph_pool_handle()  # a pool ends with the last of its graphs
        buckets = self.all_buckets()
        for bucket in {b.adapters: b for b in buckets}.values():  # the smallest without adapters, and with
            self._warm(bucket)  # what an op keeps for a KV state, or torch.compile makes, is not made in a capture
            torch.cuda.synchronize(self.device)
        for bucket in buckets:
            if bucket.graph:
                for which in (0, 1) if short(bucket) else (0,):
                    self._capture((bucket, which, False), partial(self._run, bucket, which, self._layout(bucket)))
        return kv

    def _warm(self, bucket: Bucket) -> None:
        slots = self.adapter_slots if bucket.adapters else 0
        self._run(bucket, 0, self._stage(warm_staged(bucket.tokens, bucket.rows, self.width, slots), bucket, 0))

    def _layout(self, bucket: Bucket) -> list[Slot]:
        slots = self.adapter_slots if bucket.adapters else 0
        return packed_layout(bucket.tokens, bucket.rows, self.width, slots)

    def _stage(self, staged: Staged, bucket: Bucket, which: int) -> list[Slot]:
        """Packs a step into this turn's pinned buffer, padded, and starts its copy to the device's input `which`."""
        layout = self._layout(bucket)
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
        self.coming.wait_event(self.ended[which])
        with torch.cuda.stream(self.coming):
            self.input[which][:end].copy_(host[:end], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self.coming)
        return layout

    def _run(self, bucket: Bucket, which: int, layout: list[Slot]) -> None:
        """One step over static buffers."""
        batch, sampling, feed = inputs(views(self.input[which], layout), self.last_token_R)
        mark_sizes(batch, sampling, feed)
        _, out = self.step(self.params, self.kv[0], batch, sampling, feed)
        self._hand_on(out, which)

    def _hand_on(self, out: StepOut, which: int) -> None:
        rows = out.token_R.shape[0]
        edges.hand_on(out.token_R, out.logprob_R, self.last_token_R, self.drawn[which][: 2 * rows].view(2, rows))

    def _capture(self, key: Key, run: Callable[[], None]) -> None:
        """Nothing runs: the graph reads whatever is staged when it is replayed."""
        graph = torch.cuda.CUDAGraph()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # not `torch.cuda.graph`, which collects garbage for each of many graphs
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()  # also where memory is short: the stream is needed again
        torch.cuda.current_stream().wait_stream(self.side)
        self.captured[key] = graph

    def _forward(
        self, bucket: Bucket, which: int, params: Params, kv: KVState, batch: StepBatch, feed: Feed
    ) -> tuple[KVState, Tensor]:
        """The forward pass of an extended step over input `which`; the next step may overwrite the hidden_TD it gives.

        A bucket's first one runs, which also readies this thread's libraries; then it is captured for those to come.
        """
        key, hidden_TD = (bucket, which, True), self.hidden_TD[: bucket.tokens]
        if key in self.captured:
            self.captured[key].replay()
            return kv, hidden_TD
        found = self.forward(params, kv, batch, feed)
        if self.room and bucket.graph and bucket.tokens <= len(self.hidden_TD):
            with suppress(torch.OutOfMemoryError, torch.AcceleratorError):  # where it fails, it goes on to run
                self.room = False
                if torch.cuda.mem_get_info(self.device)[0] >= GRAPH_ROOM:
                    self._capture(key, lambda: hidden_TD.copy_(self.forward(params, kv, batch, feed)[1]))
                    self.room = True
        return found

    def launch(self, kv: KVState, staged: Staged | ExtendedStaged) -> tuple[KVState, Flight]:
        """Starts a step. The state must be the one that the graphs were captured with: same storage, handed on."""
        assert kv is self.kv[0], "another KV state than the one whose addresses the graphs hold"
        wants, findings = None, None
        if isinstance(staged, ExtendedStaged):
            staged, wants = staged
        rows = staged.kv_len_R.shape[0]
        bucket = self.bucket(staged.token_T.shape[0], rows, len(staged.adapter_start_S) > 0)
        which = self.turn if short(bucket) else 0
        layout = self._stage(staged, bucket, which)
        torch.cuda.current_stream().wait_event(self.sent[which])
        if wants is not None:
            arguments = inputs(views(self.input[which], layout), self.last_token_R)
            forward = partial(self._forward, bucket, which)
            _, out, findings = self.extended(self.params, kv, *arguments, wants, self.before, forward)
            self._hand_on(out, which)
        elif bucket.graph:
            self.captured[bucket, which, False].replay()  # captured before: a run would overwrite the feed
        else:
            self._run(bucket, which, layout)
        self.ended[which].record()
        target, done = self.out[self.turn][: 2 * bucket.rows], torch.cuda.Event()
        self.going.wait_event(self.ended[which])
        with torch.cuda.stream(self.going):
            target.copy_(self.drawn[which][: 2 * bucket.rows], non_blocking=True)
            self.sent[which].record()
            done.record()
        self.turn ^= 1

        def result() -> tuple[list[int], list[float]]:
            done.synchronize()
            tokens, bits = target.view(2, -1)[:, :rows]
            return tokens.tolist(), bits.view(torch.float32).tolist()

        self.before = lambda: result()[0]
        return kv, Flight(result, findings)
