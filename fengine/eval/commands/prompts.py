"""`fengine prompts=FILE out=FILE ...`: prompts through a model, their answers in a JSONL file.

It is an evaluation that scores nothing. Its run folder is FILE.run beside the output file, or the run's own directory,
so that it goes on where it was interrupted, and `fengine verify`, `diff` and `report` read it.
Exit codes: 0 ok, 1 rows failed or the engine died, 2 usage or configuration, 130 interrupted, 143 terminated.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fengine.eval.cli import view
from fengine.eval.cli.command import FAILED, INTERRUPTED, OK, composed
from fengine.eval.cli.compose import jobs
from fengine.eval.cli.engines import EngineCache, model_directory
from fengine.eval.cli.launch import quoted
from fengine.eval.cli.schema import BadPoint, Point
from fengine.eval.cli.view import place
from fengine.eval.runs.config import RUN, RunConfig, evaluation_of
from fengine.eval.runs.digests import has_chat_template, local_directory
from fengine.eval.runs.export import Export
from fengine.eval.runs.run import Ended, run_point
from fengine.eval.runs.sweep import run_sweep
from fengine.eval.tasks import builtin

OUTPUT = "output.jsonl"  # in the run's own directory


def main(argv: Sequence[str]) -> int:
    """Runs `fengine` without a command's name, with these arguments, and returns the exit code."""

    def work(command: Namespace) -> int:
        found = [_in_place(job) for job in jobs(command, RUN)]
        with EngineCache() as engines:

            def run(point: Point, engines: EngineCache, screen: view.QuietView) -> Ended:
                return run_prompts(point, engines, screen, argv)

            if len(found) > 1:
                return run_sweep(command, RUN, found, engines, run, lambda _: FAILED)
            (point,) = (job for job in found if isinstance(job, Point))
            screen = view.choose(point.config.view)
            code, metrics = run(point, engines, screen)
            if code >= INTERRUPTED or (code != OK and metrics is None):
                own = "" if point.config.out else f" with hydra.run.dir={place(str(point.directory))}"
                screen.note(f"to go on, run the same command{own}")
            return code

    return composed(argv, RUN, work)


def is_prompt(word: str) -> bool:
    """Whether an argument is a prompt as it stands: it has a blank before any =. Pure."""
    return any(c.isspace() for c in word.partition("=")[0].strip()) and not word.startswith("-")


def prompt_override(text: str) -> str:
    """The argument that gives one prompt. Pure."""
    return f"prompts=[{quoted(text)}]"


def _in_place(job: Point | BadPoint) -> Any:
    """The point with the run folder beside its output file, where one is named."""
    if isinstance(job, BadPoint) or job.config.out is None:
        return job
    export = Export(job.config.out)
    return job if export.device else replace(job, directory=export.folder)


def run_prompts(point: Point, engines: EngineCache, screen: view.QuietView, argv: Sequence[str]) -> Ended:
    """One run of prompts. Errors: FengineError."""
    config: RunConfig = point.config
    out = point.directory / OUTPUT if config.out is None else config.out
    inputs = config.prompts if isinstance(config.prompts, str) else None
    export = Export(out, config.return_logprob, not config.engine.model.skip_tokenizer_init, inputs)
    rows: tuple[Any, ...] = ()
    if config.prompts is None:
        model = config.engine.model
        rows = builtin.rows(has_chat_template(local_directory(model.path) or model_directory(model)))
    own = replace(point, config=evaluation_of(config, rows))
    return run_point(own, engines, screen, argv, Path.cwd(), export)
