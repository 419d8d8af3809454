"""Prompt and result files: one bad line is one error record, order is kept, no half-written file takes the name."""

import json
import os
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fengine.errors import ContextLengthError, InputFileError, StorageError
from fengine.eval.runs.prompts import BadRow, OutputWriter, PromptRow, error_record, read_prompts, result_record


def rows_of(path, data: bytes, **options):
    path.write_bytes(data)
    return list(read_prompts(path, **options))


def test_inline_list():
    good, bad, empty = read_prompts(["Hello", 3, ""])
    assert good == PromptRow(0, {"prompt": "Hello"}, prompt="Hello")
    assert isinstance(bad, BadRow) and bad.index == 1 and "prompts[1] must be a string, got int" in bad.message
    assert empty.prompt == ""


def test_text_file(tmp_path):
    data = "\ufeffone\r\n\r\n  two 🙂 \n \t \nthree\x00\x0b\u2028x".encode()
    rows = rows_of(tmp_path / "p.txt", data)
    assert [row.prompt for row in rows] == ["one", "  two 🙂 ", "three\x00\x0b\u2028x"]
    assert [row.index for row in rows] == [0, 1, 2]
    assert rows[0].columns == {"prompt": "one"}


def test_jsonl_file(tmp_path):
    objects = [
        {"prompt": "a", "id": 7, "x": {"deep": [1, 2.5, None]}},
        {"messages": [{"role": "user", "content": "hi"}], "prompt": None},
        {"input_ids": [1, 2, 3], "note": "日本"},
    ]
    data = b"\xef\xbb\xbf" + "\r\n\n".join(json.dumps(o, ensure_ascii=False) for o in objects).encode()
    rows = rows_of(tmp_path / "p.jsonl", data)
    assert [row.columns for row in rows] == objects
    assert (rows[0].prompt, rows[1].messages, rows[2].input_ids) == ("a", objects[1]["messages"], [1, 2, 3])
    assert (rows[0].messages, rows[1].prompt, rows[2].prompt) == (None, None, None)


BAD_LINES = {
    b"{": "not valid JSON",
    b"nonsense": "not valid JSON",
    b"[1]": "must be a JSON object, got list",
    b'"prompt"': "must be a JSON object, got str",
    b"{}": "none of prompt, messages, input_ids",
    b'{"prompt": null}': "none of prompt",
    b'{"prompt": "a", "input_ids": [1]}': "holds prompt and input_ids",
    b'{"prompt": 3}': "prompt must be a string, got int",
    b'{"prompt": ["a"]}': "prompt must be a string, got list",
    b'{"messages": []}': "messages must be a non-empty list",
    b'{"messages": "hi"}': "messages must be a non-empty list",
    b'{"messages": ["hi"]}': "messages[0] must be an object",
    b'{"input_ids": []}': "input_ids must be a non-empty list",
    b'{"input_ids": [1, true]}': "input_ids[1] must be a token id",
    b'{"input_ids": [1.0]}': "input_ids[0] must be a token id",
    b'{"input_ids": [-1]}': "input_ids[0] must be a token id",
    b'{"prompt": "a", "prompt": "b"}': "key 'prompt' occurs twice",
    b'{"prompt": "a", "x": NaN}': "NaN is not JSON",
    b'{"prompt": "a", "x": 1e999}': "too large",
    b'{"prompt": "a", "x": ' + b"1" * 5000 + b"}": "not valid JSON",
    b'{"prompt": "a", "text": "b"}': "column 'text' is a name that results use",
    b'{"prompt": "a", "error": "b"}': "column 'error' is a name that results use",
    b'{"prompt": "\xff"}': "invalid UTF-8 at byte 12",
    b"[" * 100_000: "not valid JSON",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20].decode("utf-8", "replace"))
def test_a_bad_line_is_one_bad_row(tmp_path, line):
    first, bad, last = rows_of(tmp_path / "p.jsonl", b'{"prompt": "a"}\n\n' + line + b'\n{"prompt": "b"}')
    assert (first.prompt, last.prompt, last.index) == ("a", "b", 2)
    assert isinstance(bad, BadRow) and bad.index == 1 and bad.type == "InputFileError"
    assert "p.jsonl line 3" in bad.message and BAD_LINES[line] in bad.message
    record = error_record(bad)
    assert record["error"] == {"type": "InputFileError", "message": bad.message}
    json.dumps(record, allow_nan=False)


def test_invalid_utf8_in_a_text_file(tmp_path):
    first, bad, last = rows_of(tmp_path / "p.txt", b"a\n\xff\xfe\nb\n")
    assert (first.prompt, last.prompt) == ("a", "b")
    assert "p.txt line 2: invalid UTF-8 at byte 0" in bad.message


def test_long_lines(tmp_path):
    for end in (b"\n", b"\r\n"):
        data = b"x" * 10 + end + b"y" * 11 + end + b"z" * 5000 + end + b"w" * 10
        rows = rows_of(tmp_path / "p.txt", data, max_line_bytes=10)
        assert [getattr(row, "prompt", None) for row in rows] == ["x" * 10, None, None, "w" * 10]
        assert "line 2 is longer than 10 bytes" in rows[1].message


