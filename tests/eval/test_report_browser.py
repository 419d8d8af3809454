"""Every view of a report in a browser: no error, no request, keyboard and pointer. Needs playwright and Chromium."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from checksum import checksum_engine
from test_report import HOSTILE, big_run, cli, made  # noqa: F401  (fixtures)

from fengine import run
from fengine.eval.runs.trace import Trace

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="needs the extra `browser`: pip install 'fengine[browser]'"
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium in the PATH")
QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
COLOURS = """canvas => {
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    return new Set(new Uint32Array(data.buffer)).size;
}"""
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Opens a report; at the end there was no error in it, and nothing was asked for but the file itself."""
    faults: list[str] = []

    def open_page(path: Path, width: int = 1400, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(f"dialog {dialog.message}"))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else faults.append(r.url))
        page.goto(path.absolute().as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    assert not faults


def with_steps(folder: Path) -> None:
    """Gives a run the trace of an engine that preempts, its first rows as requests."""
    (folder / "trace.json").unlink(missing_ok=True)
    with checksum_engine(pool=92) as engine, Trace(folder / "trace.json", 1, steps=True) as written:
        prompts = [[7, 7, 7, 7, 7, i] * 4 for i in range(6)]
        with engine.steps_told(written.step):
            outputs = engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 40, "ignore_eos": True})
        for i, output in enumerate(outputs):
            written.row(i, f"r{i}", [output["meta_info"]])


def fits(page: Any) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 420])
def test_a_run(cli: Any, opened: Open, width: int, scheme: str) -> None:  # noqa: F811
    with_steps(Path("a"))
    layout = {"layout": "chunks", "what": "prompts cut into small chunks " * 2, "evidence": "steps of at most 3 tokens"}
    Path("a/verify.json").write_text(json.dumps({"identical": True, "layouts": [layout | {"verdict": "identical"}]}))
    assert run.main(["report", "a"]) == 0
    page = opened(Path("a/report.html"), width, scheme)
    assert page.title().startswith("jsonl") and page.locator(".kpi").first.inner_text() and fits(page)
    assert all(head.strip() for head in page.locator("th").all_text_contents())
    assert all(box["height"] < 200 for box in [row.bounding_box() for row in page.locator(".wide tbody tr").all()])
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    page.click("#theme")
    assert page.evaluate(background) != before
    page.locator("summary").nth(3).click()
    assert page.locator("td", has_text="sampling.temperature").is_visible()
    page.locator(".chip", has_text="failed").click()  # goes to the rows, filtered
    assert page.locator(".item").count() == 1 and "ContextLengthError" in page.locator(".item").inner_text()
    page.locator(".chip", has_text="All").click()
    page.fill("input[type=search]", "ROW NUMBER 7")
    assert page.locator(".item .id").all_inner_texts() == ["r7"]
    assert "expected" in page.locator(".item .say").inner_text()
    page.locator(".item").click()
    assert page.locator(".prompt").first.inner_text() == "row number 7"
    page.locator(".tok").first.click()
    page.keyboard.press("ArrowRight")
    assert "token 2 of 2" in page.locator(".peek").first.inner_text()
    page.locator(".tok").first.hover()
    assert "logprob" in page.locator("#tip").inner_text()
    if width < 800:
        page.locator(".back").click()
    page.fill("input[type=search]", "")
    page.locator(".list").focus()
    page.keyboard.press("End")
    assert "hostile" in page.locator(".item[aria-selected=true]").inner_text()
    if width > 800:
        assert (
            page.locator(".prompt").first.inner_text().startswith(HOSTILE[0])
            and page.locator(".detail img").count() == 0
        )
    assert fits(page)


