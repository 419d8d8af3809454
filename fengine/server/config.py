"""The schema of a server: `ServerConfig`, whose defaults `conf/serve.yaml` repeats, and `check`. No torch."""

import math
from dataclasses import dataclass, field

from fengine import config as engine_config
from fengine.config import EngineConfig


@dataclass(frozen=True)
class ServeConfig:
    """Where a server listens, and its limits: on bytes, rows, connections and seconds.

    `port` 0 takes a free one. `api_key` None: that of the environment variable FENGINE_API_KEY, or none is asked for.
    `model_name` None: `model.path`. A row is one sample of one prompt. All streams together send about
    `chunks_per_second`, and each one at least 4: where tokens come faster, several travel in a chunk; .inf: never.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    model_name: str | None = None
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


@dataclass(frozen=True)
class ServerConfig:
    """One server; `seed` is the engine's random_seed. Users write the sections of `engine` at the top."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    seed: int = 0
    serve: ServeConfig = field(default_factory=ServeConfig)


def check(config: ServerConfig) -> list[str]:
    """Every problem that can be seen without loading anything, one line each. Pure."""
    problems, serve = engine_config.check(config.engine), config.serve
    if not 0 <= serve.port <= 65535:
        problems.append(f"serve.port must be in [0, 65535], got {serve.port}; 0 takes a free one")
    if not serve.host.strip():
        problems.append("serve.host must name an address: 127.0.0.1, or 0.0.0.0 for every address of this machine")
    for name in ("api_key", "model_name"):
        if (value := getattr(serve, name)) is not None and not value.strip():
            problems.append(f"serve.{name} must not be empty; leave it out for its default")
    for name in ("max_body_bytes", "max_header_bytes", "max_samples", "max_rows", "max_connections"):
        if getattr(serve, name) < 1:
            problems.append(f"serve.{name} must be at least 1, got {getattr(serve, name)}")
    for name in ("read_seconds", "write_seconds", "keep_alive_seconds"):
        if not 0 < getattr(serve, name) < math.inf:
            problems.append(f"serve.{name} must be positive and finite, got {getattr(serve, name)}")
    if serve.drain_seconds < 0:
        problems.append(f"serve.drain_seconds must be at least 0, got {serve.drain_seconds}")
    if not serve.chunks_per_second > 0:
        problems.append(f"serve.chunks_per_second must be positive, got {serve.chunks_per_second}")
    if not -(2**63) <= config.seed < 2**63:
        problems.append(f"seed must be in [-2**63, 2**63 - 1], got {config.seed}")
    if config.engine.model.skip_tokenizer_init:
        problems.append("a server speaks text: set model.skip_tokenizer_init=false")
    return problems
