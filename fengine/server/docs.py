"""The page at /docs: every path with the fields of its body, from the schema that /openapi.json tells. It needs no
network beside the server and runs no script, so that a server without a way out has it, too. Pure."""

import json
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from fengine.server.endpoints import open_api

HEAD = Path(__file__).with_suffix(".html").read_text("utf-8")  # up to where the paths begin


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
    facts = {word: value if isinstance(value, str) else json.dumps(value) for word, value in told.items()}
    text = facts.pop("description", "")
    line = " · ".join(f"{word} {value}" for word, value in facts.items())
    return f"<dt><code>{escape(name)}</code> <span class='soft'>{escape(line)}</span></dt><dd>{escape(text)}</dd>"
