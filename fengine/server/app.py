"""The HTTP face of a `Service`: paths, bodies, streams, errors. Plain ASGI: one table of paths behind the gate."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from difflib import get_close_matches
from functools import partial
from typing import Any

from starlette.datastructures import State
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fengine.api.engine import Engine
from fengine.core.json_text import parse_json
from fengine.server.answers import events
from fengine.server.config import ServerConfig
from fengine.server.docs import page as docs_page
from fengine.server.endpoints import ENDPOINTS, Endpoint, open_api
from fengine.server.errors import ApiError, api_error_of
from fengine.server.gate import Access, Gate, path_of
from fengine.server.metrics import CONTENT_TYPE
from fengine.server.service import Call, ClientGone, Service

CLOSED_BY_CLIENT = 499  # nginx's word in logs and counters; no client reads it
KEY_VARIABLE, ADMIN_VARIABLE = "FENGINE_API_KEY", "FENGINE_ADMIN_KEY"
BY_BOTH = frozenset({"/flush_cache", "/ping"})  # asked with GET or POST, as SGLang's and SageMaker's
BY_PAGES = ("origin", "sec-fetch-site")  # headers of what a web page sends, which needs no permission without a body
LONG = 1 << 16  # bytes of a body that would hold up the other answers while it is parsed
MODELS = "/v1/models/"  # and a name behind it, which may have slashes
Page = Callable[[Request], Awaitable[Response]]


class App:
    """An ASGI app over an engine, for any ASGI server. Shutting the engine down stays its owner's business."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        service = Service(engine, config)
        self.state, self.root = State({"service": service}), config.root_path
        self.pages = {path: (partial(_answer, service, one), "GET" if one.fields is None else "POST")
                      for one in ENDPOINTS for path in one.paths}  # fmt: skip
        self.pages |= {path: (page, "GET") for path, page in _pages(service).items()}
        access = {path: one.access for one in ENDPOINTS for path in one.paths}
        access |= {"/metrics": Access.KEY} | dict.fromkeys(("/health", "/ping", "/openapi.json", "/docs"), Access.OPEN)
        key = config.api_key or os.environ.get(KEY_VARIABLE) or None
        admin = config.admin_key or os.environ.get(ADMIN_VARIABLE) or None
        self._outermost: ASGIApp = Gate(self._find, service.meter, access, key, admin, config.access_log)
        if origins := list(config.allow_origins):
            self._outermost = CORSMiddleware(self._outermost, origins, ["*"], ["*"], expose_headers=["X-Request-Id"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "") + self.root
        if self.root and scope.get("path", "").startswith(f"{root}/"):
            scope = {**scope, "root_path": root}
        await self._outermost(scope, receive, send)

    async def _find(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server that runs the app begins or ends
            while (message := await receive())["type"].startswith("lifespan."):
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
            await send({"type": "websocket.close"})  # there are none
            return
        request = Request(scope, receive)
        try:
            response = await self._page(path_of(scope), scope["method"])(request)
        except (ClientDisconnect, ClientGone):
            response = Response(status_code=CLOSED_BY_CLIENT)
        except Exception as error:
            told = api_error_of(error)
            response = JSONResponse(told.body_at(path_of(scope)), told.status, headers=dict(told.headers))
        await response(scope, receive, send)

    def _page(self, path: str, method: str) -> Page:
        """Errors: ApiError (404, 405)."""
        name = MODELS if path.startswith(MODELS) else path
        if name not in self.pages:
            near = get_close_matches(path[:200], self.pages, 1, 0.75)
            told = f"did you mean {near[0]}?" if near else "GET /openapi.json tells all paths."
            raise ApiError(404, f"there is no {path!r:.200} here; {told}")
        page, by = self.pages[name]
        allowed = ("GET", "HEAD", "POST") if name in BY_BOTH else ("GET", "HEAD") if by == "GET" else ("POST",)
        if method not in allowed:
            told = ", ".join(allowed)
            raise ApiError(405, f"this path takes {told} only.", headers={"Allow": told})
        return page


def make_app(engine: Engine, config: ServerConfig | None = None) -> App:
    """An ASGI app over an engine."""
    return App(engine, config or ServerConfig())


def _pages(service: Service) -> dict[str, Page]:
    """What is told of the server, by path."""

    async def model(request: Request) -> Response:
        return JSONResponse(service.card(path_of(request.scope).removeprefix(MODELS)))

    async def health(request: Request) -> Response:
        if (wrong := await service.healthy()) is not None:
            raise ApiError(503, wrong, code="unavailable")
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        up = await service.healthy() is None
        return PlainTextResponse(service.meter.page(service.engine.stats(), up, service.rows), media_type=CONTENT_TYPE)

    async def schema(request: Request) -> Response:
        return JSONResponse(open_api("fengine", service.config.root_path))

    async def docs(request: Request) -> Response:
        return HTMLResponse(docs_page(service.config.root_path))

    return {MODELS: model, "/health": health, "/ping": health, "/metrics": metrics, "/openapi.json": schema,
            "/docs": docs}  # fmt: skip


async def _answer(service: Service, endpoint: Endpoint, request: Request) -> Response:
    """What the model computes, whole or as events, or what the engine is asked or told."""
    body: dict[str, Any] = {}
    if endpoint.fields is not None:
        body = await read_json(request, service.config, may_be_empty=endpoint.access is not Access.KEY)
        if endpoint.query:
            body = {name: request.query_params.getlist(name) for name in request.query_params} | body
    if endpoint.call is not None:
        found = await service.ask(partial(endpoint.call, service, body), body, endpoint.words)
        if not hasattr(found, "_asdict"):
            return _json(found)
        return _json(found._asdict(), 200 if found.success else 400)
    assert endpoint.plan is not None, "an endpoint has a call or a plan"
    call = await service.begin(endpoint.plan, body, endpoint.words)
    if call.plan.writer is not None and body.get("stream"):
        return EventStream(call, service)
    try:
        outputs = await service.outputs(call, gone(request.receive))
    finally:
        service.end(call)
    return _json(call.plan.whole(outputs))


def _json(value: Any, status: int = 200) -> Response:
    """A value as JSON; what JSON does not know is written as text."""
    return Response(json.dumps(value, default=str), status, media_type="application/json")


async def gone(receive: Receive) -> None:
    """Returns when the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A call's events as they come; in one piece for HTTP/1.0, which knows no chunks. The call ends with its events, or
    when the client goes."""

    def __init__(self, call: Call, service: Service) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        assert call.plan.writer is not None, "a plan of a stream"
        self.events, self.call, self.service = events(call.collector, call.plan.writer), call, service
        super().__init__(self.events, 200, headers, "text/event-stream")  # pyright: ignore[reportArgumentType]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(gone(receive))
        watch.add_done_callback(lambda _: self.call.collector.leave())
        try:
            if scope["http_version"] == "1.0":
                whole = b"".join([piece async for piece, _ in self.events])
                await Response(whole, headers=dict(self.headers))(scope, receive, send)
            else:
                await self.stream_response(send)
        finally:
            watch.cancel()
            self.service.end(self.call)

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece, more in self.events:  # the last one with the end of the answer: one write for both
            await send({"type": "http.response.body", "body": piece, "more_body": more})


# -- bodies ------------------------------------------------------------------------------------------------------------


async def read_json(request: Request, limits: ServerConfig, may_be_empty: bool = False) -> dict[str, Any]:
    """The body's object; with `may_be_empty` no body is an empty one. Errors: ApiError 400 (no JSON, no object), 408
    (too slow), 413 (too large), 415 (other type); ClientDisconnect."""
    headers = request.headers
    empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    if may_be_empty and empty and not any(name in headers for name in BY_PAGES):
        return {}
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which is also what no web page can send here without being asked
        raise ApiError(415, f"Content-Type must be application/json, got {kind!r:.80}.")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "a Content-Encoding is not built; send plain JSON.")
    raw, most, length = bytearray(), limits.max_body_bytes, headers.get("content-length", "")
    size = int(length[:20]) if length.isdecimal() else 0
    try:
        async with asyncio.timeout(limits.read_seconds):
            stream = request.stream()
            while size <= most and (piece := await anext(stream, None)) is not None:
                raw += piece
                size = max(size, len(raw))
    except TimeoutError:
        told = f"the body did not come within {limits.read_seconds:g} seconds (serve.read_seconds)."
        raise ApiError(408, told, headers={"Connection": "close"}) from None
    if size > most:
        told = f"the body is larger than {most} bytes (serve.max_body_bytes); send less, or start the server with more."
        raise ApiError(413, told, code="body_too_large")
    return await asyncio.to_thread(parse, raw) if size > LONG else parse(raw)


def parse(raw: bytes | bytearray) -> dict[str, Any]:
    """Pure. Errors: ApiError."""
    try:
        value = parse_json(raw.decode())
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error!s:.200}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(value).__name__}.", code="invalid_json")
    return value
