"""`fengine eval task=NAME ...`, `fengine prompts=FILE ...`, `fengine.evaluate(task, engine)`: rows through a model.
A run of prompts is an evaluation that scores nothing. Exit codes stand in `fengine/eval/README.md`."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from fengine.config import EngineConfig
from fengine.core.sampling_params import SamplingParams
from fengine.core.scalars import told
from fengine.errors import ConfigError, FengineError
from fengine.eval.cli import view
from fengine.eval.cli.command import FAILED, INTERRUPTED, OK, TERMINATED, composed
from fengine.eval.cli.command import parse as parse_words
from fengine.eval.cli.compose import jobs, parse
from fengine.eval.cli.engines import EngineCache, model_directory, refuse_sampling
from fengine.eval.cli.mistakes import quoted
from fengine.eval.cli.schema import BadPoint, Point, Schema
from fengine.eval.cli.view import place
from fengine.eval.runs import manifest
from fengine.eval.runs.answering import given_sampling
from fengine.eval.runs.config import EVAL, RUN, EvalConfig, RunConfig, SamplingConfig, View, check_call, evaluation_of
from fengine.eval.runs.folder import RunFolder
from fengine.eval.runs.index import index_rows
from fengine.eval.runs.output import BatchExport, Export
from fengine.eval.runs.provenance import local_directory, source_digest, takes_images, template_digest
from fengine.eval.runs.run import Ended, open_run, render_of, run_point
from fengine.eval.runs.sweep import Job, guarded, how_to_go_on, run_sweep
from fengine.eval.tasks import drawn
from fengine.eval.tasks.judge import JudgeConfig, Judged, judged
from fengine.eval.tasks.task import Task
from fengine.eval.tasks.task_config import Format, Match, TaskConfig

BATCH = """
Usage:  fengine batch IN.jsonl OUT.jsonl [group=option] [key=value] ...

Answers a file of requests as `fengine serve` would, in OpenAI's batch format: a line of IN.jsonl is

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 64}}

and OUT.jsonl has for each {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}, in the order
of the input. url: completions, chat/completions, responses, messages, embeddings, score, rerank, /generate, /encode.
Every field of the server's bodies holds but stream. Whatever model a body names, it is answered by this one. A request
without a seed draws by `seed` and its custom_id, so that answers depend neither on order nor on batch.

