"""The page at /docs: every path with the fields of its body, from the schema that /openapi.json tells. It needs no
network beside the server and runs no script, so that a server without a way out has it, too. Pure."""

import json
from functools import cache
from html import escape
from typing import Any

from fengine.server.endpoints import open_api

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>fengine: the server's paths</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; --soft: light-dark(#5a5d66, #a2a6b1); --line: light-dark(#d8d8d2, #33353d);
  --sunk: light-dark(#f0f0ed, #232429); --accent: light-dark(#2f54c8, #92a8ff); }
body { margin: 0 auto; max-width: 960px; padding: 24px 20px 64px; overflow-wrap: anywhere;
  font: 15px/1.5 ui-sans-serif, system-ui, sans-serif; background: light-dark(#fff, #131417);
  color: light-dark(#1c1d21, #e9eaee); }
h1 { font-size: 24px; margin: 0; } a { color: var(--accent); } p, .soft { color: var(--soft); }
details { border-top: 1px solid var(--line); } summary { cursor: pointer; padding: 9px 0; }
summary:focus-visible, a:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
code { font: 0.92em ui-monospace, Menlo, Consolas, monospace; } summary code { font-weight: 650; }
b { display: inline-block; min-width: 3.2em; font-size: 12px; color: var(--accent); }
dl { margin: 0 0 16px; padding: 4px 14px; background: var(--sunk); border-radius: 8px; }
dt { padding-top: 8px; } dd { margin: 0; padding-bottom: 8px; } dd + dt { border-top: 1px solid var(--line); }
</style></head><body><main>
"""


@cache
def page(root: str = "") -> str:
    """HTML. `root` is where the server lies below another one."""
    told = open_api("fengine", root)
    title = f"<h1>fengine {escape(told['info']['version'])}</h1>\n"
    about = (
        "<p>Paths of this server, and the fields of their bodies. As data: <a href='openapi.json'>openapi.json</a>. "
        "With a key: <code>Authorization: Bearer KEY</code>.</p>\n"
    )
    paths = "".join(_path(path, *one) for path, methods in told["paths"].items() for one in methods.items())
    return f"{HEAD}{title}{about}{paths}</main></body></html>\n"


def _path(path: str, method: str, told: dict[str, Any]) -> str:
    schema = told.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    fields = "".join(_field(name, one) for name, one in schema.get("properties", {}).items())
    body = f"<dl>{fields}</dl>" if fields else "<p>No body.</p>" if not schema else "<p>No fields of its own.</p>"
    head = f"<b>{method.upper()}</b> <code>{escape(path)}</code> <span class='soft'>{escape(told['summary'])}</span>"
    return f"<details><summary>{head}</summary>{body}</details>\n"


def _field(name: str, told: dict[str, Any]) -> str:
    kind = told.get("type", "")
    facts = [" or ".join(kind) if isinstance(kind, list) else kind]
    facts += [" | ".join(map(str, told["enum"]))] if "enum" in told else []
    facts += [f"{word} {told[key]:,}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in told]
    facts += [f"default {json.dumps(told['default'])}"] if "default" in told else []
    line = " · ".join(filter(None, facts))
    head, text = f"<code>{escape(name)}</code> <span class='soft'>{escape(line)}</span>", told.get("description", "")
    return f"<dt>{head}</dt><dd>{escape(text)}</dd>"
