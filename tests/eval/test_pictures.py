"""Rows with images: paths beside the data, hashes in the manifest, the same answers as the engine's call."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("hydra")

import tiny_vision
from tiny_vision import picture

from fengine import Engine
from fengine.errors import InputFileError
from fengine.eval.commands.evaluate import evaluate
from fengine.eval.commands.replay import _read_again
from fengine.eval.runs.answering import Asker
from fengine.eval.runs.compare import compare_row
from fengine.eval.runs.index import index_rows
from fengine.eval.tasks.kinds import open_task
from fengine.eval.tasks.task import Ask, BadRow, Row
from fengine.eval.tasks.task_config import Match, TaskConfig, TaskKind, check

TEXT = "user: <image>\nwhat is it?\nassistant: "
CONFIG = TaskConfig("pictures", data="rows.jsonl", images="seen", match=Match.none, target=None, max_new_tokens=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "of rows").mkdir()
    for i in (1, 2):
        picture(i).save(tmp_path / "of rows" / f"{i}.png")
    rows = [{"prompt": TEXT, "seen": "of rows/1.png"}, {"prompt": "hi"}, {"prompt": TEXT, "seen": ["of rows/2.png"]},
            {"prompt": TEXT, "seen": "none.png"}]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_answers_are_those_of_the_engines_call(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tiny_vision.write_with_text(tmp_path_factory.mktemp("llava"))
    with Engine(model_path=str(model), device="cpu", max_total_tokens=4096) as engine:
        for chat in (False, True):
            config = replace(CONFIG, prompt="what is it?", chat=True) if chat else CONFIG
            out = folder / f"run {chat}"
            assert evaluate(open_task(config, folder, engine.tokenizer.encode_chat), engine, out)["failed"] == 1
            lines = (out / "outputs.jsonl").read_text().splitlines()
            found = [json.loads(line) for line in lines]
            for row, seed in ((0, 1), (2, 2)):
                want = engine.generate(TEXT, {"max_new_tokens": 5, "temperature": 0.0}, image_data=picture(seed))
                answer = found[row]["answers"][0]
                assert answer["text"] == want["text"]
                assert answer["pixels_sha256"] == want["meta_info"]["pixels_sha256"]
                assert want["meta_info"]["image_tokens"] == 16
            assert "pixels_sha256" not in found[1]["answers"][0]
            found[2]["answers"][0]["pixels_sha256"] = "of another picture"
            assert compare_row(json.loads(lines[2]), found[2]).other == ("pixels_sha256",)
            assert "none.png" in found[3]["error"]["message"]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_answers_about_images_are_read_again(temperature: float, folder: Path, tmp_path: Path) -> None:
    model = tiny_vision.write_with_text(tmp_path / "llava")
    sampling = {"max_new_tokens": 6, "temperature": temperature, "sampling_seed": 3, "ignore_eos": True}
    with Engine(model_path=str(model), device="cpu", max_total_tokens=4096) as engine:
        asker, seen = Asker(engine), tuple(str(folder / "of rows" / f"{i}.png") for i in (1, 2))
        ask = Ask(engine.tokenizer.encode(f"<image> and {TEXT}"), {}, "generate", images=seen)
        answer, _ = asyncio.run(asker.ask(ask, sampling))
        found = asyncio.run(_read_again(asker, ask, {"output_ids": answer.token_ids}, sampling))
    start = 3 if temperature == 0.7 else 0
    assert found == (answer.token_ids[start:], answer.logprobs[start:], start)


def test_parts_of_messages_are_images_as_those_of_the_column(folder: Path) -> None:
    words = {"type": "text", "text": "what is it?"}
    parts = [{"type": "image_url", "image_url": {"url": "of rows/1.png"}}, words]
    rows = [
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}, words]}], "seen": ["of rows/1.png"]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "none.png"}]}]},
        {"messages": [{"role": "user", "content": parts}], "seen": "of rows/2.png"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, third, both = open_task(CONFIG, folder).rows()
    assert isinstance(first, Row) and isinstance(second, Row) and first.data == second.data
    assert isinstance(third, BadRow) and "none.png" in third.message
    assert isinstance(both, BadRow) and "give them in one place" in both.message
    bare = open_task(replace(CONFIG, images=None), folder, lambda messages: [1])
    with pytest.raises(InputFileError, match="its messages have images, which task.images=images shows"):
        bare.asks(Row("a", rows[0]))


def test_a_run_knows_of_images_that_change(folder: Path) -> None:
    task = open_task(CONFIG, folder)
    before = index_rows(task)
    assert isinstance(list(task.rows())[3], BadRow) and index_rows(task).keys == before.keys
    picture(3).save(folder / "of rows" / "2.png")
    assert [a == b for a, b in zip(before.keys, index_rows(task).keys, strict=True)] == [True, True, False, True]


def test_examples_are_never_shown_without_their_images(folder: Path) -> None:
    (folder / "shown.jsonl").write_text(json.dumps({"q": "what?", "a": "it", "seen": "of rows/1.png"}))
    config = replace(CONFIG, prompt="{q}", target="a", match=Match.exact, examples="shown.jsonl", shots=1)
    with pytest.raises(InputFileError, match="task.examples: row 'line-1' has 'seen': examples are shown as text"):
        open_task(config, folder).asks(Row("a", {"q": "and?", "a": "that", "seen": []}))


def test_images_are_for_generation() -> None:
    assert "task.images is for kind=generate" in check(replace(CONFIG, kind=TaskKind.choice, target="answer"))
