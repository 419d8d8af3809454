"""The server's end, by signals and by failures, its command and its configuration."""

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

import serving
from serving import GET, GOOD, KEY, POST, STREAMED, Answer, Live, live, read, receive, request, until

from fengine.api.engine import Engine
from fengine.engine.weights import group
from fengine.errors import ConfigError, MissingExtraError
from fengine.eval.cli.compose import parse, points
from fengine.eval.commands import serve as command
from fengine.eval.commands.serve import SERVE, ServeRun, check
from fengine.server.choices import ChoiceWriter
from fengine.server.config import ServerConfig

FREE = "host port api_key admin_key model_name any_model_name allow_origins access_log drain_seconds".split()
ROOT = Path(__file__).resolve().parents[2]
engine, server, untouched = serving.engine, serving.server, serving.untouched  # fixtures


def test_a_failing_engine_is_told() -> None:
    with Engine(model_path="box", enable_torch_compile=False) as engine, live(engine) as server:
        refused = server.ask("POST", "/v1/completions", {**GOOD, "allowed_token_ids": [5]})
        assert (refused.status, refused.error["param"]) == (400, "allowed_token_ids")  # processors are off
        engine.pause_generation("in_place")
        links = [server.connect() for _ in range(2)]
        for link, data in zip(links, (POST, STREAMED), strict=True):
            link.sendall(data)
        server.wait_for_rows(2, *links)
        links[1].recv(1, socket.MSG_PEEK)  # the stream's status has been sent

        def fail() -> None:
            raise RuntimeError("the device is gone")

        engine._parts.core.handlers["ping"] = fail
        engine._parts.core.inbox.put("ping", {})
        whole, stream = (read(link) for link in links)
        assert whole.status == 503 and "the device is gone" in whole.error["message"]
        assert stream.status == 200 and b"the device is gone" in stream.body and b"[DONE]" in stream.body
        assert server.ask("GET", "/health").status == server.ask("POST", "/v1/completions", GOOD).status == 503
        assert server.service.rows == 0 and b"fengine:up 0" in server.ask("GET", "/metrics").body
        for link in links:
            link.close()


def test_a_fault_of_the_server_is_told_and_hurts_nobody(
    server: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before an answer begins it is a 500; later on it cuts the answer off."""

    def fail(*_: Any) -> None:
        raise RuntimeError("a secret")

    with server.connect() as link, monkeypatch.context() as patch:
        patch.setattr(server.service, "cards", fail)
        answer = server.ask("GET", "/v1/models")
        assert (answer.status, answer.error["code"]) == (500, "internal_error") and b"secret" not in answer.body
        assert "RuntimeError: a secret" in caplog.text
        patch.setattr(ChoiceWriter, "last", fail)
        link.sendall(STREAMED + GET)
        told = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := link.recv(1 << 16):
                told += piece
        assert told.count(b"HTTP/1.1 ") == 1 and not told.endswith(b"0\r\n\r\n")


def test_a_signal_lets_answers_end(engine: Engine) -> None:
    body = {**GOOD, "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 4}
    with live(engine) as server, server.connect() as link, server.connect() as idle:
        idle.sendall(GET)
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


def test_a_trainer_that_does_not_come_holds_no_end_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call is answered at the first signal; the engine may join later."""
    began, late = (threading.Event() for _ in range(2))
    monkeypatch.setattr(group, "join", lambda *_: began.set() or late.wait(30))
    names = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g"}
    with live(engine, admin_key="admin") as server, server.connect() as link:
        link.sendall(request("POST", "/init_weights_update_group", names | {"backend": "gloo"}, **KEY))
        assert began.wait(30)
        server.server.handle_exit(signal.SIGTERM, None)
        answer = read(link)
        assert answer.status == 400 and "shut down" in answer.json["message"]
    late.set()


def test_a_second_signal_cuts_answers_off() -> None:
    words = [sys.executable, "-m", "fengine.server", "serve.port=0", "compile=none", "serve.model_name=mine"]
    body = {"model": "mine", "prompt": [5], "max_tokens": 1000, "ignore_eos": True, "n": 64, "stream": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        stack.callback(stack.enter_context(process).kill)
        urls = (re.search(r"http://127\.0\.0\.1:(\d+)/v1", line) for line in process.stderr or ())
        port = next(int(url[1]) for url in urls if url)
        link = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
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
            (["-m", "serve.port=1,2"], "one configuration"),
        ):
            assert command.main(words) == 2
            assert said in capsys.readouterr().err, words


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "fengine.server.server")
    monkeypatch.delattr("fengine.server.server")
    monkeypatch.setattr(command, "open_engine", lambda _: pytest.fail("a model was loaded"))
    with pytest.raises(MissingExtraError, match=r"uvicorn.*pip install 'fengine\[serve\]'"):
        command.run(ServeRun())


def test_configuration() -> None:
    (point,) = points(parse([], SERVE), SERVE)
    assert point.config == ServeRun() and check(ServeRun()) == []
    (point,) = points(parse(['lora.paths=["sql=adapters/sql"]'], SERVE), SERVE)
    assert point.config.engine.lora.on and point.config.engine.lora.named() == [("sql", "adapters/sql")]
    text = (ROOT / "conf" / "serve.yaml").read_text()
    assert all(f"\n  {name}:" in text for name in ServerConfig.__dataclass_fields__)
    for name in ServerConfig.__dataclass_fields__:
        if name not in FREE:
            assert any(name in problem for problem in check(ServeRun(serve=ServerConfig(**{name: 0})))), name
    with pytest.raises(ConfigError, match="did you mean serve.chunks_per_second"):
        points(parse(["serve.chunk_per_second=1"], SERVE), SERVE)


def test_the_tools_of_these_tests(server: Live) -> None:
    """An answer that is cut off has no status; who waits for what is refused is told so."""
    assert Answer(b"").status is None and Answer(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\nx").headers == {"a": "b"}
    with server.connect() as link:
        link.sendall(request("POST", "/v1/completions", {**GOOD, "model": "other"}))
        with pytest.raises(AssertionError, match="other"):
            server.wait_for_rows(1, link)
        with pytest.raises(AssertionError, match="other"):
            receive(link, b"data: ")
