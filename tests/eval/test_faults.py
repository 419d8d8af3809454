"""Each call of the system that writes into a run's folder fails once: it is told, and the folder goes on."""

import dataclasses
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from eval_fakes import FakeEngine, fake_runs, write_rows
from faults import Faults

from fengine.errors import StorageError
from fengine.eval.cli.command import reported
from fengine.eval.cli.compose import parse, points
from fengine.eval.cli.engines import EngineCache
from fengine.eval.cli.schema import Point
from fengine.eval.cli.view import PlainView
from fengine.eval.commands import evaluate
from fengine.eval.runs import run as run_file
from fengine.eval.runs.config import EVAL, RUN
from fengine.eval.runs.folder import RunFolder, write_file
from fengine.eval.runs.record import read_metrics

WORDS = ["task=jsonl", "task.data=rows.jsonl", "task.match=exact", "task.target=answer", "compile=none"]


@pytest.fixture
def point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Point:
    fake_runs(tmp_path, monkeypatch)
    write_rows(tmp_path / "rows.jsonl", 2)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power fails here, and it takes most of the time
    return points(parse([*WORDS, "journal.sync_rows=1"], EVAL), EVAL)[0]


def go(point: Point, folder: Path) -> int:
    """One process's part of a run; an error is told, and its exit code, as the command has them."""
    with EngineCache(lambda _: FakeEngine(point.config.engine)) as cache:
        try:
            return run_file.run_point(dataclasses.replace(point, directory=folder), cache, PlainView(), ["words"])[0]
        except StorageError as error:
            return reported(error)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "outputs.jsonl").read_bytes()).hexdigest()


@pytest.mark.parametrize("damaged", [False, True])
def test_each_call_of_a_run_fails_once(
    point: Point, tmp_path: Path, damaged: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`damaged`: the run goes on from a journal that is damaged in the middle and torn at its end."""
    assert go(point, tmp_path / "whole") == 0
    before = tmp_path / "before"
    if damaged:
        shutil.copytree(tmp_path / "whole", before)
        data = bytearray((before / "journal.log").read_bytes())
        data[len(data) // 2] ^= 1
        (before / "journal.log").write_bytes(data[:-5])
    number, quiet = 0, []
    while True:
        folder = tmp_path / f"r{number}"
        if damaged:
            shutil.copytree(before, folder)
        capsys.readouterr()
        with monkeypatch.context() as patch:
            faults = Faults(folder, number)
            faults.install(patch)
            code = go(point, folder)
        said = "".join(capsys.readouterr())
        if number >= len(faults.calls):
            break
        call = faults.calls[number]
        if code == 0 and "No space left" not in said and not (damaged and call == "mkdir ."):  # it is there
            quiet.append(call)
        assert code in (0, 1) and "Traceback" not in said, call
        assert go(point, folder) == 0, f"{call}: goes on"
        assert digest(folder) == digest(tmp_path / "whole"), call
        shutil.rmtree(folder)
        number += 1
    assert not quiet, quiet
    assert faults.undurable() == ["/lock", "/trace.json"]  # who holds it, and a drawing of the steps
    assert number > (30 if damaged else 40) and {call.split()[0] for call in faults.calls} >= {"open", "write", "fsync"}


def test_each_call_of_a_run_of_prompts_fails_once(
    point: Point, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The output file is whole or absent, and the same words go on."""
    config = dataclasses.replace(points(parse(["compile=none"]), RUN)[0].config, prompts=["one", "two"], show=0)

    def prompts(folder: Path) -> int:
        own = dataclasses.replace(config, out=str(folder / "o.jsonl"))
        job = Point(own, folder / "o.jsonl.run", choices=(("task", "jsonl"),))
        with EngineCache(lambda _: FakeEngine(own.engine)) as cache:
            try:
                return evaluate.run_prompts(job, cache, PlainView(), ["words"])[0]
            except StorageError as error:
                return reported(error)

    assert prompts(tmp_path / "whole") == 0
    whole, number = (tmp_path / "whole" / "o.jsonl").read_bytes(), 0
    while True:
        folder = tmp_path / f"p{number}"
        folder.mkdir()
        capsys.readouterr()
        with monkeypatch.context() as patch:
            faults = Faults(folder, number)
            faults.install(patch)
            code = prompts(folder)
        said, out = "".join(capsys.readouterr()), folder / "o.jsonl"
        if number >= len(faults.calls):
            break
        call = faults.calls[number]
        assert "No space left" in said and "Traceback" not in said or call == "mkdir .", call
        assert code in (0, 1) and (not out.exists() or out.read_bytes() == whole), call
        assert prompts(folder) == 0 and out.read_bytes() == whole, call
        number += 1
    assert faults.undurable() == ["/o.jsonl.run/lock"]
    assert number > 30 and any(".o.jsonl." in call for call in faults.calls)


def test_each_write_of_a_run_may_be_short(point: Point, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may write less than it was given: the rest is written, and no byte differs."""
    assert go(point, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        count = Faults(tmp_path / "count")
        count.install(patch)
        assert go(point, tmp_path / "count") == 0
    for number, call in enumerate(count.calls):
        if call.startswith("write"):
            with monkeypatch.context() as patch:
                faults = Faults(tmp_path / "s", number, short=True)
                faults.install(patch)
                assert go(point, tmp_path / "s") == 0, call
            assert digest(tmp_path / "s") == digest(tmp_path / "whole"), call
            shutil.rmtree(tmp_path / "s")


def test_each_call_that_writes_a_report_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of before stays, and nothing lies beside it."""
    (tmp_path / "d").mkdir()
    path = tmp_path / "d" / "report.html"
    write_file(path, b"old")
    number = 0
    while True:
        with monkeypatch.context() as patch:
            faults = Faults(tmp_path / "d", number)
            faults.install(patch)
            try:
                write_file(path, b"new" * 100_000)
                break
            except StorageError as error:
                assert "No space left" in str(error)
        assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path], faults.calls[number]
        number += 1
    assert path.read_bytes() == b"new" * 100_000 and number >= 4


def test_a_file_of_the_end_that_cannot_be_read_is_not_said_to_be_unwritable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> bytes:
        raise OSError(5, "Input/output error")

    with RunFolder(tmp_path / "a") as folder:
        (folder.path / "metrics.json").write_text("{}")
        monkeypatch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(StorageError, match=r"metrics\.json cannot be read: Input/output error"):
            read_metrics(folder, {})