def test_a_huge_line_takes_bounded_memory(tmp_path):
    path = tmp_path / "p.jsonl"
    with path.open("wb") as file:
        file.truncate(200 << 20)  # one sparse line of NULs
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"prompt": "b"}\n')
    tracemalloc.start()
    bad, good = read_prompts(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(bad, BadRow) and good.prompt == "b"
    assert peak < 64 << 20


@settings(deadline=None, max_examples=60)
@given(lines=st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=5)))
def test_text_lines_are_the_non_blank_lines(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("p") / "p.txt"
    expected = [line for line in lines if line.encode().strip()]
    path.write_bytes("\n".join(lines).encode())
    if not expected:
        with pytest.raises(InputFileError, match="empty"):
            read_prompts(path)
    elif not lines[0].startswith("\ufeff"):
        assert [row.prompt for row in read_prompts(path)] == expected


def test_unusable_inputs(tmp_path):
    def refused(spec, reason):
        with pytest.raises(InputFileError, match=reason):
            read_prompts(spec)

    refused(tmp_path / "no.txt", "no.txt does not exist")
    (tmp_path / "dir.jsonl").mkdir()
    refused(tmp_path / "dir.jsonl", "is not a file")
    for content in (b"", b"\n \r\n", b"\xef\xbb\xbf"):
        (tmp_path / "e.txt").write_bytes(content)
        refused(tmp_path / "e.txt", "e.txt is empty")
    refused(str(tmp_path / "p.csv"), "neither .txt .* nor .jsonl")
    refused("Hello there", "inline prompt as a list")
    refused([], "empty list")
    refused(3, "got int")
    refused(b"p.txt", "got bytes")


def test_unreadable_file(tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("x")

    def refuse(self, *args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "open", refuse)
    with pytest.raises(InputFileError, match="p.txt cannot be read: Permission denied"):
        read_prompts(tmp_path / "p.txt")


# -- writing ---------------------------------------------------------------------------------------------------------


def test_records():
    row = PromptRow(0, {"prompt": "a", "id": 3}, prompt="a")
    assert list(result_record(row, {"text": "b", "finish_reason": None}).items()) == [
        ("prompt", "a"), ("id", 3), ("text", "b"), ("finish_reason", None)
    ]  # fmt: skip
    failed = error_record(row, ContextLengthError("too long"))
    assert failed == {"prompt": "a", "id": 3, "error": {"type": "ContextLengthError", "message": "too long"}}
    assert error_record(BadRow(0, "m", columns={"error": 1, "k": 2}))["k"] == 2


@settings(deadline=None, max_examples=60)
@given(order=st.integers(0, 12).flatmap(lambda n: st.permutations(range(n))))
def test_records_come_out_in_input_order(tmp_path_factory, order):
    path = tmp_path_factory.mktemp("o") / "deep" / "out.jsonl"
    with OutputWriter(path) as writer:
        for done, index in enumerate(order):
            writer.write(index, {"i": index, "text": "é\ud800" if index == 3 else "é\n🙂"})
            ready = next(n for n in range(len(order) + 1) if n not in order[: done + 1])
            assert (writer.written, writer.waiting) == (ready, done + 1 - ready)
            assert not path.exists()
    assert [json.loads(line)["i"] for line in path.read_bytes().splitlines()] == sorted(order)
    assert os.listdir(path.parent) == ["out.jsonl"]


def test_the_bytes_are_deterministic(tmp_path):
    for name in ("a", "b"):
        with OutputWriter(tmp_path / name) as writer:
            writer.write(0, {"prompt": "é🙂", "text": "\u2028", "output_ids": [1]})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_text() == '{"prompt": "é🙂", "text": "\u2028", "output_ids": [1]}\n'


def test_an_old_file_stays_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    with pytest.raises(KeyError), OutputWriter(path) as writer:
        writer.write(0, {"i": 0})
        raise KeyError
    assert path.read_text() == "old"
    assert (tmp_path / "out.jsonl.partial").read_text() == '{"i": 0}\n'
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with OutputWriter(link) as writer:
        writer.write(0, {"i": 1})
    assert link.is_symlink() and path.read_text() == '{"i": 1}\n'
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_unusable_outputs(tmp_path):
    def refused(path, reason, **options):
        with pytest.raises(StorageError, match=reason):
            OutputWriter(path, **options)

    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    (tmp_path / "alias.jsonl").symlink_to(source)
    refused(tmp_path / "alias.jsonl", "is the prompts file itself", inputs=source)
    assert source.read_text() == "{}"
    refused(tmp_path, "not a regular file")
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", "not a regular file")
    refused(source / "out.jsonl", "cannot be written")
    writer = OutputWriter(tmp_path / "busy.jsonl")
    refused(tmp_path / "busy.jsonl", "another run")
    writer.close()
    OutputWriter(tmp_path / "busy.jsonl").close()


def test_unwritable_directory(tmp_path, monkeypatch):
    def refuse(self, *args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "open", refuse)
    with pytest.raises(StorageError, match="out.jsonl cannot be written: Permission denied"):
        OutputWriter(tmp_path / "out.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk():
    writer = OutputWriter("/dev/full")
    with pytest.raises(StorageError, match="No space left"):
        writer.write(0, {"i": 0})
    writer.close()
    assert os.path.exists("/dev/full")


def test_a_device_is_written_directly():
    with OutputWriter("/dev/null") as writer:
        writer.write(0, {"i": 0})
    assert not os.path.isfile("/dev/null")


def test_what_is_no_json_is_not_written(tmp_path):
    with OutputWriter(tmp_path / "o") as writer:
        for bad in (float("nan"), object()):
            with pytest.raises((ValueError, TypeError)):
                writer.write(0, {"x": bad})
        writer.write(0, {"x": 1})
    assert (tmp_path / "o").read_text() == '{"x": 1}\n'
