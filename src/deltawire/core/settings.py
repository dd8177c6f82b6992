"""Numbers from the environment."""

from __future__ import annotations

import os

from .errors import Misconfigured


def gigabytes(variable: str, default: float) -> int:
    """An amount in bytes, from a variable that names it in gigabytes of 10⁹."""
    text = os.environ.get(variable) or str(default)
    try:
        found = int(float(text) * 1e9)
    except (ValueError, OverflowError):
        found = 0
    if found <= 0:
        raise Misconfigured(f"{variable} is {text[:40]!r}; it is a number of gigabytes, such as 20 or 0.5")
    return found