@pytest.mark.parametrize("width", [1400, 420])
def test_the_schedule(cli: Any, opened: Open, width: int) -> None:  # noqa: F811
    with_steps(Path("a"))
    assert run.main(["report", "a"]) == 0
    page = opened(Path("a/report.html"), width)
    page.click("#tab-schedule")
    slider, facts = page.locator("input[type=range]"), page.locator(".stepfacts")
    slider.fill("0")
    sync_api.expect(facts).to_contain_text("prefill")
    first, at = facts.text_content(), page.locator(".cursor").first.bounding_box()["x"]
    page.get_by_role("button", name="Next step").click()
    sync_api.expect(facts).not_to_have_text(first)
    assert page.locator(".cursor").count() == 4 and page.locator(".cursor").first.bounding_box()["x"] > at
    for name in ("Zoom in", "Zoom out", "Fit", "Play", "Play"):
        page.get_by_role("button", name=name).click()
    page.get_by_label("Across").select_option("time")
    assert all(count > 2 for count in [canvas.evaluate(COLOURS) for canvas in page.locator("canvas").all()])
    box = page.locator(".gantt canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    assert "request" in page.locator("#tip").inner_text()
    page.locator("table button", has_text="r").first.click()  # from a step to the row of one of its requests
    assert page.locator(".item[aria-selected=true]").count() == 1 and fits(page)


@pytest.mark.parametrize("width", [1400, 420])
def test_a_sweep_and_a_difference(cli: Any, opened: Open, width: int) -> None:  # noqa: F811
    with ThreadPoolExecutor(1) as thread:  # this one has playwright's event loop
        assert thread.submit(cli, "-m", "seed=1,2,3", "out=s").result() == 1
    assert run.main(["report", "s"]) == run.main(["report", "s/0", "s/1"]) == 0
    page = opened(Path("s/report.html"), width)
    assert page.locator("svg circle").count() == 1 and fits(page), "the mean over the seeds"
    page.get_by_text("All 3 points").click()
    assert page.locator("table").last.locator("tbody tr").count() == 3 and fits(page)
    page.click("#tab-deltas")
    page.get_by_label("Baseline").select_option(index=2)
    sync_api.expect(page.locator("svg circle")).to_have_count(2)
    assert page.locator("canvas").is_visible() and fits(page)
    page = opened(Path("s/0/diff.html"), width)
    assert "14 of 15 rows" in page.locator(".note").first.inner_text() and "seed" in page.locator("table").inner_text()
    page.click("#tab-rows")
    page.locator(".item").nth(1).click()
    assert page.locator(".tok.off").count() == 2 and "0x" in page.locator(".detail").inner_text()
    for tab in ("a", "b"):
        page.click(f"#tab-{tab}")
        assert page.locator(".kpi").first.is_visible() and fits(page)


@pytest.mark.parametrize("width", [1400, 390])
def test_a_metric_over_a_number(cli: Any, opened: Open, width: int) -> None:  # noqa: F811
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(cli, "-m", "sampling.temperature=0,0.5,1", "seed=1,2", "out=s").result() == 1
    assert run.main(["report", "s"]) == 0
    page = opened(Path("s/report.html"), width)
    assert page.locator("svg polyline").count() == page.locator("svg polygon").count() == 1
    points = page.locator("svg polyline").get_attribute("points").split()
    places = [float(point.split(",")[0]) for point in points]
    assert len(points) == page.locator("svg circle").count() == 3 and fits(page)
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)
    assert page.locator("table").first.locator("tbody tr").count() == 3
    assert page.locator("tbody td").first.inner_text() == "temperature=0"
    page.click("#tab-deltas")
    assert fits(page)  # the choice of a baseline too, whatever the names' length


def test_a_row_has_a_link(made: Path, opened: Open) -> None:  # noqa: F811
    assert run.main(["report", str(made / "a")]) == 0
    page = opened(made / "a/report.html")
    page.click("#tab-rows")
    page.locator(".item").nth(2).click()
    link, shown = page.url, page.locator(".detail").inner_text()
    assert "#rows/" in link
    page.goto(f"{link.partition('#')[0]}#summary")
    page.goto(link)
    page.reload()
    assert page.locator(".detail").inner_text() == shown


def test_runs_with_nothing_to_show(cli: Any, opened: Open) -> None:  # noqa: F811
    big_run(Path("none"), Path("a"), 0, 0)
    Path("none/trace.json").unlink()
    big_run(Path("long"), Path("a"), 2, 5000)
    Path("long/trace.json").write_text('[\n{"ph":"X","cat":"step"},\nrubbish,\n')
    for folder in ("none", "long"):
        assert run.main(["report", folder]) == 0
        page = opened(Path(folder, "report.html"))
        for tab in ("rows", "schedule", "summary"):
            page.click(f"#tab-{tab}")
    page.click("#tab-rows")
    assert page.locator(".tok").count() == 3000
    page.locator("button", has_text="Show more").click()
    assert page.locator(".tok").count() == 5000
