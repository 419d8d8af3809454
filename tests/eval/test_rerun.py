"""`fengine rerun`: the same run again from what its manifest tells, or a refusal that names what has changed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from eval_fakes import ROWS, FakeEngine, Run, fake_runs, refused, rewrite, write_rows

from fengine import run
from fengine.errors import EngineDeadError
from fengine.eval.cli import engines as engines_file
from fengine.eval.runs import manifest, provenance


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(engines_file, "open_engine", FakeEngine)
    return fake_runs(tmp_path, monkeypatch)


def outputs(folder: str) -> bytes:
    return (Path(folder) / "outputs.jsonl").read_bytes()


def test_the_same_bytes(make: Run, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another working directory, too: relative data is where it was."""
    make("a", "seed=7", "sampling.temperature=0.5", "task.stop=[x,y]", "run.shard=1/2")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run.main(["rerun", "../a", "out=b"]) == 0
    assert "outputs.jsonl is byte-identical to that of" in capsys.readouterr().out
    assert outputs("b") == outputs("../a")
    old, new = (json.loads((Path(f) / "manifest.json").read_text()) for f in ("../a", "b"))
    assert new["identity"] == old["identity"] and new["origin"]["base"] == old["origin"]["base"]
    assert new["origin"]["run_id"] != old["origin"]["run_id"] and new["sessions"][0]["argv"][0] == "rerun"
    assert run.main(["rerun", "b", "out=c"]) == 0, "a rerun can be run again"
    assert run.main(["rerun", "../a"]) == 0 == run.main(["rerun", "../a"])
    assert len(list(Path("runs").glob("*/*/outputs.jsonl"))) == 2


def test_a_run_of_prompts_is_not_told_to_score(make: Run, capsys: Any) -> None:
    assert run.main(["prompts=[a]", "out=o.jsonl", "compile=none"]) == 0
    assert run.main(["rerun", "o.jsonl", "view=plain"]) == 0 and "nothing was scored" not in capsys.readouterr().err


def test_changes(make: Run, capsys: Any) -> None:
    make("a")
    assert run.main(["rerun", "a", "out=b", "seed=1", "view=plain", "show=0"]) == 1
    said = capsys.readouterr()
    assert "outputs.jsonl differs from that of a; see fengine diff a b" in said.out and "seed: 0 → 1" in said.err
    make("c", "seed=1")
    assert outputs("b") == outputs("c")
    assert run.main(["rerun", "a", "out=d", "scheduler.max_running_requests=2"]) == 0
    assert run.main(["rerun", "a", "out=e.jsonl"]) == 2 and not Path("e.jsonl").exists()
    assert "out must name a folder, got 'e.jsonl'" in capsys.readouterr().err


def test_another_input_is_refused_with_its_names(make: Run, capsys: Any, tmp_path: Path) -> None:
    make("a")
    shutil.copy("rows.jsonl", "kept.jsonl")
    write_rows(tmp_path / "rows.jsonl", ROWS + 1)
    assert run.main(["rerun", "a", "out=b"]) == 2 and not Path("b").exists()
    said = capsys.readouterr().err
    assert "input.rows: 12 → 13" in said and "input.sha256" in said and "rerun.changed=true" in said
    assert run.main(["rerun", "a", "out=b", "task.data=kept.jsonl"]) == 0 and outputs("b") == outputs("a")
    assert run.main(["rerun", "a", "out=c", "rerun.changed=true"]) == 1 and len(outputs("c").splitlines()) == 13
    Path("rows.jsonl").unlink()
    assert run.main(["rerun", "a", "out=d"]) == 2 and "rows.jsonl" in capsys.readouterr().err


def test_another_checkpoint_is_refused_with_its_files(make: Run, capsys: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"one")
    make("a", f"model.path={model}")
    shutil.copytree(model, tmp_path / "moved")
    (model / "model.safetensors").write_bytes(b"two")
    assert run.main(["rerun", "a", "out=b"]) == 2
    assert "model.files.model.safetensors: " in capsys.readouterr().err
    assert run.main(["rerun", "a", "out=b", f"model.path={tmp_path / 'moved'}"]) == 0


