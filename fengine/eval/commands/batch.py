"""`fengine batch IN.jsonl OUT.jsonl`: OpenAI's batch format in and out, journaled; vLLM's run-batch files as they are.

Exit codes: those of a run of prompts (`fengine.eval.commands.evaluate`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fengine.errors import ConfigError
from fengine.eval.cli import command, compose
from fengine.eval.cli.engines import EngineCache
from fengine.eval.cli.mistakes import quoted
from fengine.eval.cli.schema import Point
from fengine.eval.cli.view import QuietView
from fengine.eval.commands import evaluate
from fengine.eval.runs.config import RUN, RunConfig, evaluation_of
from fengine.eval.runs.output import BatchExport
from fengine.eval.runs.run import Ended, run_point
from fengine.eval.tasks.task_config import Format

USAGE = """
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


def arguments(words: Sequence[str]) -> list[str]:
    """The words of a run of prompts: the two files, and what configures it. Errors: ConfigError."""
    given, rest, left = {}, [], iter(words)
    for word in left:
        name, sign, value = word.partition("=")
        if name in LONG:
            given[LONG[name]] = value if sign else next(left, "")
        else:
            rest.append(word)
    found = command.parse(rest, overrides=True)
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


def work(argv: Sequence[str]) -> int:
    """The exit code. Errors: FengineError."""
    given = compose.parse(arguments(argv), RUN)
    (point,) = compose.points(given, RUN)
    return evaluate.go(given, RUN, [evaluate.in_place(point)], partial(run_batch, argv=["batch", *argv]), argv)


def run_batch(point: Point, engines: EngineCache, screen: QuietView, argv: Sequence[str]) -> Ended:
    """One file of requests. Errors: FengineError."""
    config: RunConfig = point.config
    assert config.out is not None and isinstance(config.prompts, str), "the command gives both"
    found = evaluation_of(config, ())
    task = replace(found.task, name="batch", format=Format.batch)
    export = BatchExport(config.out, inputs=config.prompts)
    return run_point(replace(point, config=replace(found, task=task)), engines, screen, argv, Path.cwd(), export)
