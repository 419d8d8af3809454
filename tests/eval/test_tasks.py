"""Tasks: rows from good and bad files, what is asked and scored, the built-in tasks on the model in the box."""

import json
import math
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from fengine.errors import ConfigError, InputFileError, UnsupportedFeatureError
from fengine.eval.cli.compose import parse
from fengine.eval.runs.config import EVAL
from fengine.eval.runs.index import index_rows
from fengine.eval.tasks import sources as rows_file
from fengine.eval.tasks.kinds import open_task
from fengine.eval.tasks.task import Answer, Ask, BadRow, Metric, Row, Task
from fengine.eval.tasks.task_config import Format, Match, Select, TaskConfig, TaskKind, base_directory, check

ROOT = Path(__file__).resolve().parents[2]
BUILT_IN = ["capitals", "addition", "sorting", "json_filling", "multiple_choice", "stories"]


def task_of(tmp_path: Path, lines: bytes | list[Any], **values: Any) -> Task:
    """A task over a file of these lines."""
    data = lines if isinstance(lines, bytes) else "".join(json.dumps(line) + "\n" for line in lines).encode()
    (tmp_path / "rows.jsonl").write_bytes(data)
    return open_task(TaskConfig(**{"name": "mine", "data": "rows.jsonl", **values}), tmp_path)


def answer(text: str = "", logprobs: tuple[float, ...] = ()) -> Answer:
    return Answer(text, list(range(len(logprobs))), list(logprobs), {"type": "stop"})


# -- lines -------------------------------------------------------------------------------------------------------------

