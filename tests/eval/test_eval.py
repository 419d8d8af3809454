"""`fengine eval`: whatever interrupts a run, the same command ends with the same bytes."""

import asyncio
import dataclasses
import functools
import gc
import hashlib
import json
import os
import shlex
import shutil
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import forked
import pytest

pytest.importorskip("hydra")

from eval_fakes import FakeEngine, fake_engines, records, write_rows

from fengine import run
from fengine.config import EngineConfig
from fengine.core.request import derive_seed
from fengine.errors import InputFileError, InvalidRequestError
from fengine.eval.cli.compose import parse, points
from fengine.eval.cli.engines import EngineCache
from fengine.eval.cli.schema import Point, conf_dir
from fengine.eval.cli.view import QuietView
from fengine.eval.commands import evaluate
from fengine.eval.runs import run as run_file
from fengine.eval.runs.answering import Asker
from fengine.eval.runs.config import EVAL, EvalConfig
from fengine.eval.runs.index import RowTable, index_rows, row_key
from fengine.eval.runs.journal import Entry, Journal, scan
from fengine.eval.runs.manifest import row_seed
from fengine.eval.tasks.kinds import GenerateTask
from fengine.eval.tasks.task import Ask, BadRow, Row
from fengine.eval.tasks.task_config import TaskConfig

WORDS = ["task=jsonl", "task.data=rows.jsonl", "task.match=exact", "task.target=answer", "view=quiet", "compile=none"]
ROWS = 12


class Crash(BaseException):
    """The process is dead: nothing that it would do afterwards has an effect."""


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Engines that were opened; the working directory is a new one with rows.jsonl."""
    return fake_engines(tmp_path, monkeypatch)


def cli(*words: str) -> int:
    """The command with WORDS, but for those that are given otherwise."""
    given = {word.partition("=")[0] for word in words}
    return run.main(["eval", *(word for word in WORDS if word.partition("=")[0] not in given), *words])


def point() -> Point:
    return points(parse(WORDS, EVAL), EVAL)[0]


def go(point: Point, folder: Path, engine: FakeEngine | None = None) -> tuple[int, FakeEngine]:
    """One process's part of a run, without composing again."""
    engine = engine or FakeEngine(point.config.engine)
    with EngineCache(lambda _: engine) as cache:
        job = dataclasses.replace(point, directory=folder)
        return run_file.run_point(job, cache, QuietView(), ["words"])[0], engine


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- a run -------------------------------------------------------------------------------------------------------------


