"""The page as one HTML file: markup, style, scripts and, where it is a file of its own, the data.

Nothing is loaded from elsewhere: a Content-Security-Policy allows the scripts and styles of this file, by their hashes,
and requests to where the page came from. The data is JSON in a block that no browser executes.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

FRAME = "frame-ancestors 'none'"
"""What a header adds to the policy; a page cannot say it of itself."""

SCRIPTS = ("base", "charts", "panels", "lanes", "chain", "heat", "page")
"""The files of page/ that make up the page's script, in this order."""


@cache
def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _scripts() -> list[str]:
    ours = "\n".join(_read(f"page/{name}.js") for name in SCRIPTS)
    library = f"/*\n{_read('vendor/uPlot.LICENSE')}*/\n{_read('vendor/uPlot.iife.min.js')}"
    return [library, f"(() => {{\n{ours}}})();\n"]


def _styles() -> list[str]:
    return [_read("vendor/uPlot.min.css"), _read("page/page.css")]


@cache
def policy() -> str:
    """The Content-Security-Policy of the page."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, _scripts()))}",
            f"style-src {' '.join(map(_hash, _styles()))}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def html(data: bytes | None, title: str = "run", *, token: bool = False) -> str:
    """Return the page. `data` is an encoded document; without it the page asks the server it came from, where `token`
    says whether that needs one."""
    shown = title.replace("&", "&amp;").replace("<", "&lt;")
    parts = {
        "@policy@": policy(),
        "@title@": shown[:200],
        "@styles@": "".join(f"<style>{style}</style>\n" for style in _styles()),
        "@data@": embedded(data or (b'"token"' if token else b"null")),
        "@scripts@": "".join(f"<script>{script}</script>\n" for script in _scripts()),
    }
    page = _read("page/page.html")
    # cut first and then joined, so that nothing in the data can be taken for a mark
    for mark, text in parts.items():
        before, found, after = page.partition(mark)
        if not found:
            raise ValueError(f"page.html has no {mark}")
        parts[mark] = before + text
        page = after
    return "".join(parts.values()) + page


def embedded(data: bytes) -> str:
    """JSON as the content of a script block: nothing in it can end the block or begin a comment."""
    text = data.decode("utf-8")
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text
