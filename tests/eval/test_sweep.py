"""Sweeps: one engine for points that share it, a point's failure is its own, the whole goes on where it was."""

import csv
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from eval_fakes import FakeEngine, fake_engines, records, write_rows
from omegaconf import OmegaConf

from fengine import run
from fengine.errors import ConfigError
from fengine.eval.cli.compose import jobs, parse, points
from fengine.eval.cli.guard import LAUNCHERS
from fengine.eval.cli.recompose import end_with, launch
from fengine.eval.cli.schema import BadPoint, Point
from fengine.eval.runs import run as run_file
from fengine.eval.runs.config import EVAL
from fengine.eval.runs.sweep import PointStatus, as_csv, markdown, over_seeds

WORDS = ["task=jsonl", "task.data=rows.jsonl", "task.match=exact", "task.target=answer", "compile=none"]
ROWS = 6


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Engines that were opened; the working directory is a new one with rows.jsonl."""
    return fake_engines(tmp_path, monkeypatch, ROWS)


def sweep(*words: str, view: str = "quiet") -> int:
    return run.main(["eval", "-m", *WORDS, f"view={view}", *words])


def told(folder: str) -> list[dict[str, Any]]:
    return json.loads(Path(folder, "sweep.json").read_text())["points"]


def statuses(folder: str) -> list[str]:
    return [point["status"] for point in told(folder)]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


# -- points ------------------------------------------------------------------------------------------------------------


def test_a_sweep_and_its_folder(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(Path("rows.jsonl"), ROWS, {"id": "s", "prompt": "sick", "answer": ""})
    assert sweep("sampling.temperature=0,0.7", "seed=1,2", "out=s", view="plain") == run.FAILED
    assert len(engines) == 1, "sampling changes no engine"
    found = told("s")
    assert [one["folder"] for one in found] == ["0", "1", "2", "3"]
    assert found[1]["point"] == "sampling.temperature=0  seed=2" and found[1]["status"] == "rows failed"
    metrics = json.loads(Path("s/1/metrics.json").read_text())
    assert found[1]["metrics"] == metrics["metrics"] and (found[1]["rows"], found[1]["failed"]) == (ROWS + 1, 1)
    table = Path("s/sweep.md").read_text().splitlines()
    assert table[0] == "Means over seeds ± their standard errors:" and table[4].startswith("| sampling.temperature=0 ")
    table = table[table.index("All points:") + 2 :]
    assert table[0].split(" | ")[4].strip() == "exact_match" and "0.0000 ± 0.0000" in table[3] and len(table) == 6
    lines = list(csv.DictReader(Path("s/sweep.csv").read_text().splitlines()))
    assert [(one["sampling.temperature"], one["seed"], one["exact_match"]) for one in lines] == [
        (t, s, "0.0") for t in ("0", "0.7") for s in "12"
    ]
    shown = capsys.readouterr()
    assert "point 4 of 4: sampling.temperature=0.7  seed=2" in shown.err and "sweep.md" in shown.out
    assert "2 of 14 rows failed" in shown.out and "to go on" not in shown.err
    assert sweep("seed=1,2") == run.FAILED
    (own,) = Path("runs").glob("*/*/sweep.json")
    assert {p.name for p in own.parent.iterdir()} == {"0", "1", "lock", "sweep.csv", "sweep.json", "sweep.md"}


def test_points_that_share_an_engine_follow_one_another(engines: list[FakeEngine]) -> None:
    assert sweep("seed=1,2,3", "cache.page_size=8,16", "out=s") == run.OK
    assert [engine.config.cache.page_size for engine in engines] == [8, 16]
    assert [json.loads(Path(f"s/{i}/manifest.json").read_text())["identity"]["config"]["seed"] for i in range(6)] == [
        *(1, 1, 2, 2, 3, 3)
    ]


@pytest.mark.parametrize("bad", ["model.path=box,missing", "sampling.temperature=0,-1", "task=jsonl,nope"])
def test_a_point_that_fails_does_not_stop_the_others(
    engines: list[FakeEngine], bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in WORDS if word.partition("=")[0] != bad.partition("=")[0]]
    assert run.main(["eval", "-m", *words, "view=quiet", "out=s", bad, "seed=1,2"]) == run.USAGE
    assert statuses("s") == ["ok", "ok", "refused", "refused"]
    problem = told("s")[2]["problem"]
    assert problem in Path("s/sweep.md").read_text() and problem.partition(": ")[2] in capsys.readouterr().err
    assert len(records(Path("s/1/outputs.jsonl"))) == ROWS and len(engines) == 1


def test_a_fault_of_ours_is_a_points_own_too(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index_rows, calls = run_file.index_rows, []

    def failing(task: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError("ours")
        return index_rows(task)

    monkeypatch.setattr(run_file, "index_rows", failing)
    assert sweep("seed=1,2", "out=s") == run.FAILED
    assert statuses("s") == ["failed", "ok"] and "ZeroDivisionError: ours" in capsys.readouterr().err
    assert sweep("seed=1,2", "out=s") == run.OK and statuses("s") == ["ok", "ok"]


def test_all_points_refused_is_a_refusal(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("sampling.temperature=-1,-2", "out=s") == run.USAGE and not Path("s").exists()
    assert "sampling.temperature" in capsys.readouterr().err


# -- going on ----------------------------------------------------------------------------------------------------------


def test_an_interrupted_sweep_goes_on(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("seed=1,2,3", "out=whole") == run.OK
    generate = FakeEngine.async_generate

    async def interrupted(self: FakeEngine, **call: Any) -> Any:
        if len(self.prompts) == ROWS + 3:  # in the second point
            self.prompts.append("once")
            signal.raise_signal(signal.SIGINT)
        return await generate(self, **call)

    monkeypatch.setattr(FakeEngine, "async_generate", interrupted)
    assert sweep("seed=1,2,3", "out=my s", view="plain") == run.INTERRUPTED
    assert statuses("my s") == ["ok", "interrupted", "waiting"]
    assert capsys.readouterr().err.count("to go on, run the same command with out='my s'\n") == 1
    monkeypatch.setattr(FakeEngine, "async_generate", generate)
    assert sweep("seed=1,2,3", "out=my s") == run.OK and statuses("my s") == ["ok"] * 3
    for name in ("0/outputs.jsonl", "1/outputs.jsonl", "2/outputs.jsonl", "sweep.json", "sweep.md", "1/metrics.json"):
        assert Path("my s", name).read_bytes() == Path("whole", name).read_bytes()
    before, loaded = files(Path("my s")), len(engines)
    assert sweep("seed=1,2,3", "out=my s") == run.OK and len(engines) == loaded and files(Path("my s")) == before


def test_folders_of_others_are_refused(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("seed=1,2", "out=s") == run.OK
    before = files(Path("s"))
    assert sweep("seed=1,2,3", "out=s") == run.USAGE
    said = capsys.readouterr().err
    assert "holds a sweep of 2 other points" in said and "point 2: none → seed=3" in said
    assert sweep("seed=1,4", "out=s") == run.USAGE and "point 1: seed=2 → seed=4" in capsys.readouterr().err
    assert sweep("seed=1,2", "out=s", "sampling.top_p=0.5") == run.USAGE, "the points themselves say no"
    assert "sampling.top_p: 1.0 → 0.5" in capsys.readouterr().err and statuses("s") == ["refused", "refused"]
    assert sweep("seed=1,2", "out=s") == run.OK and files(Path("s")) == before
    assert run.main(["eval", *WORDS, "view=quiet", "out=s"]) == run.USAGE
    assert "no manifest.json: it is not a run's" in capsys.readouterr().err
    assert run.main(["eval", *WORDS, "view=quiet", "out=r"]) == run.OK
    assert sweep("seed=1,2", "out=r") == run.USAGE and "it is not a sweep's" in capsys.readouterr().err
    assert sweep("seed=1,2", "out='o${seed}'") == run.USAGE
    assert "one folder in common" in capsys.readouterr().err and not Path("o1").exists()
    with run_file.RunFolder(Path("lone").absolute()):
        assert sweep("seed=1,2", "out=lone") == run.USAGE
    assert "another run is writing" in capsys.readouterr().err


def test_the_table_is_told_plainly() -> None:
    metric = {"value": 0.5, "stderr": None, "n": 1}
    good = PointStatus("a|b", "0", "ok", None, 1000, 0, {"acc": metric})
    text = markdown([good, PointStatus("c", "1", "refused", "no\nway")])
    assert text.splitlines()[2].replace(" ", "") == "|a\\|b|ok|1,000|0|0.5000|0|" and text.endswith("\nc: no\nway\n")


def test_seeds_are_folded() -> None:
    """Against means and standard errors by hand; a point that has not ended is told and not counted."""

    def point(name: str, value: float | None, status: str = "ok") -> PointStatus:
        metrics = None if value is None else {"acc": {"value": value, "stderr": 0.5, "n": 9}}
        return PointStatus(name, "0", status, None, 9, 1, metrics)

    swept = [point(f"task=a  x={x}  ++seed={seed}", x + seed / 10) for x in (1, 2) for seed in (0, 2, 4)]
    swept += [point("task=a  x=3  seed=0", 7.0), point("task=a  x=3  seed=2", None, "failed")]
    one, two, three = over_seeds(swept)
    assert (one.point, one.rows, one.failed, one.status) == ("task=a  x=1  3 seeds", 27, 3, "ok")
    assert one.metrics is not None and math.isclose(one.metrics["acc"]["value"], 1.2)
    assert math.isclose(one.metrics["acc"]["stderr"], 0.2 / math.sqrt(3)) and one.metrics["acc"]["n"] == 3
    assert two.metrics is not None and math.isclose(two.metrics["acc"]["value"], 2.2)
    assert three.status == "ok, failed" and three.metrics == {"acc": {"value": 7.0, "stderr": None, "n": 1}}
    assert over_seeds([point("x=1", 1.0), point("x=2", 1.0)]) == [], "nothing to fold"
    assert as_csv(swept).splitlines()[1] == "a,1,0,0,ok,9,1,1.0,0.5"
    assert as_csv([point("task.prompt=A:  b  seed=1", 1.0)]).splitlines()[1].startswith("A:  b,1,"), (
        "a text with blanks"
    )


# -- composing ---------------------------------------------------------------------------------------------------------

SWEEPS = [
    ["task=capitals,addition", "sampling.temperature=0,0.7"],
    ["sampling=greedy,creative", "sampling.top_k=5,null", "sampling.stop=[b,'c d']"],
    ["hydra.sweep.subdir='x-${seed}-${hydra.job.num}'", "seed=1,2", "++model.path=a,b"],
    ["hydra.sweep.subdir='${hydra.job.override_dirname}'", "seed=1,2"],
    ["out='o-${seed}'", "seed=range(0,2)", "task.limit=1,2"],
    ["sampling.stop=[a,b,c],[d],[]", "sampling.top_p=0.5", "view=quiet"],
    ["sampling.top_k='${seed}',7", "seed=1,2"],
]


@pytest.mark.parametrize("words", SWEEPS, ids=[words[0] for words in SWEEPS])
def test_points_are_what_hydra_composes(words: list[str]) -> None:
    """Each point is what its own overrides give alone; every one has a directory of its own."""
    found = points(parse(["-m", *words, "hydra.sweep.dir=d"], EVAL), EVAL)
    assert len({point.directory for point in found}) == len(found) > 1
    for point in found:
        (alone,) = points(parse(list(point.overrides), EVAL), EVAL)
        assert alone.config == point.config


def test_wrong_values_of_a_sweep_are_explained() -> None:
    def problems(*words: str) -> list[str]:
        found = jobs(parse(["-m", "seed=1,2", *words], EVAL), EVAL)
        return [job.message for job in found if isinstance(job, BadPoint)]

    assert problems() == []
    assert "sampling.temperature: Value 'hot'" in problems("sampling.temperature=0,hot")[0]
    (said,) = problems("experiment=temperatures,pressure")[:1]
    assert said == "its hydra.sweeper.params would not count: sweep over this experiment alone"
    with pytest.raises(ConfigError, match="sampling.top_p=1,1: a value occurs twice"):
        problems("sampling.top_p=1,1")
    with pytest.raises(ConfigError, match="unknown key sampling.temprature; did you mean sampling.temperature"):
        problems("sampling.temprature=0,1")


# -- launchers ---------------------------------------------------------------------------------------------------------


def problem(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        jobs(parse(["-m", "task=capitals", "seed=1,2", *words], EVAL), EVAL)
    return str(caught.value)


def test_launchers_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no launcher 'nope'; there is basic" in problem("hydra/launcher=nope")
    assert "needs a package that is not installed: pip install hydra-ray-launcher" in problem("hydra/launcher=ray")
    for word in ("hydra.launcher._target_=os.system", "+hydra.launcher.x={_target_: os.system}", "hydra/sweeper=x"):
        assert "is refused" in (said := problem(word)) or "is fixed" in said
    with pytest.raises(ConfigError, match="add -m"):
        jobs(parse(["task=capitals", "hydra/launcher=joblib"], EVAL), EVAL)


def test_a_file_cannot_give_a_launcher_another_class(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    (tmp_path / "hydra" / "launcher").mkdir(parents=True)
    for name in ("joblib", "mine"):
        (tmp_path / "hydra" / "launcher" / f"{name}.yaml").write_text("_target_: os.system\n")
    (tmp_path / "hydra" / "launcher" / "basic.yaml").write_text("_target_: os.system\n")
    assert "is not known" in problem("--config-dir", str(tmp_path), "hydra/launcher=mine")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "x.yaml").write_text("# @package hydra.launcher\n_target_: os.system\n")
    for word in ("hydra/launcher=joblib", "hydra/launcher=basic"):
        assert "names another class than its own" in problem("--config-dir", str(tmp_path), "experiment=x", word)


def test_many_engines_on_one_gpu_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/dev/nvidia0")]))
    command = parse(["-m", "task=capitals", "seed=1,2", "hydra/launcher=joblib"], EVAL)
    found = [job for job in jobs(command, EVAL) if isinstance(job, Point)]
    assert found[0].launcher == "joblib"
    with pytest.raises(ConfigError, match="n_jobs=-1 would start as many engines"):
        launch(command, EVAL, tmp_path, found, len)


def test_the_process_of_a_point_ends_with_that_of_its_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, parents = list[int](), iter([7, 7, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    end_with(7)
    assert codes == [run.TERMINATED] and not list(parents)


def test_joblib_runs_points_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same folders and the same bytes as one after another in this process; a bad point among them."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(run.__file__).resolve().parent.parent))
    words = ["task=addition", "task.limit=4", "compile=none", "view=quiet", "sampling.temperature=0.9", "seed=1,2"]
    words += ["model.path=box,missing", "task.max_new_tokens=4", "model.device=cpu"]
    assert run.main(["eval", "-m", *words, "out=one"]) == run.USAGE
    apart = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert run.main(["eval", "-m", *words, "out=apart", *apart]) == run.USAGE
    assert statuses("one") == statuses("apart") == ["ok", "refused", "ok", "refused"]
    for number in (0, 2):
        for name in ("outputs.jsonl", "metrics.json"):
            assert Path(f"apart/{number}/{name}").read_bytes() == Path(f"one/{number}/{name}").read_bytes()
        configs = [OmegaConf.load(f"{folder}/{number}/config.yaml") for folder in ("one", "apart")]
        assert {**configs[0], "out": None} == {**configs[1], "out": None}
    assert {p.name for p in Path("apart").iterdir()} == {p.name for p in Path("one").iterdir()}
    pids = [json.loads(Path(f"apart/{i}/manifest.json").read_text())["sessions"][0]["pid"] for i in (0, 2)]
    here = json.loads(Path("one/0/manifest.json").read_text())["sessions"][0]["pid"]
    assert here not in pids
    assert set(LAUNCHERS) == {"joblib", "submitit_local", "submitit_slurm", "ray"}
