"""The settings of a server: `ServerConfig`, whose defaults `conf/serve.yaml` repeats under `serve`, and its log. No
torch."""

import json
import logging
import math
import re
import sys
from dataclasses import dataclass, field

LEAST = {  # the least values
    "port": 0, "max_body_bytes": 1, "max_header_bytes": 1, "max_samples": 1, "max_rows": 1, "max_connections": 1,
    "drain_seconds": 0,
}  # fmt: skip
POSITIVE = {  # and whether a value may be infinite
    "read_seconds": False, "write_seconds": False, "keep_alive_seconds": False, "chunks_per_second": True,
    "status_seconds": True,
}  # fmt: skip
CHOICES = {
    "sampling_defaults": ("model", "openai"),
    "log": ("text", "json", "none"),
    "log_level": ("debug", "info", "warning", "error"),
}
TEXTS = {  # the pattern of each, and what is told of others
    "host": (r"(?s).*\S.*", "must name an address: 127.0.0.1, or 0.0.0.0 for every address of this machine"),
    "root_path": (r"(/[\w.~-]+)*", "must be like /llm, without a / at its end"),
    **dict.fromkeys(
        ("api_key", "admin_key", "model_name"), (r"(?s).*\S.*", "must not be empty; leave it out for its default")
    ),
}


@dataclass(frozen=True)
class ServerConfig:
    """Where a server listens, and its limits: on bytes, rows, connections and seconds.

    `port` 0 takes a free one. `api_key` None: that of the environment variable FENGINE_API_KEY, or none is asked for.
    `admin_key` None: that of FENGINE_ADMIN_KEY, or what needs it is refused. `model_name` None: `model.path`;
    `any_model_name`: a name that is not known is the model's, too. `allow_origins`: web pages that may ask; "*": all.
    `root_path`: what a proxy in front of it puts before every path, which then may stand there, or not.
    `status_seconds`: between two lines of the log, while there is work. `sampling_defaults`: what holds where a body
    gives nothing, "model" those of generation_config.json, "openai" OpenAI's. A row is one sample of one prompt. All
    streams together send about `chunks_per_second`, and each one at least 4: where tokens come faster, several travel
    in a chunk; .inf: never."""

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
    values, problems = vars(config), list[str]()
    for name, least in LEAST.items():
        if values[name] < least:
            problems.append(f"serve.{name} must be at least {least}, got {values[name]}")
    for name, endless in POSITIVE.items():
        if not (0 < values[name] < math.inf or endless and values[name] == math.inf):
            told = (" and finite", "") if not endless else ("", "; .inf: never")
            problems.append(f"serve.{name} must be positive{told[0]}, got {values[name]}{told[1]}")
    if config.port > 65535:
        problems.append(f"serve.port must be in [0, 65535], got {config.port}; 0 takes a free one")
    for name, (pattern, told_of) in TEXTS.items():
        if not re.fullmatch(pattern, str(values[name])):
            problems.append(f"serve.{name} {told_of}, got {values[name]!r}")
    for name, choices in CHOICES.items():
        if values[name] not in choices:
            problems.append(f"serve.{name} must be one of {', '.join(choices)}, got {values[name]!r}")
    return problems


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
