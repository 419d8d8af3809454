"""`fengine report`: its data against brute force over outputs.jsonl, and the page against hostile texts. No browser."""

import hashlib
import json
import math
import os
import re
import shutil
from array import array
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from checksum import checksum_engine
from eval_fakes import FakeEngine, records, write_rows

from fengine import Engine, run
from fengine.eval.cli import engines as engines_file
from fengine.eval.commands import evaluate
from fengine.eval.report import facts, schedule
from fengine.eval.report import rows as report_rows
from fengine.eval.report import sweep as report_sweep
from fengine.eval.report.facts import figures, script_json, size
from fengine.eval.report.page import page, report_data, texts
from fengine.eval.runs.config import SamplingConfig
from fengine.eval.runs.trace import Trace
from fengine.eval.tasks import statistics
from fengine.worker import hub

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\u2028\u2029]]>",
    "<img src=x onerror=alert(1)>",
    "&lt;/script&gt; \\u003c \" '",
    "漢字 🎉 \x7f",
]


class Parsed(HTMLParser):
    """What a browser would see: elements with their attributes, and the text of each script and style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = f"{tag} {dict(attrs).get('id', '')}".strip()

    def handle_data(self, data: str) -> None:
        self.texts[self._inside] = self.texts.get(self._inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def data_in(path: Path) -> dict[str, Any]:
    return json.loads(Parsed(path.read_text(encoding="utf-8")).texts["script data"])


def run_words(*words: str) -> int:
    fixed = ["task=jsonl", "task.data=rows.jsonl", "task.match=prefix", "task.target=answer", "view=quiet"]
    return evaluate.main([*words[:1], *fixed, *words[1:]] if words[0] == "-m" else [*fixed, *words])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an input and the finished run `a` of it: 12 rows, one that fails, one right, one hostile."""
    folder = tmp_path_factory.mktemp("made")
    extra = [{"id": "ill", "prompt": "sick", "answer": "x"}, {"id": "ok", "prompt": "abc", "answer": "cba"}]
    write_rows(folder / "rows.jsonl", 12, *extra, {"id": "hostile", "prompt": "".join(HOSTILE), "answer": "x"})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(engines_file, "open_engine", FakeEngine)
        assert run_words("out=a") == run.FAILED
    return folder


