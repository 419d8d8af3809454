"""OpenAI's batch format: one request a line, {"custom_id", "method", "url", "body"}. No torch.

What of a body would change the answer is honoured or refused by name; the body's "model" is kept and not compared,
since a run has one model.
"""

from typing import Any

URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
SAMPLING = {  # body key -> fengine's
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop",
    "seed": "sampling_seed",
}
HARMLESS = {"model", "user", "metadata", "store", "service_tier", "logprobs", "top_logprobs", "stream_options"}
OFF: dict[str, tuple[Any, ...]] = {  # keys that may only say what would happen anyway
    "n": (1,),
    "stream": (False,),
    "echo": (False,),
    "best_of": (1,),
    "logit_bias": ({},),
    "tools": ([],),
    "response_format": ({"type": "text"},),
}
Parsed = tuple[int, dict[str, Any] | str]  # line; columns, or what is wrong


def from_openai(line: Parsed) -> Parsed:
    """The request with what a task reads beside it: "messages" or "prompt" or "input_ids", and "sampling". Pure."""
    number, request = line
    if isinstance(request, str):
        return line
    url, body = request.get("url"), request.get("body")
    problem = None
    if request.get("method", "POST") != "POST":
        problem = f"method must be POST, got {request['method']!r:.40}"
    elif not isinstance(url, str) or url not in URLS:
        problem = f"url must be one of {', '.join(URLS)}, got {url!r:.80}"
    elif not isinstance(body, dict):
        problem = f"body must be a JSON object, got {type(body).__name__}"
    else:
        problem = _wrong_body(body, URLS[url])
    if problem is not None or not isinstance(body, dict):
        return number, f"line {number} ({request.get('custom_id')!r:.80}): {problem}"
    name = URLS[str(url)]
    asked = {"input_ids" if name == "prompt" and isinstance(body[name], list) else name: body[name]}
    given = {SAMPLING[key]: value for key, value in body.items() if key in SAMPLING and value is not None}
    return number, {**request, **asked, "sampling": given}


def _wrong_body(body: dict[str, Any], name: str) -> str | None:
    """What is wrong with a body, or None. Values of sampling are checked by the engine. Pure."""
    if body.get(name) is None:
        return f"body has no {name!r}"
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        return "body has both max_tokens and max_completion_tokens; give one"
    for key, value in body.items():
        if value is None or key == name or key in SAMPLING or key in HARMLESS:
            continue
        if key not in OFF:
            return f"body.{key} is not supported"
        if not any(value == allowed and type(value) is type(allowed) for allowed in OFF[key]):
            return f"body.{key}={value!r:.40} is not supported"
    return None
