"""The schema of conf/task/*.yaml: where a task's rows are, what to ask, how to score. No torch, no Hydra. A YAML picks
among the kinds and scores that are built here; it never names code."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from fengine.config import Tuples, held
from fengine.errors import ConfigError
from fengine.eval.tasks import judge
from fengine.eval.tasks.judge import JudgeConfig
from fengine.eval.tasks.scoring import NORMAL_FORMS, pattern_problems


class TaskKind(Enum):
    generate = "generate"  # decode, then compare the text
    choice = "choice"  # which of the row's choices is likeliest
    perplexity = "perplexity"  # how likely the row's text is


class Match(Enum):
    none = "none"  # only record what was generated
    exact = "exact"  # equals a reference, both in normal form
    prefix = "prefix"  # begins with a reference, both in normal form, and no word goes on behind it
    contains = "contains"  # a reference occurs in it, both in normal form
    number = "number"  # its last number equals the reference's by value
    f1 = "f1"  # the words in common with a reference, as SQuAD's F1; task.normal_form says what words are
    regex = "regex"  # a reference is a regular expression that is found in it
    json = "json"  # is JSON, and has the fields of the reference, which may be a text of JSON


class Select(Enum):
    first = "first"
    last = "last"


class Format(Enum):
    auto = "auto"  # by suffix: .jsonl and .ndjson, .parquet
    jsonl = "jsonl"
    openai = "openai"  # OpenAI's batch format, one request a line
    parquet = "parquet"
    hf = "hf"  # `data` names a dataset of Hugging Face
    batch = "batch"  # OpenAI's, too, with answers as a server's: `fengine batch`; ids are the requests' custom_id
    drawn = "drawn"  # pictures and questions of `drawn.rows`, from the seed that `data` is
    prompts = "prompts"  # a run of prompts: .txt, .jsonl, or `prompts`; ids and seeds are the rows' numbers


MAX_SAMPLES = 10_000  # answers of one row: they are one line of outputs.jsonl


@dataclass(frozen=True)
class TaskConfig(Tuples):
    """One task. Columns are named as in the data; `a.b` reaches into an object."""

    name: str = "???"  # of the task, in records
    version: str = "1"  # changes whenever scores of the same outputs would
    kind: TaskKind = TaskKind.generate
    data: str | None = None  # a file; in a YAML of tasks relative to it
    prompts: tuple[Any, ...] | None = None  # in place of data: texts, or objects as a line of data holds
    format: Format = Format.auto
    split: str = "test"  # of a Hugging Face dataset
    subset: str | None = None  # of a Hugging Face dataset
    id: str | None = None  # the column of the row's id; None: "id" where a row has one, else the number of its line
    limit: int | None = None  # the first rows only
    prompt: str | None = None  # "{question}\nAnswer:"; None: the row's own prompt, messages or input_ids
    examples: str | None = None  # a file of rows that are shown, with their references, before each prompt
    shots: int = 0  # how many of them
    group_by: str | None = None  # a column, by whose values metrics are told, too
    images: str | None = None  # the column of a row's images: a path under that of the data, a data URL, or a list
    chat: bool = False  # send the prompt as a user's message, through the model's chat template
    target: str | None = "answer"  # the column of the reference(s), of the right choice, or of the text to be scored

    max_new_tokens: int | None = None  # None: the run's
    stop: tuple[str, ...] | None = None  # None: the run's
    samples: int = 1  # answers for each row; scores are their means
    vote: bool = False  # of several samples: also whether any of them is right, and the answer that most gave
    match: Match = Match.exact
    normal_form: tuple[str, ...] = ("strip",)  # applied in this order to answers and references
    extract: str | None = None  # a regular expression; group 1, or the whole match, is compared
    select: Select = Select.first  # which of several matches
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    choices: str = "choices"  # the column of the list of choices
    delimiter: str = " "  # stands between the prompt and a choice; not counted by acc_norm


KINDS = {  # those that a key counts for, if not for all
    **dict.fromkeys(("images", "max_new_tokens", "stop", "samples", "vote", "match", "normal_form", "extract",
                     "select", "judge"), (TaskKind.generate,)),
    **dict.fromkeys(("prompt", "examples", "shots", "group_by", "chat", "delimiter"),
                    (TaskKind.generate, TaskKind.choice)),
    "choices": (TaskKind.choice,),
}  # fmt: skip


def check(config: TaskConfig) -> list[str]:
    """Every problem that can be seen without reading the data, one line each. Pure."""
    problems = _data(config) | _kind(config) | _of_kinds(config) | _bounds(config)
    return held(problems) + pattern_problems("task.extract", config.extract) + judge.check(config.judge)


def _data(config: TaskConfig) -> dict[str, bool]:
    """Problem -> whether it is one, of where rows come from. Pure."""
    drawn, inline = config.format is Format.drawn, config.prompts is not None
    return {
        "task.format=drawn takes a seed, task.data=0, and how many rows: task.limit=100":
            drawn and not (config.limit and (config.data or "").isdecimal()),
        "task.prompts is for task.format=prompts": inline and config.format is not Format.prompts,
        "task.data must name the rows: task.data=FILE.jsonl": not inline and not (config.data or "").strip(),
        "task.examples is the file of the rows, whose first ones would be shown with their own answers: give another":
            config.examples is not None and Path(config.examples) == Path(config.data or ""),
        "task.split and task.subset are of a dataset of Hugging Face: task.format=hf":
            config.format is not Format.hf and (config.split, config.subset) != (TaskConfig.split, TaskConfig.subset),
        "task.format=batch is that of `fengine batch`, which scores nothing":
            config.format is Format.batch and (config.match is not Match.none or config.judge.prompt is not None),
        "task.format=openai holds requests to generate; kind=choice needs a prompt and choices":
            config.kind is TaskKind.choice and config.format is Format.openai,
    }  # fmt: skip


def _kind(config: TaskConfig) -> dict[str, bool]:
    """Problem -> whether it is one, of what is computed and compared. Pure."""
    generates, compared = config.kind is TaskKind.generate, config.match is not Match.none
    return {
        "task.target must name the reference's column, or set task.match=none":
            config.target is None and (compared or not generates),
        "task.judge.response brings the answers: leave out task.prompt, task.shots, task.samples":
            bool(config.judge.response and (config.prompt or config.shots or config.samples > 1)),
        "task.vote is for several samples that are compared: set task.samples and task.match":
            config.vote and (config.samples < 2 or not compared),
    }  # fmt: skip


def _of_kinds(config: TaskConfig) -> dict[str, bool]:
    """Problem -> whether it is one, of keys that would count for nothing. Pure."""
    shots, plain = bool(config.shots), TaskConfig()
    idle = [name for name, kinds in KINDS.items() if config.kind not in kinds
            and getattr(config, name) not in (getattr(plain, name), Match.none)]  # fmt: skip
    return {
        **{f"task.{name} is for {' and '.join(f'kind={kind.value}' for kind in KINDS[name])}": True for name in idle},
        "task.select says which match of task.extract counts: set that, too":
            config.select is not TaskConfig.select and config.extract is None,
        "task.delimiter is for kind=choice and for task.shots":
            config.kind is TaskKind.generate and not shots and config.delimiter != TaskConfig.delimiter,
        "task.shots needs task.examples=FILE.jsonl, a template: task.prompt, and references: task.target":
            shots and not (config.examples and config.prompt and config.target),
        "task.examples is shown by task.shots=N": config.examples is not None and not shots,
    }  # fmt: skip


def _bounds(config: TaskConfig) -> dict[str, bool]:
    """Problem -> whether it is one, of numbers and of names. Pure."""
    counts = {name: getattr(config, name) for name in ("limit", "samples", "max_new_tokens")}
    counts |= {"shots": config.shots or None}
    unknown = [name for name in config.normal_form if name not in NORMAL_FORMS]
    return {
        f"task.samples must be at most {MAX_SAMPLES:,}, got {config.samples:,}": config.samples > MAX_SAMPLES,
        **{f"task.{name} must be at least 1, got {n}": True for name, n in counts.items() if n is not None and n < 1},
        f"task.normal_form has no {''.join(unknown[:1])!r}; there are {', '.join(NORMAL_FORMS)}": bool(unknown),
    }


def base_directory(option: str, search: list[Path], overrides: list[str]) -> Path:
    """What `task.data` is relative to: the directory of task/OPTION.yaml, the first that `search` (Hydra's order) has;
    the working directory where the command line gives `task.data` itself. Errors: ConfigError."""
    if any(word.lstrip("+").startswith("task.data=") for word in overrides):
        return Path.cwd()
    for directory in search:
        if (directory / "task" / f"{option}.yaml").is_file():
            return directory / "task"
    raise ConfigError(f"no task/{option}.yaml in {', '.join(map(str, search))}")
