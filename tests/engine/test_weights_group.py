"""Weights that another process broadcasts."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_checkpoints
import torch
from safetensors.torch import load_file, save_file
from test_weights import ask, fresh, start
from torch import Tensor

from fengine import Engine
from fengine.engine.weights import group
from fengine.engine.weights.group import buffers
from fengine.errors import InvalidRequestError, UnsupportedFeatureError

GROUP = "weight_update_group"


class Trainer:
    """The other process, and the groups that the engine shares with it."""

    def __init__(self, engine: Engine, process: "subprocess.Popen[str]") -> None:
        self.engine, self.process = engine, process

    def join(self, name: str, url: str, address: str, port: int) -> None:
        """Both are in this group from here on."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{name} {url}\n")
        self.process.stdin.flush()
        result = self.engine.init_weights_update_group(address, port, 1, 2, name, backend="gloo", timeout=60)
        assert result.success, result
        assert self.process.stdout.readline() == "waiting\n"

    def broadcast(self, path: Path, how: str = "", **more: Any) -> Any:
        """Tells it to send a file's tensors, and the engine to receive them."""
        tensors = load_file(path)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{how} {path}\n".lstrip())
        self.process.stdin.flush()
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
        result = self.engine.update_weights_from_distributed(
            list(tensors), dtypes, [list(tensor.shape) for tensor in tensors.values()], **more
        )
        if how != "cut":
            assert self.process.stdout.readline() == "sent\n"
        return result


