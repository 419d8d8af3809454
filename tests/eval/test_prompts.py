"""Prompt files and output files: a bad line is one error record, order is kept, a file is whole or absent."""

import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fengine.errors import InputFileError, StorageError
from fengine.eval.runs.config import RunConfig, evaluation_of
from fengine.eval.runs.journal import Entry
from fengine.eval.runs.output import Export
from fengine.eval.runs.record import line_of
from fengine.eval.tasks import sources as rows_file
from fengine.eval.tasks.kinds import open_task
from fengine.eval.tasks.task import BadRow, Row, Task


def task_of(prompts: Any) -> Task:
    return open_task(evaluation_of(RunConfig(prompts=prompts), ()).task, Path(), lambda messages: [len(messages)])


def rows_of(path: Path, data: bytes) -> list[Any]:
    path.write_bytes(data)
    return list(task_of(str(path)).rows())


def prompts(rows: list[Any]) -> list[Any]:
    return [row.data["prompt"] if isinstance(row, Row) else None for row in rows]


def problem(row: Row | BadRow) -> str:
    if isinstance(row, BadRow):
        assert row.type == "InputFileError"
        return row.message
    with pytest.raises(InputFileError) as caught:
        task_of("x.jsonl").asks(row)
    return str(caught.value)


def test_inline_list() -> None:
    good, bad, empty, chat = task_of(["Hello", 3, "", {"messages": [{"role": "user", "content": "x"}]}]).rows()
    assert good == Row("0", {"prompt": "Hello"}) and empty == Row("2", {"prompt": ""})
    assert bad == BadRow("1", 2, "prompts[1] must be a string, got int.")
    assert isinstance(chat, Row) and task_of([]).asks(chat)[0].prompt == [1]


def test_text_file(tmp_path: Path) -> None:
    data = "\ufeffone\r\n\r\n  two 🙂 \n \t \nthree\x00\x0b\u2028x".encode()
    rows = rows_of(tmp_path / "p.txt", data)
    assert prompts(rows) == ["one", "  two 🙂 ", "three\x00\x0b\u2028x"]
    assert [row.id for row in rows] == ["0", "1", "2"]


def test_jsonl_file(tmp_path: Path) -> None:
    objects = [
        {"prompt": "a", "id": 7, "x": {"deep": [1, 2.5, None]}},
        {"messages": [{"role": "user", "content": "hi"}], "prompt": None},
        {"input_ids": [1, 2, 3], "note": "日本", "id": 7},
    ]
    data = b"\xef\xbb\xbf" + "\r\n\n".join(json.dumps(o, ensure_ascii=False) for o in objects).encode()
    rows = rows_of(tmp_path / "p.jsonl", data)
    assert [row.data for row in rows] == objects
    assert [task_of([]).asks(row)[0].prompt for row in rows] == ["a", [1], [1, 2, 3]]


BAD_LINES = {
    b"{": "not valid JSON",
    b"nonsense": "not valid JSON",
    b"[1]": "must be a JSON object, got list",
    b'"prompt"': "must be a JSON object, got str",
    b"{}": "none of prompt, messages, input_ids",
    b'{"prompt": null}': "none of prompt",
    b'{"prompt": "a", "input_ids": [1]}': "holds prompt and input_ids",
    b'{"prompt": 3}': "prompt must be a text, got int",
    b'{"prompt": ["a"]}': "prompt must be a text, got list",
    b'{"messages": []}': "messages must be a list of objects",
    b'{"messages": "hi"}': "messages must be a list of objects",
    b'{"messages": ["hi"]}': "messages must be a list of objects",
    b'{"input_ids": []}': "input_ids must be a list of token ids",
    b'{"input_ids": [1, true]}': "input_ids must be a list of token ids",
    b'{"input_ids": [1.0]}': "input_ids must be a list of token ids",
    b'{"input_ids": [-1]}': "input_ids must be a list of token ids",
    b'{"prompt": "a", "prompt": "b"}': "key 'prompt' occurs twice",
    b'{"prompt": "a", "x": NaN}': "NaN is not JSON",
    b'{"prompt": "a", "x": 1e999}': "too large",
    b'{"prompt": "a", "x": ' + b"1" * 5000 + b"}": "not valid JSON",
    b'{"prompt": "a", "text": "b"}': "column 'text' is a name that results use",
    b'{"prompt": "a", "error": "b"}': "column 'error' is a name that results use",
    b'{"prompt": "a", "temperature": 0.1}': '"sampling": {"temperature": 0.1}',
    b'{"prompt": "a", "max_tokens": 5}': '"sampling": {"max_new_tokens": 5}',
    b'{"prompt": "\xff"}': "invalid UTF-8 at byte 29",
    b"[" * 100_000: "not valid JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20].decode("utf-8", "replace"))
def test_a_bad_line_is_one_bad_row(tmp_path: Path, line: bytes) -> None:
    first, bad, last = rows_of(tmp_path / "p.jsonl", b'{"prompt": "a"}\n\n' + line + b'\n{"prompt": "b"}')
    assert prompts([first, last]) == ["a", "b"] and (bad.id, last.id) == ("1", "2")
    assert BAD_LINES[line] in problem(bad)
    if isinstance(bad, BadRow):
        assert bad.line == 3 and "p.jsonl line 3" in bad.message


def test_invalid_utf8_in_a_text_file(tmp_path: Path) -> None:
    first, bad, last = rows_of(tmp_path / "p.txt", b"a\n\xff\xfe\nb\n")
    assert prompts([first, last]) == ["a", "b"]
    assert "p.txt line 2 (byte 2) is invalid UTF-8 at byte 2" in bad.message


def test_long_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_file, "MAX_LINE_BYTES", 10)
    for end in (b"\n", b"\r\n"):
        data = b"x" * 10 + end + b"y" * 11 + end + b"z" * 5000 + end + b"w" * 10
        rows = rows_of(tmp_path / "p.txt", data)
        assert prompts(rows) == ["x" * 10, None, None, "w" * 10]
        assert "is longer than 10 bytes" in rows[1].message and "line 2" in rows[1].message


