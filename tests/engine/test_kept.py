"""What replicas are told together, while one of them comes back."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny_checkpoints
from safetensors.torch import load_file
from test_weights import start

from fengine.api.replica import Server, read_by
from fengine.engine.parallel.kept import Kept
from fengine.engine.parallel.routing import Replica
from fengine.errors import EngineDeadError, StorageError
from fengine.tokenizer.tokenizer import Tokenizer
from fengine.worker.hub import BOX


def test_one_that_comes_while_memory_is_released_releases_its_own() -> None:
    kept, command = Kept([], [], {}), ["memory", "release", (["kv_cache"],), {}]
    trial = kept.begin(command)
    assert kept.commands == [command]
    kept.end(trial, command, [])
    assert kept.commands == []


def test_one_that_has_read_another_tokenizer_than_this_process_is_told() -> None:
    """Which makes ids of texts, where the other makes masks of grammars: the first of them is not taken at its word."""
    found = Tokenizer.from_directory(BOX)
    more = replace(found, backend=copy.deepcopy(found.backend))
    more.backend.add_tokens(["more"])
    assert Tokenizer.from_directory(BOX).sha256 == found.sha256 != more.sha256
    replica = Replica(0, 1)
    replica.facts, replica.read = {}, {"tokenizer": more.sha256}
    Kept([replica], [], {"tokenizer": found.sha256}).compare()
    assert "tokenizer changed" in str(replica.fault)


def test_what_a_dead_engine_was_asked_has_the_answer_of_its_end() -> None:
    """Which names the replica; the engine's own words are of another one, and say that all has ended."""
    said: list[Any] = []

    def update(path: str) -> None:
        raise {"dead": EngineDeadError, "bad": StorageError}[path](path)

    owners = {"files": SimpleNamespace(update=update)}
    server: Any = SimpleNamespace(owners=owners, link=SimpleNamespace(say=lambda **told: said.append(told)))
    server._read = lambda part: {}
    for number, path in enumerate(("bad", "dead")):
        Server._answer(server, [number, "files", "update", [path], {}])
    assert said == [{"answer": 0, "failed": ("StorageError", "bad")}]


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
