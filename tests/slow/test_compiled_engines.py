"""What torch compiles: the bits of eager steps, and no more code than there are kinds of steps."""

import importlib
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from fengine.config import LoadFormat
from fengine.engine.parts import compile_count
from fengine.models.kv_pages import init_kv, row_batch
from fengine.models.kv_state import KVState
from fengine.worker.loader import load_params, spec_from_config
from fengine.worker.safetensors_file import read_config
from fengine.worker.step import ForwardFn, make_forward

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
build: Any = importlib.import_module("test_build")
extended: Any = importlib.import_module("test_extended")
lora: Any = importlib.import_module("test_lora")
weights: Any = importlib.import_module("test_weights")

checkpoint, alone, two = extended.checkpoint, extended.alone, weights.two
model, paths, llm, reference = lora.model, lora.paths, lora.llm, lora.reference


def test_a_compiled_step_tells_layers_apart_and_nothing_else(tmp_path) -> None:  # noqa: ANN001
    """A start on CUDA tries one layer of each kind before it runs all: one compiled step serves both."""
    (tmp_path / "config.json").write_text(json.dumps(build.SHAPE | {"hidden_size": 32, "num_hidden_layers": 2}))
    spec = spec_from_config(read_config(tmp_path))
    params = load_params(tmp_path, spec, context_length=32, load_format=LoadFormat.dummy)
    compiled, eager = make_forward(spec, compiled=True), make_forward(spec)

    def run(forward: ForwardFn, layers: int, tokens: list[int]) -> list[torch.Tensor]:
        pages = init_kv(spec, 3, 4, torch.float32, "cpu")
        batch = row_batch(tokens, 0, [1, 2], 4)
        kv = KVState(pages.k_PSGK[:layers], pages.v_PSGK[:layers])
        kv, hidden_TD = forward(params | {"layers": params["layers"][:layers]}, kv, batch)
        return [*kv.k_PSGK, *kv.v_PSGK, hidden_TD]

    counts, before = [], compile_count()
    for layers, tokens in product((1, 2, 1), ([3, 1, 2], [5], [4, 0, 1, 2, 8])):
        with torch.set_grad_enabled(len(tokens) > 1):  # its caller's mode while it starts, for example
            pairs = zip(run(compiled, layers, tokens), run(eager, layers, tokens), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        counts.append(compile_count() - before)
    assert counts[0] == 1 and counts[-1] == counts[1] <= 2  # the second in another mode of gradients, at most


def test_compiled_code_and_addresses_stay(two: tuple[Path, Path]) -> None:
    with weights.start(two[0], enable_torch_compile=True) as engine:
        weights.ask(engine)
        places = engine._parts.weights.places
        addresses = {name: place.leaf.data_ptr() for name, place in places.items()}
        compiles = engine.stats()["compiles"]
        assert engine.update_weights_from_disk(two[1]).success
        assert engine.update_weights_from_tensor(weights.tensors_of(two[1])).success
        with weights.start(two[1], enable_torch_compile=True) as other:
            assert weights.ask(engine) == weights.ask(other)
            compiles_of_other = other.stats()["compiles"]
        assert engine.stats()["compiles"] - compiles_of_other == compiles
        assert {name: place.leaf.data_ptr() for name, place in places.items()} == addresses


def test_bits_of_extended_steps(checkpoint: Path, alone: list[Any]) -> None:
    extended.check_layout(checkpoint, alone, cached=False, overlap=True, compiled=True)


def test_bits_of_random_arrivals_with_adapters(model: Path, paths: dict[str, str], reference: Any) -> None:
    with lora.engine(model, lora_paths=paths, enable_torch_compile=True) as llm:
        compiles = llm.stats()["compiles"]
        assert lora.arrivals(llm) == reference
        assert llm.stats()["compiles"] == compiles == 2  # steps without adapters, and with


@pytest.mark.parametrize("quantization", ["fp8", "w8a8_fp8"])
def test_bits_of_adapters_over_weights_in_few_bits(model: Path, paths: dict[str, str], quantization: str) -> None:
    few, requests = {"quantization": quantization, "dtype": "bfloat16", "lora_paths": paths}, lora.work(count=9)
    with lora.engine(model, **few) as eager, lora.engine(model, **few, enable_torch_compile=True) as compiled:
        assert lora.batch(compiled, requests) == lora.batch(eager, requests)
