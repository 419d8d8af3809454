"""Rows from files, streamed: one line is in memory at a time. No torch. JSONL with the user's own columns, or OpenAI's
batch format. Every line becomes exactly one `Row` or `BadRow`, whatever it holds; what is wrong with the file as a
whole raises. That no id occurs twice is for `index_rows` to see."""

import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from fengine.core.json_text import parse_json
from fengine.errors import InputFileError
from fengine.eval.tasks import columns, drawn
from fengine.eval.tasks.task import BadRow, Row
from fengine.eval.tasks.task_config import Format, TaskConfig
from fengine.server.errors import ApiError
from fengine.server.openai_body import OpenAIRequest, read_body

MAX_LINE_BYTES = 16 << 20
MAX_ID_CHARS = 512
# Names that the records of a run of prompts give to results.
RESULT_COLUMNS = "text output_ids finish_reason error sampling_seed prompt_tokens output_token_logprobs".split()
SUFFIXES = {".jsonl": Format.jsonl, ".ndjson": Format.jsonl, ".parquet": Format.parquet}
_PANDAS = "write one object a line, as pandas.read_{}(FILE).to_json(OUT, orient='records', lines=True) does"
REMEDIES = {  # for what is often tried
    ".json": "write one object a line: jq -c '.[]' FILE.json > FILE.jsonl",
    **{f".{name}": _PANDAS.format(name) for name in ("csv", "parquet")},
    ".tsv": _PANDAS.format("table"),
    ".xlsx": _PANDAS.format("excel"),
    **dict.fromkeys((".gz", ".zst", ".bz2", ".xz", ".zip"), "unpack it first"),
    "-": "rows are read twice and hashed, so that they must lie in a file: cat > rows.jsonl",
}
MAGIC = {b"\x1f\x8b": "gzip", b"PAR1": "parquet", b"PK\x03\x04": "zip", b"(\xb5/\xfd": "zstandard", b"BZh": "bzip2"}
Line = tuple[int, int, bytes | None]  # number from 1; first byte in the file; without BOM and end, None if too long
Parsed = tuple[int, dict[str, Any] | str]  # line; columns, or what is wrong


def read_rows(config: TaskConfig, base: Path) -> Iterator[Row | BadRow]:
    """The rows of a task in the order of the data, at most `config.limit`. `base` is what a relative path is under.
    Errors, before the first row: InputFileError (no file, unreadable, no row, another format), UnsupportedFeatureError
    (parquet or a Hugging Face dataset without the library); while reading: InputFileError if the file has changed."""
    rows = _read(config, base)
    if (first := next(rows, None)) is None:
        name = "prompts file" if config.format is Format.prompts else "task.data"
        raise InputFileError(
            f"{name} {data_path(config, base) or config.data} is empty: it holds no row; name one that does"
        )
    return chain([first], rows)


def _read(config: TaskConfig, base: Path) -> Iterator[Row | BadRow]:
    if config.prompts is not None:
        return _rows(map(_inline, range(len(config.prompts)), config.prompts), "row", config)
    assert config.data is not None
    if config.format is Format.hf:
        return _rows(_numbered(columns.read_dataset(config.data, config.subset, config.split)), "row", config)
    if config.format is Format.drawn:
        return _rows(_numbered(drawn.rows(int(config.data))), "row", config)
    path = base / os.path.expanduser(config.data)
    form = _format(path, config)
    if form is Format.parquet:
        return _rows(_numbered(columns.read_parquet(path)), "row", config)
    plain = form is Format.prompts
    found = _parsed(_lines(_open(path, plain), path), path.name, path.suffix.lower() == ".txt" and plain)
    return _rows(map(from_openai, found) if form is Format.openai else found, "line", config)


def data_path(config: TaskConfig, base: Path) -> Path | None:
    """The file that `read_rows` reads, as an absolute path; None for rows of no file. Pure."""
    if config.data is None or config.format in (Format.hf, Format.drawn) or config.prompts is not None:
        return None
    return (base / os.path.expanduser(config.data)).absolute()


