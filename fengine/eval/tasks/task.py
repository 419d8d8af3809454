"""What an evaluation is made of: rows, what is asked about each, what comes back, and what it scores. No torch.

A task is a value with four pure functions. The loop that runs one asks the engine for every `Ask` of a row, hands the
answers to `score` in the order of the asks, and journals its result; `metrics` sees the scores of all good rows, in any
order that is the same for every run (the order of the rows)."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol

Kind = Literal["generate", "judge", "loglikelihood", "rolling"]
DRAWN = ("generate", "judge")  # kinds whose answers are drawn
Scores = dict[str, float | bool | str]
Pair = tuple[float, int]  # logprob, token id


@dataclass(frozen=True)
class Row:
    """One input row. `id` is unique in the task; `data` holds the row's columns as JSON values."""

    id: str
    data: dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """One line that is no row, and why. `id` is unique among all rows of the task; `line` counts from 1."""

    id: str
    line: int
    message: str
    type: str = "InputFileError"


@dataclass(frozen=True)
class Ask:
    """One thing to ask the engine.

    "generate": decode after `prompt` under `sampling`, the values that differ from the run's own. `images` stand at the
        placeholders of the prompt: paths or data URLs.
    "judge": decode after `prompt` under `sampling` alone, with `adapter` and not the run's: about another answer.
    "loglikelihood": the logprobs of the tokens of `continuation` after `prompt`; two texts are encoded as the joined
        text, and the tokens that the prompt alone does not begin with are scored. `sampling` is not used.
    "rolling": the logprobs of every token of `continuation`, which is a whole document, after an empty prompt; one
        longer than the context is scored in windows that each score their own tokens once."""

    prompt: str | list[int]
    sampling: dict[str, Any]
    kind: Kind
    continuation: str | list[int] | None = None
    images: tuple[str, ...] = ()
    adapter: str | None = None  # the LoRA adapter of "judge"


@dataclass(frozen=True)
class Answer:
    """What the engine said. `logprobs` are natural, one for each of `token_ids`: the new tokens of what is drawn, else
    the tokens of the continuation. `finish` is the engine's finish_reason. `top_logprobs`, where the run records them,
    has the likeliest tokens beside each of `token_ids`; `pixels` is the hash of what the model was shown of images."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish: dict[str, Any]
    top_logprobs: list[list[Pair]] | None = None
    pixels: str | None = None


@dataclass(frozen=True)
class Metric:
    """A figure over `n` rows; `stderr` is nan where it is not defined (fewer than two rows)."""

    value: float
    stderr: float
    n: int

    def as_dict(self) -> dict[str, float | int | None]:
        """JSON has no nan: None in its place. Pure."""
        return finite(vars(self))


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """With None for floats that JSON has not. Pure."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class Task(Protocol):
    """Everything that the loop needs to know of a task."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...

    def rows(self) -> Iterator[Row | BadRow]:
        """Rows in the order of the input, streamed: one in memory at a time. Reads the input from its start."""
        ...

    def asks(self, row: Row) -> list[Ask]:
        """What to ask about a row. Pure. Errors: InputFileError that names the row and the field that it lacks."""
        ...

    def score(self, row: Row, answers: list[Answer]) -> Scores:
        """The row's scores by name, JSON values; `answers` as `asks` ordered them. Pure."""
        ...

    def metrics(self, scores: Iterable[Scores]) -> dict[str, Metric]:
        """The task's figures over the scores of its rows; one pass, memory for numbers only. A bare number is a figure
        without a standard error. Pure."""
        ...


def judging(task: Task, row: Row, answers: list[Answer]) -> list[Ask]:
    """What a task asks about its answers, once they are there: a task may have a method `judge(row, answers)`, pure as
    `asks` is. `score` then gets the answers to these behind the others."""
    judge = getattr(task, "judge", None)
    return [] if judge is None else judge(row, answers)


def rows_of(task: Task, shard: tuple[int, int] | None) -> Iterator[Row | BadRow]:
    """A task's rows; of a shard (number from 0, of how many) every n-th one from the i-th on.

    A row's record and seeds depend on the row alone, so that it does not matter which process computes it. The rule is
    stable: row r (from 0) belongs to shard r mod n. The whole input is read all the same, so that what is wrong with it
    is found in every shard."""
    return task.rows() if shard is None else islice(task.rows(), shard[0], None, shard[1])
