"""`fengine batch`: OpenAI's format in and out, with the answers that a server gives; it goes on where it ended."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")
pytest.importorskip("starlette", reason="the extra serve")

from fengine import run
from fengine.api.engine import Engine
from fengine.errors import ConfigError
from fengine.eval.cli import engines
from fengine.eval.commands.evaluate import batch_arguments
from fengine.eval.runs.manifest import row_seed
from fengine.server.batch import _seeded

HI = [{"role": "user", "content": "What is 2 + 3?"}]
WORDS = ["view=quiet", "compile.enabled=false", "cache.max_total_tokens=4096"]


def request(name: str, body: Any, url: str = "/v1/chat/completions", **other: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body, **other}


def written(*requests: dict[str, Any] | str) -> None:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in requests]
    Path("in.jsonl").write_text("\n".join(lines) + "\n")


def answers() -> dict[str, dict[str, Any]]:
    return {one["custom_id"]: one for one in map(json.loads, Path("out.jsonl").read_text().splitlines())}


def body_of(answer: dict[str, Any]) -> dict[str, Any]:
    """What of a body does not tell when it was made."""
    return {name: value for name, value in answer["response"]["body"].items() if name not in ("id", "created")}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_answers_are_those_of_a_server_and_of_the_engine() -> None:
    place = {"type": "object", "properties": {"c": {"enum": ["Paris", "Rome"]}}, "required": ["c"]}
    forecast = {"type": "function", "function": {"name": "f", "parameters": place | {"additionalProperties": False}}}
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    written(
        request("chat", {"model": "gpt-4o", "messages": HI, "max_tokens": 12, "n": 2}),
        request("text", {"prompt": "Once upon", "max_tokens": 6, "logprobs": 1}, "/v1/completions", extra=1),
        request("json", {"messages": HI, "response_format": asked, "max_tokens": 20}),
        request("tool", {"messages": HI, "tools": [forecast], "tool_choice": "required", "parallel_tool_calls": False}),
        request("score", {"query": "A", "items": ["b", "c"], "label_token_ids": [5, 6]}, "/v1/score"),
    )
    assert run.main(["batch", "in.jsonl", "out.jsonl", *WORDS]) == run.OK, answers()
    found = answers()
    assert [*found] == ["chat", "text", "json", "tool", "score"] and all(one["error"] is None for one in found.values())
    assert {one["response"]["status_code"] for one in found.values()} == {200}
    assert len({one["id"] for one in found.values()}) == 5
    assert len(body_of(found["chat"])["choices"]) == 2 and body_of(found["chat"])["usage"]["completion_tokens"] > 2
    assert isinstance(json.loads(body_of(found["json"])["choices"][0]["message"]["content"])["a"], int)
    assert body_of(found["tool"])["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    with Engine(model_path="box", enable_torch_compile=False) as engine:
        drawn = {"max_new_tokens": 6, "sampling_seed": row_seed(0, "text", 0), "temperature": 1.0}
        assert body_of(found["text"])["choices"][0]["text"] == engine.generate("Once upon", drawn)["text"]
    assert run.main(["verify", "out.jsonl.run"]) == run.main(["rerun", "out.jsonl"]) == run.USAGE


def test_what_is_wrong_with_a_request_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    written(
        request("typo", {"messages": HI, "temprature": 1}),
        request("url", {}, "/v1/nowhere"),
        request("get", {"messages": HI}, method="GET"),
        request("body", None),
        request("stream", {"messages": HI, "stream": True}),
        "no json",
        request("good", {"messages": HI, "max_tokens": 4}),
    )
    assert run.main(["batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "box", *WORDS]) == run.FAILED
    found = answers()
    assert [*found] == ["typo", "url", "get", "body", "stream", "line-6", "good"]
    assert found["typo"]["response"]["status_code"] == 400 and "temperature" in found["typo"]["error"]["message"]
    assert found["typo"]["response"]["body"]["error"]["param"] == "temprature"
    for name, said in {
        "url": "/v1/nowhere",
        "get": "POST",
        "body": "object",
        "stream": "whole",
        "line-6": "JSON",
    }.items():
        assert said in found[name]["error"]["message"]
    assert found["line-6"]["response"] is None and found["good"]["error"] is None
    assert len(Path("out.jsonl.run/journal.log").read_bytes().splitlines()) == 8  # a header, and each request


def test_a_file_without_requests_loads_no_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(engines, "open_engine", never)
    for i, text in enumerate(("", "\n\n", "\ufeff \n")):
        Path("in.jsonl").write_text(text)
        assert run.main(["batch", "in.jsonl", f"out{i}.jsonl", *WORDS]) == run.USAGE
        assert "in.jsonl is empty" in capsys.readouterr().err and not [*Path.cwd().glob("out*")]
    for i, lines in enumerate((["no json"], [{"custom_id": "a", "prompt": "b"}, {"custom_id": "b", "prompt": "c"}])):
        written(*lines)
        assert run.main(["batch", "in.jsonl", f"bad{i}.jsonl", *WORDS]) == run.USAGE
        assert ("JSON" if i == 0 else "url") in capsys.readouterr().err and not Path(f"bad{i}.jsonl").exists()


def test_it_goes_on_where_it_ended() -> None:
    written(*(request(f"r{i}", {"prompt": f"{i} and", "max_tokens": 5}, "/v1/completions") for i in range(6)))
    assert run.main(["batch", "in.jsonl", "out.jsonl", *WORDS]) == run.OK
    whole, journal = answers(), Path("out.jsonl.run/journal.log")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:4]) + lines[4][:30])  # three are there, and a torn one
    assert run.main(["batch", "in.jsonl", "out.jsonl", *WORDS, "scheduler.max_running_requests=1"]) == run.USAGE
    assert run.main(["batch", "in.jsonl", "out.jsonl", *WORDS]) == run.OK
    again = answers()
    assert [*again] == [*whole] and list(map(body_of, again.values())) == list(map(body_of, whole.values()))
    kept = {json.loads(line.partition(b"\t")[2])["id"] for line in lines[1:4]}
    same = {name for name in whole if whole[name]["response"]["body"]["id"] == again[name]["response"]["body"]["id"]}
    assert same == kept


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["in.jsonl"], "takes IN.jsonl and OUT.jsonl"),
        (["no.jsonl", "out.jsonl"], "no such file of requests"),
        (["in.jsonl", "out.jsonl", "sampling.temperature=0"], "each request"),
        (["in.jsonl", "out.jsonl", "--frob"], "unknown word --frob"),
    ],
)
def test_wrong_words(words: list[str], said: str) -> None:
    written()
    with pytest.raises(ConfigError, match=said):
        batch_arguments(words)


def test_a_seed_is_given_where_there_is_none() -> None:
    """0 is one."""
    asked = [None, {"sampling_seed": None, "n": 2}, {"sampling_seed": 0}, {"sampling_seed": 3}]
    seeds = [7, 7, 0, 3]
    assert [params["sampling_seed"] for params in _seeded(asked, 7)] == seeds and _seeded("bad", 7) == "bad"