@contextmanager
def training(engine: Engine) -> Iterator[Trainer]:
    command = [sys.executable, str(Path(__file__).parents[1] / "weight_trainer.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Trainer(engine, process)
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("two")
    return tiny_checkpoints.write(root / "a"), tiny_checkpoints.write(root / "b", seed=1)


def test_broadcasts_over_a_shared_file_and_over_loopback(two: tuple[Path, Path], tmp_path: Path) -> None:
    """By one trainer, for starting it takes a second."""
    old, new = fresh(two[0]), fresh(two[1])
    files = [directory / "model.safetensors" for directory in two]
    bad = tmp_path / "bad.safetensors"
    save_file(load_file(files[1]) | {"model.norm.weight": torch.full((64,), torch.nan)}, bad)
    url, port = f"file://{tmp_path}/store", free_port()
    with start(two[0]) as engine, training(engine) as trainer:
        trainer.join("of_a_file", url, url, 1)
        assert trainer.broadcast(files[1], group_name="of_a_file").success
        assert ask(engine) == new
        assert engine.destroy_weights_update_group("of_a_file").success
        assert not engine.destroy_weights_update_group("of_a_file").success

        trainer.join(GROUP, f"tcp://127.0.0.1:{port}", "127.0.0.1", port)
        assert not engine.init_weights_update_group("127.0.0.1", port, 1, 2, GROUP, backend="gloo").success
        assert trainer.broadcast(files[0]).success and ask(engine) == old
        assert trainer.broadcast(files[1], weight_version="step 1").success
        assert ask(engine) == new and engine._parts.core.weight_version == "step 1"
        result = trainer.broadcast(bad)
        assert not result.success and "NaN" in result.message and ask(engine) == new
        assert trainer.broadcast(files[0], "flat", load_format="flattened_bucket", group_name=GROUP).success
        assert ask(engine) == old  # a refused update leaves the ranks in step
        assert engine.begin_weight_update().success
        assert trainer.broadcast(files[1]).success and ask(engine) == old
        assert engine.end_weight_update().success and ask(engine) == new
        result = trainer.broadcast(files[0], "cut")
        assert not result.success and "receiving failed" in result.message
        assert ask(engine) == new
        result = trainer.engine.update_weights_from_distributed([], [], [])
        assert not result.success and "no group" in result.message  # it went with the rank that died
        assert not engine.destroy_weights_update_group(GROUP).success


def test_groups_that_cannot_be(two: tuple[Path, Path]) -> None:
    good = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2, "group_name": "g"}
    wrong: list[dict[str, Any]] = [
        {"backend": "nccl"},  # the weights are on the CPU; nccl is also the default
        {},
        {"master_port": 0},
        {"master_port": "29500"},
        {"rank_offset": 0},
        {"rank_offset": 2},
        {"world_size": 1},
        {"master_address": ""},
        {"master_address": "a\0b"},
        {"group_name": ""},
        *({"timeout": timeout} for timeout in (0, -1, 1e30, float("nan"), None, "5", True)),
    ]
    with start(two[0]) as engine:
        join: Any = engine.init_weights_update_group
        for i, change in enumerate(wrong):
            with pytest.raises(InvalidRequestError):
                join(**(good | ({"backend": "gloo"} if i > 1 else {}) | change))
        with pytest.raises(UnsupportedFeatureError, match="mpi"):
            join(**good, backend="mpi")
        result = join(**good | {"master_port": free_port()}, backend="gloo", timeout=0.2)
        assert not result.success and "could not join" in result.message
        for change in ({"rank_offset": 2**40, "world_size": 2**41}, {"master_address": "\ud800"}):
            assert not join(**good | change, backend="gloo", timeout=0.2).success
        names: list[Any] = [["g"], None, "g"]
        for name in names:
            assert not engine.destroy_weights_update_group(name).success
            assert not engine.update_weights_from_distributed([], [], [], name).success


def test_what_is_to_be_received_must_be_described(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    norm: list[Any] = [["model.norm.weight"], ["float32"], [[64]]]
    wrong: list[list[Any]] = [
        [3, *norm[1:]],
        [[1], *norm[1:]],
        [norm[0], [], norm[2]],
        [norm[0], ["float33"], norm[2]],
        [norm[0], ["Tensor"], norm[2]],
        [norm[0], norm[1], [[-64]]],
        [norm[0], norm[1], [64]],
        [norm[0], norm[1], "64"],
        [norm[0], norm[1], [[2**40, 2**12]]],
        [norm[0], norm[1], [[2**70]]],
    ]
    with start(two[0]) as engine:
        monkeypatch.setattr(engine._parts.updates.groups, "device", lambda name: torch.device("cpu"))
        for arguments in wrong:
            for load_format in (None, "flattened_bucket"):
                with pytest.raises(InvalidRequestError):
                    engine.update_weights_from_distributed(*arguments, load_format=load_format)
        with pytest.raises(InvalidRequestError, match="one dtype"):
            engine.update_weights_from_distributed(
                ["a", "b"], ["float32", torch.bfloat16], [[1], [1]], load_format="flattened_bucket"
            )
        with pytest.raises(UnsupportedFeatureError, match="load_format"):
            engine.update_weights_from_distributed(*norm, load_format="pkg.loader")


def test_nobody_waits_for_a_trainer_behind_the_end(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither whoever asked, though torch waits on, nor the process; a group that is made then is left."""
    began, late, ended = (threading.Event() for _ in range(3))

    def join(*_: Any) -> Any:
        began.set()
        assert late.wait(30)
        return SimpleNamespace(close=ended.set)

    monkeypatch.setattr(group, "join", join)
    engine = start(two[0])
    with ThreadPoolExecutor(1) as caller:
        result = caller.submit(engine.init_weights_update_group, "127.0.0.1", 1, 1, 2, "g", "gloo", timeout=60)
        assert began.wait(30)
        engine.shutdown()
        assert result.result(30) == (False, "group 'g' was not joined: the engine or its server is being shut down")
        late.set()
        assert ended.wait(30)


def test_received_tensors_are_those_described() -> None:
    received, tensors = buffers(["bfloat16", torch.bfloat16], [[2, 3], [4]], 2, torch.device("cpu"), True)
    received[0].copy_(torch.arange(10))
    expected: list[Tensor] = [torch.arange(6).view(2, 3), torch.arange(6, 10)]
    assert all(torch.equal(a.long(), b) for a, b in zip(tensors, expected, strict=True))
