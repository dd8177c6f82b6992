"""Line charts as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 560, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 30, 24
_COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed")


def chart(title: str, lines: Mapping[str, Points], across: str, *, marks: Points = (), top: float | None = None) -> str:
    """Draw named lines over one axis; `marks` are single points. Returns "" if there are no points."""
    every = [point for points in lines.values() for point in points] + [*marks]
    if not every:
        return ""
    last = max(x for x, _ in every) or 1.0
    high = top or 1.08 * max(y for _, y in every) or 1.0
    edge = _WIDTH - _RIGHT

    def place(x: float, y: float) -> tuple[str, str]:
        right = _LEFT + x / last * (edge - _LEFT)
        down = _HEIGHT - _BOTTOM - y / high * (_HEIGHT - _BOTTOM - _TOP)
        return f"{right:.1f}", f"{down:.1f}"

    parts = [_text(_LEFT, 16, title, "font-weight:600")]
    for value in (0.0, high / 2, high):
        _, down = place(0, value)
        parts.append(f'<line x1="{_LEFT}" x2="{edge}" y1="{down}" y2="{down}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, float(down) + 4, number(value), "text-anchor:end"))
    parts.append(_text(edge, _HEIGHT - 6, f"{across}, to {number(last)}", "text-anchor:end"))
    for at, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[at % len(_COLOURS)]
        path = " ".join(",".join(place(x, y)) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(_text(edge - 110 * at, 16, name, f"text-anchor:end;fill:{colour}"))
    for x, y in marks:
        right, down = place(x, y)
        parts.append(f'<circle cx="{right}" cy="{down}" r="4" fill="{_COLOURS[1]}"><title>{number(y)}</title></circle>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">{"".join(parts)}</svg>'


def number(value: float | None) -> str:
    """Format a number for people: three significant digits, counts in full."""
    if value is None:
        return "–"
    return f"{value:,.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" style="{style}">{escape(text)}</text>'
