"""What the server refuses in a body, by the field's name, and what it reads past."""

from typing import Any

import pytest
import serving
from serving import GOOD, Live

engine, server, untouched = serving.engine, serving.server, serving.untouched  # fixtures

COMPLETIONS = [  # (what is changed in a good body, the field to blame, the status)
    ({"prompt": None}, "prompt", 400),
    ({"prompt": 7}, "prompt", 400),
    ({"prompt": {}}, "prompt", 400),
    ({"prompt": []}, "prompt", 400),
    ({"prompt": [[]]}, "prompt", 400),
    ({"prompt": ["a", 1]}, "prompt", 400),
    ({"prompt": [1, "a"]}, "prompt", 400),
    ({"prompt": [True]}, "prompt", 400),
    ({"prompt": [[1], ["a"]]}, "prompt", 400),
    ({"prompt": [[[1]]]}, "prompt", 400),
    ({"prompt": [-1]}, "prompt", 400),
    ({"prompt": [2**70]}, "prompt", 400),
    ({"prompt": [1.5]}, "prompt", 400),
    ({"prompt": "a\ud800"}, "prompt", 400),
    ({"prompt": "x" * 20_000}, "prompt", 400),
    ({"prompt": [300] * 2000}, "prompt", 400),
    ({"prompt": [-1], "echo": True}, "prompt", 400),
    ({"model": 3}, "model", 400),
    ({"model": 0}, "model", 400),
    ({"model": []}, "model", 400),
    ({"model": "gpt-5"}, "model", 404),
    ({"max_tokens": "5"}, "max_tokens", 400),
    ({"max_tokens": -1}, "max_tokens", 400),
    ({"max_tokens": 0}, "max_tokens", 400),
    ({"max_tokens": 10**9}, "prompt", 400),
    ({"max_tokens": True}, "max_tokens", 400),
    ({"temperature": "hot"}, "temperature", 400),
    ({"temperature": -0.1}, "temperature", 400),
    ({"temperature": [1]}, "temperature", 400),
    ({"top_p": 0}, "top_p", 400),
    ({"top_k": 1.5}, "top_k", 400),
    ({"min_p": 2}, "min_p", 400),
    ({"frequency_penalty": 3}, "frequency_penalty", 400),
    ({"n": 0}, "n", 400),
    ({"n": 9}, "n", 400),
    ({"n": "2"}, "n", 400),
    ({"n": 10**12}, "n", 400),
    ({"best_of": 3}, "best_of", 400),
    ({"best_of": True}, "best_of", 400),
    ({"suffix": "end"}, "suffix", 400),
    ({"echo": 1}, "echo", 400),
    ({"logprobs": -1}, "logprobs", 400),
    ({"logprobs": True}, "logprobs", 400),
    ({"logprobs": 21}, "logprobs", 400),
    ({"logprobs": 10**6}, "logprobs", 400),
    ({"regex": "a{1000000}"}, "regex", 400),
    ({"regex": "(a{1000}){1000}"}, "regex", 400),
    ({"stop_regex": "a{1000000}"}, "stop_regex", 400),
    ({"stop": 5}, "stop", 400),
    ({"stop": [""]}, "stop", 400),
    ({"stop": ["a"] * 1000}, "stop", 400),
    ({"seed": 1.5}, "seed", 400),
    ({"seed": 2**64}, "seed", 400),
    ({"logit_bias": [1]}, "logit_bias", 400),
    ({"logit_bias": {"x": 1}}, "logit_bias", 400),
    ({"logit_bias": {"999999": 1}}, "logit_bias", 400),
    ({"stop_token_ids": [-1]}, "stop_token_ids", 400),
    ({"min_tokens": 7}, "min_tokens", 400),
    ({"stream": "yes"}, "stream", 400),
    ({"stream_options": {"include_usage": True}}, "stream_options", 400),
    ({"stream": True, "stream_options": 1}, "stream_options", 400),
    ({"stream": True, "stream_options": {"usage": True}}, "usage", 400),
    ({"temprature": 1}, "temprature", 400),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages", 400),
    ({"regex": "a", "ebnf": "b"}, "regex", 400),
    ({"guided_regex": "("}, "guided_regex", 400),
    ({"response_format": {"type": "text"}, "guided_regex": "("}, "guided_regex", 400),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", 400),
    ({"response_format": {"type": "xml"}}, "response_format", 400),
    ({"response_format": {"type": "json_schema"}}, "response_format", 400),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", 400),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stict": 1}}}, "response_format", 400),
    ({"\ud800": 1}, "\\ud800", 400),
    ({"stream": True, "stream_options": {"\udfff": 1}}, "\\udfff", 400),
    ({"json_schema": {"properties": {"\ud800" + "k" * 9000: {"requird": 1}}}}, "json_schema", 400),
    ({"json_schema": {"properties": {"k" * 9000: {"requird": 1}}}}, "json_schema", 400),
    ({"ebnf": 'root ::= "\ud800"'}, "ebnf", 400),
    ({"seed": 10**4000}, "seed", 400),
    ({"lora_path": "nowhere"}, "lora_path", 400),
    ({"custom_logit_processor": "gASVfile"}, "custom_logit_processor", 400),
    ({"custom_logit_processor": {"a": 1}}, "custom_logit_processor", 400),
    ({"cache_salt": 3}, "cache_salt", 400),
    ({"extra_key": "a", "cache_salt": "a"}, "extra_key", 400),
    ({"extra_key": ""}, "extra_key", 400),
    ({"priority": "high"}, "priority", 400),
    ({"priority": [1]}, "priority", 400),
    ({"json_schema": {"type": "temperature"}, "temperature": 0}, "json_schema", 400),
    ({"regex": None, "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
     "response_format", 400),
    ({"custom_params": 5}, "custom_params", 400),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param", "status"), COMPLETIONS, ids=[repr(c)[:50] for c, _, _ in COMPLETIONS])
def test_bad_completions_are_named(change: Any, param: str | None, status: int, server: Live) -> None:
    answer = server.ask("POST", "/v1/completions", {**GOOD, **change})
    assert answer.status == status, answer.body
    assert answer.error["param"] == param
    assert len(answer.error["message"]) < 2500 and answer.error["type"] in ("invalid_request_error", "not_found_error")


USER = {"role": "user", "content": "a"}
CHATS = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "a"}, "messages"),
    ({"messages": [3]}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages"),
    ({"messages": [{"role": "w" * 65, "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 30_000}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": None, "max_completion_tokens": "1"}, "max_completion_tokens"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"messages": [{**USER, "name": 1}]}, "messages"),
    ({"messages": [USER, {"role": "tool", "tool_call_id": {}, "content": "a"}]}, "messages"),
    ({"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": [1]}]}, "messages"),
    ({"tools": "hammer"}, "tools"),
    ({"tools": [{"name": "f"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ({"prompt": "a"}, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), CHATS, ids=[repr(c)[:50] for c, _ in CHATS])
def test_bad_chats_are_named(change: Any, param: str | None, server: Live) -> None:
    answer = server.ask("POST", "/v1/chat/completions", {"model": "box", "messages": [USER], "max_tokens": 2, **change})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


EMBEDDINGS = [{"input": None}, {"input": []}, {"input": [[]]}, {"encoding_format": "hex"}, {"dimension": 3}, {}]


@pytest.mark.parametrize("change", EMBEDDINGS)
def test_bad_embeddings_are_named(change: Any, server: Live) -> None:
    answer = server.ask("POST", "/v1/embeddings", {"model": "box", "input": "a", **change})
    assert answer.status == 400 and answer.error["message"]  # the last: this model generates


def test_a_request_without_a_model_is_for_the_served_one(server: Live) -> None:
    answers = [server.ask("POST", "/v1/completions", GOOD | {"model": name}).json for name in ("box", None, "default")]
    assert [a["choices"] for a in answers] == [answers[0]["choices"]] * 3
    assert [a["model"] for a in answers] == ["box"] * 3


def test_fields_that_say_nothing_are_accepted(server: Live) -> None:
    more = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "suffix": None, "best_of": 1}
    more |= {"response_format": {"type": "text"}, "stream_options": None, "seed": None, "logit_bias": {}}
    plain, wordy = (server.ask("POST", "/v1/completions", body).json for body in (GOOD, {**GOOD, **more}))
    assert plain["choices"] == wordy["choices"]
    chat = {"model": "box", "messages": [USER], "max_tokens": 2}
    ignored = {"tools": [], "chat_template_kwargs": {"nope": 1}, "functions": None}
    plain, wordy = (server.ask("POST", "/v1/chat/completions", body).json for body in (chat, chat | ignored))
    assert plain["usage"] == wordy["usage"]


BODIES = [
    (b"", 400),
    (b"{", 400),
    (b'{"model": "box"', 400),
    (b"[]", 400),
    (b'"text"', 400),
    (b"null", 400),
    (b"\xff\xfe", 400),
    (b'{"model": "box", "prompt": "a", "temperature": NaN}', 400),
    (b'{"model": "box", "prompt": "a", "temperature": 1e999}', 400),
    (b'{"model": "box", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
    (b'{"a":' * 20_000, 400),
    (b"[" * 90_000, 400),
    (b'{"model": "box", "prompt": "' + b"a" * 200_000 + b'"}', 413),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status"), BODIES, ids=[repr(b)[:30] for b, _ in BODIES])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "embeddings"])
def test_bodies_that_are_no_request(body: bytes, status: int, path: str, server: Live) -> None:
    answer = server.ask("POST", f"/v1/{path}", body)
    assert answer.status == status and answer.error["code"], answer.body
