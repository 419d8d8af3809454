"""The vision model in the box says what is in pictures that it has not seen, and its command needs no file."""

import base64
import json
from collections import defaultdict
from itertools import islice
from pathlib import Path

import pytest

from fengine import Engine
from fengine.config.schema import PACKAGED
from fengine.eval.tasks import drawn
from fengine.run import main

EACH = 40  # questions of a kind
BOUNDS = {"shape": 0.95, "colour": 0.95, "position": 0.95, "count": 0.9}


def test_answers_about_pictures_that_it_has_not_seen() -> None:
    asked = defaultdict(list)
    for row in islice(drawn.rows(5), 600):
        if row["kind"] in BOUNDS and len(asked[row["kind"]]) < EACH:
            asked[row["kind"]].append(row)
    rows = [row for kind in BOUNDS for row in asked[kind]]
    assert len(rows) == EACH * len(BOUNDS)
    with Engine(model_path="box-vl", device="cpu") as engine:
        parts = [[{"type": "image", "image": r["picture"]}, {"type": "text", "text": r["question"]}] for r in rows]
        found = engine.generate(
            input_ids=[engine.apply_chat_template([{"role": "user", "content": p}], tokenize=True) for p in parts],
            image_data=[row["picture"] for row in rows],
            sampling_params={"temperature": 0.0, "max_new_tokens": 32},
        )
    right = defaultdict(int)
    for row, output in zip(rows, found, strict=True):
        right[row["kind"]] += output["text"].strip() == row["answer"]
    assert all(right[kind] / EACH >= bound for kind, bound in BOUNDS.items()), dict(right)


def test_its_files_fit_into_the_package() -> None:
    assert sum(path.stat().st_size for path in PACKAGED["box-vl"].iterdir()) <= 12_000_000


def test_a_run_without_prompts_draws_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["model=box-vl", "sampling=greedy", "out=answers.jsonl", "view=quiet"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert sum(row["text"].strip() == row["answer"] for row in rows) >= 10 and len(rows) == 12
    url = drawn.chats(1, 1)[0]["images"]
    (tmp_path / "one.png").write_bytes(base64.b64decode(url.partition(",")[2]))
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": rows[0]["messages"], "images": "one.png"}) + "\n")
    assert main(["model=box-vl", "sampling=greedy", "prompts=one.jsonl", "out=one-answer.jsonl", "view=quiet"]) == 0
    assert json.loads((tmp_path / "one-answer.jsonl").read_text())["text"] == rows[0]["text"]
