"""What the server refuses, and what it survives: bad bodies, broken HTTP, slow clients, clients that go, its end."""

import contextlib
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve")

from serving import Answer, Live, live, read, request, until  # noqa: E402

from fengine.engine import Engine  # noqa: E402
from fengine.errors import ConfigError, MissingExtraError  # noqa: E402
from fengine.runs.compose import points  # noqa: E402
from fengine.runs.words import parse  # noqa: E402
from fengine.serve import command  # noqa: E402
from fengine.serve.answers import Events  # noqa: E402
from fengine.serve.config import SERVE, ServeConfig, ServerConfig, check  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
GOOD = {"model": "box", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 6, "logprobs": 1}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="box", enable_torch_compile=False, enable_custom_logit_processor=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Live]:
    with live(engine, max_body_bytes=100_000, max_samples=8) as server:
        yield server


@pytest.fixture(autouse=True)
def untouched(server: Live) -> Iterator[None]:
    """Behind every test the server is idle and answers a good request with the same bits as before."""
    before = server.ask("POST", "/v1/completions", GOOD).json["choices"]
    yield
    until(server.quiet)
    assert server.ask("POST", "/v1/completions", GOOD).json["choices"] == before


# -- bodies ------------------------------------------------------------------------------------------------------------

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
    ({"model": None}, "model", 400),
    ({"model": 3}, "model", 400),
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
    ({"suffix": "end"}, "suffix", 400),
    ({"echo": 1}, "echo", 400),
    ({"logprobs": -1}, "logprobs", 400),
    ({"logprobs": True}, "logprobs", 400),
    ({"logprobs": 10**6}, "logprobs", 400),
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
    ({"response_format": {"type": "xml"}}, "response_format", 400),
    ({"response_format": {"type": "json_schema"}}, "response_format", 400),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", 400),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stict": 1}}}, "response_format", 400),
    ({"\ud800": 1}, "\\ud800", 400),
    ({"stream": True, "stream_options": {"\udfff": 1}}, "\\udfff", 400),
    ({"json_schema": {"properties": {"\ud800" + "k" * 9000: {"typ": 1}}}}, "json_schema", 400),
    ({"json_schema": {"properties": {"k" * 9000: {"typ": 1}}}}, "json_schema", 400),
    ({"ebnf": 'root ::= "\ud800"'}, "ebnf", 400),
    ({"seed": 10**4000}, "seed", 400),
    ({"lora_path": "nowhere"}, "lora_path", 400),
    ({"custom_logit_processor": "gASVfile"}, "custom_logit_processor", 400),
    ({"custom_logit_processor": {"a": 1}}, "custom_logit_processor", 400),
    ({"cache_salt": 3}, "cache_salt", 400),
    ({"priority": "high"}, "priority", 400),
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
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 30_000}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": None, "max_completion_tokens": "1"}, "max_completion_tokens"),
    ({"functions": []}, "functions"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"tools": "hammer"}, "tools"),
    ({"tools": [{"name": "f"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),  # this template shows none
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"nope": 1}}, None),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ({"prompt": "a"}, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), CHATS, ids=[repr(c)[:50] for c, _ in CHATS])
def test_bad_chats_are_named(change: Any, param: str | None, server: Live) -> None:
    answer = server.ask("POST", "/v1/chat/completions", {"model": "box", "messages": [USER], "max_tokens": 2, **change})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


@pytest.mark.parametrize(
    "change", [{"input": None}, {"input": []}, {"input": [[]]}, {"encoding_format": "hex"}, {"dimension": 3}, {}]
)
def test_bad_embeddings_are_named(change: Any, server: Live) -> None:
    answer = server.ask("POST", "/v1/embeddings", {"model": "box", "input": "a", **change})
    assert answer.status == 400 and answer.error["message"]  # the last: this model generates


