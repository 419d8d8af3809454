"""The kinds of task that a YAML can choose: generation, multiple choice, perplexity. No torch."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fengine.api.chat_images import without_images
from fengine.core.json_text import parse_json
from fengine.errors import ConfigError, InputFileError
from fengine.eval.tasks import scoring, statistics
from fengine.eval.tasks.columns import column, filled, grouped, images_of, problem, refuse_bare, with_digests
from fengine.eval.tasks.judge import Render, judged
from fengine.eval.tasks.sources import RESULT_COLUMNS, data_path, read_rows
from fengine.eval.tasks.task import Answer, Ask, BadRow, Metric, Row, Scores, Task
from fengine.eval.tasks.task_config import Format, Match, Select, TaskConfig, TaskKind, check

RIGHT = [f"{match.value}_match" for match in Match if match is not Match.f1]  # scores that tell right from wrong


def open_task(config: TaskConfig, base: Path, render: Render | None = None) -> Task:
    """The task that a config describes; nothing is read yet. `base` is what a relative `data` is under
    (`task_config.base_directory`); `render` is the model's chat template, for messages. Errors: ConfigError."""
    problems = check(config)
    if problems:
        raise ConfigError("\n".join(problems))
    kinds = {TaskKind.generate: GenerateTask, TaskKind.choice: ChoiceTask, TaskKind.perplexity: PerplexityTask}
    return judged(kinds[config.kind](config, base, render), config.judge, render)


@dataclass(frozen=True)
class _Task:
    """What the kinds share."""

    config: TaskConfig
    base: Path
    render: Render | None = None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def version(self) -> str:
        return self.config.version

    def rows(self) -> Iterator[Row | BadRow]:
        """Errors: those of `sources.read_rows`."""
        rows, images = read_rows(self.config, self.base), self.config.images
        return rows if images is None else (with_digests(row, images, self._folder) for row in rows)

    @property
    def _folder(self) -> Path:
        """What paths of images are under."""
        data = data_path(self.config, self.base)
        return self.base if data is None else data.parent

    def images_of(self, row: Row) -> tuple[str, ...]:
        return () if self.config.images is None else images_of(row, self.config.images, self._folder)

    def prompt_of(self, row: Row) -> str | list[int]:
        """The row's prompt as text or ids. Pure. Errors: InputFileError."""
        template, data = self.config.prompt, row.data
        if template is not None:
            return self._sent(row, self.shown + filled(template, row))
        given = [name for name in ("prompt", "messages", "input_ids") if data.get(name) is not None]
        if len(given) != 1:
            there = f" (it has {', '.join(map(repr, list(data)[:12])) or 'no column'})"
            what = " and ".join(given) if given else f"none of prompt, messages, input_ids{there}"
            template = "fengine eval task=jsonl task.data=FILE " if self.config.format is Format.prompts else ""
            if {"custom_id", "body"} <= data.keys():
                raise problem(row, "is a request of OpenAI's batch format: fengine batch IN.jsonl OUT.jsonl runs these")
            raise problem(
                row, f"holds {what}; give exactly one, or a template of columns: {template}task.prompt='{{question}}'"
            )
        return self._given(row, given[0], data[given[0]])

    def _given(self, row: Row, column: str, value: Any) -> str | list[int]:
        """The row's own prompt, messages or input_ids. Errors: InputFileError."""
        if column == "prompt":
            if not isinstance(value, str):
                raise problem(row, f"prompt must be a text, got {type(value).__name__}")
            return self._sent(row, value)
        items = value if isinstance(value, list) else []
        if column == "messages":
            if not items or not all(isinstance(message, dict) for message in items):
                raise problem(row, 'messages must be a list of objects with "role" and "content"')
            if self.config.images is None and without_images(items)[1]:
                raise problem(row, "its messages have images, which task.images=images shows to the model")
            return self._rendered(row, items)
        if not items or not all(type(token) is int and token >= 0 for token in items):
            raise problem(row, "input_ids must be a list of token ids, integers >= 0")
        return items

    def _sent(self, row: Row, prompt: str) -> str | list[int]:
        if not self.config.chat:
            return prompt
        images = [{"type": "image"} for _ in self.images_of(row)]
        content: Any = [*images, {"type": "text", "text": prompt}] if images else prompt
        return self._rendered(row, [{"role": "user", "content": content}])

    def _rendered(self, row: Row, messages: list[dict[str, Any]]) -> list[int]:
        if self.render is None:
            raise problem(row, "messages need the chat template of a model with a tokenizer")
        return self.render(messages)

    def metrics(self, scores: Iterable[Scores]) -> dict[str, Metric]:
        """Means of all rows; with `group_by` also of those of each value, as "name [value]"."""
        return statistics.means(map(grouped, scores) if self.config.group_by else scores)

    def in_group(self, row: Row, scores: Scores) -> Scores:
        """The scores, with the row's group. Pure. Errors: InputFileError."""
        return scores if self.config.group_by is None else scores | {"group": str(column(self.config.group_by, row))}

    @cached_property
    def shown(self) -> str:
        """The examples before a prompt, each with its first reference. Errors: those of `read_rows`."""
        config, found = self.config, []
        if not config.shots:
            return ""
        of_file: dict[str, Any] = {"prompts": None, "format": Format.auto, "id": None}
        try:
            rows = read_rows(replace(config, data=config.examples, limit=config.shots, **of_file), self.base)
        except InputFileError as error:
            raise InputFileError(str(error).replace("task.data", "task.examples", 1)) from error
        for row in rows:
            if isinstance(row, BadRow):
                raise InputFileError(f"task.examples: {row.message}")
            if config.images is not None and row.data.get(config.images) is not None:
                raise InputFileError(f"task.examples: row {row.id!r} has {config.images!r}: examples are shown as text")
            target = self.target_of(row)
            answer = target[0] if isinstance(target, list) and target else target
            found.append(f"{filled(config.prompt or '', row)}{config.delimiter}{answer}\n\n")
        if len(found) < config.shots:
            raise InputFileError(f"task.examples={config.examples} has {len(found)} rows, task.shots is {config.shots}")
        return "".join(found)

    def target_of(self, row: Row) -> Any:
        """The reference. Pure. Errors: InputFileError."""
        assert self.config.target is not None
        return column(self.config.target, row)


