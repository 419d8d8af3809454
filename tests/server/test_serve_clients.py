"""Clients that take late, in pieces or nothing, that wait, and that go: what they get, and that nothing stays."""

import contextlib
import json
import math
import select
import socket
import threading
from typing import Any

import serving
from serving import GET, GOOD, POST, STREAMED, Live, live, paused, read, receive, request, until

from fengine.api.engine import Engine

engine, server, untouched = serving.engine, serving.server, serving.untouched  # fixtures


def test_a_stream_is_whole_however_it_is_taken(engine: Engine) -> None:
    """At once, late through buffers that have filled up, in one piece by HTTP/1.0: the same answer."""
    body = {"model": "box", "prompt": [5] * 8, "n": 4, "max_tokens": 120, "ignore_eos": True, "temperature": 0.9,
            "seed": 3, "logprobs": 5, "return_token_ids": True}  # fmt: skip
    streamed = request("POST", "/v1/completions", {**body, "stream": True})
    with live(engine, send_buffer=4096, chunks_per_second=math.inf) as server:
        whole = server.ask("POST", "/v1/completions", body).json["choices"]
        connections: Any = server.server.server_state.connections
        older = streamed.replace(b" HTTP/1.1", b" HTTP/1.0", 1)
        for data, late in ((streamed, False), (streamed, True), (older, False)):
            with server.connect() as link:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                link.sendall(data)
                if late:  # all buffers are full
                    until(lambda: any(connection.flow.write_paused for connection in connections))
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
    with server.connect() as link, contextlib.ExitStack() as stack:
        stack.callback(read_on.set)
        link.sendall(request("POST", "/v1/completions", body))
        data = receive(link, b"data: ")
        assert not read_on.is_set() and b"[DONE]" not in data
        read_on.set()
        data += receive(link, b"0\r\n\r\n")
    assert len(drawn) == GOOD["max_tokens"] and b'"finish_reason": "length"' in data


def test_a_request_that_came_before_its_turn_is_answered_to_its_end(engine: Engine) -> None:
    """The time of an idle connection is not counted while it is answered."""
    body = {"model": "box", "prompt": [5] * 8, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with live(engine, keep_alive_seconds=1) as server, server.connect() as link:
        with paused(engine):
            link.sendall(GET + request("POST", "/v1/completions", body))
            data = b""  # both heads may come in one piece
            while data.count(b"\r\n\r\n") < 2:
                data += (piece := link.recv(1 << 16))
                assert piece, data
            assert data.count(b"HTTP/1.1 200") == 2
            assert not select.select([link], [], [], 1.5)[0]  # nothing comes, nor the end
        assert b"[DONE]" in receive(link, b"0\r\n\r\n")


def test_a_client_that_takes_nothing_is_cut_off(engine: Engine) -> None:
    """It holds up nobody, and nothing of it stays."""
    body = {"model": "box", "prompt": [5] * 8, "n": 8, "max_tokens": 300, "ignore_eos": True, "stream": True,
            "logprobs": 20, "temperature": 0}  # fmt: skip
    with live(engine, send_buffer=4096, write_seconds=0.3) as server, server.connect() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.sendall(request("POST", "/v1/completions", body))
        server.wait_for_rows(8, link)
        assert server.ask("POST", "/v1/completions", GOOD).status == 200
        until(lambda: server.service.rows == 0, 60)
        until(server.quiet)
        assert b"[DONE]" not in read(link).body  # cut off


def test_the_end_of_an_answer_must_be_taken_in_time(engine: Engine) -> None:
    """What is left of it is too little to hold up the writer, and the connection is to be closed behind it."""
    with live(engine, send_buffer=4096, write_seconds=0.3) as server, socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        link.connect(("127.0.0.1", server.port))
        link.sendall(request("GET", "/metrics", Connection="close"))
        until(lambda: server.server.server_state.total_requests == 1)
        until(lambda: not server.server.server_state.connections)


def test_a_client_that_ends_its_half_has_gone_though_it_takes_nothing(engine: Engine) -> None:
    """What is written and not taken yet, too little to hold up the writer, does not hide it."""
    with live(engine, send_buffer=4096) as server, socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        link.connect(("127.0.0.1", server.port))
        with paused(engine):
            link.sendall(request("GET", "/metrics") + POST)
            server.wait_for_rows(1, link)
            link.shutdown(socket.SHUT_WR)
            server.wait_for_rows(0)


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
                assert select.select([link], [], [], 30)[0]
            if i % 2:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset
            link.close()
    until(server.quiet, 60)
    assert server.service.meter.finished["abort"] - aborted == 1500


def test_a_client_that_goes_while_it_waits(server: Live, engine: Engine) -> None:
    """In the queue, in the midst of its body, and before its answer."""
    with paused(engine):
        links = [server.connect() for _ in range(5)]
        for link, data in zip(links, (POST, STREAMED, POST[:-10], POST, STREAMED), strict=True):
            link.sendall(data)
        server.wait_for_rows(4, *links)
        for link in links[3:]:
            link.sendall(POST)  # before its turn
        for link in links:
            link.close()
        server.wait_for_rows(0)


def test_the_queue_has_an_end(engine: Engine) -> None:
    with live(engine, max_rows=4) as server:
        with server.connect() as link:
            with paused(engine):
                link.sendall(request("POST", "/v1/completions", {**GOOD, "n": 3}))
                server.wait_for_rows(3, link)
                answer = server.ask("POST", "/v1/completions", {**GOOD, "n": 2})
                assert answer.status == 429 and answer.headers["retry-after"] and answer.error["code"] == "queue_full"
                assert server.ask("POST", "/v1/completions", {**GOOD, "n": 2, "seed": 0.5}).status in (400, 429)
                assert server.service.rows == 3 and server.ask("GET", "/health").status == 200
            assert read(link).status == 200
        assert server.ask("POST", "/v1/completions", {**GOOD, "n": 4}).status == 200
        never = server.ask("POST", "/v1/completions", {**GOOD, "n": 5})  # however long it waited
        assert never.status == 400 and "more than serve.max_rows=4" in never.error["message"]
