"""`trace.json`: the trace-event format, what its steps say, and what survives a crash."""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checksum import checksum_engine
from forked import run

from fengine.core.step_trace import NewPages, StepRecord
from fengine.eval.runs import trace
from fengine.eval.runs.trace import Trace, events, runs_text


def record(step: int, rids: list[str], **changes: Any) -> StepRecord:
    count = len(rids)
    told: dict[str, Any] = {"starts": (0,) * count, "counts": (3,) * count, "decodes": (False,) * count}
    told |= {"new_pages": (), "preempted": (), "released": (), "running": count, "waiting": 0}
    told |= {"held": 1, "cached": 0, "pages": 9, "launched": float(step), "landed": step + 0.5}
    return StepRecord(step=step, rids=tuple(rids), **(told | changes))


def check_format(found: list[dict[str, Any]]) -> None:
    """What the trace-event format asks of metadata, counters and complete events; spans of a line nest or follow."""
    lines: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in found:
        assert isinstance(event["name"], str) and type(event["pid"]) is int and isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            lines.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert event["ts"] >= 0 and all(isinstance(v, (int, float)) for v in event["args"].values())
        else:
            assert event["ph"] == "M" and event["name"] in ("process_name", "thread_name", "process_sort_index")
    for spans in lines.values():
        spans.sort()
        assert all(a[1] <= b[0] + 0.5 for a, b in zip(spans, spans[1:], strict=False))  # microseconds, rounded


@pytest.mark.parametrize("overlap", [False, True])
def test_a_trace_of_steps(tmp_path: Path, overlap: bool) -> None:
    records: list[StepRecord] = []
    with checksum_engine(overlap=overlap, pool=92) as engine, Trace(tmp_path / "t", 1, steps=True) as written:
        prompts = [[7, 7, 7, 7, 7, i] * 4 for i in range(6)]
        rids = [f"r{i}" for i in range(6)]
        with engine.steps_told(records.append), engine.steps_told(written.step):
            outputs = engine.generate(
                input_ids=prompts, sampling_params={"max_new_tokens": 40, "ignore_eos": True}, rid=rids
            )
        for i, output in enumerate(outputs):
            written.row(i, f"row {i}", [output["meta_info"]])
        assert len(written._numbers) <= 4  # those that still ran at the last step
    found = json.loads((tmp_path / "t").read_text())
    check_format(found)
    steps = [e for e in found if e.get("cat") == "step"]
    rows = {e["args"]["request"]: e["args"]["id"] for e in found if e.get("cat") == "request"}
    assert len(steps) == len(records) and rows == {i + 1: f"row {i}" for i in range(6)}
    for event, told in zip(steps, records, strict=True):
        args = event["args"]
        parsed = [tuple(map(int, part.replace("@", "+").split("+"))) for part in args["rows"].split()]
        names = {i + 1: rid for i, rid in enumerate(rids)}
        assert [(names[n], s, c) for n, s, c in parsed] == list(zip(told.rids, told.starts, told.counts, strict=True))
        assert args["tokens"] == sum(told.counts) and event["name"] == told.kind and args["held"] == told.held
        pages = [part.split(":") for part in args["pages"].split()]
        assert [(names[int(n)], int(first), int(hits)) for n, first, hits, _ in pages] == [
            (new.rid, new.first, new.hits) for new in told.new_pages
        ]
        assert sorted(args["preempted"].split()) == sorted(str(rids.index(r) + 1) for r in told.preempted)
    assert sum(len(r.preempted) for r in records) > 0


def test_page_numbers_as_text() -> None:
    assert runs_text([17, 18, 19, 40, 39, 1, 2]) == "17-19,40,39,1-2" and runs_text([]) == ""


def test_killed_it_reads_up_to_there_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    code = (
        f"import os, signal, sys; sys.path.append({str(Path(__file__).parent)!r})\n"
        "from pathlib import Path; from test_trace import record; from fengine.eval.runs.trace import Trace\n"
        f"t = Trace(Path({str(path)!r}), 1, steps=True)\n"
        "for i in range(2000): t.step(record(i, ['a', 'b']))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run(code).returncode == -signal.SIGKILL
    left = path.read_bytes()
    assert not left.endswith(b"]\n")
    path.write_bytes(left[:-7])
    found = list(events(path))
    assert None not in found and len(found) > 1900
    with Trace(path, 2, steps=True) as again:
        again.step(record(0, ["a"]))
    whole = json.loads(path.read_text())
    check_format(whole)
    assert whole[: len(found)] == found
    assert Counter(e["pid"] for e in whole if e.get("cat") == "step")[2] == 1
    with Trace(path, 3) as third:
        third.row(0, "x", [])
    assert json.loads(path.read_text())[: len(whole)] == whole


def test_a_torn_line_longer_than_the_tail_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(path, 1, steps=True) as one:
        one.step(record(0, ["a"]))
    good = path.read_bytes()[: -len(trace.END)]
    path.write_bytes(good + b',\n{"ph":"X","args":{"rows":"' + b"1@1+1 " * 65536)
    with Trace(path, 2, steps=True):
        pass
    assert path.read_bytes().startswith(good) and [e["pid"] for e in json.loads(path.read_text())][-1] == 2


def test_the_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_BYTES", 20_000)
    for session in (1, 2):
        with Trace(tmp_path / "t", session, steps=True) as bounded:
            for i in range(500):
                pages = NewPages("a", 0, 0, tuple(range(1, 9)))
                bounded.step(record(i, ["a"], new_pages=(pages,), held=i))
        assert (tmp_path / "t").stat().st_size < 20_500
        check_format(json.loads((tmp_path / "t").read_text()))
    steps = [e["args"]["step"] for e in events(tmp_path / "t") if e and e.get("cat") == "step"]
    assert steps == list(range(len(steps)))  # its first part, without gaps


def test_damage_is_told_apart_from_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b'[\n{"ph":"M"},\n{"ph":\x00},\n7,\n{"ph":"C"},\n{"ph":"X","na')
    assert list(events(path)) == [{"ph": "M"}, None, None, {"ph": "C"}]
