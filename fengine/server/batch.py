"""One request of OpenAI's batch format through a `Service`: the answer that a server of the same engine would give."""

import asyncio
from collections.abc import Mapping
from typing import Any

from fengine.api.io_struct import GenerateReqInput
from fengine.api.outputs import Output
from fengine.server.answers import Plan
from fengine.server.config import ServerConfig
from fengine.server.endpoints import ENDPOINTS
from fengine.server.errors import invalid, unsupported
from fengine.server.service import Service

PATHS = {path: (one.plan, one.words) for one in ENDPOINTS if one.plan and one.fields for path in one.paths}
# For files: every model name that is not an adapter's is the model's, and the caller decides how many rows are open.
CONFIG = ServerConfig(any_model_name=True, max_rows=1 << 31)


async def respond(service: Service, request: Mapping[str, Any], seed: int) -> tuple[Any, list[Output]]:
    """(the answer's body, the outputs that it is made of). `seed`: of a request that brings none. Errors: ApiError."""
    url, method, body = (request.get(name) for name in ("url", "method", "body"))
    if not isinstance(url, str) or url not in PATHS:
        raise invalid("url", f"url must be one of {', '.join(PATHS)}, got {url!r:.80}.")
    if method not in (None, "POST"):
        raise invalid("method", f"method must be POST, got {method!r:.40}.")
    if not isinstance(body, Mapping):
        raise invalid("body", f"body must be a JSON object, got {type(body).__name__}.")
    if body.get("stream"):
        raise unsupported("stream", "stream: a batch has whole answers; leave it out.")

    read, words = PATHS[url]

    def plan(service: Service, body: Mapping[str, Any]) -> Plan:
        found = read(service, body)
        if isinstance(found.request, GenerateReqInput):
            found.request.sampling_params = _seeded(found.request.sampling_params, seed)
        return found

    call = await service.begin(plan, body, words)
    try:
        outputs = await service.outputs(call, asyncio.get_running_loop().create_future())
    finally:
        service.end(call)
    return call.plan.whole(outputs), outputs


def _seeded(params: Any, seed: int) -> Any:
    """Sampling parameters with the seed where they have none. Pure."""
    if isinstance(params, list):
        return [_seeded(one, seed) for one in params]
    if isinstance(params, Mapping | None) and (params or {}).get("sampling_seed") is None:
        return {**(params or {}), "sampling_seed": seed}
    return params
