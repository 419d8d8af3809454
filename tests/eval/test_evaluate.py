"""`fengine.evaluate`: a task that is an object of a user, through an engine that is open."""

import asyncio
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hydra")

from eval_fakes import FakeEngine

import fengine
from fengine import run
from fengine.config import EngineConfig
from fengine.errors import ConfigError, EngineDeadError, FengineError, InputFileError, ResumeMismatchError
from fengine.eval.runs import manifest
from fengine.eval.tasks.task import Answer, Ask, BadRow, Metric, Row, Scores


class Reversal:
    """A metric of one's own: whether the answer begins with the prompt reversed."""

    name, version = "reversal", "1"

    def __init__(self, words: Iterable[str]) -> None:
        self.words = list(words)

    def rows(self) -> Iterator[Row | BadRow]:
        return (Row(f"w{i}", {"word": word}) for i, word in enumerate(self.words))

    def asks(self, row: Row) -> list[Ask]:
        return [Ask(row.data["word"], {}, "generate")]

    def score(self, row: Row, answers: list[Answer]) -> Scores:
        return {"reversed": answers[0].text.startswith(row.data["word"][::-1])}

    def metrics(self, scores: Iterable[Scores]) -> dict[str, Metric]:
        values = [float(one["reversed"]) for one in scores]
        return {"share": Metric(sum(values) / len(values), 0.0, len(values))}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(manifest, "code_digest", lambda: "one")
    monkeypatch.setattr(manifest.provenance, "checkout", lambda: None)
    return FakeEngine(EngineConfig())


def test_a_task_of_ones_own(engine: FakeEngine, capsys: Any) -> None:
    task = Reversal(["one", "two", "sick"])
    metrics = fengine.evaluate(task, engine, "r", seed=3)
    assert (metrics["rows"], metrics["failed"], metrics["metrics"]["share"]["value"]) == (3, 1, 1.0)
    assert capsys.readouterr().out == ""
    identity = json.loads(Path("r/manifest.json").read_text())["identity"]
    assert len(identity["task"]["source_sha256"]) == 64 and identity["config"]["sampling.temperature"] == 0.0
    engine.sick = False
    assert fengine.evaluate(task, engine, "r", seed=3)["failed"] == 0
    assert engine.prompts == ["one", "two", "sick", "sick"], "rows that were good are not asked again"
    with pytest.raises(ResumeMismatchError, match="seed: 3 → 4"):
        fengine.evaluate(task, engine, "r", seed=4)
    assert run.main(["diff", "r", "r"]) == run.main(["report", "r"]) == run.OK
    capsys.readouterr()
    for command in ("verify", "rerun"):
        assert run.main([command, "r"]) == run.USAGE
        assert "fengine.evaluate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "updates", "said"),
    [
        ({"preferred_sampling_params": {"max_new_tokens": 5}}, 0, "in_force.arguments: null → .*max_new_tokens"),
        ({"weight_version": "step-7"}, 0, "in_force.arguments: null → .*step-7"),
        ({}, 2, "in_force.updated_weights: null → .*updates_from_memory.: 2"),
    ],
)
def test_what_no_config_tells_of_an_engine_is_recorded(
    given: dict[str, Any], updates: int, said: str, engine: FakeEngine
) -> None:
    """Also where all rows are there: their figures are not those of other weights."""
    task = Reversal(["one"])
    fengine.evaluate(task, engine, "r")
    engine.get_server_info = lambda: {"max_req_input_len": 8} | given  # type: ignore[method-assign]
    weights = SimpleNamespace(source=lambda: (None, updates))
    engine._parts = SimpleNamespace(model_dir=Path("box"), weights=weights)  # type: ignore[attr-defined]
    with pytest.raises(ResumeMismatchError, match=said):
        fengine.evaluate(task, engine, "r")


def test_an_adapter_that_was_loaded_since_the_start_is_recorded(engine: FakeEngine) -> None:
    digests, other = {"a": "1"}, Reversal(["one"])
    engine.lora_adapters = lambda: {"a": "p"}  # type: ignore[attr-defined]
    parts = {"adapters": SimpleNamespace(digests=lambda: digests), "weights": SimpleNamespace(source=lambda: (None, 0))}
    engine._parts = SimpleNamespace(model_dir=Path("box"), **parts)  # type: ignore[attr-defined]
    fengine.evaluate(other, engine, "r", adapter="a")
    assert json.loads(Path("r/manifest.json").read_text())["in_force"]["adapter"] == {"name": "a", "sha256": "1"}
    digests["a"] = "2"
    with pytest.raises(ResumeMismatchError, match=r'in_force.adapter.sha256: "1" → "2"'):
        fengine.evaluate(other, engine, "r", adapter="a")


