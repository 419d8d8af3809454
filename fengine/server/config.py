"""The settings of a server: `ServerConfig`, whose defaults `conf/serve.yaml` repeats under `serve`, and its log. No
torch."""

import json
import logging
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fengine.server.tool_calls import FORMS

Rule = tuple[Callable[[Any], object], str]  # whether a value is right, and what it must be


def _one_of(*known: str) -> Rule:
    return known.__contains__, f"must be one of {', '.join(known)}"


RULES: dict[str, Rule] = {
    "host": (lambda text: str(text).strip(), "must name an address, such as 127.0.0.1; 0.0.0.0 is every one of here"),
    "port": (lambda number: 0 <= number <= 65535, "must be in [0, 65535], where 0 takes a free one"),
    "root_path": (lambda text: re.fullmatch(r"(/[\w.~-]+)*", str(text)), "must be like /llm, without a / at its end"),
    "sampling_defaults": _one_of("model", "openai"),
    "tool_call_parser": (lambda name: name is None or name in FORMS, f"must be one of {', '.join(FORMS)}, or null"),
    "log": _one_of("text", "json", "none"),
    "log_level": _one_of("debug", "info", "warning", "error"),
    "drain_seconds": (lambda number: number >= 0, "must be at least 0"),
    **dict.fromkeys(("max_body_bytes", "max_header_bytes", "max_samples", "max_rows", "max_connections"),
                    (lambda number: number >= 1, "must be at least 1")),
    **dict.fromkeys(("read_seconds", "write_seconds", "keep_alive_seconds"),
                    (lambda number: 0 < number < math.inf, "must be positive and finite")),
    **dict.fromkeys(("chunks_per_second", "status_seconds"),
                    (lambda number: number > 0, "must be positive, where .inf is never")),
    **dict.fromkeys(("api_key", "admin_key", "model_name"),
                    (lambda text: str(text).strip(), "must not be empty; leave it out for its default")),
}  # fmt: skip


@dataclass(frozen=True)
class ServerConfig:
    """Where a server listens, and its limits: on bytes, rows, connections and seconds.

    `port` 0 takes a free one. `api_key` None: that of the environment variable FENGINE_API_KEY, or none is asked for.
    `admin_key` None: that of FENGINE_ADMIN_KEY, or what needs it is refused. `model_name` None: `model.path`;
    `any_model_name`: a name that is not known is the model's, too. `allow_origins`: web pages that may ask; "*": all.
    `root_path`: what a proxy in front of it puts before every path, which then may stand there, or not.
    `status_seconds`: between two lines of the log, while there is work. `sampling_defaults`: what holds where a body
    gives nothing, "model" those of generation_config.json, "openai" OpenAI's. `tool_call_parser`: SGLang's name for how
    calls are written; None: as the chat template teaches. A row is one sample of one prompt. All streams together send
    about `chunks_per_second`, and each one at least 4: where tokens come faster, several travel in a chunk; .inf:
    never."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    admin_key: str | None = None
    model_name: str | None = None
    any_model_name: bool = False
    allow_origins: list[str] = field(default_factory=list)
    root_path: str = ""
    log: str = "text"
    log_level: str = "info"
    access_log: bool = False
    status_seconds: float = 10.0
    sampling_defaults: str = "model"
    tool_call_parser: str | None = None
    max_body_bytes: int = 32 << 20
    max_header_bytes: int = 64 << 10
    max_samples: int = 128
    max_rows: int = 4096
    max_connections: int = 8192
    read_seconds: float = 30.0
    write_seconds: float = 60.0
    keep_alive_seconds: int = 5
    drain_seconds: int = 30
    chunks_per_second: float = 250.0


def check(config: ServerConfig) -> list[str]:
    """Every problem with the values, one line each. Pure."""
    asked = [(name, vars(config)[name], *rule) for name, rule in RULES.items()]
    return [f"serve.{name} {told}, got {value!r}" for name, value, fits, told in asked if not fits(value)]


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = {"time": record.created, "level": record.levelname, "logger": record.name}
        told["message"] = record.getMessage()
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)


def log_to_stderr(form: str, level: str = "info") -> None:
    """Lets what the package logs be seen. `form`: text, json or none; `level`: the least that is. Modifies: the logger
    `fengine`, unless the process has given it handlers of its own."""
    package = logging.getLogger("fengine")
    if form == "none" or package.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    package.addHandler(handler)
    package.setLevel(level.upper())
