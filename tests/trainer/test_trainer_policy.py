"""`auto` picks what arrives soonest, says why, and learns from what it did."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import deltawire as dw
from deltawire.bucket.run import Run
from deltawire.core.errors import UnknownFormat
from deltawire.core.sparse import DataFile
from deltawire.trainer.policy import EncodingChooser

WEIGHTS, CHANGED = 596_000_000, 6_900_000


def file(size: int, changed: int = CHANGED) -> DataFile:
    def chunks() -> Iterator[bytes]:
        return iter(())

    return DataFile(size, "", 0, "", changed, chunks)


def after_upload(bytes_per_second: float) -> EncodingChooser:
    chooser = EncodingChooser("auto")
    choice = chooser.choose(WEIGHTS, CHANGED)
    # the encode time that was expected, so that only the link is news
    expected = chooser.estimates[choice.encoding].work(WEIGHTS, CHANGED) / 2
    chooser.learn(choice, file(8_000_000), WEIGHTS, expected, 8_000_000 / bytes_per_second)
    return chooser


def test_a_slow_link_is_worth_the_smaller_encoding() -> None:
    assert after_upload(1e6).choose(WEIGHTS, CHANGED).encoding == "context"


def test_a_fast_link_is_not() -> None:
    assert after_upload(10e9).choose(WEIGHTS, CHANGED).encoding == "packed"


def test_the_reason_names_both_and_the_link() -> None:
    why = after_upload(1e6).choose(WEIGHTS, CHANGED).why
    assert "packed" in why
    assert "Mbit/s measured" in why
    assert "assumed" in EncodingChooser("auto").choose(WEIGHTS, CHANGED).why


def test_it_learns_that_an_encoding_is_slow_here() -> None:
    chooser = after_upload(1e6)
    before = chooser.estimates["context"].seconds_per_weight
    choice = chooser.choose(WEIGHTS, CHANGED)
    chooser.learn(choice, file(6_000_000), WEIGHTS, 60.0, 6.0)
    assert chooser.estimates["context"].seconds_per_weight > 1.5 * before


def test_small_uploads_say_nothing_about_the_link() -> None:
    chooser = EncodingChooser("auto")
    chooser.learn(chooser.choose(1000, 10), file(500, 10), 1000, 0.001, 10.0)
    assert not chooser.measured


def test_a_fixed_encoding_needs_no_reason() -> None:
    choice = EncodingChooser("raw").choose(WEIGHTS, CHANGED)
    assert (choice.encoding, choice.why) == ("raw", "")


def test_unknown_encodings_are_refused_at_once() -> None:
    with pytest.raises(UnknownFormat, match="zip"):
        EncodingChooser("zip")


def test_the_choice_is_in_the_manifest_and_the_replica_follows() -> None:
    random = np.random.default_rng(0)
    weights = {"w": random.integers(0, 1 << 16, (300, 400), dtype=np.uint16)}
    with dw.Publisher("memory://auto", encoding="auto") as publisher:
        for _ in range(3):
            publisher.publish(weights)
            weights["w"].reshape(-1)[random.integers(0, weights["w"].size, 2000)] ^= 1
            publisher.flush()
        publisher.publish(weights, wait=True)
    run = Run.open("memory://auto")
    links = [run.manifest(version).link("delta", version - 1) for version in (1, 2, 3)]
    assert all(link.encoding in ("packed", "context") and "Mbit/s" in link.why for link in links)
    live = {"w": np.zeros_like(weights["w"])}
    dw.Replica("memory://auto").sync(live)
    assert np.array_equal(live["w"], weights["w"])
    assert "Mbit/s" in run.timeline(3)[2].links[0].why
