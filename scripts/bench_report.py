"""How large a report is, how long it takes to write, to open, and to scroll: `fengine report` in Chromium.

    python scripts/bench_report.py [--rows 1000] [--tokens 120] [--runs 5]        needs: pip install 'fengine[browser]'

The run is made up: its records, with 5 likeliest tokens beside each token, and its trace of steps have the form and the
size of real ones. Writing: the whole command.
Ready: from the start of navigation until the first view can be used. Rows: a click on the tab until the next frame.
Scrolling: 3 seconds of wheel through all rows; a frame is late when it took over 33 ms.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
from playwright.sync_api import sync_playwright

from fengine.core.step_trace import NewPages, StepRecord
from fengine.eval.commands import evaluate
from fengine.eval.runs.trace import Trace

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync".split()
)
SCROLL = """async () => {
    const list = document.querySelector(".list"), frames = [];
    let last = performance.now(), at = 0;
    const from = last, most = list.scrollHeight - list.clientHeight;
    while (last - from < 3000) {
        list.scrollTop = (most * (last - from)) / 3000;
        const now = await new Promise(requestAnimationFrame);
        frames.push(now - last);
        last = now;
    }
    return frames.slice(1);
}"""
SCRUB = """async () => {
    const slider = document.querySelector("input[type=range]"), frames = [];
    let last = performance.now();
    for (let i = 0; i < 120; i++) {
        slider.value = Math.round((slider.max * i) / 119);
        slider.dispatchEvent(new Event("input"));
        const now = await new Promise(requestAnimationFrame);
        frames.push(now - last);
        last = now;
    }
    return frames.slice(1);
}"""


def made_up(folder: Path, rows: int, tokens: int) -> None:
    """A finished run's folder, from the form of a real one of the model in the box."""
    words = ["task=capitals", "task.limit=2", "view=quiet", "compile.enabled=false", "model.device=cpu"]
    assert evaluate.main([*words, f"out={folder}"]) == 0
    lines = []
    for i in range(rows):
        ids = [(7 * i + 13 * j) % 4000 for j in range(tokens)]
        logprobs = [-(((i * j) % 97) ** 2) / 4001 for j in range(tokens)]
        answer: dict[str, Any] = {
            "prompt": f"Question {i}: " + "why " * 40,
            "text": "word " * tokens,
            "output_ids": ids,
            "logprobs": logprobs,
            "top_logprobs": [
                [[lp - k, (token + k) % 4000] for k in range(5)] for lp, token in zip(logprobs, ids, strict=True)
            ],
            "finish_reason": {"type": "length", "length": tokens},
            "sampling_seed": 2**62 + i,
        }
        lines.append({"id": f"row-{i}", "data": {"id": f"row-{i}", "answer": str(i)}, "answers": [answer]})
        lines[-1]["scores"] = {"exact_match": i % 3 > 0}
    body = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (folder / "outputs.jsonl").write_bytes(body)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["identity"]["input"]["rows"] = rows
    manifest["result"] |= {"outputs_sha256": hashlib.sha256(body).hexdigest(), "rows": rows}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "trace.json").unlink()
    with Trace(folder / "trace.json", 1, steps=True) as trace:
        for record in steps(rows, tokens):
            trace.step(record)


def steps(rows: int, tokens: int, batch: int = 64, prompt: int = 48) -> list[StepRecord]:
    """64 requests at a time, each starting when another has ended."""
    found, left, page_ = [], list(range(rows)), 1
    running: dict[int, int] = {}  # request -> its tokens
    ended: list[int] = []
    while left or running:
        new = [left.pop(0) for _ in range(min(len(left), batch - len(running), 4))]
        running |= dict.fromkeys(new, 0)
        grown = [r for r, n in running.items() if n and n % 16 == 0]
        pages = [NewPages(f"r{r}", 0, 1, (1, *range(page_ + 3 * i, page_ + 3 * i + 3))) for i, r in enumerate(new)]
        pages += [NewPages(f"r{r}", 9, 0, (page_ + 400 + i,)) for i, r in enumerate(grown)]
        page_ = (page_ + 3 * len(new) + len(grown)) % 3000 + 1
        counts = tuple(1 if n else prompt for n in running.values())
        found.append(
            StepRecord(
                len(found), len(found) * 0.01, len(found) * 0.01 + 0.009, tuple(f"r{r}" for r in running),
                tuple(n and n + prompt for n in running.values()), counts, tuple(n > 0 for n in running.values()),
                tuple(pages), (), tuple(f"r{r}" for r in ended), len(running), len(left), 900, 100, 4096,
            )
        )  # fmt: skip
        running = {r: (n or prompt) + 1 for r, n in running.items()}
        ended = [r for r, n in running.items() if n > prompt + tokens]
        running = {r: n for r, n in running.items() if n <= prompt + tokens}
    return found


def visit(path: Path, times: int) -> dict[str, Any]:
    """Opens the file again and again. Milliseconds."""
    ready, rows, schedule, scrolled, scrubbed = [], [], [], [], []
    timed = "async (name) => { const t = performance.now(); document.getElementById(`tab-${name}`).click();" \
            " await new Promise(requestAnimationFrame); return performance.now() - t }"  # fmt: skip
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        for _ in range(times):
            tab = browser.new_page(viewport={"width": 1400, "height": 900})
            tab.goto(path.as_uri())
            tab.wait_for_selector("html[data-ready]")
            ready.append(float(tab.evaluate("document.documentElement.dataset.ready")))
            rows.append(tab.evaluate(timed, "rows"))
            scrolled += tab.evaluate(SCROLL)
            schedule.append(tab.evaluate(timed, "schedule"))
            scrubbed += tab.evaluate(SCRUB)
            tab.close()
        told = {"chromium": browser.version}
        browser.close()
    return told | {
        "ready_ms": measure.summary(ready),
        "rows_tab_ms": measure.summary(rows),
        "schedule_tab_ms": measure.summary(schedule),
        "scroll_frames_ms": frames(scrolled),
        "scrub_frames_ms": frames(scrubbed),
    }


def frames(took: list[float]) -> dict[str, Any]:
    ordered = sorted(took)
    share = sum(one > 33.4 for one in took) / len(took)
    middle, most = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return {"frames": len(took), "median": middle, "p99": most, "max": ordered[-1], "late_share": share}


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=120)
    given = parser.parse_args()
    if CHROMIUM is None:
        sys.exit("needs a Chromium in the PATH")
    with tempfile.TemporaryDirectory() as folder:
        run, path = Path(folder) / "run", Path(folder) / "report.html"
        made_up(run, given.rows, given.tokens)
        took = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "fengine.run", "report", run, f"out={path}"], check=True)
            took.append(time.perf_counter() - start)
        figures = {"rows": given.rows, "tokens": given.tokens, "bytes": path.stat().st_size}
        figures |= {"outputs_bytes": (run / "outputs.jsonl").stat().st_size, "write_seconds": measure.summary(took)}
        measure.save("bench_report", figures | visit(path, given.runs), given.out)


if __name__ == "__main__":
    main()
