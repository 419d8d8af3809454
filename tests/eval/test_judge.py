"""A judge: what it is asked, how verdicts are read, and that they are recorded, resumed and verified as answers are."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from eval_fakes import Run, fake_runs, records

import fengine
from fengine import Engine, run
from fengine.errors import ConfigError, InputFileError
from fengine.eval.runs.manifest import row_seed
from fengine.eval.tasks.judge import JudgeConfig, Judged, check
from fengine.eval.tasks.kinds import open_task
from fengine.eval.tasks.task import Answer, Ask, Metric, Row
from fengine.eval.tasks.task_config import Match, TaskConfig

YES = JudgeConfig(prompt="Is {response} {answer}?", choices=("no", "yes"))
# A question of the kind that the model in the box was trained on: the letter of the choice that is named.
LETTER = "Question: Which of these is {answer}?\nA) {response}\nB) Cairo\nC) Oslo\nD) Bern\nAnswer:"


def judged(judge: JudgeConfig, **task: Any) -> Any:
    return open_task(TaskConfig("t", **{"data": "x.jsonl", "match": Match.none, **task}, judge=judge), Path())


def said(*texts: str) -> list[Answer]:
    return [Answer(text, [1], [0.0], {"type": "stop"}) for text in texts]


@pytest.mark.parametrize(
    ("fields", "verdict", "scores"),
    [
        ({"choices": ("no", "yes")}, "Yes, it is.", {"judge": True, "judged": True, "verdict": "yes"}),
        ({"choices": ("no", "yes")}, "yes? No", {"judge": False, "judged": True, "verdict": "no"}),  # the last counts
        ({"choices": ("no", "yes")}, "nothing known", {"judged": False}),  # a part of a word is none
        ({"choices": ("B", "A")}, "a or B", {"judge": False, "judged": True, "verdict": "B"}),  # letters as they are
        ({"choices": ("bad", "fair", "good")}, "Fair", {"judge": 0.5, "judged": True, "verdict": "fair"}),
        ({"choices": ("good", "very good")}, "very good", {"judge": True, "judged": True, "verdict": "very good"}),
        ({"choices": ("0", "1"), "extract": r"\[(\w+)\]"}, "0 [1] 0", {"judge": True, "judged": True, "verdict": "1"}),
        ({"choices": ("no", "yes"), "extract": r"\[(\w+)\]"}, "yes", {"judged": False}),
        ({"scale": (1, 10)}, "I say 7", {"judge": 2 / 3, "rating": 7.0, "judged": True}),
        ({"scale": (1, 10)}, "8/10", {"judge": 7 / 9, "rating": 8.0, "judged": True}),
        ({"scale": (1, 10)}, "8 out of 10.", {"judge": 7 / 9, "rating": 8.0, "judged": True}),
        ({"scale": (1, 10)}, "10", {"judge": 1.0, "rating": 10.0, "judged": True}),
        ({"scale": (1, 10)}, "11", {"judged": False}),
        ({"scale": (10, 0)}, "2", {"judge": 0.8, "rating": 2.0, "judged": True}),
        ({"scale": (0, 1)}, "none", {"judged": False}),
    ],
)  # fmt: skip
def test_verdicts(fields: dict[str, Any], verdict: str, scores: dict[str, Any]) -> None:
    task, row = judged(JudgeConfig(prompt="{response}", **fields)), Row("r", {"prompt": "p"})
    assert task.score(row, said("an answer", verdict)) == pytest.approx(scores)


@pytest.mark.parametrize(
    ("choices", "said_word", "verdict"),
    [
        (("kötü", "iyi"), "İYİ", "iyi"),  # its casefold is longer than the word
        (("kötü", "iyi"), "KÖTÜ.", "kötü"),
        (("fail", "pass"), "pass? FAİL", "fail"),
        (("schlecht", "groß"), "GROẞ", "groß"),
        (("no", "yes"), "ſo: yeſ", "yes"),
        (("C", "C++"), "c++, rather C", "C"),
    ],
)
def test_a_word_in_any_case_is_the_choice_that_was_found(choices: Any, said_word: str, verdict: str) -> None:
    scores = judged(JudgeConfig(prompt="{response}", choices=choices)).score(Row("r", {}), said("", said_word))
    assert scores == {"judge": verdict == choices[1], "judged": True, "verdict": verdict}


@pytest.mark.parametrize(
    ("scale", "verdict", "rating"),
    [
        ((1, 10), "Score: 8 / 10", 8),
        ((1, 10), "8/10.0", 8),
        ((1, 10), "10/10", 10),
        ((1, 10), "7.5/10.", 7.5),
        ((1, 10), "**8**/10 or 8/**10**", 8),
        ((1, 10), "8／10", 8),
        ((1, 10), "8 Out  of 10", 8),
        ((1, 10), "An 8. Out of 10!", 8),
        ((1, 10), "Out of 10 I say 8", 8),
        ((1, 10), "8 points (out of 10)", 8),
        ((1, 10), "**8** of 10", 8),
        ((1, 10), "a score of 10", 10),
        ((1, 10), "style 3/10, facts 9/10", 9),
        ((1, 10), "part 2 of 3: 7", 7),
        ((1, 10), "4/5", None),  # on a scale that was not asked for
        ((1, 10), "8/10, for 2 out of 3 hold", None),
        ((1, 10), "8/1", None),
        ((1, 10), "8/100", None),
        ((1, 10), "/10", None),
        ((1, 10), "7,5", 7.5),
        ((1, 10), "8,25 / 10,0", 8.25),
        ((1, 10), "style, facts, tone: 3,4,5", 5),
        ((0, 1_000_000), "3/1000000", 3),
        ((0, 1_000_000), "3/1,000,000", 3),
        ((0, 1_000_000), "1,500 out of 1e6", 1500),
        ((0, 0.3), "0.1/0.3", 0.1),
        ((10, 0), "2/10", 2),
        ((-5, 5), "-3/5", -3),
        ((-5, 5), "−2,5 out of 5", -2.5),
        ((-10, -1), "-4", -4),
    ],
)
def test_a_number_is_read_on_the_scale_that_was_asked_for(scale: Any, verdict: str, rating: float | None) -> None:
    scores = judged(JudgeConfig(prompt="{response}", scale=scale)).score(Row("r", {}), said("", verdict))
    assert (scores["judged"], scores.get("rating")) == (rating is not None, rating)


@pytest.mark.parametrize(
    ("choices", "verdict", "read"),
    [
        (("no", "yes"), "Yes or no? Yes", "yes"),
        (("no", "yes"), "Yes (yes/no)", "yes"),  # what could be said is no verdict
        (("no", "yes"), '"yes" or "no"', None),
        (("B", "A"), "A or B: A", "A"),
        (("bad", "fair", "good"), "bad/fair/good: fair", "fair"),
        (("incorrect", "correct"), "not correct", None),  # nor what is denied
        (("incorrect", "correct"), "It isn't fully correct, so incorrect", "incorrect"),
        (("wrong", "right"), "I can't say it is right", None),
        (("wrong", "right"), "not wrong: right", "right"),
        (("no", "yes"), "yes, not no", "yes"),
        (("C", "C++"), "c++, not C", "C++"),
        (("bad", "good"), "not only good", "good"),
        (("bad", "not good", "good"), "not good", "not good"),
    ],
)
def test_a_list_of_the_choices_and_what_is_denied_are_no_verdict(choices: Any, verdict: str, read: str | None) -> None:
    scores = judged(JudgeConfig(prompt="{response}", choices=choices)).score(Row("r", {}), said("", verdict))
    assert (scores["judged"], scores.get("verdict")) == (read is not None, read)


SCALES = """
    8: 8 on a scale of 1 to 10 | On a scale from 1 to 10: 8 | 8 (scale: 1-10) | 8 (1-10) | 8 [1–10] | 1-10: 8
    8: 8 from 1 to 10
    8: 8 on a 1-10 scale | 8 on the 10-point scale | 8 on a ten-point scale | 8 points on a 10 point scale
    8: 8 out of ten
    8: 8, where 10 is the best | 8 (10 = best) | 8 where 1 is worst and 10 is best | 10 being perfect, I give 8
    8: 8 (worst 1, best 10) | 8, 1 (worst) to 10 (best) | 1 (worst) to 10 (best): 8 | between 1 and 10: 8
    8: 8 (max 10) | I give 8; the maximum is 10 | 8 out of a possible 10 | 8 out of a total of 10 | 8 on a scale of 10
    8: 8 von 10 | 8 sur 10 | 8 su 10 | 8分（满分10分） | **8** on a scale of **1** to **10** | 1/10 to 10/10: 8/10
    8: [[8]] | <score>8</score> | Score - 8 | \\boxed{8} | style 7 and facts 8 | 3 to 4 points: 8
    8: 8 on a scale of 1 to ten
    10: 10 is the highest score, and deserved | Top marks: 10 | a perfect 10
    10: 2 facts. Rating: 10 (excellent) | 2 facts. **Score:** **10**, excellent
    10: Fact 2 is right. I give it a perfect 10 | 2 flaws are gone. It deserves the top 10 | 2 facts. Perfect: 10/10
    10: from 8 to 10/10
    8: Score: 8 (10 = best) | I give 8; the best is 10 | 8; a score of 10 is perfect | 1 = worst, 10 = best. I say 8
    1: 1 (1 to 10) | 3 flaws. Final rating is 1 (worst)
    None: 7-8 | 7 to 8 | between 7 and 8 | On a scale of 1 to 10 | 4 on a scale of 1 to 5 | 8 on a scale of 5
