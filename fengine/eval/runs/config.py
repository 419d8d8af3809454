"""The schemas of runs: `RunConfig` of prompts, `EvalConfig` of tasks, and their checks. No torch, no Hydra. A run of
prompts is an evaluation that scores nothing: `evaluation_of` says which. `conf/` repeats defaults for readers."""

import os
import re
from dataclasses import dataclass, field, fields, make_dataclass
from enum import Enum
from typing import Any

from fengine import config as engine_config
from fengine.config import EngineConfig, held, outside
from fengine.core.json_text import json_object
from fengine.core.sampling_params import PARAMETERS, SamplingParams
from fengine.errors import ConfigError, FengineError
from fengine.eval.cli.schema import Schema
from fengine.eval.tasks import task_config
from fengine.eval.tasks.judge import Given
from fengine.eval.tasks.task_config import Format, Match, TaskConfig
from fengine.tokenizer.stop_regex import compile_patterns

MAX_TOP_LOGPROBS = 100  # beside each token of outputs.jsonl, some 30 bytes each


class View(Enum):
    auto = "auto"  # live in a terminal, plain otherwise
    live = "live"
    plain = "plain"
    quiet = "quiet"


class Trace(Enum):
    off = "off"
    requests = "requests"  # a line for each request: queue, prefill, decode; gauges between them
    steps = "steps"  # besides, an event for each step of the scheduler: its rows, its pages


# Of a row, or of no meaning where texts arrive whole; `task.samples` is a run's n.
_NOT_OF_RUNS = ("n", "stream_interval", "logit_bias", "custom_params", "spaces_between_special_tokens")
_TYPES: dict[str, Any] = {
    "number": float, "integer": int, "flag": bool, "stop strings": tuple[str, ...], "patterns": tuple[str, ...],
    "token ids": tuple[int, ...], "grammar": str | None, "json grammar": str | None,
}  # fmt: skip


def _sampling_fields() -> list[tuple[str, Any, Any]]:
    """The parameters that a run's config has, by the engine's table; top_k None is off."""
    found = []
    for name, row in PARAMETERS.items():
        kind, default = _TYPES.get(row.kind), None if name == "top_k" else row.default
        if row.kind == "integer" and (row.null or default is None):
            kind = int | None
        if name not in _NOT_OF_RUNS:
            found.append((name, kind, field(default=default)))
    return found


_Sampling: Any = make_dataclass("_Sampling", _sampling_fields(), frozen=True)


@dataclass(frozen=True)
class SamplingConfig(Given, _Sampling):
    """The engine's sampling parameters as a caller writes them: temperature 0 is greedy, top_k None is off."""

    def as_dict(self) -> dict[str, Any]:
        """The mapping that `Engine.generate` takes. Pure."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


@dataclass(frozen=True)
class JournalConfig:
    """How much a power failure may cost: fsync after so many seconds or rows. Killed processes lose nothing."""

    sync_seconds: float = 1.0
    sync_rows: int = 1000


@dataclass(frozen=True)
class ShardConfig:
    """Which of the rows are this run's."""

    shard: str | None = None  # "2/4": every fourth row from the second on; None: all of them


@dataclass(frozen=True)
class ResumeConfig:
    """What may have changed since a run began."""

    allow_code_change: bool = False  # fengine's own sources and version; the manifest then tells of the change


@dataclass(frozen=True)
class TemplateConfig:
    """What chats are rendered with, beside their messages."""

    system: str | None = None  # a system message before chats that have none
    template_kwargs: str | None = None  # a JSON object, the template's variables: '{"enable_thinking": false}'

    @property
    def values(self) -> dict[str, Any]:
        return json_object("chat.template_kwargs", self.template_kwargs)


@dataclass(frozen=True)
class ChatConfig(TemplateConfig):
    """Chats in a run of prompts; `chat=true` is `chat.enabled=true`."""

    enabled: bool = False  # wrap every plain prompt as a user's message, with the model's chat template


@dataclass(frozen=True)
class Shared:
    """What runs of prompts and evaluations have in common. Two with equal `engine` share one; users write its sections
    at the top."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    adapter: str | None = None  # the LoRA adapter of all rows: a name of lora.paths
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    trace: Trace = Trace.off
    max_errors: int | None = None
    show: int = 32
    view: View = View.auto


@dataclass(frozen=True)
class RunConfig(Shared):
    """One run of prompts."""

    prompts: Any = None  # None: built in; a list of prompts; the name of a .txt or .jsonl file; one prompt
    chat: ChatConfig = field(default_factory=ChatConfig)
    out: str | None = None
    return_logprob: bool = False


@dataclass(frozen=True)
class EvalConfig(Shared):
    """One evaluation: a task's rows through a model."""

    trace: Trace = Trace.requests
    show: int = 3
    task: TaskConfig = field(default_factory=TaskConfig)
    chat: TemplateConfig = field(default_factory=TemplateConfig)
    top_logprobs: int = 0
    out: str | None = None
    run: ShardConfig = field(default_factory=ShardConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)


# What may change between the parts of one run, since no result depends on it and it names no other experiment.
FREE = ("out", "resume", "journal", "trace", "max_errors", "show", "view")
OF_A_PART = ("scheduler.record",)  # so, too: a file that is never written over