BAD_LINES = [
    (b'{"prompt": "x"', "not valid JSON"),
    (b'["prompt"]', "must be a JSON object, got list"),
    (b"null", "must be a JSON object, got NoneType"),
    (b'{"prompt": NaN}', "NaN is not JSON"),
    (b'{"a": 1e999}', "too large"),
    (b'{"a": 1, "a": 2}', "occurs twice"),
    (b'{"prompt": "\xff"}', "invalid UTF-8 at byte 27"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
    (b'{"id": 1.5}', "'id' must be a text or an integer, got float"),
    (b'{"id": true}', "got bool"),
    (b'{"id": {}}', "got dict"),
    (b'{"id": null}', "has no 'id'"),
    (b'{"id": ""}', "1 to 512 characters"),
    (b'{"id": "' + b"x" * 513 + b'"}', "1 to 512 characters, got 513"),
    (b'{"id": "\\ud800"}', "surrogate"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=[message for _, message in BAD_LINES])
def test_a_bad_line_is_one_record_and_its_neighbours_are_rows(tmp_path: Path, line: bytes, message: str) -> None:
    before, after = b'{"id": "one"}\n\n', b'\n{"id": "two", "prompt": "b"}\n'
    first, bad, last = task_of(tmp_path, before + line + after).rows()
    assert isinstance(bad, BadRow) and message in bad.message, bad
    assert (bad.id, bad.line, bad.type) == ("line-3", 3, "InputFileError") and "line 3" in bad.message
    assert (first, last) == (Row("one", {"id": "one"}), Row("two", {"id": "two", "prompt": "b"}))
    assert len(bad.message) < 600


def test_the_byte_of_a_bad_line_is_told(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{]\n'
    _, bad = task_of(tmp_path, data).rows()
    assert isinstance(bad, BadRow) and f"line 4 (byte {data.index(b'{]')})" in bad.message
    (bad,) = task_of(tmp_path, b"\xef\xbb\xbf{]").rows()
    assert isinstance(bad, BadRow) and "line 1 (byte 3)" in bad.message


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", [True, False])
def test_line_ends_bom_and_blank_lines(tmp_path: Path, end: bytes, bom: bytes, last: bool) -> None:
    text = "é\u2028😀"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False).encode(), b"", b"  ", b'{"prompt": "b"}']
    data = bom + end.join(lines) + (end if last else b"")
    assert list(task_of(tmp_path, data).rows()) == [Row("line-1", {"prompt": text}), Row("line-4", {"prompt": "b"})]


def test_ids_that_occur_twice_refuse_the_input(tmp_path: Path) -> None:
    """Also those that lines without an id get."""
    lines = b'{"id": "line-2"}\n\nbad\n{"id": "line-3"}\n{"id": 7}\n{"id": "7"}\n{"x": 1}\n{"id": "line-7"}\n'
    with pytest.raises(InputFileError) as caught:
        index_rows(task_of(tmp_path, lines))
    told = str(caught.value).splitlines()
    assert told[0] == "task mine has ids that occur twice; every row needs its own:"
    assert told[1:] == ["  'line-3': rows 2 and 3", "  '7': rows 4 and 5", "  'line-7': rows 6 and 7"]
    with pytest.raises(InputFileError, match="(?s)rows 1 and 2.*and 4,989 more"):
        index_rows(task_of(tmp_path, b'{"id": 1}\n' * 5000))
    assert index_rows(task_of(tmp_path, lines, limit=2)).rows == 2, "only of the rows that are asked for"


def test_a_named_id_column_must_be_there(tmp_path: Path) -> None:
    rows = list(task_of(tmp_path, [{"key": "a"}, {"id": "b"}], id="key").rows())
    assert [type(row) for row in rows] == [Row, BadRow] and rows[0].id == "a"


def test_a_line_without_end(tmp_path: Path) -> None:
    """Its neighbours are read, and no more than the limit is ever held."""
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "a"}\n')
        file.seek(1 << 28, os.SEEK_CUR)  # a hole: zeros that take no room on the disk
        file.write(b'\n{"prompt": "b"}\n')
    task = open_task(TaskConfig("mine", data="rows.jsonl"), tmp_path)
    tracemalloc.start()
    try:
        rows = list(task.rows())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [row.id for row in rows] == ["line-1", "line-2", "line-3"]
    assert isinstance(rows[1], BadRow) and "longer than 16,777,216 bytes" in rows[1].message
    assert peak < 4 * rows_file.MAX_LINE_BYTES


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_the_longest_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes) -> None:
    monkeypatch.setattr(rows_file, "MAX_LINE_BYTES", 40)
    fits = b'{"prompt": "' + b"x" * 26 + b'"}'
    assert len(fits) == 40
    for bom in (b"", b"\xef\xbb\xbf"):
        assert isinstance(next(iter(task_of(tmp_path, bom + fits + end).rows())), Row)
        (row,) = task_of(tmp_path, bom + fits + b" " + end).rows()
        assert isinstance(row, BadRow) and "longer than 40 bytes" in row.message


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(3000):
            file.write(json.dumps({"id": i, "prompt": "x" * 10_000}) + "\n")
    task = open_task(TaskConfig("mine", data="rows.jsonl"), tmp_path)
    tracemalloc.start()
    try:
        assert sum(1 for _ in task.rows()) == 3000
        assert tracemalloc.get_traced_memory()[1] < 3 << 20  # of 30 MB
    finally:
        tracemalloc.stop()


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("empty.jsonl", b"", "empty.jsonl is empty"),
        ("blank.jsonl", b"\n  \r\n", "blank.jsonl is empty"),
        ("packed.jsonl", b"\x1f\x8b\x08\x00", "holds gzip data"),
        ("table.jsonl", b"PAR1\x00\x00", "holds parquet data"),
        ("rows.csv", b"a,b\n", "lines=True"),
        ("rows.xyz", b"a,b\n", "set task.format"),
        ("rows.jsonl.gz", b"\x1f\x8b\x08\x00", "unpack it first"),
        (".", None, "set task.format"),
        ("~nosuchuser.jsonl", None, "does not exist"),
    ],
)
def test_files_that_are_no_rows(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    task = open_task(TaskConfig("mine", data=name), tmp_path)
    with pytest.raises(InputFileError, match=message):
        task.rows()  # at once, before the first row is taken


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(InputFileError, match="is not a file"):
        open_task(TaskConfig("mine", data="rows.jsonl"), tmp_path).rows()


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    task = task_of(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    rows = task.rows()
    next(rows)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "c"}\n')
    with pytest.raises(InputFileError, match="was changed while it was read"):
        list(rows)


def test_rows_can_be_read_again_and_only_as_many_as_asked(tmp_path: Path) -> None:
    task = task_of(tmp_path, [{"prompt": str(i)} for i in range(10)], limit=3)
    assert [row.id for row in task.rows()] == [row.id for row in task.rows()] == ["line-1", "line-2", "line-3"]


@pytest.mark.parametrize(("form", "package"), [(Format.parquet, "pyarrow"), (Format.hf, "datasets")])
def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Format, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedFeatureError, match=rf"{package}.*pip install 'fengine\[data\]'"):
        open_task(TaskConfig("mine", data="rows", format=form), tmp_path).rows()


