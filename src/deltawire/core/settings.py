"""Numbers and switches from the environment."""

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


def count(variable: str, default: int) -> int:
    """A number of things, at least 1."""
    text = os.environ.get(variable) or str(default)
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise Misconfigured(f"{variable} is {text[:40]!r}; it is a whole number, 1 or more")
    return found


def switch(variable: str) -> bool:
    """Whether a variable is 1; 0 and nothing are off."""
    text = os.environ.get(variable) or "0"
    if text not in ("0", "1"):
        raise Misconfigured(f"{variable} is {text[:40]!r}; it is 1 (on) or 0 (off)")
    return text == "1"


def seconds(variable: str, default: float, most: float) -> float:
    """A time in seconds, more than 0 and at most `most`."""
    text = os.environ.get(variable) or str(default)
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= most:
        raise Misconfigured(f"{variable} is {text[:40]!r}; it is a number of seconds, more than 0, at most {most:g}")
    return found
