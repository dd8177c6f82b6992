"""The encodings. One file each; adding one is a file and a line here (see CONTRIBUTING).

`raw` is laid out by tensor, which `sparse.py` does; the others code a block at a time.
"""

from __future__ import annotations

from types import ModuleType

from ..errors import UnknownFormat
from . import context, packed, planes, raw

BLOCK_ENCODINGS: dict[str, ModuleType] = {module.name: module for module in (packed, context, planes)}

ENCODINGS: tuple[str, ...] = (raw.name, *BLOCK_ENCODINGS)


def block_encoding(name: str) -> ModuleType:
    try:
        return BLOCK_ENCODINGS[name]
    except KeyError:
        raise UnknownFormat(f"encoding {name!r} is unknown here; known: {', '.join(ENCODINGS)}") from None


def work(encoding: str, units: int, changed: int) -> int:
    """How many of `units` weights coding looks at: `context` counts all of them, the others those that changed."""
    return units if encoding == context.name else changed


def check_encoding(name: str) -> None:
    """Raise UnknownFormat for a name that no encoding has. (`planes` is chosen by `context`, not by users.)"""
    if name not in ENCODINGS:
        raise UnknownFormat(f"encoding {name!r} is unknown; choose packed, context or raw")