def test_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"id": [1, 2, 3], "prompt": ["a", None, "c"], "x": [{"y": [1.5]}, {"y": [math.nan]}, None]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    task = open_task(TaskConfig("mine", data="rows.parquet"), tmp_path)
    assert list(task.rows()) == [
        Row("1", {"id": 1, "prompt": "a", "x": {"y": [1.5]}}),
        Row("2", {"id": 2, "prompt": None, "x": {"y": [None]}}),
        Row("3", {"id": 3, "prompt": "c", "x": None}),
    ]
    parquet.write_table(pyarrow.table({"id": [1, 2, 2]}), tmp_path / "rows.parquet")
    with pytest.raises(InputFileError, match="'2': rows 2 and 3"):
        index_rows(task)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputFileError, match="parquet"):
        task.rows()


def test_a_dataset(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "test.jsonl").write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}\n')
    task = open_task(TaskConfig("mine", data=str(tmp_path / "set"), format=Format.hf), tmp_path)
    assert [(row.id, row.data["prompt"]) for row in task.rows() if isinstance(row, Row)] == [("a", "x"), ("b", "y")]
    with pytest.raises(InputFileError, match="cannot be opened"):
        open_task(TaskConfig("mine", data=str(tmp_path / "no"), format=Format.hf), tmp_path).rows()


# -- OpenAI's batch format ---------------------------------------------------------------------------------------------


