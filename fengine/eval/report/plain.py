"""Values as a page may hold them: JSON that no HTML parser can misread, short texts, small numbers. Pure; no torch."""

import json
import math
import re
import sys
from typing import Any

# What would end a script element or a line of JavaScript, or is no text in UTF-8.
_UNSAFE = re.compile("[<>&\u2028\u2029\x7f\ud800-\udfff]")
_WIDE = re.compile("[\u2028\u2029\ud800-\udfff]")  # of these, the ones of three bytes
EXACT = 2**53  # above it a number of JavaScript is not exact


def script_json(value: Any) -> str:
    """JSON for a `<script type="application/json">`, which encodes to UTF-8 whatever texts it holds. Pure.

    Errors: ValueError for NaN and infinities.
    """
    return _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", _json(value))


def size(value: Any) -> int:
    """Bytes of `script_json`, which it does not make. Pure."""
    text = _json(value)
    raw = text.encode("utf-8", "surrogatepass")
    return len(raw) + 5 * sum(map(raw.count, (b"<", b">", b"&", b"\x7f"))) + 3 * len(_WIDE.findall(text))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def cut(text: str, most: int | None) -> str:
    """At most `most` characters, with a word about the rest. Pure."""
    if most is None or len(text) <= most:
        return text
    return f"{text[:most]} … ({len(text) - most:,} more characters)"


def number(value: Any, digits: int = 4) -> float | None:
    """Rounded; None for what is no finite number. Pure."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        return None
    found = round(value, digits)
    return int(found) if abs(found) < EXACT and found == int(found) else found


def told(value: Any) -> str:
    """Any JSON value as a text for readers. Pure."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def scalar(value: Any) -> float | int | bool | str | None:
    """A score as it is, where JavaScript can hold it, else as a text. Pure."""
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, int) and abs(value) < EXACT else told(value)


def mapping(value: Any) -> dict[str, Any]:
    """The value, if it is an object; else an empty one. Pure."""
    return value if isinstance(value, dict) else {}


def plain(value: Any, deep: int = 6) -> Any:
    """A JSON value of a file that anybody may have written, with bounds. Pure."""
    if isinstance(value, dict) and deep:
        return {cut(str(k), 100): plain(v, deep - 1) for k, v in list(value.items())[:200]}
    if isinstance(value, list) and deep:
        return [plain(v, deep - 1) for v in value[:200]]
    found = value if isinstance(value, (dict, list)) else scalar(value)
    return found if isinstance(found, (bool, int, float)) or found is None else cut(told(found), 1000)
