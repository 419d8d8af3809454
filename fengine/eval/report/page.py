"""Data → one HTML file that needs nothing else: styles and scripts of this folder are put into it. No torch.

A content security policy in the page lets it run this one script (by its SHA-256) and fetch nothing at all, whatever
texts the data holds; the script itself never makes markup of them.
"""

import base64
import hashlib
from pathlib import Path
from typing import Any

from fengine.eval.report.plain import script_json

STYLES = ("page.css", "views.css")
SCRIPTS = "base chart heat row rows summary schedule pages session compare sweep main".split()
HERE = Path(__file__).parent


def page(data: dict[str, Any]) -> bytes:
    """Pure but for the files of this folder."""
    script = '"use strict";\n(() => {\n' + "\n".join(_file(f"js/{name}.js") for name in SCRIPTS) + "\n})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    filled, style = _file("page.html"), "".join(map(_file, STYLES))
    for name, text in {"hash": digest, "style": style, "script": script, "data": script_json(data)}.items():
        before, mark, after = filled.partition(f"@@{name}@@")
        assert mark, name
        filled = before + text + after
    return filled.encode()


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
