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
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from fengine import Engine


def make_app(**settings: Any) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with Engine(**settings) as app.state.engine:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.exception_handler(ValueError)  # fengine's errors about what a caller passed are ValueErrors, as JSON's are
    async def refuse(request: Request, error: ValueError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 400)

    @app.post("/generate")
    async def generate(request: Request) -> JSONResponse:
        body = await request.json()
        output = await app.state.engine.async_generate(body.get("prompt"), body.get("sampling_params"))
        return JSONResponse({"response": output["text"]})

    @app.post("/generate_stream")
    async def generate_stream(request: Request) -> StreamingResponse:
        body = await request.json()
        chunks = await app.state.engine.async_generate(body.get("prompt"), body.get("sampling_params"), stream=True)

        async def texts() -> AsyncIterator[str]:
            had = 0
            async for chunk in chunks:  # each holds all text so far
                yield chunk["text"][had:]
                had = len(chunk["text"])

        return StreamingResponse(texts(), media_type="text/plain")

    return app


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--model-path", default="box")
    options.add_argument("--port", type=int, default=8001)
    args = options.parse_args()
    uvicorn.run(make_app(model_path=args.model_path), port=args.port)
