"""Formats of JSON schemas: which of them the matcher holds, and patterns for the others. No torch.

The matcher takes 29 February of any year, second 60 at any minute, host names of any length and any `xn--` label; most
other formats it does not know. A pattern lets only texts of its format through, if not always all of them. A format
that JSON Schema does not know is an annotation."""

import difflib
import logging

from fengine.errors import GrammarError

logger = logging.getLogger(__name__)

_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_MONTHS = r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DATE = rf"(?:{_YEAR}-(?:{_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_AN, _ANH = "[A-Za-z0-9]", "[A-Za-z0-9-]"  # no label has "--" at its third character: those are encoded
_LABEL = f"{_AN}(?:{_AN}|{_ANH}(?:{_ANH}?{_AN}|(?:{_AN}{_ANH}|-{_AN}){_ANH}{{0,%d}}{_AN}))?"
_HOST = rf"(?:(?:{_LABEL % 58}\.){{0,2}}{_LABEL % 58}|(?:{_LABEL % 25}\.){{0,7}}{_LABEL % 25})"
_PATH = r"[A-Za-z0-9._~!$&'()*+,;=@-]"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "uuid4": "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    "byte": _BASE64,
    "base64": _BASE64,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,9}})(?:#|{_POINTER})",
    "uri-reference": rf"(?:{_PATH}+|https?://[a-z0-9]+(?:[.-][a-z0-9]+)*)?(?:/{_PATH}+)*/?"
    rf"(?:\?(?:{_PATH}|/)*)?(?:#(?:{_PATH}|/)*)?",
}
_ATOM = r"""(?:[A-Za-z0-9 _/@#%&=:;,<>!~"'-]|\\[dwsDWS.*+?^$()\[\]{}|\\/]|\.)"""
PATTERNS["regex"] = rf"\^?(?:{_ATOM}|\((?:{_ATOM}[*+?]?)+(?:\|(?:{_ATOM}[*+?]?)+)*\)[*+?]?|{_ATOM}[*+?])*\$?"
PATTERNS["iri-reference"] = PATTERNS["uri-reference"]
SAME = {"iri": "uri", "idn-email": "email"}  # every one of these is one of those
RANGES = {f"int{n}": (-(2 ** (n - 1)), 2 ** (n - 1) - 1) for n in (8, 16, 32, 64)}
RANGES |= {f"uint{n}": (0, 2**n - 1) for n in (8, 16, 32, 64)} | {"uint": (0, 2**32 - 1)}
FREE = ("float", "double", "binary", "password", "path")  # say nothing about a JSON text
HELD = ("duration", "email", "ipv4", "ipv6", "uuid", "uri")  # by the matcher itself
FORMATS = tuple(sorted({*PATTERNS, *SAME, *RANGES, *FREE, *HELD}))
_NEVER = ("uri-template",)


def check(name: str, at: str) -> None:
    """Errors: GrammarError for a format that is not held, and for a near miss of one. Pure but for the log."""
    if name in FORMATS:
        return
    if name in _NEVER or difflib.get_close_matches(name.lower().replace("_", "-"), FORMATS, n=1, cutoff=0.8):
        raise GrammarError(f"json_schema: format {name!r:.80} at {at} is not supported; {', '.join(FORMATS)} are")
    logger.info("json_schema: format %r at %s is none of JSON Schema, and is ignored.", name[:80], at)