"""


def test_what_tells_the_scale_is_no_verdict() -> None:
    for line in filter(None, map(str.strip, SCALES.splitlines())):
        rating, _, texts = line.partition(": ")
        for text in texts.split(" | "):
            scores = judged(JudgeConfig(prompt="{response}", scale=(1, 10))).score(Row("r", {}), said("", text))
            assert str(scores.get("rating")) == (rating if rating == "None" else f"{rating}.0"), text
    for text in ("1" + 99999 * " ", "max" + 9999 * " of"):
        assert judged(JudgeConfig(prompt="{response}", scale=(1, 10))).score(Row("r", {}), said("", text))  # soon
    for scale, text, rating in (((-5, 5), "-3 (-5 to 5)", -3), ((10, 0), "2, from 10 to 0", 2), ((0, 1), "1 (0-1)", 1)):
        scores = judged(JudgeConfig(prompt="{response}", scale=scale)).score(Row("r", {}), said("", text))
        assert scores.get("rating") == rating, text


def test_a_judge_is_asked_about_each_answer_under_its_own_sampling() -> None:
    task, row = judged(replace(YES, sampling='{"top_k": 5}'), samples=2), Row("r", {"prompt": "p", "answer": 4})
    assert [ask.kind for ask in task.asks(row)] == ["generate"] * 2
    asks = task.judge(row, said(" 4\n", "{answer}"))
    assert [(a.prompt, a.kind, a.sampling) for a in asks] == [
        ("Is 4 4?", "judge", {"temperature": 0.0, "top_k": 5}),
        ("Is {answer} 4?", "judge", {"temperature": 0.0, "top_k": 5}),  # an answer is no template
    ]
    # Of two samples the scores are means, over those that have a verdict.
    assert task.score(row, said("4", "5", "yes", "hm")) == {"judge": 1.0, "judged": 0.5}
    metrics = task.metrics([{"judge": True, "judged": True}, {"judged": False}])
    assert {name: (one.value, one.n) for name, one in metrics.items()} == {"judge": (1.0, 1), "judged": (0.5, 2)}


def test_the_run_s_system_message_is_not_the_judge_s() -> None:
    seen = []

    def render(messages: list[dict[str, Any]], with_system: bool = True) -> list[int]:
        seen.append((messages, with_system))
        return [1]

    one = replace(YES, chat=True, system="Judge.")
    task: Any = Judged(open_task(TaskConfig("t", data="x.jsonl"), Path(), render), one, render)
    (ask,) = task.judge(Row("r", {"prompt": "p", "answer": "4"}), said("5"))
    messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "Is 5 4?"}]
    assert ask.prompt == [1] and seen[-1] == (messages, False)


def test_another_model_s_answers_are_judged_as_they_are_recorded() -> None:
    task = judged(replace(YES, prompt="{response}? {data.q}", response="answers.0.text"), match=Match.exact)
    row = Row("r", {"data": {"q": "Q"}, "answers": [{"text": "4"}], "answer": "4"})
    assert task.asks(row) == [] and [ask.prompt for ask in task.judge(row, [])] == ["4? Q"]
    scores = {"exact_match": True, "judge": False, "judged": True, "verdict": "no"}
    assert task.score(row, said("no")) == scores
    with pytest.raises(InputFileError, match=r"has no column 'answers\.0\.text'"):
        task.asks(Row("r", {"answers": [], "data": {"q": "Q"}}))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt": None}, "task.judge has no prompt"),
        ({"prompt": "Good?"}, r"must have \{response\}"),
        ({"choices": None}, "either choices"),
        ({"scale": (1, 2)}, "either choices"),
        ({"choices": ("Yes", "yes")}, "two or more words that differ"),
        ({"choices": ("iyi", "İyi")}, "two or more words that differ"),
        ({"choices": ("yes", "")}, "two or more words that differ"),
        ({"choices": None, "scale": (1, 1)}, "two numbers"),
        ({"choices": None, "scale": (1, 2, 3)}, "two numbers"),
        ({"extract": "("}, "task.judge.extract: "),
        ({"system": "x"}, r"task\.judge\.chat=true"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        judged(replace(YES, **fields))
    assert check(YES) == []


def test_a_row_with_a_column_of_the_answer_s_name_is_refused() -> None:
    with pytest.raises(InputFileError, match="column 'response' is the name of the answer"):
        judged(YES).asks(Row("r", {"prompt": "p", "answer": 1, "response": "x"}))
    with pytest.raises(InputFileError, match="has no column 'answer'"):
        judged(YES).asks(Row("r", {"prompt": "p"}))


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return fake_runs(tmp_path, monkeypatch)


WORDS = ("task.judge.prompt=Right: {response}", "task.judge.choices=[wrong,right]")


def test_a_run_records_verdicts_with_seeds_of_their_own_and_goes_on(run_eval: Run) -> None:
    one = run_eval("one", *WORDS, "sampling.temperature=0.7")
    for record in records(one / "outputs.jsonl"):
        answer, verdict = record["answers"]
        assert verdict["kind"] == "judge" and verdict["prompt"] == f"Right: {answer['text'].strip()}"
        seeds = [row_seed(0, record["id"], i) for i in range(2)]
        assert [answer["sampling_seed"], verdict["sampling_seed"]] == seeds
    identity = json.loads((one / "manifest.json").read_text())["identity"]
    assert identity["config"]["task.judge.prompt"] == "Right: {response}"
    journal = (one / "journal.log").read_bytes()
    (one / "journal.log").write_bytes(journal[: len(journal) // 2])
    before = (one / "outputs.jsonl").read_bytes()
    run_eval("one", *WORDS, "sampling.temperature=0.7")
    assert (one / "outputs.jsonl").read_bytes() == before
    run_eval("one", *WORDS[:1], "task.judge.choices=[bad,right]", "sampling.temperature=0.7", code=run.USAGE)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ('task.judge.sampling={"temprature": 1}', "unknown sampling parameter 'temprature'"),
        ("task.judge.sampling=[1]", "must be a JSON object"),
        ('task.judge.sampling={"n": 2}', "task.judge.sampling has no 'n'"),
        ("task.judge.adapter=x", "task.judge.adapter='x' is not in lora.paths"),
        ("task.judge.model=qwen3-8b", "task.judge.response=answers.0.text"),
        ("task.kind=perplexity", "task.judge is for kind=generate"),
        ("task.format=batch", "which scores nothing"),
    ],
)
def test_words_that_cannot_be(run_eval: Run, capsys: pytest.CaptureFixture[str], word: str, told: str) -> None:
    run_eval("one", *WORDS, word, code=run.USAGE)
    assert told in capsys.readouterr().err


# -- the model in the box ----------------------------------------------------------------------------------------------


class Capitals:
    """A task of one's own."""

    name, version = "capitals", "1"
    answers = {"France": "Paris", "Japan": "Tokyo", "Peru": "Quito"}  # the last one is not right

    def rows(self) -> Any:
        yield from (Row(key, {"answer": value}) for key, value in self.answers.items())

    def asks(self, row: Row) -> Any:
        return [Ask(f"The capital of {row.id} is", {"max_new_tokens": 8}, "generate")]

    def score(self, row: Row, answers: list[Answer]) -> Any:
        return {"length": len(answers[0].text)}

    def metrics(self, scores: Any) -> Any:
        return {"sum": Metric(sum(one["length"] for one in scores), 0.0, 3)}


