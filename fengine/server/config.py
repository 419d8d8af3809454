"""The settings of a server: `ServerConfig`, whose defaults `conf/serve.yaml` repeats under `serve`, and `check`.

No torch.
"""

import math
from dataclasses import dataclass, field

LEAST = {  # the least values
    "port": 0, "max_body_bytes": 1, "max_header_bytes": 1, "max_samples": 1, "max_rows": 1, "max_connections": 1,
    "drain_seconds": 0,
}  # fmt: skip
POSITIVE = ("read_seconds", "write_seconds", "keep_alive_seconds")
CHOICES = {
    "sampling_defaults": ("model", "openai"),
    "log": ("text", "json", "none"),
    "log_level": ("debug", "info", "warning", "error"),
}


@dataclass(frozen=True)
class ServerConfig:
    """Where a server listens, and its limits: on bytes, rows, connections and seconds.

    `port` 0 takes a free one. `api_key` None: that of the environment variable FENGINE_API_KEY, or none is asked for.
    `admin_key` None: that of FENGINE_ADMIN_KEY, or what needs it is refused. `model_name` None: `model.path`;
    `any_model_name`: a name that is not known is the model's, too. `allow_origins`: web pages that may ask; "*": all.
    `status_seconds`: between two lines of the log, while there is work. `sampling_defaults`: what holds where a body
    gives nothing, "model" those of generation_config.json, "openai" OpenAI's. A row is one sample of one prompt. All
    streams together send about `chunks_per_second`, and each one at least 4: where tokens come faster, several travel
    in a chunk; .inf: never.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    admin_key: str | None = None
    model_name: str | None = None
    any_model_name: bool = False
    allow_origins: list[str] = field(default_factory=list)
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
    problems = [
        f"serve.{name} must be at least {least}, got {getattr(config, name)}"
        for name, least in LEAST.items()
        if getattr(config, name) < least
    ]
    problems += [
        f"serve.{name} must be positive and finite, got {getattr(config, name)}"
        for name in POSITIVE
        if not 0 < getattr(config, name) < math.inf
    ]
    if config.port > 65535:
        problems.append(f"serve.port must be in [0, 65535], got {config.port}; 0 takes a free one")
    if not config.host.strip():
        problems.append("serve.host must name an address: 127.0.0.1, or 0.0.0.0 for every address of this machine")
    for name in ("api_key", "admin_key", "model_name"):
        if (value := getattr(config, name)) is not None and not value.strip():
            problems.append(f"serve.{name} must not be empty; leave it out for its default")
    for name in ("chunks_per_second", "status_seconds"):
        if not getattr(config, name) > 0:
            problems.append(f"serve.{name} must be positive, got {getattr(config, name)}; .inf: never")
    for name, choices in CHOICES.items():
        if (value := getattr(config, name)) not in choices:
            problems.append(f"serve.{name} must be one of {', '.join(choices)}, got {value!r}")
    return problems