def test_a_run_and_its_folder(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("out=a", "view=plain", "show=1") == run.OK
    rows = records(Path("a/outputs.jsonl"))
    assert [r["id"] for r in rows] == [f"r{i}" for i in range(ROWS)]
    assert rows[3]["answers"][0]["sampling_seed"] == row_seed(0, "r3", 0)
    assert rows[3]["answers"][0]["text"].startswith("3 rebmun wor") and rows[3]["scores"] == {"exact_match": False}
    metrics = json.loads(Path("a/metrics.json").read_text())
    assert (metrics["rows"], metrics["failed"], metrics["metrics"]["exact_match"]["stderr"]) == (ROWS, 0, 0.0)
    record = json.loads(Path("a/manifest.json").read_text())
    assert record["result"]["outputs_sha256"] == sha(Path("a/outputs.jsonl"))
    assert record["result"]["prompt_tokens"] > 0 and record["sessions"][0]["how"] == "all rows"
    assert "matched" in json.dumps(rows) and "started" not in Path("a/outputs.jsonl").read_text()
    assert len(records(Path("a/timings.jsonl"))) == ROWS
    events = json.loads(Path("a/trace.json").read_text())
    assert {e["ph"] for e in events} <= {"M", "C", "X"}
    shown = capsys.readouterr()
    assert "exact_match: 0.0000 ± 0.0000" in shown.out and "folder:" in shown.out
    assert cli("out=b", "scheduler=one_by_one") == run.OK
    assert sha(Path("a/outputs.jsonl")) == sha(Path("b/outputs.jsonl"))
    assert cli() == cli() == run.OK
    assert len(list(Path("runs").glob("*/*/outputs.jsonl"))) == 2


def test_samples_under_a_seed_that_is_given_are_as_those_of_one_request(engines: list[FakeEngine]) -> None:
    assert cli("out=a", "view=plain", "sampling.sampling_seed=5", "sampling.temperature=1", "task.samples=3") == run.OK
    for row in records(Path("a/outputs.jsonl")):
        assert [one["sampling_seed"] for one in row["answers"]] == [5, derive_seed(5, 1), derive_seed(5, 2)]


def test_the_likeliest_tokens_are_recorded_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the model in the box: greedy draws the likeliest token; nothing else of a row changes."""
    monkeypatch.chdir(tmp_path)
    words = ["task.limit=3", "view=quiet", "compile.enabled=false", "out=x"]
    assert evaluate.main(["-m", "task=capitals,multiple_choice", "top_logprobs=0,3", *words]) == run.OK
    for task, first in (("capitals", 0), ("multiple_choice", 2)):
        plain, more = (records(Path(f"x/{first + point}/outputs.jsonl")) for point in (0, 1))
        for answer in [answer for row in more for answer in row["answers"]]:
            for (best, token), logprob, drawn in zip(
                [top[0] for top in answer["top_logprobs"]], answer["logprobs"], answer["output_ids"], strict=True
            ):
                assert logprob <= best and (token == drawn) == (logprob == best)
                assert task != "capitals" or token == drawn
            assert {len(top) for top in answer.pop("top_logprobs")} == {3}
        assert more == plain


def test_a_finished_run_needs_no_engine_and_changes_nothing(engines: list[FakeEngine]) -> None:
    assert cli("out=a") == run.OK
    before = {p.name: p.read_bytes() for p in Path("a").iterdir() if p.name != "lock"}
    assert cli("out=a") == run.OK and len(engines) == 1
    assert {p.name: p.read_bytes() for p in Path("a").iterdir() if p.name != "lock"} == before
    Path("a/outputs.jsonl").write_text("spoilt")
    assert cli("out=a") == run.OK and len(engines) == 1
    assert Path("a/outputs.jsonl").read_bytes() == before["outputs.jsonl"]


def test_a_sweep(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("-m", "seed=1,2", "out=s", "view=plain") == run.OK
    assert len(engines) == 1 and sha(Path("s/0/outputs.jsonl")) != sha(Path("s/1/outputs.jsonl"))
    assert "2 seeds:" in capsys.readouterr().out
    assert cli("-m", "seed=1,2", "out=s", "view=quiet") == run.OK and len(engines) == 1


def test_the_window_is_bounded_and_memory_flat(engines: list[FakeEngine], tmp_path: Path) -> None:
    """Peaks of the heap with few rows and with many. A first run fills what is made once. What a thread that an earlier
    test has left allocates meanwhile is not the run's: so, if at first too much is found, it is measured again."""
    write_rows(tmp_path / "rows.jsonl", 100)
    assert cli("out=first", "scheduler.max_running_requests=2", "trace=off") == run.OK

    def peak(rows: int, name: str) -> int:
        write_rows(tmp_path / "rows.jsonl", rows)
        gc.collect()
        tracemalloc.start()
        assert cli(f"out={name}{rows}", "scheduler.max_running_requests=2", "trace=off") == run.OK
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert 2 <= engines[-1].most_in_flight <= 8
        return found

    found = []
    while len(found) < 2 and min(found, default=250) >= 250:
        few = peak(400, "abc"[len(found)])
        found.append((peak(1400, "abc"[len(found)]) - few) / 1000)
    assert min(found) < 250, f"{found} bytes a row"


# -- interrupted anywhere ----------------------------------------------------------------------------------------------


@pytest.fixture
def whole(engines: list[FakeEngine], tmp_path: Path) -> tuple[Point, Path]:
    """A run to its end."""
    job = point()
    assert go(job, tmp_path / "whole")[0] == run.OK
    return job, tmp_path / "whole"


def test_every_prefix_of_the_journal_resumes(whole: tuple[Point, Path], tmp_path: Path) -> None:
    job, reference = whole
    data = (reference / "journal.log").read_bytes()
    starts = [0] + [i + 1 for i, byte in enumerate(data) if byte == 10]
    assert len(starts) == ROWS + 2
    for number, start in enumerate(starts):
        following = starts[number + 1] - start if number + 1 < len(starts) else 0
        for torn in sorted({0, 1, 9, 18, following // 2, following - 1} & set(range(max(following, 1)))):
            folder = tmp_path / f"p{start}-{torn}"
            folder.mkdir()
            shutil.copy(reference / "manifest.json", folder)
            (folder / "journal.log").write_bytes(data[: start + torn])
            code, engine = go(job, folder)
            assert code == run.OK
            assert sha(folder / "outputs.jsonl") == sha(reference / "outputs.jsonl"), (number, torn)
            assert len(engine.prompts) == ROWS - max(0, number - 1), "what is there is not computed again"
            assert all(isinstance(found, Entry) for found in scan(folder / "journal.log")), "the torn tail is gone"
            shutil.rmtree(folder)


def test_the_example_in_the_yaml_is_what_it_says(engines: list[FakeEngine]) -> None:
    """`task.prompt='"{question}\\nAnswer:"'` as it stands in conf/task/jsonl.yaml, its \\n being a newline."""
    text = (conf_dir() / "task" / "jsonl.yaml").read_text()
    (word,) = (shlex.split(line.strip("# \n"))[0] for line in text.splitlines() if "task.prompt=" in line)
    Path("q.jsonl").write_text('{"question": "Why?"}\n')
    assert run.main(["eval", "task=jsonl", "task.data=q.jsonl", word, "view=quiet", "out=q"]) == run.OK
    assert engines[0].prompts == ["Why?\nAnswer:"]


def test_nothing_scored_is_told(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["eval", "task=jsonl", "task.data=rows.jsonl", "view=plain", "out=u"]) == run.OK
    assert "nothing was scored: add for example task.match=exact task.target=answer" in capsys.readouterr().err
    words = ["task=jsonl", "task.data=rows.jsonl", "task.samples=2", "view=plain"]
    for kind, told in (("greedy", True), ("default", False)):
        assert run.main(["eval", *words, f"sampling={kind}", f"out={kind}"]) == run.OK
        assert ("draws the same answer each time" in capsys.readouterr().err) is told


def crashing(monkeypatch: pytest.MonkeyPatch, left: int) -> Callable[[], int]:
    """From now on the process dies at system call number `left` that changes the disk; a write is torn by it."""
    calls = {"left": left}

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def one(*args: Any) -> Any:
            calls["left"] -= 1
            if calls["left"] < 0:
                if call is os.write and calls["left"] == -1:
                    call(args[0], args[1][: len(args[1]) // 2])
                raise Crash
            return call(*args)

        return one

    sync = dying(os.fsync)
    write = dying(os.write)
    monkeypatch.setattr(run_file, "Journal", lambda path, **_: Journal(path, sync_rows=3, write=write, fsync=sync))
    for name in ("fsync", "replace", "truncate", "ftruncate", "link"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    return lambda: calls["left"]


def test_death_at_every_system_call_resumes(
    whole: tuple[Point, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the second death, while the run is going on again."""
    job, reference = whole
    wanted, number, alive = sha(reference / "outputs.jsonl"), 0, False
    original = run_file.Journal
    monkeypatch.setattr(run_file.provenance, "_DigestCache", FakeDigests)
    while not alive:
        folder = tmp_path / f"c{number}"
        for second in (None, number % 7):
            with monkeypatch.context() as patch:
                left = crashing(patch, number if second is None else second)
                try:
                    go(job, folder)
                except Crash:
                    pass
                alive = second is None and left() >= 0 or alive
        assert run_file.Journal is original
        assert go(job, folder)[0] == run.OK
        assert sha(folder / "outputs.jsonl") == wanted, number
        assert json.loads((folder / "manifest.json").read_text())["result"]["outputs_sha256"] == wanted
        number += 1
    assert number > 2 * ROWS


class FakeDigests:
    def sha256(self, path: Path) -> str:
        return path.name

    def save(self) -> None:
        return


@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.99])
def test_a_flipped_byte_is_named_and_the_rest_saved(
    whole: tuple[Point, Path], tmp_path: Path, place: float, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "f"
    shutil.copytree(whole[1], folder)
    data = bytearray((folder / "journal.log").read_bytes())
    data[int(place * len(data))] ^= 4
    (folder / "journal.log").write_bytes(data)
    assert cli(f"out={folder}", "view=quiet" if place else "view=plain", "show=0") == run.OK
    assert "journal.log is damaged at byte " in (said := capsys.readouterr().err) and "journal.damaged-1" in said
    assert (folder / "journal.damaged-1").read_bytes() == data
    assert sha(folder / "outputs.jsonl") == sha(whole[1] / "outputs.jsonl")
    assert cli(f"out={folder}", "view=plain") == run.OK and "damaged" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.json", "outputs.jsonl"])
def test_a_changed_file_of_a_finished_run_is_written_again(
    whole: tuple[Point, Path], tmp_path: Path, name: str
) -> None:
    for number, change in enumerate((lambda b: b[:-9], lambda b: b"{}", lambda b: b.replace(b"1", b"7"))):
        folder = tmp_path / str(number)
        shutil.copytree(whole[1], folder)
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        assert cli(f"out={folder}") == run.OK
        assert sha(folder / name) == sha(whole[1] / name)


@pytest.mark.parametrize("key", ["in_force", "result", "sessions", "origin"])
def test_a_manifest_that_is_none_is_refused(
    whole: tuple[Point, Path], tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "f"
    shutil.copytree(whole[1], folder)
    record = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(record | {key: 3}))
    assert cli(f"out={folder}") == 2 and f"damaged: {key} is 3" in capsys.readouterr().err


def test_a_row_whose_record_is_too_long_fails_alone(
    engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fengine.eval.runs.answering.MAX_RECORD", 2000)
    write_rows(tmp_path / "rows.jsonl", 2, {"id": "long", "prompt": "x" * 2000, "answer": "y"})
    assert cli("out=f") == run.FAILED
    (failed,) = [row for row in records(Path("f/outputs.jsonl")) if "error" in row]
    assert failed["id"] == "long" and "at most 2,000 are kept" in failed["error"]["message"]


def test_a_journal_of_line_ends_is_one_damage(whole: tuple[Point, Path], tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "f"
    shutil.copytree(whole[1], folder)
    with (folder / "journal.log").open("ab") as file:
        start = file.tell()
        file.write(b"\n" * 5000)
    assert cli(f"out={folder}", "view=plain", "show=0") == run.OK
    assert f"at byte {start:,}-{start + 4999:,}:" in capsys.readouterr().err
    assert sha(folder / "outputs.jsonl") == sha(whole[1] / "outputs.jsonl")


def test_interrupt_and_terminate(engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = FakeEngine.async_generate
    for which, code in ((signal.SIGINT, run.INTERRUPTED), (signal.SIGTERM, run.TERMINATED)):

        async def interrupted(self: FakeEngine, which: signal.Signals = which, **call: Any) -> Any:
            if len(self.prompts) == 6:
                signal.raise_signal(which)
            return await generate(self, **call)

        with monkeypatch.context() as patch:
            patch.setattr(FakeEngine, "async_generate", interrupted)
            assert cli(f"out=i{code}") == code
        assert not Path(f"i{code}/outputs.jsonl").exists()
        assert cli(f"out=i{code}") == run.OK
        assert len(json.loads(Path(f"i{code}/manifest.json").read_text())["sessions"]) == 2
    assert sha(Path("i130/outputs.jsonl")) == sha(Path("i143/outputs.jsonl"))


def test_a_second_termination_breaks_no_end(engines: list[FakeEngine], tmp_path: Path, monkeypatch: Any) -> None:
    """It may come while the rows in flight end, or behind the last one."""

    async def hanging(self: FakeEngine, **call: Any) -> Any:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(signal.SIGTERM)
            for _ in range(20):
                await asyncio.sleep(0)

    monkeypatch.setattr(FakeEngine, "async_generate", hanging)
    assert cli("out=twice") == run.TERMINATED
    (session,) = json.loads(Path("twice/manifest.json").read_text())["sessions"]
    assert session["how"].startswith("interrupted")


def test_a_termination_while_the_end_is_written_is_told(
    engines: list[FakeEngine], monkeypatch: Any, capsys: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fengine.eval.runs.run.finish", lambda *_: signal.raise_signal(signal.SIGTERM))
        assert cli("out=late") == run.TERMINATED and capsys.readouterr().err.endswith(": terminated\n")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and cli("out=late") == run.OK


def test_failed_rows_are_recorded_and_tried_again(engines: list[FakeEngine], tmp_path: Path) -> None:
    rows = [{"id": "s", "prompt": "sick", "answer": "x"}, {"id": "n", "prompt": "no answer"}]
    write_rows(tmp_path / "rows.jsonl", 2, *rows)
    with (tmp_path / "rows.jsonl").open("ab") as file:
        file.write(b'not json\n{"id": "u", "prompt": "\xff"}\n')
    assert cli("out=a") == run.FAILED
    found = records(Path("a/outputs.jsonl"))
    assert [r.get("error", {}).get("type") for r in found] == [
        *(None, None, "ContextLengthError", "InputFileError", "InputFileError", "InputFileError")
    ]
    assert json.loads(Path("a/metrics.json").read_text())["failed"] == 4
    job = point()
    engine = FakeEngine(job.config.engine)
    engine.sick = False
    assert go(job, tmp_path / "a", engine)[0] == run.FAILED
    assert engine.prompts == ["sick"], "good rows are left alone"
    assert "error" not in records(Path("a/outputs.jsonl"))[2]
    healthy = FakeEngine(job.config.engine)
    healthy.sick = False
    assert go(job, tmp_path / "b", healthy)[0] == run.FAILED
    assert sha(Path("a/outputs.jsonl")) == sha(Path("b/outputs.jsonl"))
    assert cli("out=c", "max_errors=1") == run.FAILED and not Path("c/outputs.jsonl").exists()


def test_a_journal_that_has_lost_a_line_too_many_is_told_with_its_length(
    engines: list[FakeEngine], tmp_path: Path
) -> None:
    """Of a row that was tried again the first line is damaged: nothing is left to compute."""
    write_rows(tmp_path / "rows.jsonl", 2, {"id": "s", "prompt": "sick", "answer": "x"})
    assert cli("out=a") == run.FAILED
    engine = FakeEngine(point().config.engine)
    engine.sick = False
    assert go(point(), tmp_path / "a", engine)[0] == run.OK
    whole, path = sha(Path("a/outputs.jsonl")), Path("a/journal.log")
    path.write_bytes(path.read_bytes().replace(b"too long", b"too Long"))
    assert cli("out=a") == run.OK and sha(Path("a/outputs.jsonl")) == whole
    assert json.loads(Path("a/manifest.json").read_text())["result"]["journal_bytes"] == path.stat().st_size


def test_a_dead_engine_ends_the_run(engines: list[FakeEngine], tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 4, {"id": "d", "prompt": "death", "answer": ""})
    assert cli("out=a") == run.FAILED
    assert not Path("a/outputs.jsonl").exists()


def test_a_full_disk_ends_the_run_and_room_lets_it_go_on(
    whole: tuple[Point, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for every in (1, 2, 5):
        folder, calls = tmp_path / f"d{every}", [0]

        def full(file: int, data: bytes, calls: list[int] = calls, every: int = every) -> int:
            calls[0] += 1
            if calls[0] % every == 0:
                raise OSError(28, "No space left on device")
            return os.write(file, data)

        for _ in range(20):
            with monkeypatch.context() as patch:
                patch.setattr(run_file, "Journal", functools.partial(Journal, write=full))
                if go(whole[0], folder)[0] == run.OK:
                    break
            assert "No space left" in capsys.readouterr().err
        assert go(whole[0], folder)[0] == run.OK
        assert sha(folder / "outputs.jsonl") == sha(whole[1] / "outputs.jsonl")


def test_the_input_changes_while_it_is_read(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = GenerateTask.rows
    readings = []

    def other(self: GenerateTask) -> Any:
        readings.append(1)
        for number, row in enumerate(rows(self)):
            late = number == 5 and len(readings) > 1
            yield Row(row.id, {"prompt": "other"}) if late else row

    monkeypatch.setattr(GenerateTask, "rows", other)
    assert cli("out=a") == run.USAGE
    assert "input has changed" in capsys.readouterr().err
    lengths = iter([None])
    monkeypatch.setattr(GenerateTask, "rows", lambda self: islice(rows(self), next(lengths, 5)))
    assert cli("out=b") == run.USAGE
    assert "input has changed" in capsys.readouterr().err
    monkeypatch.setattr(GenerateTask, "rows", rows)
    assert cli("out=a") == run.OK


def test_a_good_line_stays_and_the_last_failure_counts() -> None:
    table = RowTable(3)
    for index, ok, offset in ((0, False, 10), (0, False, 20), (1, True, 30), (1, False, 40), (1, True, 50)):
        table.put(index, ok, offset)
    assert (list(table.offsets), table.left, table.failed) == ([20, 30, 0], 2, 1)


# -- configuration ----------------------------------------------------------------------------------------------------


def test_defaults_are_the_dataclasses() -> None:
    """conf/eval.yaml repeats them, but for the sampling, which is greedy, and the task."""
    config = points(parse(["task=capitals"], EVAL), EVAL)[0].config
    default = EvalConfig()
    assert dataclasses.replace(config, task=default.task, sampling=default.sampling) == default
    assert config.sampling.temperature == 0.0 and config.task.name == "capitals"


@pytest.mark.parametrize("option", sorted(path.stem for path in (conf_dir() / "task").glob("*.yaml")))
def test_every_task_composes(option: str) -> None:
    own = ["task.data=x.jsonl"] if option in ("jsonl", "openai") else []
    assert points(parse([f"task={option}", *own], EVAL), EVAL)[0].config.task.data


def test_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert run.main(["eval", "--help"]) == run.OK
    said = capfd.readouterr().out
    assert "task: addition, capitals" in said and "Exit codes" in said and "fengine eval task=capitals" in said


# -- refused -----------------------------------------------------------------------------------------------------------


def test_a_named_pipe_is_never_waited_for(
    engines: list[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "task=jsonl", "task.data=rows.jsonl", "view=quiet", "out=p"]
    assert run.main(words) == run.OK
    for name in ("manifest.json", "journal.log", "outputs.jsonl", "metrics.json", "trace.json", "timings.jsonl"):
        kept = Path("p", name).read_bytes()
        Path("p", name).unlink()
        os.mkfifo(Path("p", name))
        codes = {run.main(words), run.main(["report", "p"]), run.main(["diff", "p", "p"])}
        assert codes <= {run.OK, run.FAILED, run.USAGE}, name
        assert name not in ("manifest.json", "journal.log") or f"{name} is no" in capsys.readouterr().err
        Path("p", name).unlink()
        Path("p", name).write_bytes(kept)


def test_another_config_is_refused_with_the_keys(whole: tuple[Point, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = f"out={whole[1]}"
    assert cli(folder, "sampling.temperature=0.5", "seed=3") == run.USAGE
    said = capsys.readouterr().err
    assert "sampling.temperature: 0.0 → 0.5" in said and "seed: 0 → 3" in said and "top_p" not in said
    write_rows(Path("rows.jsonl"), ROWS + 1)
    assert cli(folder) == run.USAGE and "input.rows: 12 → 13" in capsys.readouterr().err
    write_rows(Path("rows.jsonl"), ROWS)
    assert cli(folder, "show=9", "journal.sync_rows=1", "trace=off") == run.OK


class Repeating(GenerateTask):
    """A task that does not look after its ids."""

    def rows(self) -> Iterator[Row | BadRow]:
        return iter([Row("a", {}), Row("b", {}), BadRow("a", 3, "no row"), Row("b", {"x": 1})])


def test_duplicate_ids(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputFileError, match="(?s)'a': rows 1 and 3.*'b': rows 2 and 4"):
        index_rows(Repeating(TaskConfig(name="t"), Path()))
    write_rows(Path("rows.jsonl"), 3, {"id": "r1", "prompt": "again", "answer": ""})
    assert cli("out=a") == run.USAGE and not engines and not Path("a/journal.log").exists()
    assert "'r1': rows 2 and 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task=nope"], "no option 'nope' in group 'task'"),
        (["task=jsonl", "task.data=nope.jsonl"], "nope.jsonl"),
        (["task=jsonl", "task.data=rows.jsonl", "+task._target_=os.system"], "_target_ is refused"),
        (["task=jsonl", "task.data=rows.jsonl", "+x={a: [{_target_: os.system}]}"], "_target_ is refused"),
        (["task=jsonl", "task.data=rows.jsonl", "task.promt=x"], "did you mean task.prompt"),
        (["task=jsonl", "task.data=rows.jsonl", "out=rows.jsonl"], "out must name a folder, got 'rows.jsonl'"),
        (["task=jsonl", "task.data=rows.jsonl", "out=other"], "is not a run's"),
        (["task=jsonl", "task.data=rows.jsonl", "journal.sync_rows=0"], "sync_rows must be"),
    ],
)
def test_mistakes_end_with_2_before_an_engine(
    engines: list[FakeEngine], words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other").mkdir()
    Path("other/diary.txt").write_text("dear diary")
    assert run.main(["eval", *words]) == run.USAGE
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err and not engines


def test_one_writer(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("out=a") == run.OK
    with run_file.RunFolder(Path("a").absolute()):
        assert cli("out=a") == run.USAGE
        assert f"another run is writing {Path('a').absolute()} (process {os.getpid()}" in capsys.readouterr().err
    Path("a/lock").write_text("999999999 elsewhere\n")  # left behind by a process that was killed
    assert cli("out=a") == run.OK


# -- asks --------------------------------------------------------------------------------------------------------------


def ask(engine: FakeEngine, one: Ask) -> Any:
    return asyncio.run(Asker(engine).ask(one, {"sampling_seed": 3}))


def test_loglikelihood_and_rolling_score_every_token_once(engines: list[FakeEngine]) -> None:
    engine = FakeEngine(EngineConfig())
    answer, _ = ask(engine, Ask("ab", {}, "loglikelihood", " cd"))
    assert answer.token_ids == [32, 99, 100] and answer.logprobs == [-32.0, -99.0, -100.0]
    answer, _ = ask(engine, Ask([7, 8], {}, "loglikelihood", "z"))
    assert answer.token_ids == [122] and engine.prompts[-1] == "[7, 8, 122]"
    for length in range(1, 40):
        text = "".join(chr(65 + i) for i in range(length))
        answer, metas = ask(engine, Ask("", {}, "rolling", text))
        assert answer.token_ids == [ord(c) for c in text] and answer.logprobs == [-float(ord(c)) for c in text]
        assert len(metas) == max(1, -(-length // 7))
        assert {len(json.loads(p)) for p in engine.prompts[-len(metas) :]} == {min(8, length + 1)}  # all that it holds
    for wrong in (Ask("a", {}, "rolling", "b"), Ask("", {}, "rolling", ""), Ask("a", {}, "loglikelihood", "")):
        with pytest.raises(InvalidRequestError):
            ask(engine, wrong)


def test_seeds_depend_on_run_row_and_sample_only() -> None:
    seeds = {row_seed(run_seed, row, i) for run_seed in (0, 1) for row in ("a", "b", "1", "é") for i in range(3)}
    assert len(seeds) == 24 and all(0 <= s < 2**63 for s in seeds)
    assert row_seed(0, "a", 0) == 6620444910837239481, "runs of earlier versions are repeated with these"
    assert row_key(Row("a", {"x": 1})) != row_key(Row("a", {"x": 2}))


# -- the real engine ---------------------------------------------------------------------------------------------------

KILLED = """if True:
    import os, signal, sys, threading, time
    from pathlib import Path
    from fengine.run import main

    def kill():
        journal = Path("killed/journal.log")
        while not journal.exists() or journal.read_bytes().count(b"\\n") <= {lines}:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)

    if {lines}:
        threading.Thread(target=kill, daemon=True).start()
    sys.exit(main({words}))
"""


def test_killed_processes_of_the_model_in_the_box(tmp_path: Path) -> None:
    """SIGKILL once the journal has so many lines, several times on one folder; then to the end."""
    words = ["task=addition", "task.limit=60", "sampling.temperature=0.9", "compile=none", "view=quiet"]
    assert run.main(["eval", *words, f"out={tmp_path / 'whole'}"]) == run.OK
    words += ["out=killed", "scheduler.max_running_requests=4"]
    for lines, code in ((1, -signal.SIGKILL), (12, -signal.SIGKILL), (30, -signal.SIGKILL), (0, run.OK)):
        ended = forked.run(KILLED.format(lines=lines, words=["eval", *words]), tmp_path)
        assert ended.returncode == code, ended.stderr
    assert sha(tmp_path / "killed" / "outputs.jsonl") == sha(tmp_path / "whole" / "outputs.jsonl")
