"""The manifest: what results depend on is in it, and a run goes on only under the same."""

import dataclasses
import hashlib
import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from eval_fakes import FakeEngine, write_rows

from fengine import run
from fengine.config import ModelConfig
from fengine.errors import ResumeMismatchError
from fengine.eval.cli import engines as engines_file
from fengine.eval.cli.schema import flat
from fengine.eval.runs import manifest, provenance
from fengine.eval.runs.config import FREE, EvalConfig, JournalConfig, Trace, check
from fengine.eval.runs.manifest import differences, settings
from fengine.eval.runs.provenance import canonical, model_digests


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_differences_name_every_leaf() -> None:
    old = {"config": {"seed": 1, "sampling.top_p": 1.0}, "config_sha256": "a", "input": {"rows": 3, "sha256": "x"}}
    new = {"config": {"seed": 2, "sampling.top_p": 1.0}, "config_sha256": "b", "input": {"rows": 3}, "more": None}
    assert differences(old, new) == ["seed: 1 → 2", 'input.sha256: "x" → null']
    assert differences(old, old) == []
    with pytest.raises(ResumeMismatchError, match="seed: 1 → 2"):
        manifest.refuse_differences(old, new, Path("f"))


def test_settings_are_all_but_the_free_ones() -> None:
    config = EvalConfig()
    assert {key.partition(".")[0] for key in flat(config)} - {key.partition(".")[0] for key in settings(config)} == set(
        FREE
    )
    free: dict[str, Any] = {"out": "x", "show": 9, "max_errors": 1, "trace": Trace.off}
    assert settings(dataclasses.replace(config, journal=JournalConfig(0.0, 1), **free)) == settings(config)
    assert canonical(settings(config)) != canonical(settings(dataclasses.replace(config, seed=1)))
    json.dumps(flat(config))


def test_canonical_is_independent_of_order() -> None:
    assert canonical({"a": 1, "b": [1.5, None]}) == canonical({"b": [1.5, None], "a": 1})


def test_files_of_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "a.safetensors", "tokenizer.json", "notes.txt"):
        (folder / name).write_text(name)
    (folder / "chat_template.jinja").write_text("{{ x }}")
    first = model_digests(ModelConfig(path=str(folder)))["files"]
    assert set(first) == {"config.json", "a.safetensors", "tokenizer.json", "chat_template.jinja", "chat template"}
    assert model_digests(ModelConfig(path=str(folder)))["files"] == first, "from the cache"
    (folder / "a.safetensors").write_text("A.safetensors")
    os.utime(folder / "a.safetensors", ns=(1, 1))
    changed = model_digests(ModelConfig(path=str(folder)))["files"]
    assert {name for name in first if first[name] != changed[name]} == {"a.safetensors"}
    (tmp_path / "cache" / "fengine" / "sha256.json").write_text("[broken")
    assert model_digests(ModelConfig(path=str(folder)))["files"] == changed
    assert "files" not in model_digests(ModelConfig(path="some/hub-id", revision="v1"))
    box = model_digests(ModelConfig())["files"]
    assert box["model.safetensors"] and box["chat template"]


def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(engines_file, "open_engine", FakeEngine)
    write_rows(tmp_path / "rows.jsonl", 3)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"one")
    words = ["eval", "task=jsonl", "task.data=rows.jsonl", "view=quiet", "out=a", f"model.path={folder}"]
    assert run.main(words) == run.OK
    (folder / "model.safetensors").write_bytes(b"two")
    assert run.main(words) == run.USAGE
    assert "model.files.model.safetensors" in capsys.readouterr().err


def test_another_machine_is_refused_once_the_engine_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(engines_file, "open_engine", FakeEngine)
    write_rows(tmp_path / "rows.jsonl", 3, {"id": "s", "prompt": "sick"})
    words = ["eval", "task=jsonl", "task.data=rows.jsonl", "view=quiet", "out=a"]
    assert run.main(words) == run.FAILED
    before = (tmp_path / "a" / "journal.log").read_bytes()
    monkeypatch.setattr(manifest, "cpu_name", lambda: "another")
    assert run.main(words) == run.USAGE
    assert 'in_force.hardware.cpu: "' in (said := capsys.readouterr().err) and '→ "another"' in said
    assert (tmp_path / "a" / "journal.log").read_bytes() == before