def test_fields_that_say_nothing_are_accepted(server: Live) -> None:
    more = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "suffix": None, "best_of": 1}
    more |= {"response_format": {"type": "text"}, "stream_options": None, "seed": None, "logit_bias": {}}
    assert (
        server.ask("POST", "/v1/completions", {**GOOD, **more}).json["choices"]
        == (server.ask("POST", "/v1/completions", GOOD).json["choices"])
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = {"model": "box", "messages": [USER], "max_tokens": 2, "tools": tools, "tool_choice": "none"}
    assert server.ask("POST", "/v1/chat/completions", chat).status == 200


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


def test_a_body_too_large_without_a_length(server: Live) -> None:
    chunk = b"2710\r\n" + b"a" * 10_000 + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = server.send(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 20 + b"0\r\n\r\n")
    assert answer.status == 413 and answer.error["code"] == "body_too_large"


def test_a_client_that_is_still_sending_gets_its_refusal(engine: Engine, server: Live) -> None:
    """And no reset, which would make its system drop what it has not read."""
    data = request("POST", "/v1/completions", b"a" * 20_000_000)
    assert server.send(data).status == 413
    with live(engine, max_connections=1) as crowded, crowded.connect() as one:
        one.sendall(GET)
        assert read(one).status == 200
        assert crowded.send(data).status == 503


# -- HTTP --------------------------------------------------------------------------------------------------------------


def test_methods_paths_and_types(server: Live) -> None:
    for method, path in (
        ("GET", "/v1/completions"),
        ("DELETE", "/v1/models"),
        ("POST", "/health"),
        ("PUT", "/metrics"),
    ):
        answer = server.ask(method, path)
        assert (answer.status, bool(answer.headers["allow"])) == (405, True) and answer.error
    for path in ("/", "/v1", "/v1/responses", "/v1/completions/", "/../etc/passwd", "/docs", "/%00", "/openapi.json"):
        answer = server.ask("POST", path, GOOD)
        assert answer.status == 404 and answer.error["type"] == "not_found_error", path
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", "", "json"):
        answer = server.ask("POST", "/v1/completions", GOOD, Content_Type=kind)
        assert answer.status == 415 and "application/json" in answer.error["message"]
    assert server.ask("POST", "/v1/completions", GOOD, Content_Encoding="gzip").status == 415
    assert server.ask("POST", "/v1/completions", GOOD, Content_Type="Application/JSON; charset=utf-8").status == 200


BROKEN = [
    b"nonsense\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 60,  # TLS
    b"GET /health HTTP/1.1\r\n\r\n",  # no Host
    b"GET /health HTTP/x\r\nHost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000,
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize("data", BROKEN, ids=[repr(d)[:30] for d in BROKEN])
def test_broken_http(data: bytes, server: Live) -> None:
    answer = server.send(data)
    assert answer.status == 400 and answer.error["message"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
TRAILED = HEAD + CHUNKED + b"\r\n2\r\n{}\r\n0\r\n"
LARGE = [  # (what is sent, what the refusal names)
    (request("GET", "/health", X="a" * 100_000), "serve.max_header_bytes"),  # whole, in one read
    (request("GET", "/health?" + "a" * 70_000), "serve.max_header_bytes"),
    (request("GET", "/health", **{f"X{i}": "" for i in range(300)}), "256 headers"),
    (TRAILED + b"X: " + b"a" * 1_000_000, "serve.max_header_bytes"),  # and no end
    (TRAILED + b"X: a\r\n" * 200_000, "serve.max_header_bytes"),
]


@pytest.mark.parametrize(("data", "told"), LARGE, ids=range(len(LARGE)))
def test_headers_have_limits(data: bytes, told: str, server: Live) -> None:
    answer = server.send(data)
    assert answer.status == 400 and told in answer.error["message"]


def test_a_head_that_comes_in_pieces_behind_a_large_body(server: Live) -> None:
    """The body does not count as a part of it."""
    with server.connect() as link:
        link.sendall(request("POST", "/nowhere", b"a" * 90_000) + GET[:9])
        assert read(link).status == 404
        link.sendall(GET[9:])
        assert read(link).status == 200


def test_several_requests_on_a_connection(server: Live) -> None:
    with server.connect() as link:
        bad, good = request("POST", "/v1/completions", {"model": "no"}), request("POST", "/v1/completions", GOOD)
        statuses = []
        for data in (good, bad, request("GET", "/nope"), good):
            link.sendall(data)
            statuses.append(read(link).status)
    assert statuses == [200, 404, 404, 200]


def chunked(*, behind: bytes) -> bytes:
    body = json.dumps(GOOD).encode()
    return HEAD + CHUNKED + b"\r\n%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, behind)


GET, POST = request("GET", "/health"), request("POST", "/v1/completions", GOOD)
STREAMED = request("POST", "/v1/completions", {**GOOD, "stream": True})
SMUGGLED = [  # where another server may see the body end elsewhere, what hides in it must not become a request
    (b"Content-Length: 5\r\n" + CHUNKED, b"0\r\n\r\n"),
    (CHUNKED + b"Content-Length: 5\r\n", b"0\r\n\r\n"),
    (b"Content-Length: 2\r\nContent-Length: 2\r\n", b"{}"),
    (b"Content-Length: 2, 2\r\n", b"{}"),
    (b"Content-Length: +2\r\n", b"{}"),
    (b"Content-Length: 18446744073709551618\r\n", b"{}"),
    (b"Transfer-Encoding : chunked\r\n", b"0\r\n\r\n"),
    (b"Transfer-Encoding:\r\n chunked\r\n", b"0\r\n\r\n"),
    (b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"),
    (b"Transfer-Encoding: gzip\r\n" + CHUNKED, b"0\r\n\r\n"),
    (b"Transfer-Encoding: chunked, identity\r\n", b"0\r\n\r\n"),
    (b"X: a\nContent-Length: 2\r\n", b"{}"),
    (b"X: a\0\r\nContent-Length: 2\r\n", b"{}"),
    (CHUNKED, b"0x2\r\n{}\r\n0\r\n\r\n"),
    (CHUNKED, b"10000000000000002\r\n{}\r\n0\r\n\r\n"),
    (CHUNKED, b"2;a\nb\r\n{}\r\n0\r\n\r\n"),
    (CHUNKED, b"2\n{}\n0\n\n"),
]
UPGRADE = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"}
IN_A_ROW = [  # (what is sent at once, the statuses of what comes back until the server closes)
    (GET + POST + STREAMED + POST + GET, [200] * 5),
    (POST + b"\r\n\r\n" + GET, [200, 200]),
    (POST + b"}", [200, 400]),
    (STREAMED + b"garbage\r\n\r\n" + GET, [200, 400]),
    (GET * 100, [200] * 64 + [400]),
    (request("GET", "/health", Connection="close") + GET, [200]),
    (request("HEAD", "/health") + GET, [200, 200]),
    (b"GET /health HTTP/1.0\r\n\r\n" + GET, [200]),
    (chunked(behind=b"Host: example.com\r\n") + GET, [200, 200]),
    (request("GET", "/health", **UPGRADE) + request("POST", "/v1/completions", GOOD, **UPGRADE) + GET, [200] * 3),
    (request("POST", "/v1/completions", GOOD, Expect="100-continue"), [100, 200]),
    (request("POST", "/nowhere", b"{", Expect="100-continue")[:-1], [404]),  # a body not asked for need not come
    *((HEAD + head + b"\r\n" + body + GET, [400]) for head, body in SMUGGLED),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", [400]),
    (b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n", [400]),
    (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", [400]),
]


def test_requests_in_a_row(engine: Engine) -> None:
    """All that comes at once is answered in its order, what is no HTTP behind that."""
    with live(engine, keep_alive_seconds=1) as server, contextlib.ExitStack() as stack:
        links = [stack.enter_context(server.connect()) for _ in IN_A_ROW]
        for link, (data, _) in zip(links, IN_A_ROW, strict=True):
            link.sendall(data)
        for link, (data, statuses) in zip(links, IN_A_ROW, strict=True):
            told = b""
            while piece := link.recv(1 << 16):
                told += piece
            assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", told)] == statuses, data


def test_slow_clients_are_cut_off(engine: Engine) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 100\r\n\r\n{"
    with live(engine, read_seconds=1, keep_alive_seconds=1) as server, contextlib.ExitStack() as stack:
        links = [stack.enter_context(server.connect()) for _ in range(4)]
        for link, data in zip(
            links, (head, b"", b"POST /v1/comple", request("GET", "/health") + b"GET /he"), strict=True
        ):
            link.sendall(data)
        answer = read(links[0])
        assert answer.status == 408 and "serve.read_seconds" in answer.error["message"]
        for link in links[1:]:
            while link.recv(1 << 16):  # until the server closes
                pass


def test_a_client_that_takes_nothing_is_cut_off(engine: Engine) -> None:
    """It holds up nobody, and nothing of it stays."""
    body = {"model": "box", "prompt": [5] * 8, "n": 8, "max_tokens": 300, "ignore_eos": True, "stream": True,
            "logprobs": 20, "temperature": 0}  # fmt: skip
    with live(engine, send_buffer=4096, write_seconds=0.3) as server, server.connect() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.sendall(request("POST", "/v1/completions", body))
        until(lambda: server.service.rows == 8)
        assert server.ask("POST", "/v1/completions", GOOD).status == 200
        until(lambda: server.service.rows == 0, 60)
        until(server.quiet)
        assert b"[DONE]" not in read(link).body  # cut off


def test_the_end_of_an_answer_must_be_taken_in_time(engine: Engine) -> None:
    """What is left of it is too little to hold up the writer, and the connection is to be closed behind it."""
    with live(engine, send_buffer=4096, write_seconds=0.3) as server, socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        link.connect(("127.0.0.1", server.port))
        link.sendall(request("GET", "/metrics") * 3 + request("GET", "/metrics", Connection="close"))
        until(lambda: server.server.server_state.total_requests == 4)
        until(lambda: not server.server.server_state.connections)


def test_a_client_that_ends_its_half_has_gone_though_it_takes_nothing(engine: Engine) -> None:
    """What is written and not taken yet, too little to hold up the writer, does not hide it."""
    with live(engine, send_buffer=4096) as server, socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        link.connect(("127.0.0.1", server.port))
        engine.pause_generation("in_place")
        try:
            link.sendall(request("GET", "/metrics") * 6 + POST)
            until(lambda: server.service.rows == 1)
            link.shutdown(socket.SHUT_WR)
            until(lambda: server.service.rows == 0)
        finally:
            engine.continue_generation()


def test_a_stream_is_whole_however_it_is_taken(engine: Engine) -> None:
    """At once, late through buffers that have filled up, in one piece by HTTP/1.0: the same answer."""
    body = {"model": "box", "prompt": [5] * 8, "n": 4, "max_tokens": 120, "ignore_eos": True, "temperature": 0.9,
            "seed": 3, "logprobs": 5, "return_token_ids": True}  # fmt: skip
    streamed = request("POST", "/v1/completions", {**body, "stream": True})
    with live(engine, send_buffer=4096, chunks_per_second=math.inf) as server:
        whole = server.ask("POST", "/v1/completions", body).json["choices"]
        connections: Any = server.server.server_state.connections
        for data, late in (
            (streamed, False),
            (streamed, True),
            (streamed.replace(b" HTTP/1.1", b" HTTP/1.0", 1), False),
        ):
            with server.connect() as link:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                link.sendall(data)
                if late:  # all buffers are full
                    until(lambda: not all(connection.writable.is_set() for connection in connections))
                told = b""
                while not told.endswith((b"[DONE]\n\n", b"0\r\n\r\n")) and (piece := link.recv(2048)):
                    told += piece
            head, _, told = told.partition(b"\r\n\r\n")
            chunked = b"transfer-encoding: chunked" in head.lower()
            assert chunked == (b"HTTP/1.1" in data)
            events = unchunked(told) if chunked else told
            parts = [json.loads(e[6:])["choices"][0] for e in events.split(b"\n\n") if e and e != b"data: [DONE]"]
            for choice in whole:
                mine = [part for part in parts if part["index"] == choice["index"]]
                assert "".join(part["text"] for part in mine) == choice["text"]
                assert sum((part["token_ids"] for part in mine), []) == choice["token_ids"]
                logprobs = sum((part["logprobs"]["token_logprobs"] for part in mine), [])
                assert logprobs == choice["logprobs"]["token_logprobs"]


def unchunked(data: bytes) -> bytes:
    """The body that chunks make, which must end."""
    found = []
    while True:
        size, _, data = data.partition(b"\r\n")
        if int(size, 16) == 0:
            assert data == b"\r\n"
            return b"".join(found)
        found.append(data[: int(size, 16)])
        assert data[int(size, 16) :].startswith(b"\r\n")
        data = data[int(size, 16) + 2 :]


def test_a_token_is_shown_before_the_next_but_one(engine: Engine, server: Live) -> None:
    """The step that would draw it, and the one that is under way meanwhile, need not end."""
    read_on, drawn = threading.Event(), []

    def hold(logits: Any, params: Any) -> Any:
        drawn.append(params)
        assert len(drawn) < 3 or read_on.wait(30)
        return logits

    engine.register_logit_processor("hold", hold)
    body = {**GOOD, "custom_logit_processor": "hold", "stream": True}
    with server.connect() as link:
        link.sendall(request("POST", "/v1/completions", body))
        data = b""
        while b"data: " not in data:
            data += link.recv(1 << 16)
        assert not read_on.is_set() and b"[DONE]" not in data
        read_on.set()
        while not data.endswith(b"0\r\n\r\n"):
            data += link.recv(1 << 16)
    assert len(drawn) == GOOD["max_tokens"] and b'"finish_reason": "length"' in data


def test_a_body_that_is_answered_before_its_end_is_no_way_to_stay(engine: Engine) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    with live(engine, read_seconds=1) as server, server.connect() as link:
        link.sendall(head)
        assert read(link).status == 404
        with pytest.raises(OSError):
            while True:  # each byte would put off the end of an idle connection
                link.sendall(b"x")
                select.select([link], [], [], 0.02)


def test_a_request_that_came_before_its_turn_is_answered_to_its_end(engine: Engine) -> None:
    """The time of an idle connection is not counted while it is answered."""
    body = {"model": "box", "prompt": [5] * 8, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with live(engine, keep_alive_seconds=1) as server, server.connect() as link:
        engine.pause_generation("in_place")
        link.sendall(request("GET", "/health") + request("POST", "/v1/completions", body))
        assert read(link).status == 200  # of the first
        data = b""
        until(lambda: server.service.rows == 1)
        end = threading.Timer(1.5, engine.continue_generation)
        end.start()
        while not data.endswith(b"0\r\n\r\n") and (piece := link.recv(1 << 16)):
            data += piece
        end.join()
        assert b"[DONE]" in data


@pytest.mark.parametrize(
    "host", ["example.com", "example.com:8000", "127.0.0.1.example.com", "localhost.a", "10.0.0.1"]
)
def test_a_web_page_cannot_speak_to_the_loopback(host: str, server: Live) -> None:
    """DNS rebinding: the name of the page stands in Host."""
    answer = server.ask("POST", "/v1/completions", GOOD, Host=host)
    assert (answer.status, answer.error["code"]) == (403, "foreign_host")


@pytest.mark.parametrize("host", ["LOCALHOST:80", "127.0.0.1:1", "127.1.2.3", "[::1]:8000", "box.localhost"])
def test_names_of_the_loopback_are_answered(host: str, server: Live) -> None:
    assert server.ask("GET", "/v1/models", Host=host).status == 200


def test_connections_have_an_end(engine: Engine) -> None:
    with live(engine, max_connections=2) as server:
        with server.connect() as one, server.connect() as two:
            for link in (one, two):
                link.sendall(request("GET", "/health"))
                assert read(link).status == 200
            answer = server.ask("GET", "/health")
            assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
        until(lambda: not server.server.server_state.connections)
        assert server.ask("GET", "/health").status == 200


# -- clients that go ---------------------------------------------------------------------------------------------------


def test_1000_connections_dropped_in_mid_stream(server: Live) -> None:
    """A hundred at a time, half with a reset: no row stays, and the pool is balanced."""
    body = {"model": "box", "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True}
    aborted = server.service.meter.finished["abort"]
    for _ in range(10):
        links = [server.connect() for _ in range(100)]
        for i, link in enumerate(links):
            link.sendall(request("POST", "/v1/completions", {**body, "stream": i % 4 > 0, "n": 1 + i % 2}))
        for i, link in enumerate(links):
            if i % 4:
                ready, _, _ = select.select([link], [], [], 30)
                assert ready
            if i % 2:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset
            link.close()
    until(server.quiet, 60)
    assert server.service.meter.finished["abort"] - aborted == 1500


def test_a_client_that_goes_while_it_waits(server: Live, engine: Engine) -> None:
    """In the queue, in the midst of its body, and before its answer."""
    engine.pause_generation("in_place")
    try:
        links = [server.connect() for _ in range(5)]
        links[0].sendall(request("POST", "/v1/completions", GOOD))
        links[1].sendall(request("POST", "/v1/completions", {**GOOD, "stream": True}))
        links[2].sendall(request("POST", "/v1/completions", GOOD)[:-10])
        for link, stream in zip(links[3:], (False, True), strict=True):
            link.sendall(request("POST", "/v1/completions", {**GOOD, "stream": stream}))
        until(lambda: server.service.rows == 4)
        for link in links[3:]:
            link.sendall(request("POST", "/v1/completions", GOOD))  # before its turn
        for link in links:
            link.close()
        until(lambda: server.service.rows == 0)
    finally:
        engine.continue_generation()


def test_the_queue_has_an_end(engine: Engine) -> None:
    with live(engine, max_rows=4) as server:
        engine.pause_generation("in_place")
        try:
            link = server.connect()
            link.sendall(request("POST", "/v1/completions", {**GOOD, "n": 3}))
            until(lambda: server.service.rows == 3)
            answer = server.ask("POST", "/v1/completions", {**GOOD, "n": 2})
            assert answer.status == 429 and answer.headers["retry-after"] and answer.error["code"] == "queue_full"
            assert server.ask("POST", "/v1/completions", {**GOOD, "n": 2, "seed": 0.5}).status in (400, 429)
            assert server.service.rows == 3 and server.ask("GET", "/health").status == 200
        finally:
            engine.continue_generation()
        assert read(link).status == 200
        link.close()
        assert server.ask("POST", "/v1/completions", {**GOOD, "n": 4}).status == 200


# -- the engine's end, keys, the command -------------------------------------------------------------------------------


def test_a_failing_engine_is_told() -> None:
    with Engine(model_path="box", enable_torch_compile=False) as engine, live(engine) as server:
        engine.pause_generation("in_place")
        links = [server.connect() for _ in range(2)]
        for link, stream in zip(links, (False, True), strict=True):
            link.sendall(request("POST", "/v1/completions", {**GOOD, "stream": stream}))
        until(lambda: server.service.rows == 2)
        links[1].recv(1, socket.MSG_PEEK)  # the stream's status has been sent

        def fail() -> None:
            raise RuntimeError("the device is gone")

        engine._parts.driver._put(fail)
        whole, stream = (read(link) for link in links)
        assert whole.status == 503 and "the device is gone" in whole.error["message"]
        assert stream.status == 200 and b"the device is gone" in stream.body and b"[DONE]" in stream.body
        assert server.ask("GET", "/health").status == server.ask("POST", "/v1/completions", GOOD).status == 503
        assert server.service.rows == 0 and b"fengine:up 0" in server.ask("GET", "/metrics").body
        for link in links:
            link.close()


def test_a_fault_of_the_server_is_told_and_hurts_nobody(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an answer begins it is a 500, which does not end the connection; later on it cuts the answer off."""

    def fail(*_: Any) -> None:
        raise RuntimeError("a secret")

    with server.connect() as link, monkeypatch.context() as patch:
        patch.setattr(server.service, "cards", fail)
        link.sendall(request("GET", "/v1/models"))
        answer = read(link)
        assert (answer.status, answer.error["code"]) == (500, "internal_error") and b"secret" not in answer.body
        patch.setattr(Events, "_end", fail)
        link.sendall(STREAMED + GET)
        told = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := link.recv(1 << 16):
                told += piece
        assert told.count(b"HTTP/1.1 ") == 1 and not told.endswith(b"0\r\n\r\n")


def test_the_api_key(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def statuses(server: Live, path: str) -> list[int | None]:
        given = ["", "Bearer", "Bearer wrong", "Basic s3cret", "Bearer s3cret", "bearer s3cret ", "Bearer s3cretX", "ß"]
        return [server.ask("GET", path, Authorization=key).status for key in given]

    with live(engine, api_key="s3cret") as server:
        assert statuses(server, "/v1/models") == [401, 401, 401, 401, 200, 200, 401, 401]
        assert statuses(server, "/metrics")[:3] == [401, 401, 401]
        assert statuses(server, "/nope")[3:5] == [401, 404] and server.ask("GET", "/health").status == 200
        answer = server.ask("POST", "/v1/completions", GOOD)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    monkeypatch.setenv("FENGINE_API_KEY", "s3cret")
    with live(engine) as server:
        assert statuses(server, "/v1/models")[3:5] == [401, 200]


def spawn(*words: str) -> tuple[subprocess.Popen[str], int]:
    """`python -m fengine.serve` on a free port, once it says so."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fengine.serve", "serve.port=0", "compile=none", *words], stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
            return process, int(found[1])
    raise AssertionError(f"it ended with {process.wait()}")


def test_a_signal_lets_answers_end(engine: Engine) -> None:
    body = {**GOOD, "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 4}
    with live(engine) as server, server.connect() as link, server.connect() as idle:
        idle.sendall(request("GET", "/health"))
        assert read(idle).status == 200
        link.sendall(request("POST", "/v1/completions", body))
        assert select.select([link], [], [], 30)[0]
        server.server.handle_exit(signal.SIGTERM, None)
        assert b"[DONE]" in read(link).body and not idle.recv(1)
        until(lambda: not server.server.server_state.connections)
        assert server.server.stopped_by is None


def test_answers_that_last_too_long_are_cut_off_and_told(engine: Engine) -> None:
    body = {**GOOD, "prompt": [5], "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 8}
    with live(engine, drain_seconds=0) as server, server.connect() as link:
        link.sendall(request("POST", "/v1/completions", body))
        assert select.select([link], [], [], 30)[0]
        server.server.handle_exit(signal.SIGTERM, None)
        assert b"[DONE]" not in read(link).body
        until(lambda: server.server.stopped_by == signal.SIGTERM and server.quiet())


def test_a_second_signal_cuts_answers_off() -> None:
    process, port = spawn("serve.model_name=mine")
    body = {"model": "mine", "prompt": [5], "max_tokens": 1000, "ignore_eos": True, "n": 64, "stream": True}
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(request("POST", "/v1/completions", body))
        assert select.select([link], [], [], 60)[0]  # it is under way
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(ConnectionRefusedError):  # it takes no new connections
            until(lambda: socket.create_connection(("127.0.0.1", port)).close() is not None)
        process.send_signal(signal.SIGTERM)
        assert b"[DONE]" not in read(link).body
    assert process.wait(60) == 143


def test_the_command_refuses_before_it_loads(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "open_engine", lambda _: pytest.fail("a model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, said in (
            ([f"serve.port={port}"], "choose another port"),
            (["serve.host=no.such.host.invalid"], "serve.host"),
            (["serve.prot=1"], "did you mean serve.port?"),
            (["serve.port=-1", "serve.max_rows=0"], "serve.max_rows must be at least 1"),
            (["model.skip_tokenizer_init=true"], "a server speaks text"),
            (["-m", "serve.port=1,2"], "one configuration"),
        ):
            assert command.main(words) == command.USAGE
            assert said in capsys.readouterr().err, words


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "fengine.serve.server")
    monkeypatch.delattr("fengine.serve.server")
    monkeypatch.setattr(command, "open_engine", lambda _: pytest.fail("a model was loaded"))
    with pytest.raises(MissingExtraError, match=r"uvicorn.*pip install 'fengine\[serve\]'"):
        command.run(ServerConfig())


def test_configuration() -> None:
    (point,) = points(parse([], SERVE.program), SERVE)
    assert point.config == ServerConfig() and check(ServerConfig()) == []
    (point,) = points(parse(['lora.paths=["sql=adapters/sql"]'], SERVE.program), SERVE)
    assert point.config.lora.on and point.config.lora.named() == [("sql", "adapters/sql")]
    text = (ROOT / "conf" / "serve.yaml").read_text()
    assert all(f"\n  {name}:" in text for name in ServeConfig.__dataclass_fields__)
    for name in ServeConfig.__dataclass_fields__:
        if name not in ("host", "port", "api_key", "model_name", "drain_seconds"):
            assert any(name in problem for problem in check(ServerConfig(serve=ServeConfig(**{name: 0})))), name
    with pytest.raises(ConfigError, match="did you mean serve.chunks_per_second"):
        points(parse(["serve.chunk_per_second=1"], SERVE.program), SERVE)


def test_answer_reader_sees_the_end() -> None:
    """The tools of these tests: an answer that is cut off has no status."""
    assert Answer(b"").status is None and Answer(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\nx").headers == {"a": "b"}
