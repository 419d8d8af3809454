"""An engine of a few lines for evaluation runs, and the command line around it."""

import asyncio
import hashlib
import json
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from fengine import run
from fengine.config import EngineConfig, Hardware, resolve
from fengine.errors import ContextLengthError, EngineDeadError, ModelLoadError
from fengine.eval.cli import engines as engines_file
from fengine.eval.runs import manifest


class FakeTokenizer:
    bos_id, eos_ids = 0, frozenset({1})

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return [len(m["content"]) for m in messages]

    def template_of(self, tools: bool) -> tuple[str, frozenset[str]]:
        return "", frozenset()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(c) for c in text]


class FakeEngine:
    """Answers with a function of prompt and seed, in an order that is not the rows'. Some prompts misbehave."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = resolve(config, Hardware("cpu"))
        self.tokenizer = FakeTokenizer()
        self.prompts: list[str] = []
        self.sick = True  # prompts with "sick" in them fail
        self.in_flight = self.most_in_flight = 0
        self.max_input = 8

    def stats(self) -> dict[str, Any]:
        names = ("running", "waiting", "pages_used", "pages_total", "computed_tokens", "output_tokens", "preemptions")
        return dict.fromkeys([*names, "steps", "compiles", "compile_seconds", "start_seconds"], 0)

    def get_server_info(self) -> dict[str, Any]:
        return {"max_req_input_len": self.max_input}

    def shutdown(self) -> None:
        return

    async def async_generate(self, **call: Any) -> Any:
        prompt = str(call.get("prompt", call.get("input_ids")))
        self.prompts.append(prompt)
        if "death" in prompt:
            raise EngineDeadError("the engine's loop failed: RuntimeError: boom")
        if "sick" in prompt and self.sick:
            raise ContextLengthError("too long")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        for _ in range(zlib.crc32(prompt.encode()) % 5 if prompt.isascii() else 0):
            await asyncio.sleep(0)
        self.in_flight -= 1
        ids, start = call.get("input_ids", []), call.get("logprob_start_len")
        read = [] if start is None else [(None, ids[start], None)] + [(-float(i), i, None) for i in ids[start + 1 :]]
        seed = call["sampling_params"].get("sampling_seed", 0)
        meta = {"prompt_tokens": len(prompt), "completion_tokens": 2, "cached_tokens": 0, "input_token_logprobs": read}
        meta |= {"finish_reason": {"type": "stop", "matched": 1}}
        meta["output_token_logprobs"] = [(-0.1 - seed % 7, 5, None), (-0.25, 6, None)]
        output = {"text": f"{prompt[::-1]} {seed % 1000}", "output_ids": [5, 6], "meta_info": meta}
        return self.stream(output) if call.get("stream") else output

    async def stream(self, output: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield output | {"text": output["text"][:3]}
        await asyncio.sleep(0)
        yield output


def write_rows(path: Path, count: int, *extra: dict[str, Any]) -> Path:
    """A JSONL of `count` rows, and some more."""
    rows = [{"id": f"r{i}", "prompt": f"row number {i}", "answer": "x"} for i in range(count)] + list(extra)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


# -- runs that are there -----------------------------------------------------------------------------------------------

WORDS = ("task=jsonl", "task.data=rows.jsonl", "task.match=exact", "task.target=answer", "view=quiet", "compile=none")
ROWS = 12
Run = Callable[..., Path]


def fake_engines(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int = ROWS) -> list[FakeEngine]:
    """The fake engines that commands open from here on; no model is at "missing".

    `folder` becomes the working directory, with so many rows in rows.jsonl.
    """
    opened: list[FakeEngine] = []

    def open_engine(config: EngineConfig) -> FakeEngine:
        if "missing" in config.model.path:
            raise ModelLoadError("model directory 'missing' does not exist")
        opened.append(FakeEngine(config))
        return opened[-1]

    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(engines_file, "open_engine", open_engine)
    monkeypatch.setattr(manifest, "code_digest", lambda: "one")
    monkeypatch.setattr(manifest, "surroundings", dict)
    monkeypatch.setattr(manifest.provenance, "checkout", lambda: None)
    write_rows(folder / "rows.jsonl", rows)
    return opened


def refused(capsys: pytest.CaptureFixture[str], command: str, cases: Iterable[tuple[list[str], str]]) -> None:
    """A command's mistakes are answered with what is said, and no traceback."""
    for words, said in cases:
        assert run.main([command, *words]) == run.USAGE, words
        err = capsys.readouterr().err
        assert said in err and "Traceback" not in err, (words, err)


def fake_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """What makes a run in a folder of this name, by further words, `code` being its exit code; as `fake_engines`."""
    fake_engines(folder, monkeypatch)

    def run_eval(name: str, *words: str, code: int = run.OK) -> Path:
        given = {word.partition("=")[0] for word in words}
        kept = [word for word in WORDS if word.partition("=")[0] not in given]
        assert run.main(["eval", *kept, f"out={name}", *words]) == code
        return Path(name)

    return run_eval


def rewrite(folder: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Changes the records of outputs.jsonl, and the manifest. The journal, which knows better, goes."""
    (folder / "journal.log").unlink(missing_ok=True)
    rows = records(folder / "outputs.jsonl")
    rows = change(rows) or rows
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    (folder / "outputs.jsonl").write_bytes(data)
    record = json.loads((folder / "manifest.json").read_text())
    record["result"]["outputs_sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(record))


def next_float32(value: float) -> float:
    """The float32 behind one; it differs in few bits."""
    return struct.unpack(">f", (int.from_bytes(struct.pack(">f", value), "big") + 1).to_bytes(4, "big"))[0]
