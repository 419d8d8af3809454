"""What tasks score beyond equality: containing, numbers, words, patterns; examples before prompts; groups of rows."""

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hydra")

from eval_fakes import FakeEngine, FakeTokenizer

from fengine.config import EngineConfig
from fengine.errors import ConfigError, InputFileError, InvalidRequestError
from fengine.eval.runs.answering import Asker, answer_row
from fengine.eval.runs.config import EvalConfig
from fengine.eval.tasks import scoring
from fengine.eval.tasks.kinds import open_task
from fengine.eval.tasks.task import Answer, Ask, Row
from fengine.eval.tasks.task_config import Format, Match, TaskConfig, TaskKind, check

WORDS = ("case", "punctuation", "articles", "blanks")


@pytest.mark.parametrize(
    ("match", "text", "reference", "score"),
    [
        ("contains", "So it is Paris, I think", "Paris", True),
        ("contains", "So it is paris", "Paris", False),
        ("number", "7 apples and 5 make 1,012.", "1012", True),
        ("number", "it is -3.50 degrees", "-3.5", True),
        ("number", "12 and 13", "12", False),  # the last one counts
        ("number", "none", "0", False),
        ("number", "x1", "1", False),
        ("number", "1e3", "1000", True),
        ("number", "so it is .5", "0.5", True),
        ("number", "so x = −5", "-5", True),  # a minus sign
        ("number", "so x = −5", "5", False),
        ("number", "in v1.2.5", "5", False),
        ("regex", "in the year 1999", r"\b19\d\d\b", True),
        ("regex", "in the year 2001", r"\b19\d\d\b", False),
        ("f1", "the cat sat", "a cat sat down", 0.8),  # 2 words in common of 2 and 3
        ("f1", "dog", "cat", 0.0),
        ("f1", "$5 + tax", "5 tax", 1.0),  # SQuAD's punctuation is ASCII's, with its symbols
        ("f1", "The", "a", 1.0),  # nothing is left of either
    ],
)
def test_matches(match: str, text: str, reference: str, score: Any) -> None:
    forms = WORDS if match == "f1" else ("strip",)
    config = TaskConfig("t", prompts=("x",), format=Format.prompts, match=Match(match), normal_form=forms)
    task: Any = open_task(config, Path())
    row = next(iter(task.rows()))
    row.data["answer"] = reference
    (found,) = task.score(row, [Answer(text, [1], [0.0], {"type": "stop"}, None)]).values()
    assert found == pytest.approx(score) and isinstance(found, bool) == (match != "f1")


def test_of_several_references_the_best_counts() -> None:
    assert scoring.token_f1("a b", ["c", "a b"]) == 1.0 and scoring.matches("number", "5", ["4", "5.0"])
    assert scoring.matches("contains", "xyz", ["q", "y"]) and scoring.matches("regex", "xyz", ["q", "^x"])


def rows(path: Path, *values: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path.name


def test_examples_stand_before_each_prompt(tmp_path: Path) -> None:
    data = rows(tmp_path / "d.jsonl", {"q": "3+4", "answer": "7"})
    shown = rows(tmp_path / "e.jsonl", *({"q": f"{i}+1", "answer": [str(i + 1), "x"]} for i in range(3)))
    config = TaskConfig("t", data=data, prompt="Q: {q}\nA:", examples=shown, shots=2)
    task: Any = open_task(config, tmp_path)
    (ask,) = task.asks(next(iter(task.rows())))
    assert ask.prompt == "Q: 0+1\nA: 1\n\nQ: 1+1\nA: 2\n\nQ: 3+4\nA:"
    with pytest.raises(InputFileError, match="has 3 rows, task.shots is 4"):
        _ = open_task(TaskConfig("t", data=data, prompt="{q}", examples=shown, shots=4), tmp_path).shown  # type: ignore[attr-defined]


def test_groups_have_metrics_of_their_own(tmp_path: Path) -> None:
    data = rows(tmp_path / "d.jsonl", *({"prompt": "x", "answer": "a", "topic": t} for t in ("m", "m", "n")))
    task: Any = open_task(TaskConfig("t", data=data, group_by="topic"), tmp_path)
    answers = [Answer(text, [1], [0.0], {"type": "stop"}, None) for text in "aba"]
    scores = [task.score(row, [answer]) for row, answer in zip(task.rows(), answers, strict=True)]
    metrics = {name: metric.value for name, metric in task.metrics(scores).items()}
    assert metrics == {"exact_match": pytest.approx(2 / 3), "exact_match [m]": 0.5, "exact_match [n]": 1.0}
    with pytest.raises(InputFileError, match="has no column 'theme'"):
        wrong: Any = open_task(TaskConfig("t", data=data, group_by="theme"), tmp_path)
        wrong.score(next(iter(wrong.rows())), answers[:1])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"shots": 2}, "task.examples"),
        ({"examples": "e.jsonl"}, "task.shots=N"),
        ({"shots": 2, "examples": "e.jsonl"}, "a template"),
        ({"shots": 2, "examples": "e.jsonl", "prompt": "x", "target": None, "match": Match.none}, "task.target"),
        ({"shots": 1, "examples": "./d.jsonl", "prompt": "x"}, "would be shown with their own answers"),
        ({"shots": -1, "examples": "e.jsonl", "prompt": "x"}, "task.shots must be at least 1"),
        ({"kind": TaskKind.perplexity, "group_by": "x"}, "task.group_by is for kind=generate and kind=choice"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], said: str) -> None:
    assert any(said in problem for problem in check(TaskConfig("t", data="d.jsonl", **fields)))
    with pytest.raises(ConfigError):
        open_task(TaskConfig("t", data="d.jsonl", **fields), Path())


