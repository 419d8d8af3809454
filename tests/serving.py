"""A live server in this process, and clients of it: openai's, raw sockets."""

import contextlib
import json
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve")

from loops import in_loop

from fengine.api.engine import Engine  # noqa: E402
from fengine.server.app import make_app  # noqa: E402
from fengine.server.config import ServerConfig  # noqa: E402
from fengine.server.server import Server, listen, server_of  # noqa: E402
from fengine.server.service import Service  # noqa: E402

BOX = Path(__file__).resolve().parents[1] / "fengine" / "models" / "box"
PROMPT = "Once upon a time"
CHAT: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
KEY = {"Authorization": "Bearer admin"}


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Returns as soon as the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


class Live:
    """A running server: its port, its service."""

    def __init__(self, port: int, service: Service, server: Server) -> None:
        self.port, self.service, self.server, self.url = port, service, server, f"http://127.0.0.1:{port}/v1"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def send(self, data: bytes) -> "Answer":
        """What raw bytes are answered with, until the server closes or the answer is complete."""
        with self.connect() as link:
            link.sendall(data)
            return read(link)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> "Answer":
        return self.send(request(method, path, body, **headers))

    def wait_for_rows(self, count: int, *links: socket.socket) -> None:
        """Returns once so many rows are open; fails as soon as one of the links is told of an error."""

        def open_or_refused() -> bool:
            for link in select.select(links, [], [], 0)[0]:
                fail_if_refused(link.recv(1 << 16, socket.MSG_PEEK))
            return self.service.rows == count

        until(open_or_refused)

    def wait_for_requests(self, count: int, *links: socket.socket) -> None:
        """Returns once the engine has so many, too: the server counts rows before it hands them on."""
        self.wait_for_rows(count, *links)
        until(lambda: (stats := self.stats())["running"] + stats["waiting"] == count)

    def stats(self) -> dict[str, Any]:
        return in_loop(self.service.engine._parts.core, self.service.engine.stats)

    def quiet(self) -> bool:
        """Nothing runs, waits or holds a page, and the server has no row open."""
        stats = self.stats()
        return self.service.rows == stats["running"] == stats["waiting"] == stats["pages_used"] == 0


class Answer:
    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        self.status = int(first.split()[1]) if first else None
        self.headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        return error


def request(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    told = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(data))}
    told |= {k.replace("_", "-"): v for k, v in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in told.items())]
    return "\r\n".join([*lines, "", ""]).encode() + data


def read(link: socket.socket) -> Answer:
    """One answer; its length is told, or the server closes the connection, or chunks end."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := link.recv(1 << 16):
            data += piece
            head, end, body = data.partition(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            if end and (length and len(body) >= int(length) or body.endswith(b"0\r\n\r\n")):
                break
    return Answer(data)


def receive(link: socket.socket, end: bytes) -> bytes:
    """What comes, until `end` is in it; fails as soon as it tells of an error, or the server closes."""
    data = b""
    while end not in data:
        data += (piece := link.recv(1 << 16))
        fail_if_refused(data)
        assert piece, data
    return data


def fail_if_refused(data: bytes) -> None:
    assert b'"error"' not in data, data


@contextlib.contextmanager
def paused(engine: Engine) -> Iterator[None]:
    engine.pause_generation("in_place")
    try:
        yield
    finally:
        engine.continue_generation()


@contextlib.contextmanager
def live(engine: Engine, send_buffer: int | None = None, **settings: Any) -> Iterator[Live]:
    config = ServerConfig(port=0, **settings)
    bound = listen(config)
    if send_buffer is not None:  # of the connections, too
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    app = make_app(engine, config)
    server = server_of(app, config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        until(lambda: server.started)
        yield Live(bound.getsockname()[1], app.state.service, server)
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


def post(server: Live, path: str, body: Any, **headers: str) -> Any:
    answer = server.ask("POST", path, body, **headers)
    assert answer.status == 200, answer.body
    return answer.json


def events(server: Live, path: str, body: Any) -> list[tuple[str, Any]]:
    """(name, data) of each event; data that is no JSON stays text."""
    raw = server.ask("POST", path, {**body, "stream": True}).body.decode()
    found = []
    for one in re.sub(r"\r\n[0-9a-f]*\r\n", "", re.sub(r"^[0-9a-f]+\r\n", "", raw)).split("\n\n"):
        lines = dict(line.split(": ", 1) for line in one.split("\n") if ": " in line)
        if "data" in lines:
            data = lines["data"]
            found.append((lines.get("event", ""), json.loads(data) if data.startswith("{") else data))
    return found


GOOD = {"model": "box", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 6, "logprobs": 1}
GET, POST = request("GET", "/health"), request("POST", "/v1/completions", GOOD)
STREAMED = request("POST", "/v1/completions", {**GOOD, "stream": True})


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(
        model_path="box",
        enable_torch_compile=False,
        enable_custom_logit_processor=True,
        enable_priority_scheduling=True,
    ) as engine:
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
