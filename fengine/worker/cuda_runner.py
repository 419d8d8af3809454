"""Runs steps on CUDA: captured graphs over static buffers, one of the forward pass and one of the sampler."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fengine.core.scheduler_output import StepOutput
from fengine.models.kv_state import KVState, Params
from fengine.ops import edges
from fengine.ops.edit_logits import words
from fengine.worker.cuda_graphs import GRAPH_TOKENS, Bucket, Buckets, Graphs, beside
from fengine.worker.device import enter
from fengine.worker.logits.logprobs import ASKED, MOST_ASKED, TOPS, Likeliest, put, rounded_top, scores_of, to_host
from fengine.worker.logits.structured import StructuredOutput
from fengine.worker.static_buffers import StaticBuffers
from fengine.worker.step import Drawn, ForwardFn, Result, SampleFn, UnembedFn, batch_of, read_out, sample_rows
from fengine.worker.step_input import ADAPTERS, IMAGES, INPUTS, Arrays, Field, LogitsStage, Sizes, StepInput
from fengine.worker.warm_up import warm_step

DRAWS = Field("draw_2R", torch.int32)  # tokens, and the bits of their logprobs
OUTPUTS = (DRAWS, Field("top_id_RX", torch.int32), Field("logprob_RZ", torch.float32))  # of DRAWS and Likeliest


@dataclass(slots=True)
class Behind:
    """What is still to be launched behind the forward pass of a step, and then its result. Modifies: itself."""

    step: StepInput
    bucket: Bucket
    which: int
    hidden_TD: Tensor
    result: Result | None = None


class CudaRunner:
    """Pads each step to a bucket, copies its packed inputs to the device and replays the bucket's graphs.

    Copies run on streams of their own: the input of a step comes in, and the draws of the one before go out, while
    another step runs. Static buffers: inputs and outputs, two of each on the host (pinned) and on the device, and the
    device's `last_token_R` and `hidden_TD`. Modifies: these buffers."""

    def __init__(
        self, params: Params, forward: ForwardFn, unembed: UnembedFn, stages: tuple[LogitsStage, ...], *, rows: int,
        tokens: int, width: int, vocab: int, graphs: bool, device: str, adapter_slots: int,
        sampler: SampleFn = sample_rows, prefill_graphs: bool = True, graph_rows: int | None = None,
        images: str = "", grouped: bool = False, guesses: int = 0,
    ) -> None:  # fmt: skip
        """`images`: letters of the fields of IMAGES. `grouped`: windowed layers have pages of their own. `guesses`: how
        many tokens lie behind the drawn ones, to be fed."""
        self.params, self.forward, self.unembed, self.stages = params, forward, unembed, stages
        self.sampler, self.grouped = sampler, grouped
        self.width, self.vocab, self.adapter_slots, self.images = width, vocab, adapter_slots, images
        self.rows = rows
        self.device = torch.device(f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device)
        self.buckets = Buckets(rows, tokens, graphs, adapter_slots > 0, prefill_graphs, graph_rows)
        self.graphs = Graphs(self.device)
        self.tables = 0  # the versions of the stages' tables that graphs hold
        self.coming, self.going = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        most = Bucket(self.buckets.tokens[-1], rows, graphs, adapter_slots > 0)
        edits = (ASKED, *(field for stage in stages for field in stage.fields if field.letters in ("R", "RK")))
        self.inputs = StaticBuffers(INPUTS + IMAGES + ADAPTERS, self._sizes(most), self.device)
        self.edits = StaticBuffers(edits, edit_sizes(rows), self.device)
        self.masks: StaticBuffers | None = None  # on the host alone; made for the first grammar
        self.found = StaticBuffers(OUTPUTS, output_sizes(rows, min(TOPS[-1], vocab)), self.device)
        self.came = [torch.cuda.Event() for _ in range(2)]  # this input is on the device
        self.ended = [torch.cuda.Event() for _ in range(2)]  # the last step over it has
        self.sent = [torch.cuda.Event() for _ in range(2)]  # what it found is on the host
        self.last_token_R = torch.zeros(rows + guesses, dtype=torch.int32, device=self.device)
        self.guess_token_S = self.last_token_R[rows:]
        self.hidden_TD = blank_hidden(params, min(GRAPH_TOKENS, most.tokens) if graphs else 0)
        self.turn = 0
        self.drawn: Drawn = list  # gives the tokens of the step before; may wait
        self.behind: Behind | None = None  # of the step whose sampler is not launched yet
        self.kv: list[KVState] = []  # the one state whose addresses the graphs hold

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device.index)  # by number: to look it up takes longer than a launch

    def warm_up(self, kv: KVState, page_size: int) -> KVState:
        """Captures every bucket's graphs over `kv`, which it returns; `cuda_start.prepare` has run once before."""
        enter(self.device)
        self.kv = [kv]
        self.graphs.clear()
        buckets = self.buckets.all()
        for bucket in {b.adapters: b for b in buckets}.values():  # the smallest without adapters, and with
            self.warm(bucket)  # what an op keeps for a KV state, or torch.compile makes, is not made in a capture
            torch.cuda.synchronize(self.device)
        for bucket in buckets:
            for which in range(bucket.inputs) if bucket.graph else ():
                self.graphs.capture(("forward", bucket, which), partial(self._capture_forward, bucket, which))
                if (key := ("sample", bucket.rows, which, (), None)) not in self.graphs.captured:
                    hidden_TD = self.hidden_TD
                    self.graphs.capture(key, partial(self._run_sampler, bucket, which, hidden_TD, (), None))
        return kv

    def warm(self, bucket: Bucket) -> None:
        """Runs a harmless step of this size, without graphs."""
        blank = warm_step(bucket.tokens, self._sizes(bucket))
        self._stage(blank, bucket, 0, self._stream())
        self._run_sampler(bucket, 0, self._run_forward(bucket, 0), (), None)

    def launch(self, kv: KVState, step: StepInput) -> tuple[KVState, Result]:
        """Starts a step. Modifies: the storage of `kv`, which must be the state that `warm_up` was given. Where draws
        wait for masks, the sampler is launched when the tokens of the step before are known, or the next step is."""
        enter(self.device)
        assert kv is self.kv[0], "another KV state than the one whose addresses the graphs hold"
        self.finish()
        for write in step.writes:
            write()
        bucket = self.buckets.of(step.tokens, step.rows, step.adapters)
        which = self.turn if bucket.inputs == 2 else 0
        stream = self._stream()
        self._stage(step, bucket, which, stream)
        stream.wait_event(self.sent[which])
        if bucket.graph and self.graphs.replay(("forward", bucket, which)):
            hidden_TD = self.hidden_TD
        else:
            hidden_TD = self._run_forward(bucket, which)
        self.behind = behind = Behind(step, bucket, which, hidden_TD)
        if not step.waits:
            self.finish()

        def result() -> StepOutput:
            if behind.result is None:
                self.finish()
            assert behind.result is not None
            out = behind.result()
            self.finish()  # of the next step, whose masks need these tokens: now the device can go on
            return out

        return kv, result

    def finish(self) -> None:
        """Launches what still stands behind the last forward pass: where masks come late it waits for them."""
        behind, self.behind = self.behind, None
        if behind is None:
            return
        enter(self.device)
        step, bucket, which, hidden_TD = behind.step, behind.bucket, behind.which, behind.hidden_TD
        large = self._sample(step, bucket, which, hidden_TD) if step.draws else None
        sizes = output_sizes(bucket.rows, None if large is not None else self._top(step))
        found, likeliest, done = self.found.arrays(self.turn, sizes), None, torch.cuda.Event()
        if large is not None:
            likeliest = partial(scores_of, *large, rows=step.rows)
        elif step.top is not None:
            likeliest = partial(scores_of, found["logprob_RZ"], found["top_id_RX"], step.rows)

        def draws() -> np.ndarray:
            done.synchronize()
            return found["draw_2R"][:, : step.rows] if step.draws else np.zeros((2, step.rows), np.int32)

        behind.result = read_out(self.params, self.unembed, hidden_TD, step, draws, likeliest)
        stream = self._stream()
        self.ended[which].record(stream)
        self.going.wait_event(self.ended[which])
        with beside(self.going, stream):
            self.found.fetch(self.turn, which, sizes)
            self.sent[which].record(self.going)
            done.record(self.going)
        self.turn ^= 1
        self.drawn = lambda: draws()[0].tolist()

    def _stage(self, step: StepInput, bucket: Bucket, which: int, stream: torch.cuda.Stream) -> None:
        """Packs a step into this turn's pinned buffers, padded, and starts their copies to the device's `which`."""
        sizes, edits = self._sizes(bucket), step.top is not None or not all(stage.late for stage in step.stages)
        self.inputs.fill(step.arrays, sizes, self.turn)
        if edits:
            arrays = {k: v for k, v in step.arrays.items() if k != ASKED.name or v.shape[1] <= MOST_ASKED}
            self.edits.fill(arrays, edit_sizes(bucket.rows), self.turn)
        self.coming.wait_event(self.ended[which])
        with beside(self.coming, stream):
            self.inputs.send(self.turn, which, sizes)
            if edits:
                self.edits.send(self.turn, which, edit_sizes(bucket.rows))
            self.came[which].record(self.coming)
        stream.wait_event(self.came[which])

    # -- its parts over static buffers, run or captured ----------------------------------------------------------------

    def _run_forward(self, bucket: Bucket, which: int) -> Tensor:
        batch = batch_of(self.inputs.tensors(which, self._sizes(bucket)), self.last_token_R)
        return self.forward(self.params, self.kv[0], batch)[1]

    def _capture_forward(self, bucket: Bucket, which: int) -> None:
        self.hidden_TD[: bucket.tokens].copy_(self._run_forward(bucket, which))

    def _run_sampler(
        self, bucket: Bucket, which: int, hidden_TD: Tensor, stages: tuple[LogitsStage, ...], top: int | None,
        asked_RK: Tensor | None = None,
    ) -> Likeliest | None:  # fmt: skip
        """With `asked_RK`, which no static buffer holds, neither does one what it finds but the draws."""
        tensors = self.inputs.tensors(which, self._sizes(bucket))
        tensors |= self.edits.tensors(which, edit_sizes(bucket.rows)) if stages or top is not None else {}
        if self.masks is not None and any(stage.name == StructuredOutput.name for stage in stages):
            tensors |= self.masks.tensors(self.turn, self._mask_sizes(bucket.rows))
        if asked_RK is not None:
            tensors[ASKED.name] = asked_RK
        token_R, logprob_R, likeliest = self.sampler(self.params, self.unembed, hidden_TD, tensors, stages, top)
        kept = None if asked_RK is not None else top
        found = self.found.tensors(which, output_sizes(bucket.rows, kept))
        edges.hand_on(token_R, logprob_R, self.last_token_R, found["draw_2R"])
        if likeliest is not None and asked_RK is None:
            found["logprob_RZ"].copy_(likeliest.logprob_RZ)
            found["top_id_RX"].copy_(likeliest.top_id_RX)
        return likeliest

    def _sample(self, step: StepInput, bucket: Bucket, which: int, hidden_TD: Tensor) -> list[np.ndarray] | None:
        """Draws, by a graph where one holds what the step wants. Returns what no static buffer has room for."""
        self._put_masks(step.late_fields(self.drawn), bucket.rows)
        asked_RK = step.arrays.get(ASKED.name)
        if asked_RK is not None and ((step.top or 0) > TOPS[-1] or asked_RK.shape[1] > MOST_ASKED):
            return self._sample_many(step, bucket, which, hidden_TD, asked_RK)
        if (tables := sum(stage.version for stage in self.stages)) != self.tables:
            self.tables = tables
            self.graphs.forget(lambda key: key[0] == "sample" and key[3] != ())
        run = partial(self._run_sampler, bucket, which, hidden_TD, step.stages, self._top(step))
        names = tuple(stage.name for stage in step.stages)
        reads = (which, self.turn) if StructuredOutput.name in names else which
        key = ("sample", bucket.rows, reads, names, self._top(step))
        if not (bucket.graph and self.graphs.replay(key)):
            run()  # which also readies this thread's libraries
            if bucket.graph and not any(stage.host for stage in step.stages):
                self.graphs.capture_late(key, run)
        return None

    def _sample_many(
        self, step: StepInput, bucket: Bucket, which: int, hidden_TD: Tensor, asked_RK: np.ndarray
    ) -> list[np.ndarray]:
        """Draws without a graph, and logprobs of more ids than static buffers have room for."""
        asked_RK = np.pad(asked_RK, ((0, bucket.rows - len(asked_RK)), (0, 0)))
        likeliest = self._run_sampler(bucket, which, hidden_TD, step.stages, step.top, put(asked_RK, hidden_TD))
        return [to_host(x).numpy() for x in likeliest or ()]

    def _put_masks(self, arrays: Arrays, rows: int) -> None:
        """Masks of grammars go where the sampler reads them: a copy would take the host as long as several of them."""
        if arrays and self.masks is None:
            self.masks = StaticBuffers(StructuredOutput.fields, self._mask_sizes(self.rows), None)
        if arrays and self.masks is not None:
            self.masks.fill(arrays, self._mask_sizes(rows), self.turn)

    def _top(self, step: StepInput) -> int | None:
        return None if step.top is None else min(rounded_top(step.top), self.vocab)

    def _sizes(self, bucket: Bucket) -> Sizes:
        sizes = {"T": bucket.tokens, "R": bucket.rows, "B": bucket.rows + 1, "N": self.width}
        sizes |= dict.fromkeys(self.images, bucket.tokens)
        sizes |= {"U": bucket.tokens, "Y": self.width} if self.grouped else {}
        return sizes | ({"A": bucket.tokens, "S": self.adapter_slots + 1} if bucket.adapters else {})

    def _mask_sizes(self, rows: int) -> Sizes:
        return {"M": rows, "W": words(self.vocab)}


def edit_sizes(rows: int) -> Sizes:
    return {"R": rows, "K": MOST_ASKED}


def output_sizes(rows: int, top: int | None) -> Sizes:
    """`top` None: only draws come back."""
    return {"R": rows} | ({} if top is None else {"X": top, "Z": top + MOST_ASKED})


def blank_hidden(params: Params, tokens: int) -> Tensor:
    """hidden_TD of zeros, as wide as an embedding: a norm with a bias is twice as wide."""
    norm_D: Tensor = params["final_norm_D"]
    return norm_D.new_zeros((tokens, params["embed"].packed.shape[1] if "embed" in params else len(norm_D)))
