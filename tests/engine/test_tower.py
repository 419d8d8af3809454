"""Towers whose images are captured by size: the bits of those that run, whatever came between."""

from pathlib import Path

import pytest
import tiny_vision
import torch
from fake_cuda import Torch
from tiny_vision import picture

from fengine import Engine
from fengine.models import lookup
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
        graphs.room = False
        for piece in engine._parts.images.read([picture(9, 40, 30)])[0].pieces:
            assert torch.equal(captured.encode(piece), plain.encode(piece))
        assert not graphs.captured
