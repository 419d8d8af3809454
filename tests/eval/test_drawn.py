"""Pictures drawn from a seed: what is said of them against what is seen in their pixels."""

import base64
import io
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hydra")

from eval_fakes import FakeEngine
from PIL import Image

from fengine import run
from fengine.errors import ConfigError
from fengine.eval.cli import engines as engines_file
from fengine.eval.report.page import report_data
from fengine.eval.tasks import drawn
from fengine.eval.tasks.kinds import open_task
from fengine.eval.tasks.task_config import Format, TaskConfig


def pixels_of(url: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))


def test_it_is_asked_where_an_object_is_if_no_other_is_like_it() -> None:
    said = (("circle", "red", "top left"), ("circle", "blue", "centre"), ("ring", "red", "top right"))
    things = [drawn.Thing(shape, colour, 0, 0, 0, place) for shape, colour, place in said]
    asked = {one.text: one.answer for one in drawn.about_objects([*things, things[2]]) if one.kind == "position"}
    assert asked == {"Where is the red circle?": "In the top left.", "Where is the blue circle?": "In the centre."}


def islands(pixels_HWC: np.ndarray) -> list[tuple[float, float, str]]:
    """Of each connected island that is not the ground (the commonest colour): its middle, and its colour's name."""
    flat = pixels_HWC.reshape(-1, 3)
    values, counts = np.unique(flat, axis=0, return_counts=True)
    left = {tuple(at) for at in np.argwhere((pixels_HWC != values[counts.argmax()]).any(-1)).tolist()}
    found = []
    while left:
        island, edge = [], [left.pop()]
        while edge:
            y, x = edge.pop()
            island.append((y, x))
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            edge += near
        y, x = np.mean(island, 0)
        colour = pixels_HWC[island[0]].astype(int)
        name = min(drawn.COLOURS, key=lambda name: np.abs(colour - drawn.COLOURS[name]).sum())
        found.append((x, y, name))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_answers_are_what_pixels_show(seed: int) -> None:
    picture = drawn.picture(Random(f"test {seed}"))
    answers = {question.text: question.answer for question in picture.questions}
    found = islands(picture.pixels_HWC)
    if "How many bars are there?" in answers:
        assert answers["How many bars are there?"] == f"{len(found)}."
        heights = sorted((y, colour) for _, y, colour in found)  # a taller bar has a higher middle
        assert answers["Which bar is the tallest?"] == f"The {heights[0][1]} bar."
        assert answers["Which bar is the shortest?"] == f"The {heights[-1][1]} bar."
    elif "How many objects are there?" in answers:
        assert answers["How many objects are there?"] == f"{len(found)}."
        for colour in drawn.COLOURS:
            count = sum(name == colour for _, _, name in found)
            assert answers[f"How many {colour} objects are there?"] == f"{count}."
        places = {drawn.PLACES[int(y * 3 // drawn.SIDE) * 3 + int(x * 3 // drawn.SIDE)]: name for x, y, name in found}
        for place in drawn.PLACES:
            assert answers.get(f"What colour is in the {place}?") == (
                f"{places[place].capitalize()}." if place in places else None
            )
            assert (answers[f"What is in the {place}?"] == "Nothing.") == (place not in places)
    else:
        assert answers["What colour is the digit?"].rstrip(".").lower() in {name for _, _, name in found}


def test_a_seed_decides_every_row() -> None:
    first, again, other = (list(islice(drawn.rows(seed), 20)) for seed in (3, 3, 4))
    assert first == again and not {row["picture"] for row in first} & {row["picture"] for row in other}
    picture = drawn.picture(Random("3/0"))
    assert (pixels_of(first[0]["picture"]) == picture.pixels_HWC).all()
    assert {"question", "answer", "kind"} < first[0].keys()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engines_file, "open_engine", FakeEngine)
    return tmp_path


def test_thumbnails_of_drawn_pictures(folder: Path) -> None:
    """They are the pictures, as many as a page has bytes for."""
    words = ["eval", "task=pictures", "task.data='5'", "task.limit=6", "view=quiet", "compile=none", "out=made"]
    assert run.main(words) == run.OK
    wanted = list(islice(drawn.rows(5), 6))
    found = report_data([folder / "made"])["run"]["rows_here"]["items"]
    assert [dict(row["d"])["answer"] for row in found] == [row["answer"] for row in wanted]
    for row, own in zip(found, wanted, strict=True):
        (shown,) = row["img"]
        assert (pixels_of(shown) == pixels_of(own["picture"])).all()
    few = report_data([folder / "made"], megabytes=0.01)["run"]["rows_here"]["items"]
    assert 0 < sum(len(url) for row in few for url in row.get("img", ())) <= 1000


def test_thumbnails_of_files(folder: Path) -> None:
    """Large ones are small beside the row; of one that has changed since there is none."""
    (folder / "data").mkdir()
    for name in ("large", "changed"):
        Image.fromarray(np.full((300, 500, 3), 7, np.uint8)).save(folder / "data" / f"{name}.png")
    rows = [{"prompt": name, "seen": f"{name}.png"} for name in ("large", "changed")]
    (folder / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", "task=jsonl", "task.data=data/rows.jsonl", "task.images=seen", "view=quiet", "out=made"]
    assert run.main(words) == run.OK
    Image.fromarray(np.full((9, 9, 3), 7, np.uint8)).save(folder / "data" / "changed.png")
    large, changed = report_data([folder / "made"])["run"]["rows_here"]["items"]
    assert pixels_of(large["img"][0]).shape == (75, 125, 3) and "img" not in changed


@pytest.mark.parametrize("change", [{"limit": None}, {"data": "five"}, {"data": None}])
def test_a_task_that_is_drawn_needs_a_seed_and_an_end(change: dict[str, Any], tmp_path: Path) -> None:
    config = TaskConfig("drawn", format=Format.drawn, data="5", limit=6, images="picture", prompt="{question}")
    assert next(open_task(config, tmp_path).rows())
    with pytest.raises(ConfigError, match="task.format=drawn takes a seed"):
        open_task(replace(config, **change), tmp_path)
