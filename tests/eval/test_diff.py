"""`fengine diff` and what it reads: every difference is found and named, damage is told, what is good is read."""

import copy
import json
import math
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hydra")

from eval_fakes import ROWS, Run, fake_runs, next_float32, records, refused, rewrite, write_rows

from fengine import run
from fengine.errors import StorageError
from fengine.eval.runs.compare import compare, compare_row, flipped_bits, hex_bits
from fengine.eval.runs.journal import Entry, encode, scan
from fengine.eval.runs.records import Records, pairs_of, runs_of


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return fake_runs(tmp_path, monkeypatch)


def diff(capsys: Any, *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run.main(["diff", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


# -- two records -------------------------------------------------------------------------------------------------------


def answer(ids: list[int], logprobs: list[float] | None = None, text: str = "") -> dict[str, Any]:
    return {"prompt": "p", "text": text, "output_ids": ids, "logprobs": logprobs or [-0.5] * len(ids)} | {
        "finish_reason": {"type": "stop"}
    }


def row(*answers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "r", "data": {"x": 1}, "answers": list(answers), "scores": {"m": 1.0}} | more


def test_bits() -> None:
    assert hex_bits(-0.5) == "0xbf000000" and hex_bits(0.1) == "0x3fb999999999999a" and len(hex_bits(1e300)) == 18
    x, y = np.array([-0.5, 0.0, -0.5, 0.5, 1e300]), np.array([-0.5, -0.0, next_float32(-0.5), 0.1, 1e300])
    wide = bin(int.from_bytes(struct.pack(">d", 0.5), "big") ^ int.from_bytes(struct.pack(">d", 0.1), "big")).count("1")
    assert flipped_bits(x, y).tolist() == [0, 1, 1, wide, 0] and flipped_bits(x[:0], y[:0]).tolist() == []


def test_a_row_against_every_kind_of_change() -> None:
    base = row(answer([1, 2, 3], [-0.5, -0.25, -0.125], "abc"), answer([4], text="d"))
    assert compare_row(base, copy.deepcopy(base)).same

    def changed(path: list[Any], value: Any) -> Any:
        other: Any = copy.deepcopy(base)
        inner = other
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return compare_row(base, other)

    one = changed(["answers", 0, "output_ids", 1], 9)
    assert one.first_token is not None and (one.first_token.sample, one.first_token.token) == (0, 1)
    assert (one.first_token.a.token, one.first_token.b.token, one.tokens, one.logprobs) == (2, 9, 3, 2)
    bit = changed(["answers", 0, "logprobs", 2], next_float32(-0.125))
    assert bit.first_token is None and bit.first_logprob is not None and bit.first_logprob.token == 2
    assert (bit.differing_logprobs, bit.differing_bits, bit.first) == (1, 1, bit.first_logprob)
    assert bit.first_logprob.a.bits == "0xbe000000" and bit.first_logprob.b.bits == "0xbe000001"
    shorter = changed(["answers", 0], answer([1, 2], [-0.5, -0.25], "ab"))
    assert shorter.first_token is not None and shorter.first_token.token == 2 and shorter.first_token.b.token is None
    assert changed(["answers", 1, "text"], "e").other == ("text",)
    assert changed(["answers", 1, "prompt"], "q").other == ("prompt",)
    assert changed(["answers", 1, "finish_reason"], None).other == ("finish_reason",)
    assert changed(["scores", "m"], 0.0).other == ("scores",)
    assert changed(["data", "x"], 2).other == ("data",)
    assert changed(["answers"], base["answers"][:1]).other == ("number of answers",)
    failed = {"id": "r", "data": {"x": 1}, "error": {"type": "E", "message": "m"}}
    assert compare_row(base, failed).other == ("error",) and compare_row(failed, dict(failed)).same


def test_a_logprob_before_a_token_is_the_first() -> None:
    found = compare_row(row(answer([1, 2, 3], text="abc")), row(answer([1, 2, 4], [-0.5, -0.25, -0.5], text="abd")))
    assert found.first_token is not None and found.first_token.token == 2 and found.first_token.b.text == "d"
    assert found.first is found.first_logprob and found.first is not None and found.first.token == 1
    base = row(answer([1, 2]), answer([3, 4]))
    found = compare_row(base, row(answer([1, 2], [-0.5, -0.25]), answer([9, 4])))  # an earlier answer, a later token
    assert found.first is found.first_logprob and found.first_token is not None and found.first_token.token == 0
    found = compare_row(base, row(answer([1, 9]), answer([3, 4], [-0.5, -0.25])))
    assert found.first is found.first_token and found.first_logprob is not None and found.first_logprob.sample == 1
    found = compare_row(base, row(answer([1, 2], [-0.25, -0.5]), answer([3, 4], [-0.5, -0.375])))
    assert found.largest == (0.25, 0, 0)  # of all answers
    assert (
        found.first is found.first_logprob
        and found.first is not None
        and (found.first.sample, found.first.token) == (0, 0)
    )


def test_all_rows_against_brute_force() -> None:
    """Random pairs of records, counted again in the plainest way."""
    draw = random.Random(7)
    pairs: list[Any] = []
    for i in range(300):
        ids = [draw.randrange(9) for _ in range(draw.randrange(1, 8))]
        a = row(answer(ids, [-draw.random() for _ in ids]), id=f"r{i}", scores={"m": draw.random()})
        b = copy.deepcopy(a)
        kind = draw.randrange(5)
        if kind == 1:
            b["answers"][0]["output_ids"][draw.randrange(len(ids))] += draw.randrange(2)
        if kind == 2:
            b["answers"][0]["logprobs"][draw.randrange(len(ids))] -= 10.0 ** -draw.randrange(0, 12)
        if kind == 3:
            b["scores"] = {"m": draw.random()}
        pairs.append((None, b) if kind == 4 and i % 2 else (a, None) if kind == 4 else (a, b))
    found = compare(iter(pairs), keep=5)
    both = [(a, b) for a, b in pairs if a and b]
    assert found.rows == len(both) and found.differing_rows == sum(a != b for a, b in both) > 50
    assert (found.only_a, found.only_b) == (sum(b is None for _, b in pairs), sum(a is None for a, _ in pairs))
    deltas, tokens = [], 0
    for a, b in both:
        (x,), (y,) = a["answers"], b["answers"]
        for (i, p), (j, q) in zip(
            zip(x["output_ids"], x["logprobs"], strict=True),
            zip(y["output_ids"], y["logprobs"], strict=True),
            strict=True,
        ):
            if i != j:
                tokens += 1
                break
            deltas.append(abs(p - q))
    assert found.differing_tokens == tokens == found.rows_with["tokens"]
    assert found.logprobs == len(deltas) and found.differing_logprobs == sum(d > 0 for d in deltas) == sum(
        found.histogram
    )
    assert found.largest_delta == max(deltas)
    for low, high, number in found.bins():
        assert number == sum(low <= d < (high or math.inf) for d in deltas if d)
    differences = [b["scores"]["m"] - a["scores"]["m"] for a, b in both]
    assert math.isclose(found.metrics["m"].value, sum(differences) / len(differences))
    parted = [a["id"] for a, b in both if a["answers"][0]["output_ids"] != b["answers"][0]["output_ids"]]
    assert [one.id for one in found.firsts] == parted[:5] and len(parted) > 5 and len(found.only_a_ids) <= 5
    assert json.dumps(found.as_dict(), allow_nan=False)


# -- two runs ----------------------------------------------------------------------------------------------------------


def test_equal_runs(make: Run, capsys: Any) -> None:
    make("a")
    make("b", "scheduler.max_running_requests=3")
    assert run.main(["diff", "a", "b"]) == 0
    said = capsys.readouterr().out
    assert "the same: 12 rows" in said and "scheduler.max_running_requests: null → 3" in said
    code, told = diff(capsys, "a", "b")
    assert code == 0 and told["same"] and told["rows"] == ROWS and told["differing_logprobs"] == 0
    assert told["a"]["finished"] and told["a"]["outputs_sha256"] == told["b"]["outputs_sha256"]


def test_another_seed_is_named_as_the_cause(make: Run, capsys: Any) -> None:
    make("a")
    make("b", "seed=1")
    code, told = diff(capsys, "a", "b")
    assert code == 1 and not told["same"] and told["rows_with"]["sampling_seed"] == ROWS
    assert "seed: 0 → 1" in told["causes"] and told["metrics"]["exact_match"]["n"] == ROWS
    assert run.main(["diff", "a", "b", "show=2"]) == 1
    said = capsys.readouterr().out
    assert "seed: 0 → 1" in said and "more rows that differ" in said and "exact_match, B - A: +0.0000 ± 0.0000" in said
    make("one", "task.limit=1")
    assert run.main(["diff", "one", "one"]) == 0  # a single row has no error
    assert "exact_match, B - A: +0.0000 (1 row, 0 up, 0 down)" in capsys.readouterr().out


def test_a_flipped_bit_and_another_token_are_found(make: Run, capsys: Any) -> None:
    make("a")
    shutil.copytree("a", "b")

    def change(rows: list[dict[str, Any]]) -> None:
        rows[3]["answers"][0]["logprobs"][1] = next_float32(-0.25)
        rows[7]["answers"][0]["output_ids"][0] = 4

    rewrite(Path("b"), change)
    code, told = diff(capsys, "a", "b")
    assert code == 1 and told["differing_rows"] == 2 and (told["differing_logprobs"], told["differing_bits"]) == (1, 1)
    assert [one["id"] for one in told["firsts"]] == ["r7", "r3"]  # another token says more than a bit
    assert told["firsts"][1]["logprob"]["b"]["bits"] == "0xbe800001" and told["firsts"][1]["token"] is None
    assert (told["firsts"][0]["token"]["a"]["token"], told["firsts"][0]["token"]["b"]["token"]) == (5, 4)
    assert run.main(["diff", "a", "b"]) == 1
    said = capsys.readouterr().out
    assert "row 'r7', answer 0, token 0: first difference in tokens" in said and "0xbe800001" in said
    assert "should be the same" in said


def test_rows_in_another_order_and_rows_of_one_only(make: Run, capsys: Any) -> None:
    make("a")
    shutil.copytree("a", "b")
    rewrite(Path("b"), lambda rows: [rows[-1], *rows[1:-1][::-1], rows[0] | {"id": "new"}])
    code, told = diff(capsys, "a", "b")
    assert code == 1 and told["differing_rows"] == 0 and told["rows"] == ROWS - 1
    assert (told["only_a_ids"], told["only_b_ids"]) == (["r0"], ["new"])
    rewrite(Path("b"), lambda rows: [r | {"id": "r0"} if r["id"] == "new" else r for r in rows])
    assert diff(capsys, "a", "b")[0] == 0, "the order of rows is no difference"


def test_failed_rows(make: Run, capsys: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 3, {"id": "s", "prompt": "sick", "answer": "x"})
    make("a", code=run.FAILED)
    shutil.copytree("a", "b")
    assert diff(capsys, "a", "b")[0] == 0
    rewrite(Path("b"), lambda rows: rows[3]["error"].update(message="other"))
    code, told = diff(capsys, "a", "b")
    assert code == 1 and told["rows_with"] == {"error": 1}


def test_sweeps_are_compared_by_their_points(make: Run, capsys: Any) -> None:
    make("a", "-m", "seed=1,2")
    make("b", "-m", "seed=1,3")
    code, told = diff(capsys, "a", "b")
    assert code == 1 and [one["same"] for one in told["points"]] == [True, False]
    (Path("b/0/manifest.json")).write_text("{")
    assert run.main(["diff", "a", "b", "--json"]) == 2
    said = capsys.readouterr()
    assert [one["same"] for one in json.loads(said.out)["points"]] == [False] and "0 (2), 1 (1)" in said.err
    make("c", "-m", "seed=1,2,3")
    assert run.main(["diff", "a", "c"]) == 2 and "0, 1 and 0, 1, 2" in capsys.readouterr().err
    assert [path.name for path in runs_of(Path("c"))] == ["0", "1", "2"]


# -- damage ------------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_of_outputs_is_told_and_the_rest_is_read(make: Run) -> None:
    make("a")
    good = (Path("a") / "outputs.jsonl").read_bytes()
    wanted = records(Path("a/outputs.jsonl"))
    draw = random.Random(3)
    for place in [*range(0, 40), *draw.sample(range(len(good)), 150), good.index(b"\n"), len(good) - 1]:
        data = bytearray(good)
        data[place] ^= 1 << draw.randrange(8)
        Path("a/outputs.jsonl").write_bytes(data)
        with Records(Path("a")) as found:
            assert found.damaged and not found.vouched and "another SHA-256" in found.notes[0]
            ids = [found.record(i)["id"] for i in range(len(found))]
        kept = [record["id"] for record in wanted if record["id"] in ids]
        assert [one for one in ids if one in kept] == kept and len(kept) >= ROWS - 1
    for cut in draw.sample(range(len(good)), 40):
        Path("a/outputs.jsonl").write_bytes(good[:cut])
        with Records(Path("a")) as found:
            assert found.damaged and [found.record(i) for i in range(len(found))] == wanted, "the journal has the rest"
    for wrong in (b"NaN", b"-Infinity", b"1e999", b"true", b"null", b'"x"', b"9" * 400):
        Path("a/outputs.jsonl").write_bytes(good.replace(b"-0.25", wrong, 1))
        with Records(Path("a")) as found:
            assert [found.record(i) for i in range(len(found))] == wanted, wrong
    Path("a/journal.log").unlink()
    lines = good.splitlines(keepends=True)
    Path("a/outputs.jsonl").write_bytes(lines[0] + b"{broken\n" + b"".join(lines[2:]))
    with Records(Path("a")) as found:
        assert [found.record(i)["id"] for i in range(len(found))] == ["r0", *(f"r{i}" for i in range(2, ROWS))]
        assert any("line 2 (byte" in note for note in found.notes) and "11 of 12 rows" in found.notes[-1]


@pytest.mark.parametrize("vouched", [True, False])
def test_a_changed_digit_that_the_journal_contradicts_is_damage(make: Run, vouched: bool, capsys: Any) -> None:
    """Also where whoever changed it has written the new SHA-256 into the manifest."""
    make("a")
    shutil.copytree("a", "b")
    journal, manifest = (Path("b", name).read_bytes() for name in ("journal.log", "manifest.json"))
    rewrite(Path("b"), lambda rows: rows[4]["answers"][0]["logprobs"].__setitem__(1, -0.26))
    Path("b/journal.log").write_bytes(journal)
    if not vouched:
        Path("b/manifest.json").write_bytes(manifest)
    with Records(Path("b")) as found:
        assert found.damaged and found.vouched == vouched and len(found) == ROWS
        assert "outputs.jsonl and journal.log hold different records of row 5" in found.notes
    code, told = diff(capsys, "a", "b")
    assert code == 1 and told["b"]["damaged"] and not told["a"]["damaged"] and told["differing_rows"] == 1
    assert run.main(["diff", "b", "b"]) == 1 and "different records of row 5" in capsys.readouterr().out
    assert run.main(["verify", "b", "verify.layouts=permuted"]) == 1
    assert "note: outputs.jsonl and journal.log hold different records of row 5" in capsys.readouterr().out
    assert run.main(["report", "b"]) == 0 and "different records of row 5" in Path("b/report.html").read_text()


def test_rows_that_came_after_the_end_are_no_damage(make: Run, tmp_path: Path) -> None:
    """Rows that failed were computed again, and the process died before it wrote the files of the end."""
    write_rows(tmp_path / "rows.jsonl", 3, {"id": "s", "prompt": "sick", "answer": "x"})
    make("a", code=run.FAILED)
    good = [entry for entry in scan(Path("a/journal.log")) if isinstance(entry, Entry)]
    with Path("a/journal.log").open("ab") as file:
        failed = next(entry for entry in good if entry.head[0] == 3)
        file.write(encode([3, 1, *failed.head[2:]], good[1].record.replace(b'"r0"', b'"s"')))
    with Records(Path("a")) as found:
        assert found.vouched and not found.damaged and not found.notes


def test_an_unfinished_run_is_read_from_its_journal(make: Run, capsys: Any) -> None:
    make("a")
    shutil.copytree("a", "b")
    Path("b/outputs.jsonl").unlink()
    record = json.loads(Path("b/manifest.json").read_text())
    Path("b/manifest.json").write_text(json.dumps(record | {"result": None}))
    lines = Path("b/journal.log").read_bytes().splitlines(keepends=True)
    Path("b/journal.log").write_bytes(b"".join(lines[:6]) + lines[6][:30])
    code, told = diff(capsys, "a", "b")
    assert code == 1 and told["rows"] == 5 and told["only_a"] == ROWS - 5 and not told["b"]["damaged"]
    assert told["differing_rows"] == 0 and told["b"]["notes"] == [
        "the run has not come to its end",
        "5 of 12 rows are there",
    ]
    Path("b/journal.log").write_bytes(b"".join(lines[:3]) + lines[3].replace(b"r", b"R", 1) + b"".join(lines[4:]))
    code, told = diff(capsys, "a", "b")
    assert (
        code == 1
        and told["only_a"] == 1
        and told["b"]["damaged"]
        and "journal.log is damaged" in str(told["b"]["notes"])
    )


def test_what_is_no_run(make: Run, capsys: Any) -> None:
    make("a")
    Path("empty").mkdir()
    refused(capsys, "diff", [
        (["a"], "takes two run folders"),
        (["a", "nope"], "does not exist"),
        (["a", "a/outputs.jsonl"], "is a file"),
        (["a", "empty"], "no run's folder"),
        (["a", "a", "shw=1"], "did you mean show"),
        (["a", "a", "show=-1"], "show=-1: must be from 0"),
    ])  # fmt: skip
    for text in ("", "{", "[]", '{"fengine_manifest": 99}', '{"fengine_manifest": 1, "identity": {}}', "[" * 100_000):
        shutil.copytree("a", "b")
        Path("b/manifest.json").write_text(text)
        assert run.main(["diff", "a", "b"]) == 2 and "manifest.json" in capsys.readouterr().err
        shutil.rmtree("b")
    shutil.copytree("a", "b")
    text = Path("b/manifest.json").read_text()
    Path("b/manifest.json").write_text(text.replace('"sampling.top_p": 1.0', '"sampling.top_p": 0.5'))
    assert run.main(["diff", "a", "b"]) == 2 and "config_sha256" in capsys.readouterr().err
    record = json.loads(text)
    record["result"]["journal_bytes"] = [0]
    Path("b/manifest.json").write_text(json.dumps(record))
    assert run.main(["diff", "a", "b"]) == 2 and "result.journal_bytes is [0]" in capsys.readouterr().err
    Path("b/manifest.json").write_text(text.replace('"code_sha256": "one"', '"code_sha256": "two"'))
    Path("b/outputs.jsonl").unlink()
    with Records(Path("b")) as found:
        assert found.damaged and any("not of the same run" in note for note in found.notes)
    Path("b/journal.log").unlink()
    with pytest.raises(StorageError, match="holds no record"):
        Records(Path("b"))


def test_pairs_do_not_depend_on_luck_with_keys(make: Run) -> None:
    """A thousand permutations of few rows: the pairs are those of a dictionary."""
    make("a")
    shutil.copytree("a", "b")
    draw = random.Random(1)
    for _ in range(20):
        wanted = draw.sample(records(Path("a/outputs.jsonl")), draw.randrange(1, ROWS + 1))
        rewrite(Path("b"), lambda _, wanted=wanted: wanted)
        with Records(Path("a")) as a, Records(Path("b")) as b:
            pairs = list(pairs_of(a, b))
            mine = {a.record(i)["id"]: a.record(i) for i in range(len(a))}
        its = {record["id"]: record for record in wanted}
        assert [(x and x["id"], y and y["id"]) for x, y in pairs] == [(i, i if i in its else None) for i in mine]
        assert all(y == its[y["id"]] for _, y in pairs if y)
