"""The HTTP face of a `Service`: routes, streams, errors, the API key. FastAPI routes; bodies are read by us."""

import asyncio
import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fengine import __version__
from fengine.api.engine import Engine
from fengine.server import embeddings
from fengine.server.config import ServerConfig
from fengine.server.errors import ApiError, api_error_of
from fengine.server.json_body import read_json
from fengine.server.metrics import CONTENT_TYPE, Meter
from fengine.server.responses import Envelope, Events, usage_of
from fengine.server.service import ClientGone, Service

CLOSED_BY_CLIENT = 499  # nginx's word in logs and counters; no client reads it
OPEN = frozenset({"/health", "/ping"})  # needs no key
COUNTED = frozenset(
    "/v1/completions /v1/chat/completions /v1/embeddings /v1/models /tokenize /detokenize /health /metrics".split()
)
KEY_VARIABLE = "FENGINE_API_KEY"


def make_app(engine: Engine, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI app over an engine, for any ASGI server. Errors: ConfigError if the engine has no tokenizer.

    Shutting the engine down stays its owner's business.
    """
    config = config or ServerConfig()
    service = Service(engine, config)

    app = FastAPI(title="fengine", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    routes = Routes(service)
    for path, method, handler in routes.table():
        app.add_route(path, handler, methods=[method])  # bodies are ours to read, so nothing is FastAPI's to solve
    for kind in (ApiError, HTTPException, ClientDisconnect, ClientGone, Exception):
        app.add_exception_handler(kind, _refuse)
    app.add_middleware(Gate, meter=service.meter, key=config.api_key or os.environ.get(KEY_VARIABLE) or None)
    app.state.service = service
    return app


class Routes:
    """One method for each path."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def table(self) -> list[tuple[str, str, Callable[..., Any]]]:
        return [
            ("/v1/completions", "POST", self.completions),
            ("/v1/chat/completions", "POST", self.chat_completions),
            ("/v1/embeddings", "POST", self.embeddings),
            ("/tokenize", "POST", self.tokenize),
            ("/detokenize", "POST", self.detokenize),
            ("/v1/models", "GET", self.models),
            ("/v1/models/{name:path}", "GET", self.model),
            ("/version", "GET", self.version),
            ("/ping", "GET", self.health),
            ("/health", "GET", self.health),
            ("/metrics", "GET", self.metrics),
        ]

    async def completions(self, request: Request) -> Response:
        return await self._complete(request, "/v1/completions")

    async def chat_completions(self, request: Request) -> Response:
        return await self._complete(request, "/v1/chat/completions")

    async def _complete(self, request: Request, path: str) -> Response:
        service = self.service
        body = await read_json(request, service.config)
        begun = await service.generate(body, path)
        asked, form, call = begun.request, begun.form, begun.call
        envelope = Envelope.of(form, asked.stream, service.adapter_of(body) or service.model, service.fingerprint)
        if asked.stream:
            return EventStream(Events(call, asked, form, envelope), service)
        try:
            outputs = await service.outputs(call.wait_async(), gone(request.receive))
        finally:
            service.end(call)
        choices = [form.whole(i, output) for i, output in enumerate(outputs)]
        return JSONResponse(envelope.around(choices, usage_of(outputs, asked.samples)))

    async def embeddings(self, request: Request) -> Response:
        service = self.service
        body = await read_json(request, service.config)
        call, as_base64 = await service.encode(body)
        try:
            outputs = await service.outputs(call.wait_async(), gone(request.receive))
        finally:
            service.end(call)
        return JSONResponse(embeddings.answer(outputs, service.adapter_of(body) or service.model, as_base64))

    async def tokenize(self, request: Request) -> Response:
        body = await read_json(request, self.service.config)
        return JSONResponse(await self.service.tokenize(body))

    async def detokenize(self, request: Request) -> Response:
        body = await read_json(request, self.service.config)
        return JSONResponse(await self.service.detokenize(body))

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(self.service.cards().values())})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.service.adapter_of({"model": name})
        return JSONResponse(self.service.cards()[name])

    async def health(self, request: Request) -> Response:
        wrong = await self.service.healthy()
        if wrong is not None:
            raise ApiError(503, wrong, code="unavailable")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(await self.service.metrics(), media_type=CONTENT_TYPE)


async def gone(receive: Receive) -> None:
    """Returns when the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A call's events as they come; in one piece for HTTP/1.0, which knows no chunks. The call ends with its events, or
    when the client goes."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, service: Service) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events, self.service = events, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(gone(receive))
        watch.add_done_callback(lambda _: self.events.call.abort())  # which ends the events
        try:
            if scope["http_version"] == "1.0":
                whole = b"".join([piece async for piece, _ in self.events])
                await Response(whole, headers=self.headers, media_type=self.media_type)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece, more in self.events:
                await send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            watch.cancel()
            self.service.end(self.events.call)


async def _refuse(request: Request, error: Exception) -> Response:
    """Every error as OpenAI's body."""
    if isinstance(error, (ClientDisconnect, ClientGone)):
        return Response(status_code=CLOSED_BY_CLIENT)
    if isinstance(error, HTTPException):
        allowed = (error.headers or {}).get("Allow")
        told = {404: f"there is no {request.url.path!r:.200} here.", 405: f"this path takes {allowed} only."}
        error = ApiError(error.status_code, told.get(error.status_code, str(error.detail)), headers=error.headers)
    refusal = api_error_of(error)
    return JSONResponse(refusal.body(), refusal.status, headers=dict(refusal.headers))


def misdirected(scope: Scope) -> ApiError | None:
    """What came over the loopback must be meant for it. A web page whose name was pointed here (DNS rebinding) may send
    what it likes, but its own name stands in Host. Pure."""
    arrived, _ = scope.get("server") or ("", None)
    for _, value in [pair for pair in scope["headers"] if pair[0] == b"host"]:
        name = re.sub(r":[0-9]*$", "", value.decode("latin-1")).strip("[]").lower()
        if not (f".{name}".endswith(".localhost") or is_loopback(name)) and is_loopback(arrived):
            told = (
                f"Host is {name!r:.200}, not localhost: refused, as a web page may have sent it; to serve such names, "
            )
            return ApiError(403, f"{told}set an API key.", None, "foreign_host")
    return None


@lru_cache(256)  # nearly all requests name the same address
def is_loopback(address: str) -> bool:
    """Pure."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


class Gate:
    """Before every route: asks for the API key, or, if there is none, for a Host of this machine; counts answers.
    Pure ASGI, so that streams pass untouched."""

    def __init__(self, app: ASGIApp, meter: Meter, key: str | None) -> None:
        self.app, self.meter = app, meter
        self.digest = None if key is None else hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in COUNTED else "other"  # a client cannot add to these
                self.meter.answers[path, message["status"]] += 1
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self.app(scope, receive, counted)
            return
        await JSONResponse(refusal.body(), refusal.status, headers=dict(refusal.headers))(scope, receive, counted)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self.digest is None:
            return misdirected(scope)
        if scope["path"] in OPEN or self._has_key(scope):
            return None
        return ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY.", None,
                       "invalid_api_key", {"WWW-Authenticate": "Bearer"})  # fmt: skip

    def _has_key(self, scope: Scope) -> bool:
        """Compared in constant time, by digests of one length."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(key.strip()).digest()
        return hmac.compare_digest(digest, self.digest or b"") and kind.lower() == b"bearer"
