"""The schema of an evaluation run: `EvalConfig`, whose defaults `conf/eval.yaml` repeats for readers. No torch."""

import re
from dataclasses import dataclass, field
from enum import Enum

from fengine import config as engine_config
from fengine.config import EngineConfig
from fengine.core.sampling_params import SamplingParams
from fengine.errors import ConfigError, FengineError
from fengine.eval.cli.schema import Schema
from fengine.eval.runs.config import SamplingConfig, View
from fengine.eval.tasks import task_config
from fengine.eval.tasks.task_config import TaskConfig
from fengine.tokenizer.stop_regex import compile_patterns

MAX_TOP_LOGPROBS = 100  # beside each token of outputs.jsonl, some 30 bytes each


class Trace(Enum):
    off = "off"
    requests = "requests"  # a line for each request: queue, prefill, decode; gauges between them
    steps = "steps"  # besides, an event for each step of the scheduler: its rows, its pages


@dataclass(frozen=True)
class JournalConfig:
    """How much a power failure may cost: fsync after so many seconds or rows. Killed processes lose nothing."""

    sync_seconds: float = 1.0
    sync_rows: int = 1000


@dataclass(frozen=True)
class PartConfig:
    """Which of the rows are this run's."""

    shard: str | None = None  # "2/4": every fourth row from the second on; None: all of them


@dataclass(frozen=True)
class ResumeConfig:
    """What may have changed since a run began."""

    allow_code_change: bool = False  # fengine's own sources and version; the manifest then tells of the change


@dataclass(frozen=True)
class EvalConfig:
    """One evaluation: a task's rows through a model."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    seed: int = 0
    adapter: str | None = None  # the LoRA adapter of all rows: a name of lora.paths
    top_logprobs: int = 0
    out: str | None = None
    run: PartConfig = field(default_factory=PartConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)
    trace: Trace = Trace.requests
    max_errors: int | None = None
    show: int = 3
    view: View = View.auto


# What may change between the parts of one run, since no result depends on it and it names no other experiment.
FREE = ("out", "resume", "journal", "trace", "max_errors", "show", "view")


def check(config: EvalConfig) -> list[str]:
    """Every problem that can be seen without loading anything, one line each. Pure."""
    problems = engine_config.check(config.engine) + task_config.check(config.task)
    problems += engine_config.check_adapter(config.adapter, config.engine.lora)
    try:
        compile_patterns(SamplingParams.of(config.sampling.as_dict()).stop_regex)
    except FengineError as error:
        problems.append(f"sampling.{error}")
    for name in ("max_errors", "show"):
        value = getattr(config, name)
        if value is not None and value < 0:
            problems.append(f"{name} must be at least 0, got {value}")
    if not 0 <= config.journal.sync_seconds < float("inf"):
        problems.append(f"journal.sync_seconds must be at least 0, got {config.journal.sync_seconds}")
    if config.journal.sync_rows < 1:
        problems.append(f"journal.sync_rows must be at least 1, got {config.journal.sync_rows}")
    if not -(2**63) <= config.seed < 2**63:
        problems.append(f"seed must be in [-2**63, 2**63 - 1], got {config.seed}")
    try:
        parse_shard(config.run.shard)
    except ConfigError as error:
        problems.append(str(error))
    if not 0 <= config.top_logprobs <= MAX_TOP_LOGPROBS:
        problems.append(f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {config.top_logprobs}")
    if config.out is not None and not config.out.strip():
        problems.append("out must name a folder; leave it out for a new one below runs/")
    if config.engine.model.skip_tokenizer_init:
        problems.append("an evaluation needs texts: set model.skip_tokenizer_init=false")
    if config.engine.model.is_embedding:
        problems.append("an evaluation needs a model that generates: set model.is_embedding=false")
    return problems


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """(number from 0, of how many) of "2/4". Pure. Errors: ConfigError."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= count:
        raise ConfigError(f"run.shard must be i/n with i from 1 to n, such as 1/4, 2/4, 3/4 and 4/4, got {text!r:.40}")
    return number - 1, count


EVAL = Schema(EvalConfig, "eval", "eval_schema", check, "fengine eval", one_file=False, launchers=True)
