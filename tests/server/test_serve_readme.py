"""The server's README: its Python runs against a server, its commands compose, its limits are those of the schema."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")
pytest.importorskip("openai", reason="openai's client, of the extra dev")
pytest.importorskip("llguidance", reason="the extra grammar")

import serving  # noqa: E402
from serving import Live  # noqa: E402

from fengine.eval.cli.compose import parse, points  # noqa: E402
from fengine.eval.commands.serve import SERVE  # noqa: E402
from fengine.server.config import ServerConfig  # noqa: E402
from fengine.server.endpoints import open_api  # noqa: E402
from fengine.server.openai_body import OF_CHATS, OF_COMPLETIONS  # noqa: E402

engine, server = serving.engine, serving.server  # fixtures
PAGE = (Path(__file__).resolve().parents[2] / "fengine" / "server" / "README.md").read_text()


def test_the_examples_run(server: Live, capsys: Any) -> None:
    names: dict[str, Any] = {}
    for source in re.findall(r"```py\n(.*?)```", PAGE, flags=re.S):
        exec(source.replace("http://127.0.0.1:8000/v1", server.url), names)
    printed = capsys.readouterr().out
    assert "Paris" in printed and "weather True tool_calls" in printed
    names["client"].close()


def test_the_commands_compose() -> None:
    commands = re.findall(r"^(?:\w+=\w+ )?fengine serve(.*)$", PAGE, flags=re.M)
    assert len(commands) == 4
    for words in commands:
        points(parse(shlex.split(words, comments=True), SERVE), SERVE)


def test_the_limits_are_those_of_the_schema() -> None:
    told = dict(re.findall(r"`(\w+)` ([\d,]+)(?: for| between| samples| chunks| while|;)", PAGE))
    assert len(told) == 8
    for name, value in told.items():
        assert getattr(ServerConfig(), name) == int(value), name


def test_the_tables_are_those_of_the_endpoints() -> None:
    """Each path and each field that is named is one."""
    rows = re.findall(r"^\| (`/.*?) \|", PAGE, flags=re.M)
    told = {path for row in rows for path in re.findall(r"`(/[\w/]+)`", row)}
    pages = {"/v1/models", "/health", "/ping", "/metrics", "/docs"}
    assert len(told) > 30 and told <= open_api("fengine")["paths"].keys() | pages
    section = PAGE[PAGE.index("Others, of both kinds") : PAGE.index("A choice tells")]
    fields = {name for row in re.findall(r"^\| (`.*?) \|", section, flags=re.M) for name in re.findall(r"`(\w+)`", row)}
    assert len(fields) > 20 and fields <= OF_COMPLETIONS.keys() | OF_CHATS.keys()
