"""Towers whose images are captured by size: the bits of those that run, whatever came between."""

import weakref
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch
from fake_cuda import Torch
from loops import in_loop
from tiny_vision import picture

from fengine import Engine
from fengine.models import lookup, vision_layers, vision_qwen_tower
from fengine.worker import tower
from fengine.worker.cuda_graphs import Graphs
from fengine.worker.tower import Tower


def towers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[Tower, Tower]:
    """One that captures, and one that does not."""
    monkeypatch.setattr("fengine.worker.cuda_graphs.torch", Torch())
    parts = engine._parts
    family = lookup(parts.spec.architecture).vision
    assert family is not None
    params = parts.weights.params
    return Tower(family, params, parts.spec, Graphs(torch.device("cpu"))), Tower(family, params, parts.spec)


@pytest.mark.parametrize("kind", tiny_vision.FAMILIES)
def test_a_size_that_comes_again_is_captured_with_the_same_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_vision.write(tmp_path, kind)
    with Engine(model_path=str(path), device="cpu", skip_tokenizer_init=True, max_total_tokens=2048) as engine:
        captured, plain = towers(engine, monkeypatch)
        monkeypatch.setattr(tower, "SIZES", 2)
        sizes = [(40, 30), (40, 30), (33, 64), (40, 30), (33, 64), (30, 30), (30, 30), (40, 30)]
        for i, size in enumerate(sizes):
            for piece in engine._parts.images.read([picture(i, *size)])[0].pieces:
                assert torch.equal(captured.encode(piece), plain.encode(piece))
        graphs = captured.graphs
        assert graphs is not None and 0 < len(graphs.captured) <= 2
        assert sum(graph.replays for graph in graphs.captured.values()) > 0  # pyright: ignore[reportAttributeAccessIssue]
        graphs.clear()  # as memory is released
        assert not graphs.beside
        graphs.room = False
        for piece in engine._parts.images.read([picture(9, 40, 30)])[0].pieces:
            assert torch.equal(captured.encode(piece), plain.encode(piece))
        assert not graphs.captured


@pytest.mark.gpu
@pytest.mark.parametrize("kind", tiny_vision.FAMILIES)
def test_captured_sizes_give_the_same_bits_on_a_gpu(kind: str, tmp_path: Path) -> None:
    """In the engine's own tower, whose graphs share the runner's memory; also while it decodes."""
    path = tiny_vision.write(tmp_path, kind)
    with Engine(model_path=str(path), dtype="bfloat16", skip_tokenizer_init=True, max_total_tokens=2048) as engine:
        images = engine._parts.core.stepper.input_batch.images
        assert images is not None
        plain = Tower(images.tower.family, images.tower.params, images.tower.spec)

        def compare(i: int, width: int, height: int) -> None:
            for piece in engine._parts.images.read([picture(i, width, height)])[0].pieces:
                assert torch.equal(images.tower.encode(piece), plain.encode(piece))

        for i, size in enumerate([(40, 30), (40, 30), (33, 64), (40, 30), (33, 64)]):
            in_loop(engine._parts.core, partial(compare, i, *size))
            engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 4})
        assert images.tower.graphs is not None and any("tower" in str(key) for key in images.tower.graphs.captured)


def test_what_a_graph_reads_lives_as_long_as_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the caches of layouts have forgotten it: a graph knows addresses alone."""
    path = tiny_vision.write(tmp_path, "qwen2_5_vl")
    with Engine(model_path=str(path), device="cpu", skip_tokenizer_init=True, max_total_tokens=2048) as engine:
        captured, _ = towers(engine, monkeypatch)
        graphs = captured.graphs
        assert graphs is not None
        caches = (vision_qwen_tower.plan, vision_layers.layout)
        for cache in caches:
            cache.cache_clear()
        for i in range(3):
            captured.encode(engine._parts.images.read([picture(i, 40, 30)])[0].pieces[0])
        (grid,) = {
            tuple(map(int, x.arrays["grid_2"])) for x in engine._parts.images.read([picture(0, 40, 30)])[0].pieces
        }
        known = vision_qwen_tower.plan(engine._parts.spec.vision, grid, captured.device)
        layouts = [vision_layers.layout(lengths, captured.device) for lengths in (known.near, (len(known.order_I),))]
        tensors = [known.rope_IK, known.order_I, *(at.table_RN for at in layouts)]
        assert vision_layers.layout.cache_info().misses == vision_qwen_tower.plan.cache_info().misses + 1 == 2
        alive = [weakref.ref(x) for x in tensors]
        keys, empty = list(graphs.captured), dict[Hashable, Any]()
        graphs.captured = empty  # the tests' own graphs hold what they read
        graphs.captured.update(dict.fromkeys(keys))
        del known, layouts, tensors
        for cache in caches:
            cache.cache_clear()
        assert all(x() is not None for x in alive)
        graphs.clear()
        assert all(x() is None for x in alive)