@dataclass(frozen=True)
class GenerateTask(_Task):
    """`samples` answers for each row. Scores by `match`: `exact_match`, `prefix_match`, or those of `json_scores`;
    with `extract` also `found` and, for a single sample, the text `extracted`. Scores of several samples are means;
    with `vote` there are `pass` (any sample is right) and `majority` (the answer that most of them gave is), too."""

    @cached_property
    def _extractor(self) -> scoring.Extractor | None:
        return None if self.config.extract is None else scoring.Extractor(self.config.extract)

    def asks(self, row: Row) -> list[Ask]:
        config = self.config
        fixed = {"max_new_tokens": config.max_new_tokens, "stop": None if config.stop is None else list(config.stop)}
        sampling = {name: value for name, value in fixed.items() if value is not None}
        if config.format is Format.prompts and (taken := [name for name in RESULT_COLUMNS if name in row.data]):
            raise problem(row, f"column {taken[0]!r} is a name that results use; rename it (what is asked is 'prompt')")
        asked = {} if row.data.get("sampling") is None else row.data["sampling"]
        if not isinstance(asked, dict):
            raise problem(row, f"sampling must be an object, got {type(asked).__name__}")
        if config.prompt is None:
            refuse_bare(row)
        if config.match is not Match.none:
            self._references(row)
        self.in_group(row, {})
        one = Ask(self.prompt_of(row), {**sampling, **asked}, "generate", images=self.images_of(row))
        return [one] * config.samples

    def score(self, row: Row, answers: list[Answer]) -> Scores:
        each = [self._score_one(row, answer.text) for answer in answers]
        if len(each) == 1:
            return self.in_group(row, each[0])
        numbers = [{name: value for name, value in one.items() if not isinstance(value, str)} for one in each]
        scores: Scores = {name: statistics.mean(float(one[name]) for one in numbers).value for name in numbers[0]}
        right = next((name for name in RIGHT if name in scores), None)
        if self.config.vote and right is not None:
            scores["pass"] = any(one[right] for one in each)
            scores["majority"] = bool(self._most_common(each, answers)[right])
        return self.in_group(row, scores)

    def _most_common(self, each: list[Scores], answers: list[Answer]) -> Scores:
        """The scores of the answer that most samples gave, by what was extracted or in normal form; of equals the first
        one's. Samples in which nothing was found do not vote, unless all are such."""
        texts = [one.get("extracted") if self.config.extract else a.text for one, a in zip(each, answers, strict=True)]
        votes = [None if text is None else scoring.normal(str(text), self.config.normal_form) for text in texts]
        counts = Counter(vote for vote in votes if vote is not None)
        return each[votes.index(counts.most_common(1)[0][0])] if counts else each[0]

    def _score_one(self, row: Row, text: str) -> Scores:
        config, scores, found = self.config, {}, text
        if self._extractor is not None:
            extracted = self._extractor.find(text, last=config.select is Select.last)
            scores["found"] = extracted is not None
            if extracted is not None:
                scores["extracted"] = extracted
            found = extracted
        match = config.match.value
        if match in scoring.COMPARISONS:
            right = found is not None and scoring.matches(match, found, self._references(row), config.normal_form)
            scores[f"{match}_match"] = right
        elif config.match is Match.f1:
            scores["f1"] = found is not None and scoring.token_f1(found, self._references(row), config.normal_form)
        elif config.match is Match.json:
            scores |= scoring.json_scores("" if found is None else found, self._references(row))
        return scores

    def _references(self, row: Row) -> Any:
        """A list of texts; for json, any value, also an object or a list as a text. Pure. Errors: InputFileError."""
        target, match = self.target_of(row), self.config.match
        if match is Match.json:
            with suppress(ValueError):
                target = parse_json(target) if isinstance(target, str) and target.strip()[:1] in ("{", "[") else target
            return target
        listed = target if isinstance(target, list) else [target]
        if not listed or not all(isinstance(one, (str, int, float)) and not isinstance(one, bool) for one in listed):
            raise problem(row, f"{self.config.target!r} must be a text, a number, or a list of them")
        texts = [str(one) for one in listed]
        kept = [scoring.normal(text, self.config.normal_form) for text in texts]
        if match in (Match.contains, Match.prefix) and not all(kept):
            raise problem(row, f"{self.config.target!r} is empty in task.normal_form, which any text contains")
        if match is Match.number and not any(map(scoring.numbers, texts)):
            raise problem(
                row, f"{self.config.target!r} holds no number, got {texts[0]!r:.80}; task.match=number needs one"
            )
        return texts