The record is OUT.jsonl.run: killed or interrupted, the same command goes on; requests that failed are tried again.

    fengine batch in.jsonl out.jsonl model=qwen3-0.6b
    fengine batch -i in.jsonl -o out.jsonl --model Qwen/Qwen3-0.6B         (vLLM's words)

Exit codes:  0 ok   1 some requests failed   2 usage, configuration or input   130 interrupted   143 terminated
"""
LONG = {"-i": "in", "--input-file": "in", "-o": "out", "--output-file": "out", "--model": "model.path"}
OWN = ("prompts", "out", "chat", "return_logprob", "adapter")  # keys of RUN that mean nothing here
OUTPUT = "output.jsonl"  # of a run of prompts, in its own directory
# What a run of prompts has that names none: SGLang's examples of the offline engine, and what the model in the box can.
TEXTS = (
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "Once upon a time",
    "Write a short, neutral self-introduction for a fictional character. Hello, my name is",
    "Provide a concise factual statement about France's capital city. The capital of France is",
    "Explain possible future trends in artificial intelligence. The future of AI is",
    "Question: What is 27 + 48?\nAnswer:",
    "Sort these numbers: 83, 12, 57, 30\nSorted:",
    "Copy: river moon 42 tiger lamp ->",
    "Sentence: Anna is 31 years old, lives in Oslo and works as a teacher.\nJSON:",
)
CHATS = (
    ("Who are you?",),
    ("What is the capital of Japan?",),
    ("What is 90 - 35?",),
    ("Hello, my name is Tom.", "Hello, Tom! Nice to meet you.", "What is my name?"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `fengine eval` with these arguments (default: those of this process) and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return composed(words, EVAL, lambda command: go(command, EVAL, run_point, words))


def prompts(argv: Sequence[str]) -> int:
    """Runs `fengine` without a command's name, with these arguments, and returns the exit code."""
    words = with_prompts(argv)
    return composed(words, RUN, lambda command: go(command, RUN, run_prompts, words))


def go(command: Namespace, schema: Schema, work: Callable[..., Ended], words: Sequence[str]) -> int:
    """A run, or a sweep of them, each by `work`."""
    found, run = placed(jobs(command, schema), schema), partial(work, argv=words)
    with EngineCache() as engines:
        if len(found) > 1:
            return run_sweep(command, schema, found, engines, run, partial(run_alone, words))
        (point,) = (job for job in found if isinstance(job, Point))
        screen = view.choose(point.config.view)
        try:
            code, metrics = run(point, engines, screen)
        except BrokenPipeError:  # nobody reads what it shows
            code, metrics = FAILED, None
        if code >= INTERRUPTED or (code != OK and metrics is None):
            screen.note(how_to_go_on(point.directory, schema, point.config.out))
        return code


def placed(found: Sequence[Job], schema: Schema) -> list[Job]:
    """The points with their folders as `out` has them, where it is given: the folder of an evaluation, or one in it for
    each of several; of a run of prompts the one beside its output file."""
    own = list(found)
    for index, job in enumerate(found):
        if isinstance(job, BadPoint) or (out := job.config.out) is None:
            continue
        if not schema.one_file:
            folder = Path(out).absolute()
            own[index] = replace(job, directory=folder / str(index) if len(found) > 1 else folder)
        elif not (export := Export(out)).device:
            own[index] = replace(job, directory=export.folder)
    return own


def run_alone(words: Sequence[str], point: Point) -> int:
    """One point of a sweep in a process of its own, without a live view. Returns its exit code."""
    screen = view.QuietView() if point.config.view.value == "quiet" else view.PlainView()
    with EngineCache() as engines:
        return guarded(point, engines, partial(run_point, argv=words), screen)[0]


# -- prompts -----------------------------------------------------------------------------------------------------------


def is_prompt(word: str) -> bool:
    """Whether an argument is a prompt as it stands: it has a blank before any =. Pure."""
    return any(c.isspace() for c in word.partition("=")[0].strip()) and not word.startswith("-")


def with_prompts(words: Sequence[str]) -> list[str]:
    """The arguments, those that are prompts as they stand as one `prompts=[...]`. Pure."""
    texts, others = [w for w in words if is_prompt(w)], [w for w in words if not is_prompt(w)]
    return [f"prompts=[{', '.join(map(quoted, texts))}]", *others] if texts else others


def builtin_rows(directory: Path) -> tuple[Any, ...]:
    """The rows of a run that names none, for the model in the folder: about pictures where it sees, else with chats
    where it has a template."""
    chats = template_digest(directory) is not None
    if chats and takes_images(directory):
        return drawn.chats(seed=1, count=12)
    roles = ("user", "assistant")
    talks = [[{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)] for turns in CHATS]
    return (*TEXTS, *({"messages": talk} for talk in talks if chats))


def run_prompts(point: Point, engines: EngineCache, screen: view.QuietView, argv: Sequence[str]) -> Ended:
    """One run of prompts. Errors: FengineError."""
    config: RunConfig = point.config
    model, out = config.engine.model, point.directory / OUTPUT if config.out is None else config.out
    inputs = config.prompts if isinstance(config.prompts, str) else None
    export = Export(out, config.return_logprob, not model.skip_tokenizer_init, inputs)
    rows: tuple[Any, ...] = ()
    if config.prompts is None:
        rows = builtin_rows(local_directory(model.path) or model_directory(model))
    own = replace(point, config=evaluation_of(config, rows))
    return run_point(own, engines, screen, argv, Path.cwd(), export)


# -- batches: OpenAI's format in and out, journaled; vLLM's run-batch files as they are --------------------------------


def batch_arguments(words: Sequence[str]) -> list[str]:
    """The words of a run of prompts: the two files, and what configures it. Errors: ConfigError."""
    given, rest, left = {}, [], iter(words)
    for word in left:
        name, sign, value = word.partition("=")
        if name in LONG:
            given[LONG[name]] = value if sign else next(left, "")
        else:
            rest.append(word)
    found = parse_words(rest, overrides=True)
    files = [*filter(None, (given.get("in"), given.get("out"))), *found.places]
    if len(files) != 2:
        raise ConfigError(f"fengine batch takes IN.jsonl and OUT.jsonl, got {len(files)} files; --help tells more")
    if not Path(files[0]).is_file():
        raise ConfigError(f"{files[0]}: there is no such file of requests")
    for word in found.overrides:
        key = word.partition("=")[0].lstrip("+")
        if key.partition(".")[0] == "sampling" or key in OWN:
            raise ConfigError(f"{word:.200}: each request of a batch says this in its body")
    model = [f"model.path={quoted(given['model.path'])}"] if "model.path" in given else []
    return [f"prompts={quoted(files[0])}", f"out={quoted(files[1])}", *model, *found.overrides]


def batch(argv: Sequence[str]) -> int:
    """Runs `fengine batch` and returns the exit code. Errors: FengineError."""
    return go(parse(batch_arguments(argv), RUN), RUN, run_batch, ["batch", *argv])


def run_batch(point: Point, engines: EngineCache, screen: view.QuietView, argv: Sequence[str]) -> Ended:
    """One file of requests. Errors: FengineError."""
    config: RunConfig = point.config
    assert config.out is not None and isinstance(config.prompts, str), "the command gives both"
    found = evaluation_of(config, ())
    task = replace(found.task, name="batch", format=Format.batch)
    export = BatchExport(config.out, inputs=config.prompts)
    return run_point(replace(point, config=replace(found, task=task)), engines, screen, argv, Path.cwd(), export)


# -- from Python -------------------------------------------------------------------------------------------------------


def evaluate(
    task: Task, engine: Any, out: str | Path | None = None, *, sampling: dict[str, Any] | None = None, seed: int = 0,
    adapter: str | None = None, top_logprobs: int = 0, max_errors: int | None = None, show: int = 0,
    judge: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Runs a task's rows through an open engine; returns what metrics.json holds.

    `task` brings rows, what is asked of each, scores and metrics (`fengine.eval.tasks.task.Task`). `out` is the run
    folder, a new one below runs/ if None: the same call goes on where it was interrupted. The manifest has the SHA-256
    of the task's source. With `judge`, the keys of `task.judge`, the engine's model judges the answers. `fengine diff`
    and `report` read the folder; `verify` and `rerun` need the task, and say so.
    Errors: FengineError and its kinds; KeyboardInterrupt."""
    _refuse_others(task, engine)
    counts = {"seed": seed, "top_logprobs": top_logprobs, "max_errors": max_errors, "show": show}
    config = _config_of(engine, task, {} if sampling is None else sampling, judge, counts)
    if adapter is not None and adapter not in (known := engine.lora_adapters()):
        raise ConfigError(f"adapter={adapter!r:.80}: the engine has {', '.join(known) or 'none'}")
    config = replace(config, adapter=adapter)
    point = Point(config, Path(f"runs/{datetime.now():%Y-%m-%d/%H-%M-%S-%f}" if out is None else out).absolute())
    code, metrics, record = _run(judged(task, config.task.judge, render_of(engine, config.chat)), engine, point)
    if metrics is not None:
        return metrics
    if code in (INTERRUPTED, TERMINATED):
        raise KeyboardInterrupt
    how = record["sessions"][-1]["how"]
    raise FengineError(f"the run in {place(str(point.directory))} ended early: {how}; the same call goes on")


def _config_of(engine: Any, task: Task, sampling: Any, judge: Any, counts: dict[str, Any]) -> EvalConfig:
    """Errors: ConfigError with every problem."""
    wrong = [name for name, value in counts.items() if type(value) is not int and (name, value) != ("max_errors", None)]
    if wrong:
        raise ConfigError(f"{wrong[0]} must be a whole number, got {told(counts[wrong[0]])}")
    greedy = {"temperature": 0.0} | sampling if isinstance(sampling, dict) else sampling
    own = TaskConfig(task.name, task.version, target=None, match=Match.none, judge=JudgeConfig.of("judge", judge))
    view_of = View.plain if counts["show"] else View.quiet
    config = EvalConfig(engine.config, SamplingConfig.of("sampling", greedy), task=own, view=view_of, **counts)
    if problems := check_call(config):
        raise ConfigError("\n".join(problems))
    refuse_sampling(config.engine, SamplingParams.of(given_sampling(config)), None)
    return config


def _refuse_others(task: Any, engine: Any) -> None:
    """Errors: ConfigError for what is no task, or no engine."""
    if lacks := [name for name in ("name", "version", "rows", "asks", "score", "metrics") if not hasattr(task, name)]:
        raise ConfigError(
            f"task must be an object with {', '.join(lacks)} (fengine.eval.tasks.task.Task), got "
            f"{type(task).__name__}; a task of fengine's own is run by fengine eval task=NAME"
        )
    if not isinstance(getattr(engine, "config", None), EngineConfig):
        raise ConfigError(f"engine must be an open Engine, got {type(engine).__name__}")


def _run(task: Task, engine: Any, point: Point) -> tuple[int, dict[str, Any] | None, dict[str, Any]]:
    """Exit code, metrics.json and manifest of the run in the point's folder."""
    screen, rows = view.choose(point.config.view), index_rows(task)
    with RunFolder(point.directory) as folder:
        what = manifest.identity(point.config, task, rows)
        what["task"]["source_sha256"] = source_digest(task.task if isinstance(task, Judged) else task)
        run = open_run(folder, point, what, rows, Path.cwd(), screen)
        run.check_engine(engine)
        if not run.table.left:
            return *run.end(task, screen, [], 0.0), run.record
        return *run.compute(engine, task, screen, ["evaluate"]), run.record


if __name__ == "__main__":
    sys.exit(main())