@pytest.fixture
def cli(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Evaluations in a folder that has a copy of `made`."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engines_file, "open_engine", FakeEngine)
    return run_words


# -- a run -------------------------------------------------------------------------------------------------------------


def test_a_run_against_its_records(cli: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["report", "a"]) == 0 and "report.html" in capsys.readouterr().out
    found = data_in(Path("a/report.html"))["run"]
    truth = records(Path("a/outputs.jsonl"))
    metrics = json.loads(Path("a/metrics.json").read_text())
    assert (found["rows"], found["here"], found["finished"]) == (15, 15, True) and found["score"] == "prefix_match"
    right = sum(r["scores"]["prefix_match"] for r in truth if "scores" in r)
    assert found["counts"] == {"failed": 1, "wrong": 14 - right, "right": right, "scored": 0} and right > 0
    value, error = (metrics["metrics"]["prefix_match"][k] for k in ("value", "stderr"))
    (shown,) = found["metrics"]
    assert math.isclose(error, math.sqrt(value * (1 - value) / 13)) and shown["value"] == round(value, 12)
    for edge in (shown["low"], shown["high"]):  # Wilson's: where the share is just at the edge of its own interval
        assert math.isclose(abs(value - edge), 1.959963984540054 * math.sqrt(edge * (1 - edge) / 14), rel_tol=1e-9)
    items = found["rows_here"]["items"]
    assert [(i["n"], i["i"]) for i in items] == [(n, r["id"]) for n, r in enumerate(truth)]
    for item, record in zip(items, truth, strict=True):
        assert item["s"] == (0 if "error" in record else 2 if record["scores"]["prefix_match"] else 1)
        for answer, said in zip(item["a"], record.get("answers", ()), strict=True):
            assert (item["p"][answer["p"]], answer["t"], answer["k"]) == (
                said["prompt"],
                said["text"],
                said["output_ids"],
            )
            assert answer["l"] == [round(lp, 4) for lp in said["logprobs"]] and answer["seed"] == str(
                said["sampling_seed"]
            )
    assert items[12]["e"] == ["ContextLengthError", "too long"]
    recorded = json.loads(Path("a/manifest.json").read_text())
    assert found["totals"]["outputs_sha256"] == recorded["result"]["outputs_sha256"]
    told = {k: v for _, pairs in found["facts"] for k, v in pairs}
    assert told["seed"] == "0" if "seed" in told else told["run_seed"] == "0"
    assert told["code_sha256"] == recorded["identity"]["code_sha256"]
    assert found["commands"][0][1].startswith("fengine eval task=jsonl") and found["verify"] is None
    assert "there is no trace.json" not in str(found["schedule"]["notes"])
    brief, read, drawn = dict(found["brief"]), *(recorded["result"][f"{n}_tokens"] for n in ("prompt", "completion"))
    assert brief["Sampling"] == "greedy, at most 128 new tokens" and brief["Seed"] == "0" and "Time" in brief
    assert brief["Tokens"] == f"{read:,} in, {drawn:,} out" and "tokens/s" in brief["Speed"]
    assert found["target"] == "answer" and found["model"] in brief["Model"]
    before = {p.name: p.read_bytes() for p in Path("a").iterdir()}
    assert run.main(["report", "a", "out=other.html"]) == 0  # writes nothing into the run
    assert {p.name: p.read_bytes() for p in Path("a").iterdir()} == before


def test_a_page_to_be_sent_tells_no_paths_of_its_machine(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    cli(
        "--config-dir",
        f"{tmp_path}/conf",
        f"out={tmp_path}/inside/c",
        f"model.tokenizer_path={tmp_path.parent}/tok/box",
    )
    os.chdir(tmp_path / "inside")
    assert run.main(["report", "c"]) == 0
    page = Path("c/report.html").read_text()
    assert "fengine rerun c" in page and "out=c" in page and "…/box" in page
    assert str(tmp_path) not in page and str(tmp_path.parent) not in page
    (tmp_path / "away").mkdir()
    os.chdir(tmp_path / "away")
    assert run.main(["report", "../inside/c", "out=c.html"]) == 0
    page = Path("c.html").read_text()
    assert "fengine rerun c" in page and ", typed where the run's folder lies" in page
    assert "rerun …" not in page and str(tmp_path) not in page


def test_a_picture_in_a_column_is_told_by_its_bytes() -> None:
    record = {
        "id": "r",
        "data": {"picture": [{"image": "data:image/png;base64," + "A" * 400, "alt": "short"}]},
        "scores": {},
    }
    ((_, text),) = report_rows.item(record, 0)["d"]
    assert json.loads(text) == [{"image": "data:image/png;base64,… (300 bytes)", "alt": "short"}]


def test_an_unfinished_run_shows_what_is_journaled(cli: Any) -> None:
    cli("out=c", "max_errors=0")
    whole = report_data([Path("c")])["run"]
    assert not whole["finished"] and whole["here"] < whole["rows"] == 15
    shutil.copytree("a", "b")
    Path("b/outputs.jsonl").unlink()
    (Path("b/manifest.json")).write_text(Path("b/manifest.json").read_text().replace('"result": {', '"resulted": {'))
    shown = report_data([Path("b")])["run"]
    assert shown["here"] == 15 and not shown["finished"] and "not come to its end" in str(shown["notes"])


@pytest.mark.parametrize("name", ["metrics.json", "timings.jsonl", "trace.json", "verify.json", "config.yaml"])
@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\x00{",
        b"[1, 2",
        b'{"metrics": 7, "rows": [NaN], "sessions": 3}',
        b'{"metrics": {"m": {"value": -1e308, "stderr": 1e308, "n": 1%b}}, "row": 0, "seconds": 1%b}'
        % ((b"0" * 400,) * 2),
        b"null",
    ],
)
def test_damaged_files_beside_the_records_cost_themselves(cli: Any, name: str, damage: bytes) -> None:
    Path("a", name).write_bytes(damage)
    assert run.main(["report", "a"]) == 0
    assert len(data_in(Path("a/report.html"))["run"]["rows_here"]["items"]) == 15


def test_runs_without_rows_without_trace_and_all_failed(cli: Any) -> None:
    big_run(Path("none"), Path("a"), 0, 0)
    Path("none/trace.json").unlink()
    empty = report_data([Path("none")])["run"]
    assert empty["rows_here"]["items"] == [] and "trace=off" in str(empty["schedule"]["notes"])
    Path("rows.jsonl").write_text('{"id": "x", "prompt": "sick", "answer": "x"}\n')
    cli("out=bad")
    assert report_data([Path("bad")])["run"]["counts"]["failed"] == 1
    for folder in ("none", "bad"):
        assert run.main(["report", folder]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "takes one folder or two"),
        (["nowhere"], "does not exist"),
        (["rows.jsonl"], "is a file"),
        (["empty"], "is no run's folder"),
        (["a", "rows=-1"], "rows=-1"),
        (["a", "colour=red"], "unknown word"),
        (["a", "out=no/such/folder/x.html"], "cannot be written"),
        (["a", "a", "a"], "takes one folder or two"),
        (["a", "s"], "is a sweep"),
    ],
)
def test_what_is_refused(cli: Any, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s").mkdir()
    shutil.copytree("a", "s/0")
    Path("empty").mkdir()
    capsys.readouterr()
    assert run.main(["report", *words]) == 2 and said in capsys.readouterr().err
    assert not list(Path("a").glob("*.html")) and not list(Path("a").glob(".*html*"))


# -- which rows, and how much of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("score", "kind"), [(True, 2), (1.0, 2), (0.5, 1), (0, 1), ("a", 3)])
def test_a_row_is_right_where_all_its_samples_are(score: Any, kind: int) -> None:
    assert report_rows.kind_of({"scores": {"exact_match": score}}) == kind


@pytest.mark.parametrize("score", ["judged", "found"])
def test_a_row_without_a_verdict_is_not_wrong(score: str) -> None:
    assert report_rows.kind_of({"scores": {score: False}}) == report_rows.SCORED


def test_rows_are_chosen_by_kind_and_evenly() -> None:
    kinds = [0] * 10 + [1] * 3000 + [2] * 90_000
    kept = report_rows.chosen(kinds, 1000)
    assert len(kept) == 1000 and kept == sorted(set(kept)) and kept[:10] == list(range(10))
    wrong = [place for place in kept if kinds[place] == 1]
    assert 333 <= len(wrong) <= 660 and max(b - a for a, b in zip(wrong, wrong[1:], strict=False)) <= 10
    told = report_rows.why(kinds, kept) or ""
    assert told.startswith("1,000 of 93,010 rows are in this file") and "10 of 10 failed" in told
    for most in (0, 1, 2, 3, 7, 100):
        for made in ([1] * 5, [0, 1, 2] * 40, [3] * 200, [], [0] * 200 + [2]):
            assert len(report_rows.chosen(made, most)) == min(most, len(made))
    assert report_rows.chosen([2] * 100, 10) == list(range(0, 100, 10))
    assert report_rows.chosen([2, 1, 0], 3) == [0, 1, 2] and report_rows.why([2, 1], [0, 1]) is None


@pytest.mark.parametrize("sizes", [[5] * 10, [1, 2, 3, 10_000], [1000] * 3 + [10], [], [7]])
@pytest.mark.parametrize("budget", [1, 30, 100, 2500])
def test_the_level_to_which_rows_are_cut(sizes: list[int], budget: int) -> None:
    found = report_rows.level(sizes, budget)
    assert sum(min(one, found) for one in sizes) <= max(budget, 0)
    if sum(sizes) > budget:
        assert sum(min(one, found + 1) for one in sizes) > budget - len(sizes)


def big_run(folder: Path, source: Path, count: int, tokens: int, huge: int = 0) -> None:
    """A finished run's folder with `count` made-up records, as if the run at `source` had had them."""
    shutil.copytree(source, folder)
    lines = []
    for i in range(count):
        ids, logprobs = (
            [(7 * i + j) % 4096 for j in range(tokens)],
            [-(((i + j) % 97) ** 2) / 1000 for j in range(tokens)],
        )
        answer = {"prompt": "p" * 200, "text": "word " * tokens, "output_ids": ids, "logprobs": logprobs}
        answer |= {"finish_reason": {"type": "length", "length": tokens}, "sampling_seed": 2**62 + i}
        lines.append(
            {"id": f"r{i}", "data": {"id": f"r{i}"}, "answers": [answer], "scores": {"exact_match": i % 3 == 0}}
        )
    if huge:
        lines[1]["answers"][0]["text"] = "<" * huge
    put_records(folder, lines)


def test_a_thousand_rows_are_a_few_megabytes(cli: Any) -> None:
    big_run(Path("long"), Path("a"), 1000, 250, huge=500_000)
    data = report_data([Path("long")])
    assert 3_000_000 < len(page(data)) <= 5_000_000
    items = data["run"]["rows_here"]["items"]
    assert len(items) == 1000 and [i["n"] for i in items] == list(range(1000))
    assert all("lost" in i or len(i["a"][0]["k"]) == len(i["a"][0]["l"]) for i in items)
    cut = next(i for i in items if "cut" in i and i["n"] != 1)
    assert cut["a"][0]["m"] == 250 > len(cut["a"][0]["k"]) and "more characters" in cut["a"][0]["t"]
    whole = report_data([Path("long")], most_rows=20)["run"]["rows_here"]["items"]
    assert len(whole[5]["a"][0]["k"]) == 250 and "cut" not in whole[5]


@pytest.mark.parametrize("megabytes", [0.5, 1.0, 10.0])
def test_pages_keep_to_their_bytes_whatever_fills_them(cli: Any, megabytes: float) -> None:
    shutil.copytree("a", "b")
    top = [[[-1.2345678 * k - 0.0001, 4095 - k] for k in range(1, 6)] for _ in range(60)]
    ids, logprobs = list(range(4000, 4060)), [-12.3456789] * 60
    answer = {"text": "&" * 400, "output_ids": ids, "logprobs": logprobs, "top_logprobs": top}
    fills = [
        {"prompt": "\u2028" * 700},
        {"prompt": ids * 9},
        {"prompt": "é" * 900},
        {"prompt": "a", "text": "\0" * 3000},
    ]
    lines = [
        {"id": f"{i}", "data": {"x": "\ud800" * i}, "answers": [answer | fills[i % 4]] * (1 + i % 3), "scores": {}}
        for i in range(150)
    ]
    put_records(Path("b"), lines)
    data = report_data([Path("b")], megabytes=megabytes)
    written, items = len(page(data)), data["run"]["rows_here"]["items"]
    assert (
        written <= megabytes * 1e6
        and len(items) == 150
        and (megabytes < 10) == any("cut" in i or "lost" in i for i in items)
    )
    assert sum(map(size, items)) <= 0.68 * megabytes * 1e6
    assert megabytes in (0.5, 10.0) or sum(map(size, items)) >= 0.5 * megabytes * 1e6  # and the room is used


@pytest.mark.parametrize(
    "change",
    [
        {"top_logprobs": 7},
        {"top_logprobs": [None]},
        {"top_logprobs": [[[1]]]},
        {"top_logprobs": [[["x", "y"]]]},
        {"prompt": 7},
        {"prompt": [float("nan")]},
        {"prompt": [[[1, 2]]]},
        {"top_logprobs": [[[-1.0, [2]]]]},
        {"prompt": None},
        {"output_ids": [-1], "logprobs": [-1e308]},
        {"output_ids": [2**70], "logprobs": [float("nan")]},
        {"output_ids": [], "logprobs": [0.0] * 5},
        {"finish_reason": [1], "sampling_seed": None, "kind": {}},
    ],
)
def test_records_with_parts_that_no_run_writes(cli: Any, change: dict[str, Any]) -> None:
    lines = records(Path("a/outputs.jsonl"))
    lines[0]["answers"][0] |= change
    lines[1]["data"] = [1]
    lines[2] = {"id": "r2", "error": {"type": 7}, "answers": "?"}
    put_records(Path("a"), lines)
    assert run.main(["report", "a"]) == 0
    text = Path("a/outputs.jsonl").read_text()
    none = "NaN" in text or "1e+308" in text  # no record any more that could be compared
    assert run.main(["report", "a", "a"]) == (2 if none else 0)
    items = data_in(Path("a/report.html"))["run"]["rows_here"]["items"]
    assert len(items) == 15 and [i["n"] for i in items] == list(range(15))
    assert items[1]["strange"] and "strange" not in items[3]


def put_records(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Makes a finished run's records others, as if it had had them."""
    body = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (folder / "outputs.jsonl").write_bytes(body)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["identity"]["input"]["rows"] = len(lines)
    manifest["result"] |= {"outputs_sha256": hashlib.sha256(body).hexdigest(), "rows": len(lines)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_more_rows_than_a_page_holds(cli: Any) -> None:
    big_run(Path("many"), Path("a"), 5000, 3)
    found = report_data([Path("many")], most_rows=100)["run"]
    assert len(found["rows_here"]["items"]) == 100 and found["counts"] == {
        "failed": 0,
        "wrong": 3333,
        "right": 1667,
        "scored": 0,
    }
    assert (
        found["rows_here"]["why"].startswith("100 of 5,000 rows are in this file")
        and "rows=N" in found["rows_here"]["why"]
    )


# -- the page ----------------------------------------------------------------------------------------------------------


def test_texts_never_become_markup(cli: Any) -> None:
    run.main(["report", "a"])
    html = Path("a/report.html").read_text(encoding="utf-8")
    seen = Parsed(html)
    template = Parsed(page({"title": "x"}).decode())
    assert [e for e in seen.elements if e[0] != "meta"] == [e for e in template.elements if e[0] != "meta"]
    assert "alert(1)" not in "".join(text for name, text in seen.texts.items() if name != "script data")
    hostile = json.loads(seen.texts["script data"])["run"]["rows_here"]["items"][14]
    assert hostile["p"] == ["".join(HOSTILE)]
    raw = seen.texts["script data"]
    assert not set("<>&\u2028\u2029") & set(raw)


@pytest.mark.parametrize("text", [*HOSTILE, "\ud800 lone", "\x00\x1f", "a" * 10])
def test_json_for_scripts_round_trips(text: str) -> None:
    told = script_json({"k": [text, {text: 1}]})
    assert json.loads(told) == {"k": [text, {text: 1}]} and "<" not in told
    assert size([text]) == len(script_json([text]).encode("utf-8"))


def test_the_page_asks_for_nothing(cli: Any) -> None:
    run.main(["report", "a"])
    html = Path("a/report.html").read_text(encoding="utf-8")
    seen = Parsed(html)
    for tag, attributes in seen.elements:
        assert tag not in ("img", "iframe", "object", "embed", "form")
        for name in ("src", "href", "srcset", "action"):
            assert not re.match(r"(https?:)?//", attributes.get(name) or ""), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    own = "".join(text for name, text in seen.texts.items() if name != "script data")
    assert set(re.findall(r"https?://[^\"'\s)]+", own)) <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(
        r"\b(fetch|XMLHttpRequest|WebSocket|importScripts|sendBeacon|innerHTML|eval\(|@import|url\()", own
    )
    (policy,) = [
        a["content"] for t, a in seen.elements if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    digest = b64encode(hashlib.sha256(seen.texts["script"].encode()).digest()).decode()
    assert policy is not None and policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}';")


# -- the schedule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_the_timeline_against_the_steps_themselves(tmp_path: Path, overlap: bool) -> None:
    told: list[Any] = []
    with checksum_engine(overlap=overlap, pool=92) as engine, Trace(tmp_path / "t", 1, steps=True) as written:
        prompts = [[7, 7, 7, 7, 7, i] * 4 for i in range(6)]
        with engine.steps_told(told.append), engine.steps_told(written.step):
            outputs = engine.generate(
                input_ids=prompts,
                sampling_params={"max_new_tokens": 40, "ignore_eos": True},
                rid=[f"r{i}" for i in range(6)],
            )
        for i, output in enumerate(outputs):
            written.row(i, f"row {i}", [output["meta_info"]])
    (session,), notes = schedule.timeline(tmp_path / "t", 10**6)
    assert not notes and session["steps"]["n"] == [record.step for record in told]
    assert session["steps"]["tok"] == [sum(record.counts) for record in told]
    assert session["steps"]["held"] == [record.held for record in told] and session["pool"] == told[0].pages
    names = [int(request["id"].split()[1]) for request in session["requests"]]
    holding: dict[str, list[int]] = {}
    for now, record in enumerate(told):
        for place, request in enumerate(session["requests"]):
            rid = f"r{names[place]}"
            inside = [seg for seg in request["seg"] if seg[1] <= now <= seg[2]]
            assert (rid in record.rids) <= bool(inside) and len(inside) <= 1
            if rid in record.rids and inside[0][0] == schedule.PREFILL:
                at = record.rids.index(rid)
                assert inside[0][3:] == [record.starts[at], record.counts[at]]
            assert (now in request["pre"]) == (rid in record.preempted)
        for rid in record.released:
            del holding[rid]
        for new in record.new_pages:
            holding[new.rid] = holding.get(new.rid, [])[: new.first] + list(new.pages)
        drawn: dict[str, list[int]] = {}
        for page_, count, first, behind, place, _ in session["holds"]:
            if first <= now < behind:
                drawn.setdefault(f"r{names[place]}", []).extend(range(page_, page_ + count))
        assert {rid: sorted(pages) for rid, pages in drawn.items()} == {rid: sorted(p) for rid, p in holding.items()}
    hits = sum(count for _, count, *_, hit in session["holds"] if hit)
    assert hits == sum(new.hits for record in told for new in record.new_pages) > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_guesses_of_each_step_and_how_many_were_right(tmp_path: Path, overlap: bool) -> None:
    texts = ["Copy: red green blue red green blue. Copy: red green blue red green", "Once upon a time"]
    options: dict[str, Any] = {"speculative_algorithm": "NGRAM", "disable_overlap_schedule": not overlap}
    with Engine(model_path="box", device="cpu", enable_torch_compile=False, **options) as engine:
        with Trace(tmp_path / "t", 1, steps=True) as written, engine.steps_told(written.step):
            outputs = engine.generate(texts, {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0})
            for i, output in enumerate(outputs):
                written.row(i, f"row {i}", [output["meta_info"]])
        stats = engine.stats()
    (session,), _ = schedule.timeline(tmp_path / "t", 10**6)
    guess, right = session["steps"]["guess"], session["steps"]["right"]
    assert sum(guess) == stats["draft_tokens"] > 0 and sum(right) == stats["correct_draft_tokens"] > 0
    assert all(a >= b for a, b in zip(guess, right, strict=True))


def test_a_long_or_damaged_trace_is_drawn_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_trace import record

    with Trace(tmp_path / "t", 1, steps=True) as written:
        for i in range(100):
            written.step(record(i, ["a", "b"]))
    (few,), notes = schedule.timeline(tmp_path / "t", 2000)
    assert 0 < len(few["steps"]["n"]) < 60 and few["dropped"] == 100 - len(few["steps"]["n"])
    assert notes == [f"the first {100 - few['dropped']} of 100 steps are drawn; trace.json has all (ui.perfetto.dev)"]
    lines = (tmp_path / "t").read_bytes().split(b"\n")
    lines[10] = lines[10][:40] + b"\x00" + lines[10][41:]
    lines[20] = lines[20].replace(b'"rows":"1@', b'"rows":1,"x":"')
    lines[30] = b'{"ph":"X","cat":"step","pid":{},"args":[]},'
    (tmp_path / "t").write_bytes(b"\n".join(lines))
    (drawn,), notes = schedule.timeline(tmp_path / "t", 10**6)
    assert len(drawn["steps"]["n"]) == 97 and "3 of its events are left out" in notes[0]
    assert {len(values) for values in drawn["steps"].values()} == {97}
    for pages in ("1-99999999", "10", "-", "9-9999999999999999999999"):
        lines[40] = re.sub(rb'"pages":"[^"]*"', f'"pages":"1:0:0:{pages}"'.encode(), lines[40])
        (tmp_path / "t").write_bytes(b"\n".join(lines))
        assert len(schedule.timeline(tmp_path / "t", 10**6)[0][0]["steps"]["n"]) == 96
    (tmp_path / "t").write_bytes(b"\0" * 10_000)
    assert schedule.timeline(tmp_path / "t", 10**6) == ([], ["trace.json has no event that can be drawn"])


# -- sweeps and differences --------------------------------------------------------------------------------------------


def test_a_sweep_and_its_paired_differences(cli: Any) -> None:
    cli("-m", "seed=1,2,3", "out=s")
    Path("s/2/outputs.jsonl").write_text("spoilt")
    Path("s/2/journal.log").write_text("spoilt")
    rows: list[dict[str, Any]] = [
        {r["id"]: r.get("scores") for r in records(Path(f"s/{i}/outputs.jsonl"))} for i in range(2)
    ]
    assert run.main(["report", "s"]) == 0
    sweep = data_in(Path("s/report.html"))["sweep"]
    assert [p["folder"] for p in sweep["points"]] == ["0", "1", "2"] and sweep["keys"] == ["seed"]
    assert sweep["points"][2]["problem"] and not sweep["points"][1]["problem"]
    pairs = [(rows[0][i], rows[1][i]) for i in rows[0] if rows[0][i] and rows[1][i]]
    truth = statistics.paired(pairs)["prefix_match"]
    (folded,) = sweep["folded"]
    values = [one["value"] for point in sweep["points"][:2] for one in point["metrics"]]
    assert folded["name"] == "2 seeds" and folded["metrics"][0]["n"] == 2 and folded["task"] == "jsonl"
    assert math.isclose(folded["metrics"][0]["value"], sum(values) / 2) and folded["rows"] == 30
    ((a, b, name, value, stderr, low, high, n, up, down),) = sweep["deltas"]
    assert (a, b, name, n, up, down) == (0, 1, "prefix_match", truth.n, truth.up, truth.down)
    assert math.isclose(value, truth.value, abs_tol=1e-9) and math.isclose(stderr, truth.stderr, abs_tol=1e-9)
    assert math.isclose(low, truth.low, abs_tol=1e-9) and math.isclose(high, truth.high, abs_tol=1e-9)
    (grid,) = sweep["grid"]
    kinds = ["".join("0" if s is None else "21"[not s["prefix_match"]] for s in one.values()) for one in rows]
    assert grid["kinds"] == kinds and grid["points"] == [0, 1]


@pytest.mark.parametrize(
    ("argv", "data", "told"),
    [
        (["task=a"], "x", "fengine eval task=a"),
        (["rerun", "a"], "x", "fengine rerun a"),
        (["evaluate"], None, "fengine.evaluate(task, engine, out)"),
    ],
)
def test_the_command_of_a_run_is_one(argv: list[str], data: str | None, told: str) -> None:
    manifest = {"sessions": [{"argv": argv}], "identity": {"config": {"task.data": data}}}
    commands = facts.commands(manifest, Path("a"))
    assert commands[0][1] == told and len(commands) == (3 if data else 1)


def test_what_the_model_recommends_is_told_as_sampled_with() -> None:
    config = {f"sampling.{name}": value for name, value in SamplingConfig(top_p=0.5).as_dict().items()}
    told = facts._sampling(config, {"temperature": 0.6, "top_p": 0.95})
    assert told == "temperature 0.6, top_p 0.5, at most 128 new tokens"


def test_a_share_over_seeds_ends_at_one() -> None:
    points = []
    for seed, wrong in enumerate((0, 0, 9)):
        metrics = {"m": statistics.mean([True] * (100 - wrong) + [False] * wrong).as_dict()}
        point = {"name": f"seed={seed}", "task": "t", "values": [], "finished": True, "rows": 100}
        points.append(point | {"counts": {"failed": 0}, "metrics": figures({"metrics": metrics})})
    (figure,) = report_sweep._folded(points)[0]["metrics"]
    assert figure["high"] == 1 and math.isclose(figure["value"] - figure["low"], 1.959963984540054 * figure["stderr"])


def test_points_of_several_tasks_differ_in_their_task() -> None:
    configs = [{"task.name": name, "task.max_new_tokens": most, "seed": most} for name, most in (("a", 8), ("b", 16))]
    points = [
        report_sweep.SweptRun(Path("r"), identity={"task": {"name": c["task.name"]}, "config": c}) for c in configs
    ]
    assert report_sweep.assembled(Path("s"), points, {})["keys"] == ["task.name", "seed"]
    del points[0].config["seed"], points[1].config["seed"]
    assert report_sweep.assembled(Path("s"), points, {})["keys"] == ["task.name"], "no figure over max_new_tokens"


@pytest.mark.parametrize(("shards", "grids"), [(("1/2", "2/2"), 0), (("1/2", "1/2"), 1)])
def test_shards_have_no_rows_in_common(shards: tuple[str, str], grids: int) -> None:
    kinds = report_sweep.RowKinds(bytearray(b"\1"), array("q", [0]), None)
    points = [
        report_sweep.SweptRun(Path("r"), identity={"config": {"run.shard": shard}}, finished=True, seen=kinds)
        for shard in shards
    ]
    assert len(report_sweep.assembled(Path("s"), points, {})["grid"]) == grids


def test_points_without_a_run_are_told(cli: Any) -> None:
    assert cli("-m", "sampling.top_p=0.9,7", "out=s") == 2
    sweep = report_data([Path("s")])["sweep"]
    assert len(sweep["points"]) == 1 and "(0, 1]" in sweep["missing"][0] and "top_p=7" in sweep["missing"][0]
    for damage in ('{"points": 7}', '{"points": [{}]}', "["):
        Path("s/sweep.json").write_text(damage)
        assert report_data([Path("s")])["sweep"]["missing"] == []


def test_points_that_share_only_some_rows(cli: Any) -> None:
    cli("-m", "seed=1,2", "out=s")
    lines = Path("s/1/outputs.jsonl").read_text().split("\n")[:-1]
    record = json.loads(lines[3])
    record["scores"]["prefix_match"] = True
    Path("s/1/outputs.jsonl").write_text("".join(f"{line}\n" for line in [*lines[:3], json.dumps(record), *lines[5:]]))
    for name in ("journal.log", "metrics.json"):
        Path("s/1", name).unlink()
    (delta,) = report_data([Path("s")])["sweep"]["deltas"]
    assert delta[7] == 13 and delta[8:] == [1, 0]  # all but the failed row and the one that is lost


def test_two_runs(cli: Any) -> None:
    cli("out=b", "seed=5")
    assert run.main(["report", "a", "b"]) == 0
    data = data_in(Path("a/diff.html"))
    mine, its = ({r["id"]: r for r in records(Path(f"{name}/outputs.jsonl"))} for name in "ab")
    differ = [i for i in mine if mine[i] != its[i]]
    assert data["diff"]["differing_rows"] == len(differ) > 0 and not data["diff"]["same"]
    assert sorted(one["id"] for one in data["diff"]["firsts"]) == sorted(differ)
    assert any(line.startswith("seed: 0 → 5") for line in data["diff"]["causes"])
    one = data["diff"]["firsts"][0]
    assert [row["a"][0]["t"] for row in one["pair"]] == [r[differ[0]]["answers"][0]["text"] for r in (mine, its)]
    assert one["logprob"] == [0, 0] and one["sides"][0]["bits"].startswith("0x")
    deltas = [
        abs(its[i]["answers"][0]["logprobs"][0] - mine[i]["answers"][0]["logprobs"][0])
        for i in mine
        if "answers" in mine[i]
    ]
    assert (
        sum(n for _, _, n in data["diff"]["histogram"])
        == sum(d > 0 for d in deltas)
        == data["diff"]["differing_logprobs"]
    )
    assert run.main(["report", "a", "a", "out=same.html"]) == 0 and data_in(Path("same.html"))["diff"]["same"]


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_token_texts_join_to_the_answers_of_the_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "task=capitals",
        "task.limit=4",
        "view=quiet",
        "out=a",
        "compile.enabled=false",
        "trace=steps",
        "top_logprobs=3",
    ]
    assert evaluate.main(words) == 0
    found = report_data([Path("a")])["run"]
    here = found["rows_here"]
    assert here["tokens"] is None and here["recorded"]
    for item in here["items"]:
        (answer,) = item["a"]
        assert "".join(here["vocab"][str(i)] for i in answer["k"][:-1]) == answer["t"]
        assert all(str(i) in here["vocab"] for top in answer["top"] for _, i in top)
    (session,) = found["schedule"]["sessions"]
    assert {request["id"] for request in session["requests"]} == {item["i"] for item in here["items"]}
    manifest = json.loads(Path("a/manifest.json").read_text())
    manifest["identity"]["model"]["files"]["tokenizer.json"] = "0" * 64
    Path("a/manifest.json").write_text(json.dumps(manifest))
    changed = report_data([Path("a")])["run"]["rows_here"]
    assert changed["vocab"] == {} and "has changed since the run" in changed["tokens"]


def test_a_tokenizer_is_looked_for_where_the_engine_would(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def cached(name: str, **more: Any) -> str:
        asked.append((name, more["revision"], more["cache_dir"]))
        return str(hub.BOX)

    monkeypatch.setattr(hub, "snapshot_download", cached)
    config = {"model.path": "some/model", "model.revision": "v2", "model.download_dir": "cache"}
    for more in ({}, {"model.tokenizer_path": "some/tokenizer"}):
        assert texts({"config": config | more}, None, [5], 100)[0]
    assert asked == [("some/model", "v2", "cache"), ("some/tokenizer", None, "cache")]


def test_a_segment_ends_where_its_request_was_preempted() -> None:
    """With the prefix cache it may go on decoding in the very next step."""
    session = schedule.TraceSession(0)
    rows = [(5, 0, 3, False, True), (6, 3, 1, True, True), (7, 4, 1, True, False), (9, 5, 2, True, False)]
    for now, start, count, decodes, new in rows:
        assert session.segment(now, (7, start, count), decodes) is new
    session.requests[0]["pre"].append(10)
    assert session.segment(11, (7, 7, 1), True) and session.segment(14, (7, 8, 1), True)
    assert session.requests[0]["seg"] == [[1, 5, 5, 0, 3], [0, 6, 9, 3, 4], [0, 11, 11, 7, 1], [0, 14, 14, 8, 1]]