def _format(path: Path, config: TaskConfig) -> Format:
    """Errors: InputFileError where neither the config nor the name tells."""
    suffix, asked = path.suffix.lower(), config.format
    remedy = REMEDIES.get(suffix) or (REMEDIES["-"] if path.name == "-" or str(path).startswith("/dev/") else None)
    if "://" in str(config.data):
        raise InputFileError(f"{config.data!r:.200} is a URL, and rows are read from files: download it first")
    if asked is Format.prompts and suffix not in (".txt", ".jsonl", ".ndjson"):
        raise InputFileError(
            f"prompts={config.data!r:.200} ends in neither .txt (one prompt a line) nor .jsonl (one object a line); "
            + (remedy or "write an inline prompt as a list: prompts=['…']")
        )
    form = SUFFIXES.get(suffix) if asked is Format.auto else asked
    if form is None:
        remedy = remedy or "set task.format to jsonl, openai, parquet or hf"
        raise InputFileError(f"task.data={path} ends in none of {', '.join(SUFFIXES)}; {remedy}")
    return form


def _open(path: Path, plain: bool) -> BinaryIO:
    """Errors: InputFileError for what is no readable, uncompressed file."""
    name = f"prompts file {path}" if plain else f"task.data={path}"
    try:
        if not path.is_file():
            problem = "is not a file" if path.exists() else "does not exist"
            where = "a task's paths are under the folder of task/NAME.yaml, or with task.data=FILE the current one"
            where = f"check the path (relative to {Path.cwd()})" if plain else where
            raise InputFileError(f"{name} {problem}; {where}")
        file = path.open("rb")
        start = file.read(64)
        file.seek(0)
    except OSError as error:
        raise InputFileError(f"{name} cannot be read: {error.strerror or error}") from error
    kind = next((name for magic, name in MAGIC.items() if start.startswith(magic)), None)
    if kind is not None:
        file.close()
        raise InputFileError(f"{name} holds {kind} data, not lines of JSON; unpack or convert it")
    if path.suffix.lower() != ".txt" and re.match(rb"\s*\[\s*(\{|$)", start):
        file.close()
        raise InputFileError(f"{name} holds one JSON array; {REMEDIES['.json']}")
    return file


def _lines(file: BinaryIO, path: Path) -> Iterator[Line]:
    """Lines that hold something, at most MAX_LINE_BYTES of each. Closes `file`. Errors: InputFileError (unreadable,
    changed)."""
    with file:
        before, number, offset = os.fstat(file.fileno()), 0, 0
        while True:
            try:
                line = file.readline(MAX_LINE_BYTES + 5)  # room for BOM and line end
                size, rest = len(line), line
                while rest and not rest.endswith(b"\n"):
                    rest = file.readline(1 << 20)
                    size += len(rest)
            except OSError as error:
                raise InputFileError(f"task.data={path} cannot be read: {error.strerror or error}") from error
            if not line:
                break
            number += 1
            mark = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0
            data = line[mark:].removesuffix(b"\n").removesuffix(b"\r")
            if len(data) > MAX_LINE_BYTES:
                yield number, offset, None
            elif data.strip():
                yield number, offset + mark, data
            offset += size
        after = os.fstat(file.fileno())
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise InputFileError(f"task.data={path} was changed while it was read; run again when it is complete")


def _numbered(records: Iterable[dict[str, Any] | str]) -> Iterator[Parsed]:
    for number, record in enumerate(records, 1):
        yield number, f"row {number}: {record}" if isinstance(record, str) else record


def _inline(index: int, item: Any) -> Parsed:
    if isinstance(item, (str, dict)):
        return index + 1, {"prompt": item} if isinstance(item, str) else item
    return index + 1, f"prompts[{index}] must be a string, got {type(item).__name__}."


def _parsed(lines: Iterable[Line], name: str, text: bool) -> Iterator[Parsed]:
    """Each line as an object; with `text` as a prompt. A message names file, line and byte."""
    for number, offset, data in lines:
        where = f"{name} line {number} (byte {offset})"
        if data is None:
            yield number, f"{where} is longer than {MAX_LINE_BYTES:,} bytes; split or shorten it"
            continue
        try:
            value = {"prompt": data.decode()} if text else parse_json(data.decode())
        except UnicodeDecodeError as error:
            yield number, f"{where} is invalid UTF-8 at byte {offset + error.start}; save the file as UTF-8"
        except ValueError as error:
            yield number, f"{where} is not valid JSON: {error}"
        else:
            named = f"{where} must be a JSON object, got {type(value).__name__}"
            yield number, value if isinstance(value, dict) else named


