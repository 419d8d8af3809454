"""A judge: the run's own model is asked about each answer, and what it says is read as a score. No torch.

`Judged` is a task with a second round of asks, which know the answers of the first. Verdicts are recorded beside the
answers, have seeds of their own, and are computed again by `fengine verify` as these are.
"""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import permutations
from typing import Any, Self

from fengine.config import Tuples, held
from fengine.core.json_text import json_object
from fengine.core.scalars import told
from fengine.errors import ConfigError
from fengine.eval.tasks.columns import column, filled, problem
from fengine.eval.tasks.scoring import Extractor, pattern_problems
from fengine.eval.tasks.statistics import mean
from fengine.eval.tasks.task import Answer, Ask, BadRow, Metric, Row, Scores, Task
from fengine.eval.tasks.verdicts import by_choice, by_number, pattern

# Messages, and whether the run's system message goes before them -> ids to be answered.
Render = Callable[..., list[int]]
RESPONSE = "response"  # the name of the answer in a judge's template
FIGURES = ("judge", "rating", "judged")


class Given(Tuples):
    """A dataclass that callers in Python write as a mapping."""

    @classmethod
    def of(cls, name: str, values: Any) -> Self:
        """From a mapping that a caller in Python gives; None: {}. Pure. Errors: ConfigError."""
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        if not isinstance(values, dict | None):
            raise ConfigError(f"{name} must be a dict, got {told(values)}")
        if strange := [key for key in values or {} if key not in names]:
            raise ConfigError(f"{name} has no {strange[0]!r}; there are {', '.join(names)}")
        return cls(**values or {})


@dataclass(frozen=True)
class JudgeConfig(Given):
    """The run's own model judges each answer: what it is asked, and how its verdict is read."""

    prompt: str | None = None  # a template of the row's columns and {response}, the answer; None: no judge
    response: str | None = None  # a column to judge, with nothing generated: what another model said; `a.0` works
    choices: tuple[str, ...] | None = None  # the words of a verdict, from the worst to the best: the last one counts
    scale: tuple[float, ...] | None = None  # or the worst and the best number: the last number counts
    extract: str | None = None  # a regular expression; group 1, or the whole match, of the last match is the verdict
    chat: bool = False  # send the prompt as a user's message, through the model's chat template
    system: str | None = None  # the judge's system message; that of the run is not shown to it
    sampling: str | None = None  # the judge's parameters, a JSON object; the rest is not the run's; temperature 0
    adapter: str | None = None  # the LoRA adapter that judges, of lora.paths; None: the model itself

    @property
    def parameters(self) -> dict[str, Any]:
        return {"temperature": 0.0} | json_object("task.judge.sampling", self.sampling)


def check(config: JudgeConfig) -> list[str]:
    """Every problem that can be seen without reading rows, one line each. Pure."""
    prompt, choices, scale = config.prompt, config.choices or (), config.scale or ()
    if prompt is None:
        missing = "task.judge has no prompt: task.judge.prompt='… {response} …' is what it is asked"
        return [missing] * (config != JudgeConfig())
    alike = any(re.fullmatch(pattern(a), b) for a, b in permutations(map(str.strip, choices), 2))  # found for another
    problems = {
        "task.judge.prompt must have {response} in it, the answer that is judged": f"{{{RESPONSE}}}" not in prompt,
        "task.judge takes either choices, from the worst to the best, or a scale: task.judge.choices=[no,yes]":
            bool(choices) == bool(scale),
        f"task.judge.choices must be two or more words that differ, got {list(choices)}": bool(choices)
            and (len(choices) < 2 or alike or not all(map(str.strip, choices))),
        f"task.judge.scale must be two numbers, the worst and the best, got {list(scale)}": bool(scale)
            and len({*scale}) != 2 or len(scale) > 2,
        "task.judge.system is for task.judge.chat=true": config.system is not None and not config.chat,
    }  # fmt: skip
    return held(problems) + pattern_problems("task.judge.extract", config.extract)


def judged(task: Task, config: JudgeConfig, render: Render | None) -> Task:
    """The task with a judge, if it has one. `render` is the model's chat template. Pure. Errors: ConfigError."""
    if problems := check(config):
        raise ConfigError("\n".join(problems))
    return task if config.prompt is None else Judged(task, config, render)


