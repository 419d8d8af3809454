"""What an engine writes about its requests: lines in the log, and the last of them in a file when it dies."""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fengine.api.server_args import ServerArgs
from fengine.core.request import FinishReason, Request
from fengine.errors import EngineDeadError, FengineError
from fengine.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("fengine")
KEPT = 1000  # requests
SHOWN = (0, 0, 2048, None)  # characters of a text, by log_requests_level
SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password", "default_chat_template_kwargs")
PRIVATE = frozenset({"custom_params"})


class RequestLog:
    """Does what the settings ask. Thread-safe. Modifies: itself, the log, and once a file in `crash_dump_folder`."""

    def __init__(self, args: ServerArgs, tokenizer: Tokenizer | None) -> None:
        self._args, self._tokenizer = args, tokenizer
        self._last: deque[tuple[float, Request]] = deque(maxlen=KEPT)
        self._dumped = False

    def received(self, requests: Sequence[Request]) -> None:
        """Requests were queued."""
        if self._args.crash_dump_folder is not None:
            self._last.extend((time.time(), request) for request in requests)
        if self._args.log_requests:
            for request in requests:
                self._log("received", {"rid": request.rid, "prompt_tokens": request.prompt_len}, request, 0)

    def finished(self, request: Request, finish: FinishReason) -> None:
        if self._args.log_requests:
            facts = {"rid": request.rid, "completion_tokens": request.num_output, "finish_reason": finish}
            self._log("finished", facts, request, request.prompt_len)

    def _log(self, event: str, facts: dict[str, Any], request: Request, start: int) -> None:
        level, ids = self._args.log_requests_level, request.token_ids[start:]
        if level >= 1 and event == "received":
            facts["sampling_params"] = params_of(request)
        if level >= 2:
            text = repr(ids) if self._tokenizer is None else self._tokenizer.decode(ids)
            facts["text"] = text[: SHOWN[level]]
        logger.info("%s: %s", event, json.dumps(facts, default=str, ensure_ascii=False))

    def died(self, error: FengineError) -> None:
        """Writes the last requests, once: their ids and parameters, and neither keys, salts nor custom parameters."""
        folder = self._args.crash_dump_folder
        if folder is None or self._dumped or not isinstance(error, EngineDeadError):
            return
        self._dumped = True
        settings = asdict(self._args)
        settings |= {name: "(hidden)" for name in SECRETS if settings[name]}
        rows = [
            {"time": at, "rid": request.rid, "input_ids": request.token_ids[: request.prompt_len],
             "output_ids": request.token_ids[request.prompt_len :], "sampling_params": params_of(request),
             "finished": request.finish is not None}
            for at, request in list(self._last)
        ]  # fmt: skip
        found = {"error": str(error), "time": time.time(), "server_args": settings, "requests": rows}
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            path = Path(folder) / f"crash_{time.time_ns()}_{os.getpid()}.json"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                json.dump(found, file, default=str)
            logger.error("the engine died; its last %d requests are in %s", len(rows), path)
        except OSError as fault:
            logger.error("the engine died, and crash_dump_folder %r cannot be written: %s", folder, fault)


def params_of(request: Request) -> dict[str, Any]:
    """The sampling parameters that differ from their defaults, as plain values. Pure."""
    values = {f.name: getattr(request.params, f.name) for f in fields(request.params) if f.name not in PRIVATE}
    plain = (bool, int, float, str, tuple)
    defaults = type(request.params)()
    return {k: v for k, v in values.items() if isinstance(v, plain) and v != getattr(defaults, k)}
