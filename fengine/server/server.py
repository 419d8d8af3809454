"""uvicorn, with limits on slow clients, errors as JSON, and an end in two steps. The one file that imports uvicorn."""

import asyncio
import contextlib
import logging
import math
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
import uvloop  # noqa: F401  uvicorn imports it late, when a server runs

from fengine.api.engine import Engine
from fengine.errors import ConfigError, UnsupportedFeatureError
from fengine.server.app import App, make_app
from fengine.server.config import ServerConfig
from fengine.server.metrics import logger, report
from fengine.server.protocol import LimitedProtocol

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server(uvicorn.Server):
    """Runs until SIGINT or SIGTERM, then answers what it has, within `drain_seconds`; a second signal stops at once.
    `stopped_by` tells which signal cut answers off."""

    stopped_by: int | None = None

    def __init__(self, config: uvicorn.Config, limits: ServerConfig, ready: Callable[[], None] = lambda: None) -> None:
        """`ready` is called once connections are taken."""
        super().__init__(config)
        self._limits, self._ready = limits, ready
        self._signal: int | None = None  # the last one
        self._report: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._limits.status_seconds < math.inf:
            engine = self.config.app.state.service.engine  # type: ignore[union-attr]
            self._report = asyncio.create_task(report(engine.stats, self._limits.status_seconds))
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, does not raise the signals again: the process ends by itself, in order."""
        here = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS if here}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            self._cut(sig)
        self._signal, self.should_exit = sig, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        seconds, tasks = self._limits.drain_seconds, len(self.server_state.tasks)
        timer = asyncio.get_running_loop().call_later(seconds, self._cut, self._signal)
        logger.info("draining %d requests, for %d s at most; another signal cuts them off", tasks, seconds)
        with contextlib.suppress(UnsupportedFeatureError):  # of replicas, which join none
            self.config.app.state.service.engine._parts.updates.groups.end_joins()  # type: ignore[union-attr]
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            if self._report is not None:
                self._report.cancel()
        logger.info("drained" if self.stopped_by is None else "answers were cut off")

    def _cut(self, sig: int | None) -> None:
        self.stopped_by = sig
        self.stop()

    def stop(self) -> None:
        """Cuts all connections off; what ran for them is aborted."""
        self.should_exit = self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)  # type: ignore[union-attr]


def listen(config: ServerConfig) -> socket.socket:
    """A socket bound to the address, which takes connections once a server runs. Errors: ConfigError."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"serve.host={config.host!r} is no address of this machine: {error}") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        told = f"cannot listen on serve.host={config.host} serve.port={config.port}: {error.strerror}"
        raise ConfigError(f"{told}; choose another port, or 0 for a free one") from error
    return bound


def server_of(app: App, config: ServerConfig, ready: Callable[[], None] = lambda: None) -> Server:
    """A server of an app; `run(sockets=[listen(config)])` it, in any thread."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what clients do wrong is told to them
    protocol = type("Protocol", (LimitedProtocol,), {"limits": config})
    of_uvicorn = uvicorn.Config(
        app, http=protocol, ws="none", loop="uvloop", lifespan="off", timeout_keep_alive=config.keep_alive_seconds,
        log_config=None, access_log=False, proxy_headers=False, server_header=False,
    )  # fmt: skip
    return Server(of_uvicorn, config, ready)


def serve(engine: Engine, config: ServerConfig, bound: socket.socket) -> int | None:
    """Serves until a signal; returns the one that cut answers off, None if all were finished. The engine stays open.
    Modifies: the process's limit of open files, to as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 65536), hard))
    app = make_app(engine, config)
    engine.freeze_gc()  # or the collector would stop every stream, to look through what never goes
    service, (host, port, *_) = app.state.service, bound.getsockname()
    pages, tokens = engine.stats()["pages_total"], engine._parts.pool_tokens
    logger.info("the KV cache has %d pages, for %d tokens", pages, tokens)
    told = f"fengine serves {service.model} at http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    if defaults := service.sampling_defaults:
        told += f" (where a request gives none: {', '.join(f'{name}={value}' for name, value in defaults.items())})"
    server = server_of(app, config, lambda: logger.info(told))
    server.run(sockets=[bound])
    return server.stopped_by
