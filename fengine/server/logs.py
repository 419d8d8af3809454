"""Lines of the logger `fengine` while a server runs, as text or JSON, and the line that tells its state. No torch."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from fengine.errors import FengineError

logger = logging.getLogger("fengine.server")
RATES = {"computed_tokens": "computed", "output_tokens": "drawn"}  # counters of Engine.stats -> words of the line


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = {"time": record.created, "level": record.levelname, "logger": record.name}
        told["message"] = record.getMessage()
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)


def log_to_stderr(form: str, level: str = "info") -> None:
    """Lets what the package logs be seen. `form`: text, json or none; `level`: the least that is.

    Modifies: the logger `fengine`, unless the process has given it handlers of its own.
    """
    package = logging.getLogger("fengine")
    if form == "none" or package.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    package.addHandler(handler)
    package.setLevel(level.upper())


def status_line(stats: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> str:
    """What runs and waits, and tokens a second since `before`. Pure."""
    rates = [f"{(stats[key] - before[key]) / seconds:.0f} tokens/s {word}" for key, word in RATES.items()]
    used, total = stats["pages_used"], stats["pages_total"]
    cache = f"{100 * used / max(1, total):.0f} % of {total} pages held, {stats['pages_cached']} cached"
    return f"{stats['running']} running, {stats['waiting']} waiting; {', '.join(rates)}; {cache}"


async def report(stats: Callable[[], Mapping[str, Any]], seconds: float) -> None:
    """Logs a line every `seconds` in which something was computed, until it is cancelled or the engine has ended."""
    with suppress(FengineError):
        before, then = await asyncio.to_thread(stats), time.monotonic()
        while True:
            await asyncio.sleep(seconds)
            now, moment = await asyncio.to_thread(stats), time.monotonic()
            if now["computed_tokens"] != before["computed_tokens"]:
                logger.info("%s", status_line(now, before, moment - then))
            before, then = now, moment
