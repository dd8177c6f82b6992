"""Line charts as SVG text."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from deltawire_wordle.charts import chart, number


def test_a_chart_is_xml_with_a_line_for_each_name() -> None:
    svg = chart("a < b", {"one": [(0, 1), (10, 5)], "two": [(0, 0)]}, "step", marks=[(10, 3)])
    root = ElementTree.fromstring(svg)
    assert [len(line.get("points", "").split()) for line in root.iter("polyline")] == [2, 1]
    assert len([*root.iter("circle")]) == 1
    assert "a < b" in [text.text for text in root.iter("text")]


def test_points_lie_within_the_picture() -> None:
    root = ElementTree.fromstring(chart("t", {"": [(x, x * x) for x in range(100)]}, "x"))
    width, height = (float(root.get(side, "0")) for side in ("width", "height"))
    (line,) = root.iter("polyline")
    for point in line.get("points", "").split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= width
        assert 0 <= y <= height


def test_without_points_there_is_no_chart() -> None:
    assert chart("t", {"": []}, "x") == ""


def test_numbers_as_people_read_them() -> None:
    assert [number(value) for value in (None, 3, 1234567, 0.12345, 12345.6)] == [
        "–", "3", "1,234,567", "0.123", "12,346",
    ]  # fmt: skip
