"""A server of one's own in about fifty lines: SGLang's custom-server example over fengine's `Engine`.

    pip install 'fengine[serve]'
    python scripts/custom_server.py --model-path box --port 8001
    curl localhost:8001/generate -d '{"prompt": "The capital of France is"}' -H 'Content-Type: application/json'
    curl -N localhost:8001/generate_stream -d '{"prompt": "Once upon a time"}' -H 'Content-Type: application/json'

`fengine serve` is the whole server: limits, OpenAI's API, clients that go.
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from fengine import Engine


def make_app(**settings: Any) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with Engine(**settings) as app.state.engine:
            yield

    async def refuse(request: Request, error: ValueError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 400)

    async def generate(request: Request) -> JSONResponse:
        body = await request.json()
        output = await request.app.state.engine.async_generate(body.get("prompt"), body.get("sampling_params"))
        return JSONResponse({"response": output["text"]})

    async def generate_stream(request: Request) -> StreamingResponse:
        body = await request.json()
        chunks = await request.app.state.engine.async_generate(
            body.get("prompt"), body.get("sampling_params"), stream=True
        )

        async def texts() -> AsyncIterator[str]:
            had = 0
            async for chunk in chunks:  # each holds all text so far
                yield chunk["text"][had:]
                had = len(chunk["text"])

        return StreamingResponse(texts(), media_type="text/plain")

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/generate_stream", generate_stream, methods=["POST"]),
    ]
    # fengine's errors about what a caller passed are ValueErrors, as JSON's are
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={ValueError: refuse})  # type: ignore[dict-item]


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--model-path", default="box")
    options.add_argument("--port", type=int, default=8001)
    args = options.parse_args()
    uvicorn.run(make_app(model_path=args.model_path), port=args.port)