def test_the_box_judges_as_it_does_when_asked_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge = {"prompt": LETTER, "choices": ["D", "C", "B", "A"]}
    with Engine(model_path="box", log_level="error") as engine:
        metrics = fengine.evaluate(Capitals(), engine, tmp_path / "a", judge=judge, sampling={"temperature": 1.0})
        for record in records(tmp_path / "a" / "outputs.jsonl"):
            answer, verdict = record["answers"]
            prompt = LETTER.format(answer=record["data"]["answer"], response=answer["text"].strip())
            alone: Any = engine.generate(prompt, {"temperature": 0}, return_logprob=True)
            assert (verdict["text"], verdict["output_ids"]) == (alone["text"], alone["output_ids"])
            assert verdict["logprobs"] == [entry[0] for entry in alone["meta_info"]["output_token_logprobs"]]
            assert record["scores"]["judge"] == "DCBA".index(record["scores"]["verdict"]) / 3
        assert metrics["metrics"]["judged"]["value"] == 1.0 and metrics["metrics"]["judge"]["n"] == 3
        assert list(metrics["metrics"]) == ["sum", "judge", "judged"]
        with pytest.raises(ConfigError, match="judge has no 'promt'"):
            fengine.evaluate(Capitals(), engine, tmp_path / "b", judge={"promt": "x"})
        with pytest.raises(ConfigError, match="unknown sampling parameter"):
            fengine.evaluate(Capitals(), engine, tmp_path / "b", judge=judge | {"sampling": '{"tmp": 1}'})


