"""Shards of a run: each a run of its own; merged they are the unsharded run, byte for byte."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from eval_fakes import FakeEngine, fake_engines, records, write_rows

from fengine import run
from fengine.errors import ConfigError
from fengine.eval.commands import merge
from fengine.eval.runs import manifest
from fengine.eval.runs.config import parse_shard

WORDS = ["task=jsonl", "task.data=rows.jsonl", "task.match=exact", "task.target=answer", "compile=none", "view=quiet"]


@pytest.fixture(autouse=True)
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    return fake_engines(tmp_path, monkeypatch)


def cli(*words: str) -> int:
    return run.main(["eval", *WORDS, *words])


def split(shards: int, *words: str, rows: int = 11) -> list[str]:
    """A run and its shards, in the folders whole and s1, s2, ..."""
    write_rows(Path("rows.jsonl"), rows, {"prompt": "sick", "answer": ""}, {"id": "z", "answer": "no prompt"})
    with Path("rows.jsonl").open("ab") as file:
        file.write(b"\nnot json\n")
    assert cli("out=whole", *words) == run.FAILED
    for number in range(1, shards + 1):
        assert cli(f"out=s{number}", f"run.shard={number}/{shards}", *words) in (run.OK, run.FAILED)
    return [f"s{number}" for number in range(1, shards + 1)]


def read(path: str) -> Any:
    return json.loads(Path(path).read_text())


@pytest.mark.parametrize("shards", [1, 2, 3, 20])
def test_merged_shards_are_the_run(shards: int, engines: list[FakeEngine]) -> None:
    folders = split(shards, "seed=7", "sampling.temperature=0.9")
    parts = [records(Path(folder, "outputs.jsonl")) for folder in folders]
    whole = records(Path("whole/outputs.jsonl"))
    assert [row["id"] for row in parts[0]] == [row["id"] for row in whole[::shards]], "every n-th row"
    assert sum(map(len, parts)) == len(whole) == 14
    assert run.main(["merge", "m", *reversed(folders)]) == run.FAILED
    for name in ("outputs.jsonl", "metrics.json"):
        assert Path("m", name).read_bytes() == Path("whole", name).read_bytes()
    merged, alone = read("m/manifest.json"), read("whole/manifest.json")
    assert merged["identity"] == alone["identity"] and merged["in_force"] == alone["in_force"]
    assert {k: v for k, v in merged["result"].items() if k not in ("row_seconds", "journal_bytes")} == {
        k: v for k, v in alone["result"].items() if k not in ("row_seconds", "journal_bytes")
    }
    assert "run.shard" not in json.dumps(merged["origin"]) and merged["origin"]["base"] == alone["origin"]["base"]
    assert run.main(["diff", "whole", "m"]) == run.OK
    config = Path("m/config.yaml").read_text()
    assert (
        config.partition("\nout: ")[2].splitlines()[1:]
        == Path("whole/config.yaml").read_text().partition("\nout: ")[2].splitlines()[1:]
    )
    sessions = {row["session"] for row in records(Path("m/timings.jsonl"))}
    assert sessions == set(range(1, len(merged["sessions"]) + 1)) and merged["merged"][0]["shard"] == f"1/{shards}"
    before = Path("m/journal.log").read_bytes()
    assert run.main(["merge", "m", *folders]) == run.FAILED, "again"
    opened = len(engines)
    assert cli("out=m", "seed=7", "sampling.temperature=0.9") == run.FAILED, "goes on: what failed, once more"
    assert len(engines) == opened + 1 and engines[-1].prompts == ["sick"]
    assert Path("m/outputs.jsonl").read_bytes() == Path("whole/outputs.jsonl").read_bytes()
    assert Path("m/journal.log").read_bytes().startswith(before)


def test_a_sweep_of_shards(capsys: pytest.CaptureFixture[str]) -> None:
    split(1)
    assert cli("-m", "out=s", "run.shard=1/3,2/3,3/3") == run.FAILED
    assert run.main(["merge", "m", "s"]) == run.FAILED
    assert Path("m/outputs.jsonl").read_bytes() == Path("whole/outputs.jsonl").read_bytes()
    assert "m: 14 rows, 3 failed, of 3 shards" in capsys.readouterr().out


def test_an_interrupted_shard_and_an_interrupted_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = split(2)
    data = Path("s2/journal.log").read_bytes()
    shutil.rmtree("s2")
    assert cli("out=s2", "run.shard=2/2", "max_errors=0") == run.FAILED and not Path("s2/outputs.jsonl").exists()
    assert run.main(["merge", "m", *folders]) == run.USAGE and not Path("m").exists()
    assert cli("out=s2", "run.shard=2/2") == run.FAILED
    assert Path("s2/journal.log").read_bytes() != data, "another order, other times"

    class Crash(BaseException): ...

    def crash(*_: Any) -> Any:
        raise Crash

    for name in ("_weave", "finish"):
        with monkeypatch.context() as patch:
            patch.setattr(merge, name, crash)
            with pytest.raises(Crash):
                run.main(["merge", "m", *folders])
    assert run.main(["merge", "m", *folders]) == run.FAILED
    assert Path("m/outputs.jsonl").read_bytes() == Path("whole/outputs.jsonl").read_bytes()


def test_junk_beside_a_shards_identity_and_a_changed_result(
    engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    split(1)
    good = read("s1/manifest.json")
    for number, junk in enumerate((None, 7, [None], [{}], ["run.shard=1/1", 3])):
        Path("s1/manifest.json").write_text(json.dumps(good | {"origin": good["origin"] | {"overrides": junk}}))
        assert run.main(["merge", f"m{number}", "s1"]) == run.FAILED, "merged, with the rows that failed"
    metrics = Path("m4/metrics.json").read_bytes()
    for change in (b"{}", b"", metrics.replace(b"1", b"2")):
        Path("m4/metrics.json").write_bytes(change)
        capsys.readouterr()
        assert run.main(["merge", "m4", "s1"]) == run.USAGE and "metrics.json is damaged" in capsys.readouterr().err
    assert cli("out=m4") == run.FAILED and Path("m4/metrics.json").read_bytes() == metrics


def test_shards_that_make_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    split(3)
    assert cli("out=other", "run.shard=2/3", "seed=5") == run.FAILED
    assert cli("out=half", "run.shard=2/2") == run.FAILED
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text() + '{"prompt": "more", "answer": ""}\n')
    assert cli("out=longer", "run.shard=2/3") == run.FAILED
    shutil.copytree("s1", "flipped")
    journal = bytearray(Path("flipped/journal.log").read_bytes())
    journal[len(journal) // 2] ^= 1
    Path("flipped/journal.log").write_bytes(journal)
    shutil.copytree("s1", "lies")
    Path("lies/manifest.json").write_text(Path("s1/manifest.json").read_text().replace('"seed": 0', '"seed": 1'))
    shutil.copytree("s1", "shorter")
    Path("shorter/journal.log").write_bytes(b"".join(Path("s1/journal.log").read_bytes().splitlines(True)[:-1]))
    shutil.copytree("s1", "stranger")
    shutil.copy("s2/journal.log", "stranger")
    for shards, said in [
        ("s1 s3", "shard 2/3 is missing"),
        ("s1 s2 s3 s2", "shard 2/3 is there twice: s2 and s2"),
        ("s1 other s3", "other is not of the same run as s1:\n  seed: 0 → 5"),
        ("s1 longer s3", "input.rows: 14 → 15"),
        ("s1 half", "half is shard 2/2, s1 is 1/3"),
        ("s1 s2 whole", "whole is no shard of a run: its run.shard is null"),
        ("s1 s2 nope", "nope does not exist"),
        ("s1 s2 rows.jsonl", "is a file"),
        ("flipped s2 s3", "flipped/journal.log is damaged at byte"),
        ("lies s2 s3", "its config is not that of its config_sha256"),
        ("shorter s2 s3", "shorter/journal.log lacks row"),
        ("stranger s2 s3", "is not the journal of manifest.json beside it"),
        ("", "takes a new folder and the shards"),
    ]:
        assert run.main(["merge", "m", *shards.split()]) == run.USAGE
        assert said in (err := capsys.readouterr().err) and "Traceback" not in err, (shards, err)
        assert not Path("m").exists()
    assert run.main(["merge", "whole", "s1", "s2", "s3"]) == run.USAGE
    assert "holds another run" in capsys.readouterr().err
    assert run.main(["merge", "--help"]) == run.OK and "Exit codes" in capsys.readouterr().out


def test_what_a_shard_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert [parse_shard(text) for text in (None, "1/1", "2/4")] == [None, (0, 1), (1, 4)]
    for text in ("0/4", "5/4", "1", "a/b", "1/0", "-1/4", "1/4/2", "1.5/4", "", "1 /4", "9999999/9999999"):
        with pytest.raises(ConfigError, match="run.shard must be i/n"):
            parse_shard(text)
    write_rows(Path("rows.jsonl"), 3, {"id": "r1", "prompt": "again", "answer": ""})
    assert cli("run.shard=0/2") == run.USAGE and "run.shard must be i/n" in capsys.readouterr().err
    assert cli("run.shard=1/2", "out=a") == run.USAGE, "found in every shard"
    assert "'r1': rows 2 and 4" in capsys.readouterr().err
    write_rows(Path("rows.jsonl"), 4)
    assert cli("run.shard=1/2", "out=b") == run.OK
    assert cli("run.shard=2/2", "out=b") == run.USAGE
    assert 'run.shard: "1/2" → "2/2"' in capsys.readouterr().err


# -- code that has changed ---------------------------------------------------------------------------------------------


def test_a_change_of_our_code_is_refused_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(Path("rows.jsonl"), 6, {"prompt": "sick", "answer": ""})
    assert cli("out=a") == run.FAILED
    before = Path("a/journal.log").read_bytes()
    monkeypatch.setattr(manifest, "code_digest", lambda: "two")
    assert cli("out=a") == run.USAGE
    said = capsys.readouterr().err
    assert 'code_sha256: "one" → "two"' in said and "resume.allow_code_change=true goes on all the same" in said
    assert cli("out=a", "resume.allow_code_change=true", "seed=1") == run.USAGE, "nothing else is let through"
    assert "seed: 0 → 1" in (said := capsys.readouterr().err) and "allow_code_change" not in said
    assert cli("out=a", "resume.allow_code_change=true") == run.FAILED
    record = read("a/manifest.json")
    assert record["identity"]["code_sha256"] == "one", "the run is the one that began"
    assert [session["code_sha256"] for session in record["sessions"]] == ["one", "two"]
    assert Path("a/journal.log").read_bytes().startswith(before)
    assert cli("out=a") == run.USAGE, "each time"
    monkeypatch.setattr(manifest, "code_digest", lambda: "one")
    assert cli("out=a", "resume.allow_code_change=true") == run.FAILED
