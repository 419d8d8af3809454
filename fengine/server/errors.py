"""What a request is refused with: a status and OpenAI's error body, from this package or from an engine's error."""

import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fengine import errors

UNAVAILABLE = (errors.EngineBusyError, errors.EngineClosedError, errors.EngineDeadError, errors.MemoryReleasedError,
               errors.AbortedError, errors.QueueFullError, errors.TimedOutError)  # fmt: skip
OURS = (errors.NumericsError, errors.LogitProcessorError)  # a request failed, and not for what it asked
MAX_MESSAGE, MAX_PARAM = 2000, 80  # characters
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "response_format", "structured_outputs", "guided_json",
            "guided_regex", "guided_choice", "guided_grammar", "output_config", "text", "tools",
            "functions")  # fmt: skip
NO_FORMAT = {"type": "text"}  # a response_format, or the format of /v1/responses' text, that asks for no grammar
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
         429: "rate_limit_error"}  # fmt: skip
ANTHROPIC = TYPES | {413: "request_too_large", 503: "overloaded_error"}


class ApiError(Exception):
    """An answer other than 200. `param`: the field of the body that is to blame. `code`: OpenAI's word for the case."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}
        self.message = _shortened(message, MAX_MESSAGE)
        self.param = None if param is None else _shortened(param, MAX_PARAM)

    def body(self) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}. Pure."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Anthropic's body. Pure."""
        kind = ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def body_at(self, path: str) -> dict[str, Any]:
        """As the clients of a path read it: SGLang's the same without an "error" around it. Pure."""
        if path.startswith("/v1/messages"):
            return self.anthropic()
        kind, body = HTTPStatus(self.status).phrase.replace(" ", "").removesuffix("Error"), self.body()
        return body | body["error"] | {"object": "error", "type": f"{kind}Error", "code": self.status}


def _shortened(text: str, most: int) -> str:
    """As much of a text as an answer may hold; what UTF-8 cannot is written as escapes. Pure."""
    text = text if len(text) <= most else f"{text[:most]}…"
    return text.encode("utf-8", "backslashreplace").decode()


def api_error_of(
    error: BaseException, body: Mapping[str, Any] | None = None, words: Mapping[str, str] | None = None
) -> ApiError:
    """The refusal for an engine's error. `words`: engine's word -> the field's name in `body`. What is not fengine's
    own error is a bug: its text goes to the log alone."""
    if not isinstance(error, (ApiError, errors.FengineError)):
        logging.getLogger("fengine.server").error("internal error", exc_info=error)
        return ApiError(500, f"internal error: {type(error).__name__}; see the server's log", code="internal_error")
    message, body, words = str(error), body or {}, words or {}
    for old, new in words.items():
        message = re.sub(rf"\b{old}\b", new, message)
    if isinstance(error, ApiError):
        if error.code == "unknown_parameter":  # it names the body's own word
            return error
        param = words.get(error.param or "", error.param)
        return error if param == error.param else ApiError(error.status, message, param, error.code, error.headers)
    if isinstance(error, UNAVAILABLE):
        return ApiError(503, message, code="unavailable", headers={"Retry-After": "5"})
    if isinstance(error, OURS) or not isinstance(error, (ValueError, errors.ProfileError)):
        return ApiError(500, message, code="request_failed")
    return _refusal(error, message, body)


def _refusal(error: Exception, message: str, body: Mapping[str, Any]) -> ApiError:
    """What the caller can mend, with the field that it lies in. Pure."""
    if isinstance(error, errors.ContextLengthError):
        param = next((name for name in ("messages", "prompt", "input") if name in body), None)
        said = f"{message} Please reduce the length of the input prompt."
        return ApiError(400, said, param, "context_length_exceeded")
    if isinstance(error, errors.GrammarError):
        given = {**body, "text": text.get("format") if isinstance(text := body.get("text"), dict) else None}
        found = (name for name in GRAMMARS if given.get(name) and given[name] != NO_FORMAT)
        return ApiError(400, message, next(found, None), "invalid_value")
    code = "unsupported_feature" if isinstance(error, errors.UnsupportedFeatureError) else "invalid_value"
    return ApiError(400, message, _blamed(message, body), code)


def _blamed(message: str, body: Mapping[str, Any]) -> str | None:
    """The first word of a message that is a field of the body; rather one that is no ordinary word, if not in front."""
    found = [word for word in re.findall(r"\w+", re.sub(r"^prompt \d+: ", "", message)) if word in body]
    if not found or message.startswith(found[0]):
        return found[0] if found else None
    told = [word for word in found if word not in ("model", "prompt", "messages", "input", "stop", "n", "stream")]
    return next((word for word in (*told, *found) if word not in ("model", "n", "stream")), None)


def tokenizer_of(engine: Any) -> Any:
    """Errors: ApiError, where the engine has none."""
    if engine._parts.tokenizer is None:
        told = "this server has no tokenizer (skip_tokenizer_init): only /generate and /encode with input_ids are."
        raise ApiError(400, told, code="unsupported_feature")
    return engine._parts.tokenizer


def missing(name: str) -> ApiError:
    return ApiError(400, f"{name} is missing.", name, "missing_required_parameter")


def invalid(name: str, message: str) -> ApiError:
    return ApiError(400, message, name, "invalid_value")


def unsupported(name: str, message: str) -> ApiError:
    return ApiError(400, message, name, "unsupported_feature")
