"""The HTTP face of a `Service`: routes, bodies, streams, errors. FastAPI routes; bodies are read by us."""

import asyncio
import json
import os
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from fengine.api.engine import Engine
from fengine.core.json_text import parse_json
from fengine.server import messages
from fengine.server.answers import events
from fengine.server.config import ServerConfig
from fengine.server.endpoints import ENDPOINTS, Endpoint, open_api
from fengine.server.errors import ApiError, api_error_of
from fengine.server.gate import Access, Gate
from fengine.server.metrics import CONTENT_TYPE
from fengine.server.service import Call, ClientGone, Service

CLOSED_BY_CLIENT = 499  # nginx's word in logs and counters; no client reads it
KEY_VARIABLE, ADMIN_VARIABLE = "FENGINE_API_KEY", "FENGINE_ADMIN_KEY"
BY_BOTH = frozenset({"/flush_cache", "/ping"})  # asked with GET or POST, as SGLang's and SageMaker's
BY_PAGES = ("origin", "sec-fetch-site")  # headers of what a web page sends, which needs no permission without a body
LONG = 1 << 16  # bytes of a body that would hold up the other answers while it is parsed


def make_app(engine: Engine, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI app over an engine, for any ASGI server. Shutting the engine down stays its owner's business."""
    config = config or ServerConfig()
    app = FastAPI(title="fengine", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.service = service = Service(engine, config)
    paths = _add_routes(app, service)
    for kind in (ApiError, HTTPException, ClientDisconnect, ClientGone, Exception):
        app.add_exception_handler(kind, _refuse)
    key, admin_key = config.api_key or os.environ.get(KEY_VARIABLE), config.admin_key or os.environ.get(ADMIN_VARIABLE)
    app.add_middleware(
        Gate, meter=service.meter, paths=paths, key=key or None, admin_key=admin_key or None, log=config.access_log
    )
    if config.allow_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.allow_origins), allow_methods=["*"], allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )  # fmt: skip
    return app


def _add_routes(app: FastAPI, service: Service) -> dict[str, Access]:
    """Who may call each path. Modifies: app."""

    async def model(request: Request) -> Response:
        return JSONResponse(service.card(request.path_params["name"]))

    async def health(request: Request) -> Response:
        if (wrong := await service.healthy()) is not None:
            raise ApiError(503, wrong, code="unavailable")
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        up = await service.healthy() is None
        return PlainTextResponse(service.meter.page(service.engine.stats(), up, service.rows), media_type=CONTENT_TYPE)

    async def schema(request: Request) -> Response:
        return JSONResponse(open_api("fengine"))

    async def docs(request: Request) -> Response:
        return get_swagger_ui_html(openapi_url="/openapi.json", title="fengine", swagger_favicon_url="data:,")

    paths = {path: one.access for one in ENDPOINTS for path in one.paths}
    for one in ENDPOINTS:
        for path in one.paths:
            methods = ["GET"] if one.fields is None else ["GET", "POST"] if path in BY_BOTH else ["POST"]
            app.add_route(path, partial(_answer, service, one), methods=methods)
    for path, page, access in (
        ("/v1/models/{name:path}", model, Access.KEY), ("/health", health, Access.OPEN), ("/ping", health, Access.OPEN),
        ("/metrics", metrics, Access.KEY), ("/openapi.json", schema, Access.OPEN), ("/docs", docs, Access.OPEN),
    ):  # fmt: skip
        app.add_route(path, page, methods=["GET", "POST"] if path in BY_BOTH else ["GET"])
        paths[path] = access
    return paths


async def _answer(service: Service, endpoint: Endpoint, request: Request) -> Response:
    """What the model computes, whole or as events, or what the engine is asked or told."""
    body: dict[str, Any] = {}
    if endpoint.fields is not None:
        body = await read_json(request, service.config, may_be_empty=endpoint.access is not Access.KEY)
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
        super().__init__(events(call.collector, call.plan.writer), 200, headers, "text/event-stream")
        self.call, self.service = call, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(gone(receive))
        watch.add_done_callback(lambda _: self.call.collector.leave())
        try:
            if scope["http_version"] == "1.0":
                whole = b"".join([piece async for piece in self.body_iterator])  # type: ignore[misc]
                await Response(whole, headers=dict(self.headers))(scope, receive, send)
            else:
                await self.stream_response(send)
        finally:
            watch.cancel()
            self.service.end(self.call)


async def _refuse(request: Request, error: Exception) -> Response:
    """Every error as OpenAI's body; under Anthropic's paths as Anthropic's."""
    if isinstance(error, (ClientDisconnect, ClientGone)):
        return Response(status_code=CLOSED_BY_CLIENT)
    if isinstance(error, HTTPException):
        allowed = (error.headers or {}).get("Allow")
        said = {404: f"there is no {request.url.path!r:.200} here.", 405: f"this path takes {allowed} only."}
        error = ApiError(error.status_code, said.get(error.status_code, str(error.detail)), headers=error.headers)
    refusal = api_error_of(error)
    body = refusal.body()
    if request.url.path.startswith("/v1/messages"):
        body = messages.error_body(refusal)
    else:  # SGLang's clients read the same without an "error" around it
        kind = "BadRequestError" if refusal.status == 400 else "InternalServerError"
        body |= body["error"] | {"object": "error", "type": kind, "code": refusal.status}
    return JSONResponse(body, refusal.status, headers=dict(refusal.headers))


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