def test_verify_computes_verdicts_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"task.judge.prompt={LETTER}", "task.judge.choices=[D,C,B,A]", 'task.judge.sampling={"temperature": 1}']
    out, few = tmp_path / "a", ["task=capitals", "task.limit=4", "sampling.temperature=0.5", "view=quiet"]
    assert run.main(["eval", *few, *words, f"out={out}"]) == run.OK
    assert run.main(["verify", str(out), "verify.layouts=[permuted,rescored,alone]"]) == run.OK
    assert "8 answers re-scored" in capsys.readouterr().out
    record = [json.loads(line) for line in (out / "outputs.jsonl").read_text().splitlines()]
    data = tmp_path / "other.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in record))
    given = [f"task.judge.prompt={LETTER.replace('{answer}', '{data.answer}')}", "task.judge.response=answers.0.text"]
    again = ["eval", "task=jsonl", f"task.data={data}", *words[1:2], *given, "view=quiet", f"out={tmp_path / 'b'}"]
    assert run.main(again) == run.OK
    for one in records(tmp_path / "b" / "outputs.jsonl"):
        (verdict,) = one["answers"]
        assert verdict["kind"] == "judge" and "judge" in one["scores"]
    assert run.main(["verify", str(tmp_path / "b"), "verify.layouts=[permuted,rescored]"]) == run.OK