def test_a_huge_line_takes_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    with path.open("wb") as file:
        file.truncate(200 << 20)  # one sparse line of NULs
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"prompt": "b"}\n')
    tracemalloc.start()
    bad, good = task_of(str(path)).rows()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(bad, BadRow) and prompts([good]) == ["b"]
    assert peak < 64 << 20


@settings(deadline=None, max_examples=60)
@given(lines=st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=5)))
@example(lines=["["])
def test_text_lines_are_the_non_blank_lines(tmp_path_factory: Any, lines: list[str]) -> None:
    path = tmp_path_factory.mktemp("p") / "p.txt"
    expected = [line for line in lines if line.encode().strip()]
    if not expected:
        with pytest.raises(InputFileError, match="empty"):
            rows_of(path, "\n".join(lines).encode())
    elif not lines[0].startswith("\ufeff"):
        assert prompts(rows_of(path, "\n".join(lines).encode())) == expected


def test_unusable_inputs(tmp_path: Path) -> None:
    def refused(spec: Any, reason: str) -> None:
        with pytest.raises(InputFileError, match=reason):
            list(task_of(str(spec)).rows())

    refused(tmp_path / "no.txt", "no.txt does not exist")
    (tmp_path / "dir.jsonl").mkdir()
    refused(tmp_path / "dir.jsonl", "is not a file")
    os.mkfifo(tmp_path / "pipe.jsonl")
    refused(tmp_path / "pipe.jsonl", "is not a file")
    for content in (b"", b"\n \r\n", b"\xef\xbb\xbf"):
        (tmp_path / "e.txt").write_bytes(content)
        refused(tmp_path / "e.txt", "e.txt is empty")
    refused(tmp_path / "p.csv", "neither .txt .* nor .jsonl")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "p.txt").write_text("x")
    monkeypatch.setattr(type(tmp_path), "open", refuse)
    with pytest.raises(InputFileError, match="p.txt cannot be read: Permission denied"):
        list(task_of(str(tmp_path / "p.txt")).rows())


# -- writing ---------------------------------------------------------------------------------------------------------


def entry(data: dict[str, Any], text: str | None = "b") -> Entry:
    """A line of the journal: a row that was answered, or one that failed."""
    answer = {"prompt": "p", "text": text, "output_ids": [1], "logprobs": [-0.5], "finish_reason": None}
    record: dict[str, Any] = {"id": "0", "data": data}
    error = {"type": "ContextLengthError", "message": "too long"}
    record |= {"error": error} if text is None else {"answers": [answer | {"sampling_seed": 3}], "scores": {}}
    return Entry(0, [0, 1, 0, 1, 0.0, 0.0, 7, 1], line_of(record))


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_records(tmp_path: Path) -> None:
    export = Export(tmp_path / "o.jsonl", logprobs=True)
    export.write(
        [entry({"prompt": "a", "id": 3}), entry({"prompt": "é\ud800", "error": 1, "text": "own", "k": 2}, None)]
    )
    assert list(written(export.path)[0].items()) == [
        *(("prompt", "a"), ("id", 3), ("text", "b"), ("output_ids", [1]), ("finish_reason", None)),
        *(("prompt_tokens", 7), ("sampling_seed", 3), ("output_token_logprobs", [-0.5])),
    ]
    error = {"type": "ContextLengthError", "message": "too long"}
    assert written(export.path)[1] == {"prompt": "é\ud800", "k": 2, "error": error}
    assert os.listdir(export.path.parent) == ["o.jsonl"]


def test_an_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    path.write_text("old")
    link.symlink_to(path)

    def broken() -> Iterator[Entry]:
        yield entry({})
        raise StorageError("the journal changed")

    with pytest.raises(StorageError, match="^the journal changed$"):
        Export(link).write(broken())
    assert path.read_text() == "old"
    Export(link).write([entry({"i": 1})])
    assert link.is_symlink() and written(path)[0]["i"] == 1
    assert sorted(os.listdir(tmp_path)) == ["link.jsonl", "out.jsonl"]


def test_what_a_killed_run_left_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    if (pid := os.fork()) == 0:  # the run that is killed while it writes
        try:
            Export(path).write(entry({}) if number < 9 else os.kill(os.getpid(), 9) for number in range(10))  # type: ignore[misc]
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 9 and len(os.listdir(tmp_path)) == 1
    Export(path).write([entry({"i": 2})])
    assert os.listdir(tmp_path) == ["out.jsonl"] and written(path)[0]["i"] == 2


def test_unusable_outputs(tmp_path: Path) -> None:
    def refused(path: Path, reason: str, inputs: str | None = None) -> None:
        with pytest.raises(StorageError, match=reason):
            Export(path, inputs=inputs).write([])

    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    (tmp_path / "alias.jsonl").symlink_to(source)
    refused(tmp_path / "alias.jsonl", "is the prompts file itself", str(source))
    assert source.read_text() == "{}"
    refused(tmp_path, "not a regular file")
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", "not a regular file")
    refused(Path("/"), "not a regular file")
    refused(Path("a\0b"), "is no name of a file")
    refused(source / "out.jsonl", "cannot be written")
    refused(tmp_path / ("x" * 5000), "cannot be written")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_devices_are_written_directly() -> None:
    with pytest.raises(StorageError, match="No space left"):
        Export("/dev/full")
    Export("/dev/null").write([entry({})])
    assert not os.path.isfile("/dev/null") and os.path.exists("/dev/full")
