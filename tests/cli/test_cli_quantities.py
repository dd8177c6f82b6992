"""Numbers as people type them."""

from __future__ import annotations

import pytest
import typer

from deltawire.cli.quantities import count, rate, seconds


@pytest.mark.parametrize(
    "text, expected",
    [("405e9", 405e9), ("405B", 405e9), ("7b", 7e9), ("0.6B", 6e8), ("600M", 6e8), ("1_000", 1000), ("1.5T", 1.5e12)],
)
def test_counts(text: str, expected: float) -> None:
    assert count(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("1Gbit", 125e6),
        ("100Mbit", 12.5e6),
        ("100 Mbit/s", 12.5e6),
        ("10Gbps", 1.25e9),
        ("2GB/s", 2e9),
        ("2GiB/s", 2 * 2**30),
        ("800kbit", 1e5),
        ("1Gb", 125e6),
        ("1e9B/s", 1e9),
    ],
)
def test_rates(text: str, expected: float) -> None:
    assert rate(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text, expected",
    [("90", 90), ("90s", 90), ("250ms", 0.25), ("30min", 1800), ("1h", 3600), ("2d", 172800), ("0", 0)],
)
def test_times(text: str, expected: float) -> None:
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "parse, text",
    [
        *(
            (parse, text)
            for parse in (count, rate, seconds)
            for text in ("", "x", "-1", "1e999", "nan", "1 2", "5furlong")
        ),
        (rate, "1"),
        (rate, "0Gbit"),
        (count, "1GB/s"),
        (seconds, "1B"),
    ],
)
def test_nonsense(parse: object, text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse(text)  # type: ignore[operator]