def test_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_file, "open_engine", FakeEngine)
    write_rows(tmp_path / "rows.jsonl", 3)
    words = ["task=jsonl", "task.data=rows.jsonl", "view=quiet", "out=a", "seed=5", "scheduler.record=steps.jsonl"]
    assert run.main(["eval", *words]) == run.OK
    record = json.loads((tmp_path / "a" / "manifest.json").read_text())
    identity = record["identity"]
    assert identity["config_sha256"] == canonical(identity["config"]) and identity["seeds"]["run_seed"] == 5
    assert identity["versions"]["torch"] and len(identity["code_sha256"]) == len(identity["input"]["sha256"]) == 64
    assert record["in_force"]["numerics"] == "exact" and record["in_force"]["engine"]["cache.page_size"] == 16
    for engine in (record["in_force"]["engine"], identity["config"]):  # what is left of a run has another file for it
        assert engine["scheduler.record"] is None
    assert record["surroundings"]["packages"] and record["sessions"][0]["argv"][0] == "task=jsonl"
    assert (tmp_path / "a" / "config.yaml").read_text().startswith("model:\n  path: box\n")


def test_the_record_tells_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_file, "open_engine", FakeEngine)
    write_rows(tmp_path / "rows.jsonl", 3, {"id": "s", "prompt": "sick"})
    words = ["task=jsonl", "task.data=rows.jsonl", "view=quiet", "out=a"]
    assert run.main(["eval", *words]) == run.FAILED
    record = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert record["origin"]["base"] == str(tmp_path) and record["origin"]["choices"]["task"] == "jsonl"
    assert record["origin"]["overrides"] == words and record["sessions"][0]["cwd"] == str(tmp_path)
    assert record["in_force"]["max_input"] == 8 and record["sessions"][0]["seconds"] >= 0.0
    run_id, whole = record["origin"]["run_id"], hashlib.sha256()
    for line in (tmp_path / "a" / "outputs.jsonl").read_text().splitlines():
        row = json.loads(line)
        whole.update(row["id"].encode() + b"\0")
        for one in row.get("answers", []):
            for kind, values in (("q", [2, 2]), ("q", one["output_ids"]), ("d", one["logprobs"])):
                whole.update(b"".join(struct.pack(f">{kind}", value) for value in values))
    assert record["result"]["bits_sha256"] == whole.hexdigest()
    assert run.main(["eval", *words, "show=1"]) == run.FAILED
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["origin"]["run_id"] == run_id


def test_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "repo" / "fengine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("1")
    (tmp_path / "repo" / "pyproject.toml").write_text("")
    monkeypatch.setattr(provenance.fengine, "__file__", str(package / "__init__.py"))
    assert provenance.checkout.__wrapped__() is None, "no checkout"

    def git(*words: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        done = subprocess.run(["git", *who, *words], cwd=package, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q", "..")
    assert provenance.checkout.__wrapped__() is None, "no commit"
    git("add", "-A", "..")
    git("commit", "-qm", "x")
    clean = {"commit": git("rev-parse", "HEAD"), "dirty": False, "change_sha256": None}
    assert provenance.checkout.__wrapped__() == clean
    digests = set()
    for text in ("2", "3"):
        (package / "__init__.py").write_text(text)
        found = provenance.checkout.__wrapped__()
        assert found is not None and found["dirty"] and found["commit"] == clean["commit"]
        digests.add(found["change_sha256"])
    assert len(digests) == 2
    canary = tmp_path / "canary"
    git("config", "core.fsmonitor", f"touch {canary}")
    git("config", "diff.external", f"touch {canary}")
    assert provenance.checkout.__wrapped__() is not None and not canary.exists()
    monkeypatch.setattr(provenance, "GIT_SECONDS", 0.0)
    assert provenance.checkout.__wrapped__() is None, "too slow"
    monkeypatch.setattr(provenance, "GIT_SECONDS", 5.0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.checkout.__wrapped__() is None, "no git"


def test_every_problem_of_a_config_is_told() -> None:
    config = EvalConfig(show=-1, journal=JournalConfig(-1.0, 0), out=" ")
    told = "\n".join(check(config))
    for word in ("show", "journal.sync_seconds", "journal.sync_rows", "out"):
        assert word in told


def test_a_package_that_computes_nothing_may_change() -> None:
    old, new = ({"versions": {"torch": "2", "transformers": version}} for version in ("5.0", None))
    assert differences(old, new) == [] != differences(old, {"versions": {"torch": "3"}})
    assert differences({"versions": {"fengine": "1"}}, {"versions": {"fengine": "2"}})


def test_settings_that_came_later_have_their_defaults() -> None:
    """A run goes on although its manifest is older than a key, as long as the key says what was so before."""
    now = settings(EvalConfig())
    old = {"config": {key: value for key, value in now.items() if key != "model.is_embedding"}}
    known = manifest.completed(old, "config", now)
    assert differences(old, {"config": now}) and differences(known, {"config": now}) == []
    assert differences(known, {"config": now | {"model.is_embedding": True}}) == ["model.is_embedding: false → true"]
    assert manifest.completed({"engine": None}, "engine", now) == {"engine": None}