def test_other_code_and_versions_are_told(make: Run, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make("a", "view=plain", "show=0")
    monkeypatch.setattr(manifest, "code_digest", lambda: "two")
    assert run.main(["rerun", "a", "out=b", "view=plain", "show=0"]) == 0
    assert 'code_sha256: "one" → "two"' in capsys.readouterr().err


def test_an_interrupted_rerun_goes_on(make: Run, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make("a")
    generate = FakeEngine.async_generate

    async def dying(self: FakeEngine, **call: Any) -> Any:
        if len(self.prompts) == 5:
            raise EngineDeadError("boom")
        return await generate(self, **call)

    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "async_generate", dying)
        assert run.main(["rerun", "a", "out=b"]) == 1 and not Path("b/outputs.jsonl").exists()
    assert run.main(["rerun", "a", "out=b"]) == 0 and outputs("b") == outputs("a")
    assert len(json.loads(Path("b/manifest.json").read_text())["sessions"]) == 2


def test_a_sweep_is_run_again_point_by_point(make: Run, capsys: Any) -> None:
    make("s", "-m", "seed=1,2")
    assert run.main(["rerun", "s", "out=t"]) == 0
    assert [outputs(f"t/{i}") for i in (0, 1)] == [outputs(f"s/{i}") for i in (0, 1)]
    Path("s/0/manifest.json").write_text("{}")
    assert run.main(["rerun", "s", "out=u"]) == 2 and outputs("u/1") == outputs("s/1")
    assert "1 of 2 runs with an exit code other than 0: 0 (2)" in capsys.readouterr().err


def test_rows_that_fail_fail_again(make: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 2, {"id": "s", "prompt": "sick", "answer": "x"})
    make("a", code=run.FAILED)
    assert run.main(["rerun", "a", "out=b"]) == 0 and outputs("a") == outputs("b")


def test_mistakes(make: Run, capsys: Any) -> None:
    make("a")
    before = {p.name: p.read_bytes() for p in Path("a").iterdir()}
    refused(capsys, "rerun", [
        ([], "takes one run folder"),
        (["nope"], "does not exist"),
        (["a", "out=a"], "is the run itself"),
        (["a", "sampling=greedy"], "change single keys"),
        (["a", "sampling.temprature=1"], "did you mean sampling.temperature"),
        (["a", "rerun.changed=maybe"], "true or false"),
        (["a", "task._target_=os.system"], "_target_ is refused"),
        (["a", "--force"], "unknown word --force"),
    ])  # fmt: skip
    assert {p.name: p.read_bytes() for p in Path("a").iterdir()} == before
    make("b", "seed=3")
    assert run.main(["rerun", "a", "out=b"]) == 2 and "seed: 3 → 0" in capsys.readouterr().err
    rewrite(Path("a"), lambda rows: rows[0]["answers"][0].update(text="other"))
    assert run.main(["rerun", "a", "out=e"]) == 1, "what was tampered with is not what comes out"


JUNK = [None, -1, 10**30, 1.5, "", [1], {"a": 1}, True, "\ud800"]


@pytest.mark.parametrize("place", [
    ("identity",), ("identity", "config", "model.tokenizer_path"), ("identity", "config", "task.stop"),
    ("identity", "config", "numerics"), ("identity", "input"), ("identity", "input", "rows"), ("identity", "model"),
    ("identity", "versions"), ("in_force",), ("in_force", "engine"), ("in_force", "engine", "cache.page_size"),
    ("in_force", "hardware"), ("in_force", "max_input"), ("origin",), ("origin", "base"), ("origin", "choices"),
    ("origin", "overrides"), ("result",), ("result", "outputs_sha256"), ("result", "prompt_tokens"), ("sessions",),
], ids=".".join)  # fmt: skip
def test_junk_in_a_manifest_ends_typed(
    make: Run, place: tuple[str, ...], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a manifest holds: `diff`, `verify` and `rerun` end with an exit code and say why."""
    monkeypatch.setattr(engines_file, "open_engine", FakeEngine)
    make("a")
    text = Path("a/manifest.json").read_text()
    for junk in JUNK:
        record: Any = json.loads(text)
        inner = record
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = junk
        if place[:2] == ("identity", "config"):
            record["identity"]["config_sha256"] = provenance.canonical(record["identity"]["config"])
        Path("a/manifest.json").write_text(json.dumps(record))
        for words in (
            ["diff", "a", "a"],
            ["verify", "a", "verify.layouts=[permuted,preempted]"],
            ["rerun", "a", "out=z"],
        ):
            assert run.main(words) in (0, 1, 2)
            capsys.readouterr()
        shutil.rmtree("z", ignore_errors=True)
