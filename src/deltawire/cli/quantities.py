"""Parse numbers with units as people type them: 405B, 1Gbit, 2GB/s, 1h. Used as `parser=` of options."""

from __future__ import annotations

import math
import re

from typer import BadParameter

_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(.*?)\s*", re.DOTALL)
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
_TIMES = {"ms": 1e-3, "": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_RATE = re.compile(r"([kmgt]i?|)(bit|bits|b|byte|bytes)(?:/s|ps)?", re.IGNORECASE)


def count(text: str) -> float:
    """Parse a count: 405e9, 405B, 7B, 600M."""
    number, unit = _split(text)
    if unit.lower() not in _COUNTS:
        raise BadParameter(f"{text!r} is not a count: write it as 405e9, 405B or 600M")
    return number * _COUNTS[unit.lower()]


def rate(text: str) -> float:
    """Parse a rate into bytes per second: 1Gbit, 100Mbit/s, 10Gbps, 2GB/s. "bit", "bps" and a small "b" are bits."""
    number, unit = _split(text)
    match = _RATE.fullmatch(unit)
    if match is None or number <= 0:
        raise BadParameter(f"{text!r} is not a rate: write it as 1Gbit, 100Mbit/s or 2GB/s")
    bits = "bit" in match[2].lower() or match[2] == "b" or unit.endswith("bps")
    return number * _PREFIXES[match[1].lower()] / (8 if bits else 1)


def seconds(text: str) -> float:
    """Parse a duration into seconds: 90, 90s, 30min, 1h, 2d."""
    number, unit = _split(text)
    if unit.lower() not in _TIMES:
        raise BadParameter(f"{text!r} is not a time: write it as 90s, 30min, 1h or 2d")
    return number * _TIMES[unit.lower()]


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(str(text))
    number = float(match[1]) if match else math.nan
    if match is None or not math.isfinite(number):
        raise BadParameter(f"{text!r} does not begin with a number")
    return number, match[2]
