"""The HTTP face of a `Service`: routes, streams, errors. FastAPI routes; bodies are read by us."""

import asyncio
import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from fengine.api.engine import Engine
from fengine.server import messages
from fengine.server.answers import events
from fengine.server.config import ServerConfig
from fengine.server.endpoints import ENDPOINTS, Endpoint, open_api
from fengine.server.errors import ApiError, api_error_of
from fengine.server.gate import Access, Gate
from fengine.server.json_body import read_json
from fengine.server.metrics import CONTENT_TYPE
from fengine.server.service import Call, ClientGone, Service

CLOSED_BY_CLIENT = 499  # nginx's word in logs and counters; no client reads it
KEY_VARIABLE, ADMIN_VARIABLE = "FENGINE_API_KEY", "FENGINE_ADMIN_KEY"
FLAT = frozenset({"/v1/score", "/v1/rerank"})  # whose errors SGLang's clients read without an "error" around them


def make_app(engine: Engine, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI app over an engine, for any ASGI server. Errors: ConfigError if the engine has no tokenizer.

    Shutting the engine down stays its owner's business.
    """
    config = config or ServerConfig()
    service = Service(engine, config)

    app = FastAPI(title="fengine", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
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
    app.state.service = service
    return app


def _add_routes(app: FastAPI, service: Service) -> dict[str, Any]:
    """Who may call each path. Modifies: app."""
    paths = {path: one.access for one in ENDPOINTS for path in one.paths}
    for one in ENDPOINTS:  # bodies are ours to read, so nothing is FastAPI's to solve
        handler = partial(_planned if one.plan else _called, service, one)
        for path in one.paths:
            app.add_route(path, handler, methods=["GET" if one.fields is None else "POST"])
    for path, handler, access in _pages(service):
        app.add_route(path, handler, methods=["GET", "POST"] if path == "/ping" else ["GET"])
        paths[path] = access
    return paths


async def _planned(service: Service, endpoint: Endpoint, request: Request) -> Response:
    """What the model computes, whole or as events."""
    assert endpoint.plan is not None, "an endpoint with a plan"
    body = await _body(service, endpoint, request)
    call = await service.begin(endpoint.plan, body, endpoint.words)
    if call.plan.writer is not None and body.get("stream"):
        return EventStream(call, service)
    try:
        outputs = await service.outputs(call.collector.wait_async(), gone(request.receive))
    finally:
        service.end(call)
    return json_response(call.plan.whole(outputs))


async def _called(service: Service, endpoint: Endpoint, request: Request) -> Response:
    """What the engine is asked or told."""
    assert endpoint.call is not None, "an endpoint with a call"
    body = await _body(service, endpoint, request)
    found = await service.ask(partial(endpoint.call, service, body), body, endpoint.words)
    if not hasattr(found, "_asdict"):
        return json_response(found)
    return json_response(found._asdict(), 200 if found.success else 400)


async def _body(service: Service, endpoint: Endpoint, request: Request) -> dict[str, Any]:
    if endpoint.fields is None:
        return {}
    return await read_json(request, service.config, may_be_empty=endpoint.access is not Access.KEY)


def json_response(value: Any, status: int = 200) -> Response:
    """A value as JSON; what JSON does not know is written as text."""
    return Response(json.dumps(value, default=str), status, media_type="application/json")


def _pages(service: Service) -> list[tuple[str, Callable[..., Any], Access]]:
    """What the server tells about itself."""

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(service.cards().values())})

    async def model(request: Request) -> Response:
        return JSONResponse(service.card(request.path_params["name"]))

    async def health(request: Request) -> Response:
        wrong = await service.healthy()
        if wrong is not None:
            raise ApiError(503, wrong, code="unavailable")
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(await service.metrics(), media_type=CONTENT_TYPE)

    async def schema(request: Request) -> Response:
        return JSONResponse(open_api("fengine"))

    async def docs(request: Request) -> Response:
        return get_swagger_ui_html(openapi_url="/openapi.json", title="fengine", swagger_favicon_url="data:,")

    return [
        ("/v1/models", models, Access.KEY), ("/v1/models/{name:path}", model, Access.KEY),
        ("/health", health, Access.OPEN), ("/ping", health, Access.OPEN), ("/metrics", metrics, Access.KEY),
        ("/openapi.json", schema, Access.OPEN), ("/docs", docs, Access.OPEN),
    ]  # fmt: skip


async def gone(receive: Receive) -> None:
    """Returns when the client has gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A call's events as they come; in one piece for HTTP/1.0, which knows no chunks. The call ends with its events, or
    when the client goes."""

    media_type = "text/event-stream"

    def __init__(self, call: Call, service: Service) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.call, self.service = call, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self.call
        assert call.plan.writer is not None, "a plan of a stream"
        found, watch = events(call.collector, call.plan.writer), asyncio.create_task(gone(receive))
        watch.add_done_callback(lambda _: call.collector.abort())  # which ends the events
        try:
            if scope["http_version"] == "1.0":
                whole = b"".join([piece async for piece, _ in found])
                await Response(whole, headers=self.headers, media_type=self.media_type)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece, more in found:
                await send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            watch.cancel()
            self.service.end(call)


async def _refuse(request: Request, error: Exception) -> Response:
    """Every error as OpenAI's body; under Anthropic's paths as Anthropic's."""
    if isinstance(error, (ClientDisconnect, ClientGone)):
        return Response(status_code=CLOSED_BY_CLIENT)
    if isinstance(error, HTTPException):
        allowed = (error.headers or {}).get("Allow")
        said = {404: f"there is no {request.url.path!r:.200} here.", 405: f"this path takes {allowed} only."}
        error = ApiError(error.status_code, said.get(error.status_code, str(error.detail)), headers=error.headers)
    refusal = api_error_of(error)
    body, path = refusal.body(), request.url.path
    if path.startswith("/v1/messages"):
        body = messages.error_body(refusal)
    elif path in FLAT:
        kind = "BadRequestError" if refusal.status == 400 else "InternalServerError"
        body |= body["error"] | {"object": "error", "type": kind, "code": refusal.status}
    return JSONResponse(body, refusal.status, headers=dict(refusal.headers))