def test_what_is_no_task_or_no_engine_is_told(engine: FakeEngine) -> None:
    other: Any = "capitals"
    with pytest.raises(ConfigError, match="task must be an object with name, version, .*got str; a task of fengine"):
        fengine.evaluate(other, engine)
    with pytest.raises(ConfigError, match="engine must be an open Engine, got str"):
        fengine.evaluate(Reversal(["one"]), "box")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sampling": {"temprature": 1}}, "sampling has no 'temprature'; there are max_new_tokens"),
        ({"sampling": 3}, "sampling must be a dict, got 3"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature must be"),
        ({"sampling": {"stop_regex": "("}}, "stop_regex"),
        ({"sampling": {"regex": "("}}, "sampling.regex: .*regex '\\('"),
        ({"judge": 3}, "judge must be a dict, got 3"),
        ({"seed": "a"}, "seed must be a whole number, got 'a'"),
        ({"max_errors": -1}, "max_errors must be at least 0"),
        ({"show": "a"}, "show must be a whole number"),
        ({"top_logprobs": 5000}, "top_logprobs must be at most 100"),
        ({"adapter": "a"}, "adapter='a': the engine has none"),
    ],
)
def test_arguments_that_are_refused(given: dict[str, Any], said: str, engine: FakeEngine) -> None:
    engine.lora_adapters = dict  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=said):
        fengine.evaluate(Reversal(["one"]), engine, "r", **given)
    assert not Path("r").exists()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row(7, {}), "a row's id must be a text, got 7"),  # type: ignore[arg-type]
        (Row("a", {"x": {1}}), "row 'a': its data is no JSON: Object of type set"),
        (Row("a", {"x": float("nan")}), "row 'a': its data is no JSON: Out of range float"),
    ],
)
def test_rows_that_are_none_are_named(row: Row, said: str, engine: FakeEngine) -> None:
    task = Reversal([])
    task.rows = lambda: iter([row])  # type: ignore[method-assign]
    with pytest.raises(InputFileError, match=said):
        fengine.evaluate(task, engine, "r")


@pytest.mark.parametrize("scores", [None, {"x": [1]}, {"x": None}, {"x": 1e300}, {"x": 10**400}, {"x": float("nan")}])
def test_scores_that_no_record_holds_are_the_rows_failure(scores: Any, engine: FakeEngine) -> None:
    task = Reversal(["one", "two"])
    task.score = lambda row, answers: scores if row.id == "w0" else {"reversed": True}  # type: ignore[method-assign]
    assert fengine.evaluate(task, engine, "r")["failed"] == 1
    assert Path("r/outputs.jsonl").read_text().count("scores must be a dict of texts, booleans and numbers") == 1


def test_a_figure_may_be_a_number(engine: FakeEngine) -> None:
    task = Reversal(["one", "two"])
    task.metrics = lambda scores: {"share": sum(one["reversed"] for one in scores) / 2}  # type: ignore[method-assign]
    found = fengine.evaluate(task, engine, "r")["metrics"]
    assert found == {"share": {"value": 1.0, "stderr": None, "n": 2}}


def test_inside_a_running_loop_as_in_a_notebook(engine: FakeEngine) -> None:
    async def cell() -> Any:
        return fengine.evaluate(Reversal(["one"]), engine)

    assert asyncio.run(cell())["rows"] == 1
    assert len(list(Path("runs").glob("*/*/outputs.jsonl"))) == 1


def test_what_ends_early_is_raised(engine: FakeEngine) -> None:
    with pytest.raises(EngineDeadError):
        fengine.evaluate(Reversal(["death"]), engine, "d")
    with pytest.raises(FengineError, match="max_errors=0"):
        fengine.evaluate(Reversal(["sick", "one"]), engine, "e", max_errors=0)
    with pytest.raises(FengineError, match="first 20 rows failed alike"):
        fengine.evaluate(Reversal(["sick"] * 30), engine, "f")
    assert fengine.evaluate(Reversal(["one", *["sick"] * 30]), engine, "g")["failed"] == 30  # one was good
    named = Reversal(["one"] * 30)
    named.score = lambda row, answers: (_ for _ in ()).throw(InputFileError(f"row {row.id!r}: no such column"))
    with pytest.raises(FengineError, match=r"failed alike \(InputFileError: no such column\)"):
        fengine.evaluate(named, engine, "h")