@dataclass(frozen=True)
class Judged:
    """A task whose answers are judged, too. Scores are the task's, and `judge`, from 0 for the worst verdict to 1 for
    the best; on a scale also `rating`, the number itself. `judged` says whether there was a verdict: where there was
    none, `judge` is missing, not 0. Of several samples they are means."""

    task: Task
    config: JudgeConfig
    render: Render | None = None

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def version(self) -> str:
        return self.task.version

    @property
    def shown(self) -> str:
        return getattr(self.task, "shown", "")

    def rows(self) -> Iterator[Row | BadRow]:
        return self.task.rows()

    def asks(self, row: Row) -> list[Ask]:
        """The task's. Errors: as its; InputFileError for a row of which nothing can be judged."""
        if RESPONSE in row.data:
            raise problem(row, f"column {RESPONSE!r} is the name of the answer in task.judge.prompt; rename it")
        self._prompt(row, "")
        asks = [] if self._given(row) else self.task.asks(row)
        if any(ask.kind != "generate" for ask in asks):
            raise problem(row, "only what is generated can be judged")
        return asks

    def judge(self, row: Row, answers: list[Answer]) -> list[Ask]:
        """What the judge is asked about each answer. Pure. Errors: InputFileError."""
        parameters, adapter = self.config.parameters, self.config.adapter
        given = answers or self._given(row)
        return [Ask(self._prompt(row, one.text), parameters, "judge", adapter=adapter) for one in given]

    def _given(self, row: Row) -> list[Answer]:
        """The answer that the row brings, if it is to. Errors: InputFileError."""
        if self.config.response is None:
            return []
        text = column(self.config.response, row)
        if not isinstance(text, str):
            raise problem(row, f"task.judge.response={self.config.response} must be a text, got {type(text).__name__}")
        return [Answer(text, [], [], {})]

    def score(self, row: Row, answers: list[Answer]) -> Scores:
        """`answers`: the task's, unless the row brings it, then as many verdicts."""
        given = self._given(row)
        half = len(answers) // 2
        each = [self._score_one(answer.text) for answer in answers[half:]]
        found: Scores = each[0]
        if len(each) > 1:
            values = {name: [float(one[name]) for one in each if name in one] for name in FIGURES}
            found = {name: mean(numbers).value for name, numbers in values.items() if numbers}
        return self.task.score(row, given or answers[:half]) | found

    def metrics(self, scores: Iterable[Scores]) -> dict[str, Metric]:
        """The task's, and the judge's own where the task does not tell all scores."""
        own = {name: array("d") for name in FIGURES}

        def passed() -> Iterator[Scores]:
            for one in scores:
                for name, values in own.items():
                    values.extend(float(one[name]) for _ in range(name in one))
                yield one

        found = self.task.metrics(passed())
        return found | {name: mean(values) for name, values in own.items() if values and name not in found}

    def _prompt(self, row: Row, response: str) -> str | list[int]:
        text = filled(self.config.prompt or "", Row(row.id, row.data | {RESPONSE: response.strip()}))
        if not self.config.chat:
            return text
        if self.render is None:
            raise problem(row, "task.judge.chat needs the chat template of a model with a tokenizer")
        head = [] if self.config.system is None else [{"role": "system", "content": self.config.system}]
        return self.render([*head, {"role": "user", "content": text}], False)

    # -- verdicts ------------------------------------------------------------------------------------------------------

    @cached_property
    def _extractor(self) -> Extractor | None:
        return None if self.config.extract is None else Extractor(self.config.extract)

    def _score_one(self, verdict: str) -> Scores:
        """Pure. Errors: as `Extractor.find`."""
        found = verdict if self._extractor is None else self._extractor.find(verdict, last=True)
        read = self._by_choice if self.config.choices else self._by_number
        return {"judged": False} if found is None else read(found) or {"judged": False}

    def _by_choice(self, text: str) -> Scores | None:
        choices = [word.strip() for word in self.config.choices or ()]
        if (place := by_choice(text, choices)) is None:
            return None
        last = len(choices) - 1
        return {"judge": bool(place) if last == 1 else place / last, "judged": True, "verdict": choices[place]}

    def _by_number(self, text: str) -> Scores | None:
        worst, best = self.config.scale or (0.0, 1.0)
        value = by_number(text, worst, best)
        return value if value is None else {"judge": (value - worst) / (best - worst), "rating": value, "judged": True}
