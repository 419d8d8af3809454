"""`fengine eval task=NAME ...`: a task's rows through a model, kept in a run folder.

Exit codes: 0 all rows good; 1 rows failed, or the run could not go on (the engine died, the disk is full, too many
errors); 2 usage, configuration, input, or a folder of another run; 130 interrupted; 143 terminated.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fengine.eval.cli import view
from fengine.eval.cli.command import OK, composed
from fengine.eval.cli.compose import jobs
from fengine.eval.cli.engines import EngineCache
from fengine.eval.cli.schema import BadPoint, Point
from fengine.eval.runs.config import EVAL
from fengine.eval.runs.run import run_point
from fengine.eval.runs.sweep import guarded, how_to_go_on, run_sweep


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `fengine eval` with these arguments (default: those of this process) and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)

    def work(command: Namespace) -> int:
        found = own_folders(jobs(command, EVAL))
        with EngineCache() as engines:
            if len(found) > 1:
                run = partial(run_point, argv=words)
                return run_sweep(command, EVAL, found, engines, run, partial(run_alone, words))
            (point,) = (job for job in found if isinstance(job, Point))
            screen = view.choose(point.config.view)
            code, metrics = run_point(point, engines, screen, words)
            if code != OK and metrics is None:
                screen.note(how_to_go_on(point.directory, EVAL))
            return code

    return composed(words, EVAL, work)


def own_folders(found: Sequence[Point | BadPoint]) -> list[Point | BadPoint]:
    """The points with `out`, where it is given, as their folders: itself, or a folder in it for each of several. Pure
    but for the working directory."""
    own: list[Point | BadPoint] = []
    for index, point in enumerate(found):
        if isinstance(point, Point) and point.config.out is not None:
            folder = Path(point.config.out).absolute()
            point = replace(point, directory=folder / str(index) if len(found) > 1 else folder)
        own.append(point)
    return own


def run_alone(words: Sequence[str], point: Point) -> int:
    """One point of a sweep in a process of its own, without a live view. Returns its exit code."""
    screen = view.QuietView() if point.config.view.value == "quiet" else view.PlainView()
    with EngineCache() as engines:
        return guarded(point, engines, partial(run_point, argv=words), screen)[0]


if __name__ == "__main__":
    sys.exit(main())