def _rows(parsed: Iterable[Parsed], word: str, config: TaskConfig) -> Iterator[Row | BadRow]:
    """Gives every row an id, and ends at `config.limit`. `word` is what the source calls a row."""
    parsed = islice(parsed, config.limit)  # the rest of the file is not read
    if config.format is Format.prompts:
        for count, (number, columns) in enumerate(parsed):
            yield BadRow(str(count), number, columns) if isinstance(columns, str) else Row(str(count), columns)
        return
    given = "custom_id" if config.format in (Format.openai, Format.batch) and config.id is None else config.id
    column = given or "id"
    for number, columns in parsed:
        own = f"{word}-{number}"
        if isinstance(columns, str):
            yield BadRow(own, number, columns)
            continue
        row_id = columns.get(column, own if given is None else None)
        problem = _wrong_id(column, row_id)
        yield Row(str(row_id), columns) if problem is None else BadRow(own, number, f"{word} {number}: {problem}")


def _wrong_id(column: str, found: Any) -> str | None:
    """What is wrong with an id, or None. Pure."""
    if found is None:
        return f"has no {column!r}, which names the row"
    if isinstance(found, bool) or not isinstance(found, (str, int)):
        return f"{column!r} must be a text or an integer, got {type(found).__name__}"
    if not 0 < len(str(found)) <= MAX_ID_CHARS:
        return f"{column!r} must have 1 to {MAX_ID_CHARS} characters, got {len(str(found))}"
    if not str(found).isascii() and any("\ud800" <= c <= "\udfff" for c in str(found)):
        return f"{column!r} holds half a surrogate pair, which is no character"
    return None


# -- OpenAI's batch format: one request a line, {custom_id, method, url, body} -----------------------------------------


LOGPROBS = {"return_logprob", "top_logprobs_num", "logprob_start_len"}  # a run records its own


def from_openai(line: Parsed) -> Parsed:
    """The request with what a task reads beside it: "messages" or "prompt" or "input_ids", and "sampling". Pure."""
    number, request = line
    if isinstance(request, str):
        return line
    try:
        if request.get("method", "POST") != "POST":
            raise ApiError(400, f"method must be POST, got {request['method']!r:.40}")
        body = request.get("body")
        return number, {**request, **_columns(read_body(request.get("url"), body, 1), body)}
    except ApiError as error:
        return number, f"line {number} ({request.get('custom_id')!r:.80}): {error.message}"


def _columns(read: OpenAIRequest, body: Any) -> dict[str, Any]:
    """Errors: ApiError for what a run cannot do."""
    arguments = {name: value for name, value in read.arguments.items() if name not in LOGPROBS}
    sampling = arguments.pop("sampling_params")
    sampling.pop("n", None)
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        del sampling["max_new_tokens"]  # the run's own holds
    if (chat := read.chat) is not None:
        refused = {"tools": chat.callable, "continue_final_message": chat.continue_final}
        refused["add_generation_prompt"] = not chat.add_generation_prompt
        refused |= {"chat_template_kwargs": chat.template_values, "reasoning_effort": chat.reasoning_effort}
        prompt = {"messages": chat.messages}
    else:
        refused, prompt = {}, _prompt(read, arguments)
    given = ("echo", "bad_words", "allowed_token_ids", "stream", "truncate_prompt_tokens")
    refused |= {name: read.given[name] for name in given}
    refused |= {"thinking_token_budget": read.given.get("thinking_token_budget") is not None}
    refused |= {"prompt_logprobs": read.given["prompt_logprobs"] is not None}
    refused |= {"add_special_tokens": read.given["add_special_tokens"] is (chat is not None)}
    rest = {name: value for name, value in arguments.items() if name not in ("text", "input_ids")}
    for name, value in (refused | rest).items():
        if value:
            raise ApiError(400, f"body.{read.words.get(name, name)} is not supported in a run")
    return {**prompt, "sampling": sampling}


def _prompt(read: OpenAIRequest, arguments: dict[str, Any]) -> dict[str, Any]:
    """The prompt of a completion, as a task reads it. Errors: ApiError for several of them."""
    if read.prompts > 1 or isinstance(arguments.get("input_ids", [0])[0], list):
        raise ApiError(400, "body.prompt holds several prompts, which is not supported: give each a line")
    if "text" not in arguments:
        return {"input_ids": arguments["input_ids"]}
    text = arguments["text"]
    return {"prompt": text if isinstance(text, str) else text[0]}
