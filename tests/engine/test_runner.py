"""Every step that can come finds its bucket among those that warm-up compiles and captures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints
import torch
from fake_cuda import Cuda, Graph, Torch, tensors
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fengine.config import LoraConfig
from fengine.lora.adapters import open_adapters
from fengine.models.kv_pages import init_kv
from fengine.models.kv_state import KVState
from fengine.worker.compiled import layer_kinds
from fengine.worker.cuda_graphs import Buckets, Graphs, decode_sizes
from fengine.worker.cuda_runner import CudaRunner
from fengine.worker.loader import load_params, spec_from_config
from fengine.worker.safetensors_file import read_config
from fengine.worker.static_buffers import StaticBuffers, layout, pack, target_of
from fengine.worker.step import batch_of, make_forward, on_cpu
from fengine.worker.step_input import ADAPTERS, INPUTS, blank
from fengine.worker.warm_up import warm_step


@pytest.mark.parametrize(
    ("rows", "tokens"), [(1, 1), (16, 64), (33, 33), (48, 100), (64, 512), (128, 128), (512, 8192), (1000, 1000)]
)
def test_no_step_needs_a_bucket_that_warm_up_left_out(rows: int, tokens: int) -> None:
    buckets = Buckets(rows, tokens, True, True)
    known = set(buckets.all())
    for count in range(1, rows + 1):
        odd = bool(count % 2)  # of sizes and rows that share a bucket some have adapters, others none
        found = {buckets.of(total, count, (total % 2 > 0) != odd) for total in range(count, min(tokens, 1200) + 1)}
        assert found <= known, count
    assert {bucket.adapters for bucket in found} == {False, True} or tokens == rows


def test_what_fails_in_a_capture_is_told_and_not_that_the_capture_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def invalidated(graph: Graph) -> None:
        end(graph)
        raise torch.AcceleratorError("operation failed due to a previous error during capture")

    def short() -> None:
        raise torch.OutOfMemoryError

    end = Graph.capture_end
    monkeypatch.setattr("fengine.worker.cuda_graphs.torch", Torch())
    monkeypatch.setattr(Graph, "capture_end", invalidated)
    with pytest.raises(torch.OutOfMemoryError):
        Graphs(torch.device("cpu")).capture("step", short)


@pytest.mark.parametrize("rows", [1, 5, 48, 64, 65, 100, 512])
def test_decode_buckets_hold_every_step_and_waste_no_tile(rows: int) -> None:
    sizes = decode_sizes(rows)
    assert sizes == sorted(set(sizes)) and sizes[-1] == rows
    for step in range(1, rows + 1):
        size = next(s for s in sizes if s >= step)
        assert size - step < (64 if step > 64 else 8)


@pytest.mark.parametrize("slots", [0, 2])
def test_steps_with_adapters_and_without_run_before_any_is_captured(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile cannot compile inside a capture, and these are two graphs to it."""
    for module in ("cuda_runner", "cuda_graphs", "static_buffers"):
        monkeypatch.setattr(f"fengine.worker.{module}.torch", Torch())
    seen: list[tuple[bool, bool]] = []  # whether with adapters, whether in a capture

    def forward(params: Any, kv: Any, batch: Any) -> Any:
        seen.append(("token_A" in batch, Cuda.is_current_stream_capturing()))
        return kv, torch.zeros(len(batch["token_T"]), 4)

    made = CudaRunner({"final_norm_D": torch.ones(4)}, forward, lambda params, hidden: hidden, (), rows=3, tokens=40,
                      width=2, vocab=4, graphs=True, device="cpu", adapter_slots=slots)  # fmt: skip
    made.warm_up(KVState((), ()), 4)
    kinds = {adapters for adapters, _ in seen}
    assert kinds == {False, slots > 0} and {(kind, True) for kind in kinds} <= set(seen)
    assert sorted(seen[: len(kinds)]) == [(kind, False) for kind in sorted(kinds)]