@dataclass(frozen=True)
class ChoiceTask(_Task):
    """The loglikelihood of every choice after the prompt; `acc` and `acc_norm` of `scoring.choice_scores`. The
    reference is the right choice's text, or its index from 0."""

    def asks(self, row: Row) -> list[Ask]:
        self._right(row)
        prompt, lead = self.prompt_of(row), self.config.delimiter
        if isinstance(prompt, str):  # as in lm-evaluation-harness, blanks at its end are the continuation's
            kept = prompt.rstrip()
            prompt, lead = kept, prompt[len(kept) :] + lead
        return [Ask(prompt, {}, "loglikelihood", lead + choice) for choice in self._choices(row)]

    def score(self, row: Row, answers: list[Answer]) -> Scores:
        sums = list(map(scoring.loglikelihood, answers))
        return self.in_group(row, scoring.choice_scores(sums, self._choices(row), self._right(row)))

    def _choices(self, row: Row) -> list[str]:
        choices = column(self.config.choices, row)
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
            raise problem(row, f"{self.config.choices!r} must be a list of at least two texts, none of them empty")
        if len(set(choices)) < len(choices):
            raise problem(row, f"{self.config.choices!r} must differ from one another")
        return choices

    def _right(self, row: Row) -> int:
        choices, target = self._choices(row), self.target_of(row)
        if isinstance(target, str) and target in choices:
            return choices.index(target)
        if type(target) is int and 0 <= target < len(choices):
            return target
        raise problem(row, f"{self.config.target!r} must be a choice or its index from 0, got {target!r:.80}")


@dataclass(frozen=True)
class PerplexityTask(_Task):
    """The loglikelihood of the row's whole text, the column `target`; metrics of `statistics.perplexities`."""

    def asks(self, row: Row) -> list[Ask]:
        return [Ask("", {}, "rolling", self._text(row))]

    def score(self, row: Row, answers: list[Answer]) -> Scores:
        return scoring.perplexity_scores(scoring.loglikelihood(answers[0]), self._text(row))

    def metrics(self, scores: Iterable[Scores]) -> dict[str, Metric]:
        return statistics.perplexities(scores)

    def _text(self, row: Row) -> str:
        text = self.target_of(row)
        if not isinstance(text, str) or not text:
            raise problem(row, f"{self.config.target!r} must be a text that is not empty")
        return text