def request(name: str = "r", url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    said = {} if "prompt" in body or "messages" in body else {"messages": [{"role": "user", "content": "Hi"}]}
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", **said, **body}}


def openai_task(tmp_path: Path, lines: list[Any]) -> Task:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = TaskConfig("mine", data="rows.jsonl", format=Format.openai, match=Match.none, target=None)
    return open_task(config, tmp_path, render=lambda messages: [len(messages), *map(ord, messages[-1]["content"])])


def test_openai_requests(tmp_path: Path) -> None:
    given = [
        request("chat", max_tokens=5, temperature=0.5, seed=3, stop="x", top_p=None, n=1, stream=False, user="me"),
        request("text", url="/v1/completions", prompt="Once", max_tokens=7),
        request("ids", url="/v1/completions", prompt=[1, 2]),
        request("held", response_format={"type": "json_object"}, min_tokens=2, logit_bias={"5": 1}, stop_token_ids=[7]),
    ]
    task = openai_task(tmp_path, given)
    rows = list(task.rows())
    assert [row.id for row in rows] == ["chat", "text", "ids", "held"]
    asks = [ask for row in rows if isinstance(row, Row) for ask in task.asks(row)]
    held = {"json_schema": '{"type": "object"}', "min_new_tokens": 2, "logit_bias": {"5": 1}, "stop_token_ids": [7]}
    sampling = {"max_new_tokens": 5, "temperature": 0.5, "sampling_seed": 3, "stop": "x"}
    assert asks == [
        Ask([1, 72, 105], sampling, "generate"),
        Ask("Once", {"max_new_tokens": 7}, "generate"),
        Ask([1, 2], {}, "generate"),
        Ask([1, 72, 105], held, "generate"),
    ]
    assert isinstance(rows[0], Row) and task.score(rows[0], [answer("x")]) == {} and task.metrics([{}]) == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (request(url="/v1/embeddings"), "url must be one of"),
        ({**request(), "url": None}, "url must be one of"),
        ({**request(), "method": "GET"}, "method must be POST"),
        ({**request(), "body": [1]}, "the body must be a JSON object"),
        (request(url="/v1/completions", prompt=None), "prompt is missing"),
        (request(n=2), "n must be an integer in [1, 1]"),
        (request(stream=True), "body.stream is not supported"),
        (request(n=True), "n must be an integer"),
        (request(tools=[{"type": "function", "function": {"name": "f"}}]), "body.tools is not supported"),
        (request(response_format={"type": "xml"}), "response_format must have the type"),
        (request(url="/v1/completions", prompt=["a", "b"]), "several prompts"),
        (request(lora_path="x"), "body.lora_path is not supported"),
        (request(extra_key="x"), "body.extra_key is not supported"),
        (request(bad_words=["x"]), "body.bad_words is not supported"),
        (request(truncate_prompt_tokens=3), "body.truncate_prompt_tokens is not supported"),
        (request(prompt_logprobs=0), "body.prompt_logprobs is not supported"),
        (request(add_special_tokens=True), "body.add_special_tokens is not supported"),
        (request(nonsense=1), "unknown field 'nonsense'"),
        (request(max_tokens=1, max_completion_tokens=1), "give one"),
        ({"method": "POST", "url": "/v1/chat/completions", "body": request()["body"]}, "has no 'custom_id'"),
        ({**request(), "custom_id": ["r"]}, "must be a text"),
    ],
)
def test_openai_requests_that_are_refused(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    good, bad, last = openai_task(tmp_path, [request("good"), line, request("last")]).rows()
    assert isinstance(bad, BadRow) and message in bad.message and "line 2" in bad.message
    assert isinstance(good, Row) and isinstance(last, Row) and (good.id, last.id) == ("good", "last")


# -- generation --------------------------------------------------------------------------------------------------------


def row(**data: Any) -> Row:
    return Row("r", data)


def test_prompts(tmp_path: Path) -> None:
    def prompt(data: dict[str, Any], **values: Any) -> Any:
        config = TaskConfig("t", data="x.jsonl", match=Match.none, target=None, **values)
        (ask,) = open_task(config, tmp_path, render=lambda messages: [len(str(messages))]).asks(row(**data))
        return ask.prompt

    assert prompt({"prompt": " as it is\n"}) == " as it is\n" and prompt({"input_ids": [0, 5]}) == [0, 5]
    chat = [{"role": "user", "content": "Hi"}]
    assert prompt({"messages": chat}) == prompt({"prompt": "Hi"}, chat=True) == [len(str(chat))]
    doc = {"q": "Why?", "n": 3, "deep": {"a": {"b": 1.5}}, "dot.ted": "d"}
    assert prompt(doc, prompt="{q} {n}{{{deep.a.b}}} {dot.ted}:") == "Why? 3{1.5} d:"
    assert prompt({"q": "{n} {{q.__class__}}"}, prompt="{q}") == "{n} {{q.__class__}}"  # values are not filled again
    for data, values, message in [
        ({}, {}, "none of prompt, messages, input_ids"),
        ({"prompt": "a", "messages": chat}, {}, "prompt and messages; give exactly one"),
        ({"prompt": 1}, {}, "must be a text, got int"),
        ({"messages": ["Hi"]}, {}, "must be a list of objects"),
        ({"input_ids": [1, -1]}, {}, "token ids"),
        ({"input_ids": [True]}, {}, "token ids"),
        ({"a": 1}, {"prompt": "{q}"}, "row 'r': has no column 'q'; it has 'a'"),
        ({"q": None}, {"prompt": "{q}"}, "has no column 'q'"),
        ({"q": [1]}, {"prompt": "{q}"}, "'q' is list"),
        ({"q": "x"}, {"prompt": "{q.__class__}"}, "has no column 'q.__class__'"),
        ({"q": "x"}, {"prompt": "{}"}, "has no column ''"),
        ({"prompt": "x", "sampling": 3}, {}, "sampling must be an object"),
    ]:
        with pytest.raises(InputFileError, match=message.replace("(", "\\(")):
            prompt(data, **values)


def test_messages_without_a_template(tmp_path: Path) -> None:
    task = open_task(TaskConfig("t", data="x.jsonl", chat=True), tmp_path)
    with pytest.raises(InputFileError, match="chat template"):
        task.asks(row(prompt="a", answer="b"))


def test_exact_match(tmp_path: Path) -> None:
    task = open_task(TaskConfig("t", data="x.jsonl", max_new_tokens=9, stop=("\n",)), tmp_path)
    one = row(prompt="p", answer=["four", 4], sampling={"stop": ["."]})
    assert task.asks(one) == [Ask("p", {"max_new_tokens": 9, "stop": ["."]}, "generate")]
    assert task.score(one, [answer(" 4 ")]) == {"exact_match": True}
    assert task.score(one, [answer("4.")]) == {"exact_match": False}
    found = task.metrics([{"exact_match": True}, {"exact_match": False}])
    assert found == {"exact_match": Metric(0.5, 0.5, 2)}
    for data in ({"prompt": "p"}, {"prompt": "p", "answer": True}, {"prompt": "p", "answer": []}):
        with pytest.raises(InputFileError, match="answer"):  # before anything is asked
            task.asks(row(**data))


def test_extracted_answers(tmp_path: Path) -> None:
    config = TaskConfig("t", data="x.jsonl", extract=r"#### (\d+)", select=Select.last)
    task, one = open_task(config, tmp_path), row(prompt="p", answer=2)
    assert task.score(one, [answer("#### 1 no: #### 2")]) == {"found": True, "extracted": "2", "exact_match": True}
    assert task.score(one, [answer("2")]) == {"found": False, "exact_match": False}
    assert set(task.metrics([{"found": True, "extracted": "2", "exact_match": True}])) == {"found", "exact_match"}


def test_samples_vote(tmp_path: Path) -> None:
    task = open_task(TaskConfig("t", data="x.jsonl", samples=5, extract=r"\d+", vote=True), tmp_path)
    row = Row("r", {"prompt": "p", "answer": 7})

    def scores(*texts: str) -> tuple[Any, ...]:
        found = task.score(row, [Answer(text, [], [], {}) for text in texts])
        return found["exact_match"], found["pass"], found["majority"], found["found"]

    assert scores("7", "7.", "8", "9", "10") == (0.4, True, True, 1.0)
    assert scores("8", "7", "8", "7", "9") == (0.4, True, False, 1.0), "of equals the first"
    assert scores("1", "2", "3", "4", "5") == (0.0, False, False, 1.0)
    assert scores("x", "y", "z", "u", "7") == (0.2, True, True, 0.2), "where nothing is found there is no vote"
    assert scores(*"abcde") == (0.0, False, False, 0.0)
    plain = open_task(TaskConfig("t", data="x.jsonl", samples=5, extract=r"\d+"), tmp_path)
    assert "pass" not in plain.score(row, [Answer("7", [], [], {})] * 5)


def test_several_samples(tmp_path: Path) -> None:
    task = open_task(TaskConfig("t", data="x.jsonl", samples=4, extract=r"\d+"), tmp_path)
    one = row(prompt="p", answer="1")
    assert len(task.asks(one)) == 4
    scores = task.score(one, [answer(text) for text in ("1", "2", "x", "1")])
    assert scores == {"found": 0.75, "exact_match": 0.5}


def test_json_and_prefix(tmp_path: Path) -> None:
    task = open_task(TaskConfig("t", data="x.jsonl", match=Match.json, extract=r"(?s)```json(.*?)```"), tmp_path)
    one = row(prompt="p", answer={"a": 1, "b": 2})
    right = task.score(one, [answer('So:\n```json\n{"b": 2, "a": 1}\n```')])
    assert {k: right[k] for k in ("found", "valid_json", "fields", "json_match")} == {
        "found": True, "valid_json": True, "fields": 1.0, "json_match": True,
    }  # fmt: skip
    assert task.score(row(prompt="p", answer='{"b": 2, "a": 1}'), [answer('```json{"b": 2, "a": 1}```')]) == right | {
        "extracted": '{"b": 2, "a": 1}'
    }  # a column of JSON's texts
    assert task.score(one, [answer("{}")]) == {"found": False, "valid_json": False, "fields": 0.0, "json_match": False}
    task = open_task(TaskConfig("t", data="x.jsonl", match=Match.prefix), tmp_path)
    assert task.score(row(prompt="p", answer="Rome"), [answer(" Rome, of course")]) == {"prefix_match": True}


# -- likelihoods -------------------------------------------------------------------------------------------------------


def test_multiple_choice(tmp_path: Path) -> None:
    task = open_task(TaskConfig("t", data="x.jsonl", kind=TaskKind.choice, prompt="{q}\nAnswer: "), tmp_path)
    one = row(q="Which?", choices=["abc", "d"], answer=1)
    assert task.asks(one) == [  # the blank moves to where the tokens have it
        Ask("Which?\nAnswer:", {}, "loglikelihood", "  abc"),
        Ask("Which?\nAnswer:", {}, "loglikelihood", "  d"),
    ]
    scores = task.score(one, [answer(logprobs=(-2.0, -2.5)), answer(logprobs=(-4.0,))])
    assert scores == {"acc": True, "acc_norm": False, "picked": "d"}
    assert task.score(row(q="Which?", choices=["abc", "d"], answer="d"), [answer(), answer(logprobs=(-1.0,))]) == {
        "acc": False, "acc_norm": False, "picked": "abc",
    }  # fmt: skip
    assert set(task.metrics([scores])) == {"acc", "acc_norm"}
    for data, message in [
        ({"choices": ["a", "b"]}, "has no column 'answer'"),
        ({"choices": ["a", "b"], "answer": 2}, "must be a choice or its index"),
        ({"choices": ["a", "b"], "answer": -1}, "must be a choice"),
        ({"choices": ["a", "b"], "answer": True}, "must be a choice"),
        ({"choices": ["a", "b"], "answer": "c"}, "must be a choice"),
        ({"choices": ["a"], "answer": 0}, "at least two"),
        ({"choices": ["a", ""], "answer": 0}, "none of them empty"),
        ({"choices": ["a", "a"], "answer": 0}, "must differ"),
        ({"choices": "ab", "answer": 0}, "must be a list"),
    ]:
        with pytest.raises(InputFileError, match=message):
            task.asks(row(q="x", **data))


def test_perplexity(tmp_path: Path) -> None:
    task = open_task(TaskConfig("t", data="x.jsonl", kind=TaskKind.perplexity, target="text"), tmp_path)
    one = row(text="ab cd")
    assert task.asks(one) == [Ask("", {}, "rolling", "ab cd")]
    scores = task.score(one, [answer(logprobs=(-1.0, -3.0))])
    assert scores == {"loglikelihood": -4.0, "words": 2, "bytes": 5}
    assert task.metrics([scores])["word_perplexity"].value == pytest.approx(math.exp(2))
    for data in ({"text": ""}, {"text": 1}, {}):
        with pytest.raises(InputFileError, match="text"):
            task.asks(row(**data))


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": None}, "task.data must name"),
        ({"data": "x.jsonl", "limit": 0}, "task.limit must be at least 1"),
        ({"data": "x.jsonl", "samples": 0}, "task.samples"),
        ({"data": "x.jsonl", "vote": True}, "task.vote is for several samples"),
        ({"data": "x.jsonl", "max_new_tokens": 0}, "task.max_new_tokens"),
        ({"data": "x.jsonl", "normal_form": ("strip", "lower")}, "no 'lower'; there are strip, blanks"),
        ({"data": "x.jsonl", "target": None}, "task.target"),
        ({"data": "x.jsonl", "kind": TaskKind.perplexity, "match": Match.none, "target": None}, "task.target"),
        ({"data": "x.jsonl", "kind": TaskKind.choice, "samples": 2}, "task.samples is for kind=generate"),
        ({"data": "x.jsonl", "kind": TaskKind.choice, "format": Format.openai}, "task.format=openai"),
        ({"data": "x.jsonl", "extract": "("}, "task.extract: .*not a regular expression"),
        ({"data": "x.jsonl", "split": "train"}, "task.split and task.subset are of a dataset of Hugging Face"),
        ({"data": "x.jsonl", "select": Select.last}, "task.select says which match of task.extract"),
        ({"data": "x.jsonl", "choices": "options"}, "task.choices is for kind=choice"),
        ({"data": "x.jsonl", "delimiter": ""}, "task.delimiter is for kind=choice and for task.shots"),
        ({"data": "x.jsonl", "kind": TaskKind.choice, "match": Match.f1}, "task.match is for kind=generate"),
        ({"data": "x.jsonl", "kind": TaskKind.choice, "max_new_tokens": 8}, "task.max_new_tokens is for kind=generate"),
        ({"data": "x.jsonl", "kind": TaskKind.choice, "normal_form": ("blanks",)}, "task.normal_form is for"),
        ({"data": "x.jsonl", "kind": TaskKind.perplexity, "stop": (".",)}, "task.stop is for kind=generate"),
        ({"data": "x.jsonl", "kind": TaskKind.perplexity, "prompt": "{q}"}, "is for kind=generate and kind=choice"),
        ({"data": "x.jsonl", "kind": TaskKind.perplexity, "chat": True}, "task.chat is for"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_task(TaskConfig("t", **values), tmp_path)


def test_where_data_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, mine = tmp_path / "ours", tmp_path / "mine"
    for directory, name in ((ours, "a"), (mine, "a"), (mine, "b")):
        (directory / "task").mkdir(parents=True, exist_ok=True)
        (directory / "task" / f"{name}.yaml").write_text("name: x\n")
    assert base_directory("a", [ours, mine], []) == ours / "task"
    assert base_directory("b", [ours, mine], ["task=b", "task.database=1"]) == mine / "task"
    monkeypatch.chdir(mine)
    assert base_directory("b", [ours, mine], ["task=b", "task.data=x.jsonl"]) == mine
    with pytest.raises(ConfigError, match="no task/c.yaml"):
        base_directory("c", [ours, mine], [])


# -- the built-in tasks ------------------------------------------------------------------------------------------------


def built_in(name: str, **values: Any) -> Task:
    omegaconf = pytest.importorskip("omegaconf").OmegaConf
    directory = ROOT / "conf" / "task"
    schema, given = omegaconf.structured(TaskConfig), omegaconf.load(directory / f"{name}.yaml")
    config = omegaconf.to_object(omegaconf.merge(schema, given, values))
    assert isinstance(config, TaskConfig)
    return open_task(config, directory)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_rows(name: str) -> None:
    task = built_in(name)
    rows = [row for row in task.rows() if isinstance(row, Row)]
    assert task.name == name and len(rows) == (150 if name == "capitals" else 200)
    assert [row.id for row in rows] == [f"{name}-{i:03}" for i in range(len(rows))]
    assert all(task.asks(row) for row in rows)
    asked = [tuple((ask.prompt, ask.continuation) for ask in task.asks(row)) for row in rows]
    assert len(set(asked)) == len(rows)


def test_every_yaml_is_here() -> None:
    names = {path.stem for path in (ROOT / "conf" / "task").glob("*.yaml")}
    assert names == {*BUILT_IN, "pictures", "jsonl", "openai"}
    for name in ("jsonl", "openai"):
        assert check(built_in(name, data="x.jsonl").config) == []  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="task.data must name the rows"):
            built_in(name)


def test_the_data_is_what_the_script_writes() -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / "box_tasks.py"), "--check"], check=True)


