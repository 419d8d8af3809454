"""What replicas are told together, while one of them comes back."""

from pathlib import Path

import tiny_checkpoints
from safetensors.torch import load_file
from test_weights import start

from fengine.api.replica import read_by
from fengine.engine.parallel.kept import Kept


def test_one_that_comes_while_memory_is_released_releases_its_own() -> None:
    kept, command = Kept([], []), ["memory", "release", (["kv_cache"],), {}]
    trial = kept.begin(command)
    assert kept.commands == [command]
    kept.end(trial, command, [])
    assert kept.commands == []


def test_values_that_come_from_no_files_are_counted(tmp_path: Path) -> None:
    """By these two replicas differ, one of which has refused them."""
    checkpoint = tiny_checkpoints.write(tmp_path)
    norm = load_file(checkpoint / "model.safetensors")["model.norm.weight"]
    with start(checkpoint) as engine:
        told = []
        for scale in (2, 3):
            assert engine.update_weights_from_tensor([("model.norm.weight", norm * scale)]).success
            told.append(read_by(engine._parts))
        assert told[0] != told[1]
        assert engine.update_weights_from_disk(str(checkpoint)).success
        assert read_by(engine._parts)["tensors"] == 0