def test_examples_are_those_of_their_file_whatever_rows_are_of(tmp_path: Path) -> None:
    examples = rows(tmp_path / "e.jsonl", {"q": "1+1", "answer": "2"})
    shown: dict[str, Any] = {"prompt": "{q} =", "examples": examples, "shots": 1, "delimiter": " "}
    inline: dict[str, Any] = {"format": Format.prompts, "prompts": ({"q": "2+2", "answer": "4"},)}
    named: dict[str, Any] = {"data": rows(tmp_path / "d.jsonl", {"q": "2+2", "answer": "4", "name": "a"}), "id": "name"}
    for source in (inline, named):
        task = open_task(TaskConfig("t", **shown, **source), tmp_path)
        (row,) = task.rows()
        assert isinstance(row, Row) and task.asks(row)[0].prompt == "1+1 = 2\n\n2+2 ="


def test_an_ask_has_one_answer() -> None:
    asker = Asker(FakeEngine(EngineConfig()))
    with pytest.raises(InvalidRequestError, match="n=2: an ask has one answer; fengine eval task.samples=N draws"):
        asyncio.run(asker.ask(Ask("x", {}, "generate"), {"n": 2}))


# -- thoughts ----------------------------------------------------------------------------------------------------------


class Thinker(FakeEngine):
    """Writes a thought before its answer, as models of the template `source` do."""

    def __init__(self, source: str, written: str) -> None:
        super().__init__(EngineConfig())
        self.tokenizer, self.written = Template(source), written

    async def async_generate(self, **call: Any) -> Any:
        shown = not call["sampling_params"]["skip_special_tokens"]
        text = self.written if shown else re.sub(r"<\|\w+\|>", "", self.written)
        entries = [(-0.5, 5, None)]
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": entries, "completion_tokens": 1}
        return {"text": text, "output_ids": [5], "meta_info": meta}


class Template(FakeTokenizer):
    def __init__(self, source: str) -> None:
        self.source = source
        self.backend = SimpleNamespace(get_added_tokens_decoder=dict)

    def template_of(self, tools: bool) -> tuple[str, frozenset[str]]:
        return self.source, frozenset()

    def decode(self, ids: list[int], skip: bool) -> str:
        return ""


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("<think>", "<think>So 3</think>\n\n4"),
        (
            "<|channel|> functions",
            "<|channel|>analysis<|message|>So 3<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
        ),
    ],
)
def test_what_is_scored_follows_the_thoughts(source: str, written: str, tmp_path: Path) -> None:
    config = EvalConfig(
        task=TaskConfig("t", data=rows(tmp_path / "d.jsonl", {"prompt": "x", "answer": "4"}), chat=True)
    )
    task = open_task(config.task, tmp_path, lambda messages: [len(messages)])
    (row,) = task.rows()
    assert isinstance(row, Row)
    record, _ = asyncio.run(answer_row(Asker(Thinker(source, written)), config, task, row, []))
    assert record["scores"] == {"exact_match": True} and record["answers"][0]["text"] == written
