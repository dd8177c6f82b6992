"""The aligned lists of our docstrings as Markdown lists, for the API's page."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"(\w[\w ,.*/()]*?) {2,}(\S.*)$")
_MORE = re.compile(r" {8,}(\S.*)$")


class AlignedLists(griffe.Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """`name   what it is` becomes an item; lines that continue it are joined to it."""
    found: list[str] = []
    for line in text.split("\n"):
        entry, more = _ENTRY.match(line), _MORE.match(line)
        inside = bool(found) and found[-1].startswith("* ")
        if entry:
            if found and found[-1] and not inside:
                found.append("")
            found.append(f"* `{entry[1]}`: {entry[2]}")
        elif more and inside:
            found[-1] += f" {more[1]}"
        else:
            found.append(line)
    return "\n".join(found)