@pytest.mark.parametrize("words", [["name: x\nmore: 1\n", "more"], ["name: x\nkind: fengine.Engine\n", "kind"]])
def test_a_yaml_chooses_among_values(tmp_path: Path, words: list[str]) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    (tmp_path / "x.yaml").write_text(words[0])
    with pytest.raises(omegaconf.errors.OmegaConfBaseException, match=words[1]):
        schema = omegaconf.OmegaConf.structured(TaskConfig)
        omegaconf.OmegaConf.merge(schema, omegaconf.OmegaConf.load(tmp_path / "x.yaml"))


def composed(*words: str) -> tuple[TaskConfig, Path]:
    """The task of a command line, and what its data is relative to."""
    pytest.importorskip("hydra")
    from fengine.eval.cli.compose import points

    (point,) = points(parse(words, EVAL), EVAL)
    base = base_directory(dict(point.choices)["task"], list(point.search), list(point.overrides))
    return point.config.task, base


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_tasks_compose(name: str) -> None:
    config, base = composed(f"task={name}")
    assert config == built_in(name).config  # type: ignore[attr-defined]
    assert next(open_task(config, base).rows()).id == f"{name}-000"


def test_a_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data is beside its YAML; what the command line names is where the user is."""
    (tmp_path / "mine" / "task").mkdir(parents=True)
    (tmp_path / "mine" / "task" / "exam.yaml").write_text('name: exam\ndata: a.jsonl\nprompt: "{q}?"\nstop: ["\\n"]\n')
    (tmp_path / "mine" / "task" / "a.jsonl").write_text('{"id": "beside the YAML", "q": "Why", "answer": "So"}\n')
    (tmp_path / "a.jsonl").write_text('{"id": "where I am", "q": "Why", "answer": "So"}\n')
    monkeypatch.chdir(tmp_path)
    for words, name in [((), "beside the YAML"), (("task.data=a.jsonl",), "where I am")]:
        task = open_task(*composed("--config-dir", "mine", "task=exam", *words))
        (one,) = task.rows()
        assert isinstance(one, Row) and one.id == name
        assert task.asks(one) == [Ask("Why?", {"stop": ["\n"]}, "generate")]
    with pytest.raises(ConfigError, match="_target_"):
        (tmp_path / "mine" / "task" / "bad.yaml").write_text("name: bad\n_target_: os.getcwd\n")
        composed("--config-dir", "mine", "task=bad")


@pytest.fixture(scope="module")
def box():  # noqa: ANN201
    from fengine import Engine

    with Engine(model_path="box") as engine:
        yield engine


def read(engine: Any, pairs: list[tuple[list[int], list[int]]]) -> list[Answer]:
    """The logprobs of the second ids of each pair after the first."""
    outputs = engine.generate(
        input_ids=[before + after for before, after in pairs],
        sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0,
    )  # fmt: skip
    found = [out["meta_info"]["input_token_logprobs"] for out in outputs]
    return [Answer("", b, [e[0] for e in one[len(a) :]], {}) for (a, b), one in zip(pairs, found, strict=True)]


@pytest.mark.parametrize(
    ("name", "figure", "least"),
    [
        ("capitals", "prefix_match", 0.97),
        ("addition", "exact_match", 0.97),
        ("sorting", "exact_match", 0.97),
        ("json_filling", "json_match", 0.97),
    ],
)
def test_generation_on_the_box(box: Any, name: str, figure: str, least: float) -> None:
    task = built_in(name, limit=64)
    rows = [row for row in task.rows() if isinstance(row, Row)]
    asks = [ask for row in rows for ask in task.asks(row)]
    outputs = box.generate([a.prompt for a in asks], [{"temperature": 0.0, **a.sampling} for a in asks])
    scores = [task.score(row, [answer(out["text"])]) for row, out in zip(rows, outputs, strict=True)]
    metric = task.metrics(scores)[figure]
    assert metric.n == 64 and metric.value >= least
    assert task.metrics(task.score(row, [answer("nothing")]) for row in rows)[figure].value == 0.0


def test_multiple_choice_on_the_box(box: Any) -> None:
    task = built_in("multiple_choice", limit=30)
    scores = []
    for one in task.rows():
        assert isinstance(one, Row)
        before = [box.tokenizer.encode(ask.prompt) for ask in task.asks(one)]
        whole = [box.tokenizer.encode(f"{ask.prompt}{ask.continuation}") for ask in task.asks(one)]
        assert all(w[: len(b)] == b for b, w in zip(before, whole, strict=True))
        scores.append(task.score(one, read(box, [(b, w[len(b) :]) for b, w in zip(before, whole, strict=True)])))
    assert task.metrics(scores)["acc"].value >= 0.97 and {score["picked"] for score in scores} == set("ABCD")


def test_perplexity_on_the_box_is_that_of_transformers(box: Any) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path = str(ROOT / "fengine" / "models" / "box")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    task = built_in("stories", limit=5)
    rows = [row for row in task.rows() if isinstance(row, Row)]
    ours, theirs = [], []
    for one in rows:
        (ask,) = task.asks(one)
        assert isinstance(ask.continuation, str)
        first, *ids = box.tokenizer.encode(ask.continuation)
        ours.append(task.score(one, read(box, [([first], ids)])))
        with torch.inference_mode():
            logprobs = model(torch.tensor([[first, *ids]])).logits[0, :-1].log_softmax(-1)
        picked = logprobs[torch.arange(len(ids)), torch.tensor(ids)].tolist()
        theirs.append(task.score(one, [Answer("", ids, picked, {})]))
    for name, metric in task.metrics(ours).items():
        assert metric.value == pytest.approx(task.metrics(theirs)[name].value, rel=1e-4), name
        assert isinstance(metric, Metric) and metric.n == 5