def test_one_layer_of_each_kind_stands_for_all() -> None:
    def layer(width: int = 8, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Any]:
        return {"wo": torch.zeros(width, 4, dtype=dtype), "norm_D": torch.ones(4), **more}

    assert layer_kinds([layer()]) == [0] and layer_kinds([layer() for _ in range(5)]) == [0]
    bias, adapters = {"bo_D": torch.zeros(4)}, {"lora": {"wo": ()}}
    kinds = [layer(), layer(**bias), layer(), layer(16), layer(dtype=torch.float16), layer(**adapters), layer(**bias)]
    assert layer_kinds(kinds) == [0, 1, 3, 4, 5]


class Beside(TorchDispatchMode):
    """The most bytes that ops have made and that still live when another begins, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []
        self.most: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made = [(storage, size) for storage, size in self.made if not storage.expired()]
        live = sum(size for _, size in self.made)
        self.most[str(func)] = max(self.most.get(str(func), 0), live)
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        new = {s._cdata: s for s in (x.untyped_storage() for x in tensors(out)) if s._cdata not in known}
        self.made += [(StorageWeakRef(storage), storage.nbytes()) for storage in new.values()]
        return out


@pytest.mark.parametrize("slots", [0, 2])
def test_one_layer_takes_as_much_memory_as_all(slots: int, tmp_path: Path) -> None:
    """Which is measured, before the KV pool gets what is left."""
    directory = tiny_checkpoints.write(tmp_path, "qwen3", num_hidden_layers=3)
    spec = spec_from_config(read_config(directory))
    params, kv = load_params(directory, spec), init_kv(spec, 1, 16, torch.float32, "cpu")
    open_adapters(LoraConfig(enabled=slots > 0, max_loras_per_batch=2, max_lora_rank=4), spec, params, str(directory))
    sizes = {"T": 40, "R": 3, "B": 4, "N": 3} | ({"A": 40, "S": slots + 1} if slots else {})
    batch = batch_of(on_cpu(warm_step(40, sizes).arrays), torch.zeros(3, dtype=torch.int32))
    most = []
    for layers in (1, 3):
        short = KVState(kv.k_PSGK[:layers], kv.v_PSGK[:layers])
        with Beside() as beside:
            make_forward(spec)(params | {"layers": params["layers"][:layers]}, short, batch)
        most.append(beside.most)
    assert most[0] == most[1] and len(most[0]) > 5


def test_inputs_lie_apart_and_are_padded_as_declared() -> None:
    """The places of rows' fields depend on R alone: one sampler's graph serves every number of tokens."""
    fields = INPUTS + ADAPTERS
    sizes = {"T": 21, "R": 5, "B": 6, "N": 3, "U": 21, "Y": 3, "A": 21, "S": 3}
    slots = layout(fields, sizes)
    assert [slot.field for slot in slots] == list(fields)
    assert all(a.end <= b.start and not b.start % 16 for a, b in zip(slots, slots[1:], strict=False))
    rows = [slot for slot in slots if slot.field.letters == "R"]
    assert rows == [slot for slot in layout(fields, {"R": 5}) if slot.field.letters == "R"] == slots[: len(rows)]
    given = warm_step(17, {"T": 17, "R": 4, "B": 5, "N": 2, "U": 17, "Y": 2, "A": 17, "S": 3}).arrays
    for field in fields:
        target = np.full_like(blank(field, sizes), 9)
        pack(given, [target_of(field, target)])
        source, fill = given[field.name], given[field.name][-1] if field.name == "q_start_B" else field.pad
        assert (target[tuple(map(slice, source.shape))] == source).all(), field.name
        assert field.letters in ("RN", "RY") or (target[len(source) :] == fill).all(), field.name
        pack({}, [target_of(field, target)])
        assert field.letters in ("RN", "RY", "B") or (target == field.pad).all(), field.name


def test_what_is_filled_is_what_the_device_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fengine.worker.static_buffers.torch", Torch())
    most = {"T": 21, "R": 5, "B": 6, "N": 3}
    static = StaticBuffers(INPUTS, most, torch.device("cpu"))
    for turn, which, (tokens, rows) in ((0, 1, (21, 5)), (1, 0, (4, 2)), (0, 0, (6, 2))):
        sizes = {"T": tokens, "R": rows, "B": rows + 1, "N": 2}
        given = warm_step(tokens, sizes).arrays
        static.fill(given, sizes, turn)
        static.send(turn, which, sizes)
        got = static.tensors(which, sizes)
        assert all(np.array_equal(got[name].numpy(), array) for name, array in given.items())
