"""`fengine report`: a run, a sweep, or two runs as one HTML file that opens offline. No torch."""

from collections.abc import Sequence
from pathlib import Path

from fengine.errors import ConfigError
from fengine.eval.cli import command
from fengine.eval.cli.command import OK
from fengine.eval.cli.view import place
from fengine.eval.records.records import runs_of
from fengine.eval.report.page import page, report_data
from fengine.eval.runs.folder import write_file

USAGE = """
Usage: fengine report RUN_OR_SWEEP [RUN_B] [out=FILE] [rows=1000] [megabytes=5]

Writes one HTML file that opens offline, wherever it is copied to: metrics with error bars, what the run depends on, its
rows with a heatmap of their tokens, the scheduler's steps and pages over time (of a run with trace=steps); of a sweep
its metrics with paired differences; of two runs where they differ and why. It also reads runs that have not come to
their end. The likeliest tokens beside each token are there if the run recorded them (top_logprobs=5).

  out=FILE      default: report.html in the folder, diff.html in the first one of two
  rows=N        how many rows the file holds at most; a third each for failed, wrong and other ones (default 1000)
  megabytes=M   about how large it may be (default 5); the largest rows are cut, to the same size

Exit codes: 0 written   2 usage, a folder that is no run's, or a file that cannot be written
"""


def work(argv: Sequence[str]) -> int:
    """The exit code. Errors: FengineError."""
    options = {"out": _file, "rows": command.whole(0, 100_000), "megabytes": command.number(0.5, 500)}
    words = command.parse(argv, options)
    if len(words.places) not in (1, 2):
        raise ConfigError(f"fengine report takes one folder or two, got {len(words.places)}; see fengine report --help")
    folders = [Path(word) for word in words.places]
    name = "diff.html" if len(folders) == 2 else "report.html"
    out: Path = words.options.get("out", folders[0] / name)
    for folder in folders:
        runs_of(folder)
    data = report_data(
        folders, most_rows=words.options.get("rows", 1000), megabytes=words.options.get("megabytes", 5.0)
    )
    content = page(data)
    write_file(out, content)
    print(f"{place(str(out))}: {len(content) / 1e6:.1f} MB; open it in a browser")
    return OK


def _file(text: str) -> Path:
    if not text.strip() or Path(text).is_dir():
        raise ValueError("must name a file")
    return Path(text)