def evaluation_of(config: RunConfig, builtin: tuple[Any, ...]) -> EvalConfig:
    """The evaluation that a run of prompts is; `builtin` are the rows of one that names none. Pure."""
    prompts = builtin if config.prompts is None else config.prompts
    if isinstance(prompts, str) and is_prompt(prompts):
        prompts = [prompts]
    rows: dict[str, Any] = {"data": prompts} if isinstance(prompts, str) else {"prompts": tuple(prompts)}
    rows |= {"format": Format.prompts, "images": "images", "chat": config.chat.enabled}
    task = TaskConfig("prompts", target=None, match=Match.none, **rows)
    chat = TemplateConfig(config.chat.system, config.chat.template_kwargs)
    return EvalConfig(task=task, chat=chat, **{f.name: getattr(config, f.name) for f in fields(Shared)})


def is_prompt(text: str) -> bool:
    """Whether what could be a file's name is one prompt: it has a blank in it and no suffix of a file. Pure."""
    return any(c.isspace() for c in text.strip()) and not text.lower().endswith((".txt", ".jsonl", ".ndjson"))


def check_run(config: RunConfig) -> list[str]:
    """Every problem that can be seen without loading anything, one line each."""
    prompts, bare = config.prompts, config.engine.model.skip_tokenizer_init
    files = [one for one in prompts if is_file(one)] if isinstance(prompts, list) else []
    return _check_shared(config) + held({
        f"prompts=[…] is a list of texts, and {''.join(files[:1])!r:.200} is a file; of one file write prompts=FILE, "
        "several are joined by cat": bool(files),
        "out must name a file; leave it out for output.jsonl in the run's own directory": _blank(config.out),
        f"prompts must be a list or a file's name, got {prompts!r:.80}": not isinstance(prompts, str | list | None),
        "prompts is empty; leave it out to run the built-in prompts": prompts in ("", []),
        "chat=true needs a tokenizer: set model.skip_tokenizer_init=false": config.chat.enabled and bare,
    })  # fmt: skip


def check(config: EvalConfig) -> list[str]:
    """Every problem that can be seen without loading anything, one line each. Pure."""
    seconds, rows = config.journal.sync_seconds, config.journal.sync_rows
    model = config.engine.model
    problems = held({
        f"journal.sync_seconds must be at least 0, got {seconds}": not 0 <= seconds < float("inf"),
        f"journal.sync_rows must be at least 1, got {rows}": rows < 1,
        f"out must name a folder, got {config.out!r:.200}; leave it out for a new one below runs/":
            _blank(config.out) or (config.out or "").lower().endswith((".jsonl", ".ndjson")),
        "an evaluation needs texts: set model.skip_tokenizer_init=false":
            model.skip_tokenizer_init and config.task.format is not Format.prompts,
        "an evaluation needs a model that generates: set model.is_embedding=false": model.is_embedding,
    })  # fmt: skip
    try:
        parse_shard(config.run.shard)
    except ConfigError as error:
        problems.append(str(error))
    return check_call(config) + task_config.check(config.task) + problems


def check_call(config: EvalConfig) -> list[str]:
    """Problems with all but where rows come from and results go to, one line each. Pure."""
    likeliest = outside({"top_logprobs": (0, MAX_TOP_LOGPROBS)}, vars(config))
    return _check_shared(config) + _check_judge(config) + likeliest


def _check_judge(config: EvalConfig) -> list[str]:
    """Problems of a task's judge with what it is run by. Pure."""
    judge, names = config.task.judge, {f.name for f in fields(SamplingConfig)}
    problems = engine_config.check_adapter(judge.adapter, config.engine.lora, "task.judge.adapter")
    try:
        SamplingParams.of(judge.parameters)
    except FengineError as error:
        return [*problems, str(error) if isinstance(error, ConfigError) else f"task.judge.sampling: {error}"]
    strange = [name for name in judge.parameters if name not in names]
    return problems + [f"task.judge.sampling has no {name!r}; there are {', '.join(names)}" for name in strange]


def is_file(prompt: Any) -> bool:
    """Whether what stands as a prompt's text is the name of a file of prompts that is there."""
    return isinstance(prompt, str) and prompt.lower().endswith((".txt", ".jsonl", ".ndjson")) and os.path.isfile(prompt)


def _blank(text: str | None) -> bool:
    return text is not None and not text.strip()


def _check_shared(config: RunConfig | EvalConfig) -> list[str]:
    problems = engine_config.check(config.engine) + engine_config.check_adapter(config.adapter, config.engine.lora)
    model, chat = config.engine.model, config.chat
    for key, text in {
        "model.json_overrides": model.json_overrides,
        "chat.template_kwargs": chat.template_kwargs,
    }.items():
        try:
            json_object(key, text)
        except ConfigError as error:
            problems.append(str(error))
    problems += engine_config.check_home("out", config.out)
    try:
        compile_patterns(SamplingParams.of(config.sampling.as_dict()).stop_regex)
    except FengineError as error:
        told = str(error)
        problems.append(f"sampling.{told}" if told.partition(" ")[0] in PARAMETERS else f"sampling: {told}")
    problems += outside({"max_errors": (0, None), "show": (0, None)}, vars(config))
    several = config.trace is Trace.steps and config.engine.parallel.dp_size > 1
    problems += held({"trace=steps is of one engine's steps; set parallel.dp_size=1, or trace=requests": several})
    return problems + engine_config.check_seed(config.seed)


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """(number from 0, of how many) of "2/4". Pure. Errors: ConfigError."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= count:
        raise ConfigError(f"run.shard must be i/n with i from 1 to n, such as 1/4, 2/4, 3/4 and 4/4, got {text!r:.40}")
    return number - 1, count


RUN = Schema(RunConfig, "config", "run_schema", check_run)
EVAL = Schema(EvalConfig, "eval", "eval_schema", check, "fengine eval", one_file=False, launchers=True)
