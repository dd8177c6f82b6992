"""Skip deltas from undone changes: exactly the pattern that readers count on, and exactly the right bits."""

from __future__ import annotations

import os

import numpy as np
import pytest

from deltawire.core.added import skip_spans
from deltawire.core.change import Change, Region, compare, whole
from deltawire.core.schema import Schema, TensorSpec
from deltawire.core.sparse import DeltaWriter
from deltawire.core.state import State
from deltawire.keeper import skips as module
from deltawire.keeper.skips import ArrayFile, Reversal, SkipDelta, Skips
from support import Bag, moved_bag, opened, random_bag

SCHEMA = Schema.build([TensorSpec("a", "BF16", (12, 10)), TensorSpec("b", "F32", (7,)), TensorSpec("c", "I64", (3, 2))])


def decoded(skip: SkipDelta, base: Bag, encoding: str) -> Bag:
    with DeltaWriter(encoding) as writer:
        digest = base.digest()
        for block, step in skip.encode(encoding):
            writer.add(block)
            digest += step
        file = writer.finish({"run": "r"})
        blob = b"".join(file.chunks())
    result = base.copy()
    for changes in opened(blob, SCHEMA).changes(base.bits, threads=1):
        for change in changes:
            change.write(result.tensors[change.region.tensor.name])
    assert result.digest() == digest
    return result


def changes_between(old: Bag, new: Bag, cut: bool) -> list[Change]:
    """Of whole tensors, or of the columns that two ranks of a trainer hold."""
    found = []
    for tensor in SCHEMA.tensors:
        half = tensor.columns // 2 if cut and tensor.rows > 1 else 0
        parts = [whole(tensor)]
        if half:
            parts = [
                Region(tensor, 0, tensor.rows, 0, half),
                Region(tensor, 0, tensor.rows, half, tensor.columns - half),
            ]
        found += [compare(part, old.region(part), new.region(part)) for part in parts]
    return found


class Followed:
    def __init__(self, count: int, density: float, levels: int = 4, start: int = 0) -> None:
        self.bags = [random_bag(SCHEMA, 1)]
        for seed in range(count):
            self.bags.append(moved_bag(self.bags[-1], seed, density))
        self.state = State(SCHEMA)
        self.skips = Skips(self.state, levels)
        self.start(start)

    def start(self, version: int) -> None:
        self.take(version)
        self.skips.start(version)

    def take(self, version: int) -> None:
        for name, bits in self.bags[version].tensors.items():
            self.state.tensors[name][:] = bits

    def go(self, version: int, encoding: str = "packed", cut: bool = False) -> list[int]:
        """Go to a version; returns the bases of the skip deltas that are due, each proven."""
        assert self.skips.version is not None
        changes = changes_between(self.bags[self.skips.version], self.bags[version], cut)
        self.take(version)
        bases = []
        for skip in self.skips.reach(version, changes):
            assert decoded(skip, self.bags[skip.base], encoding) == self.bags[version]
            bases.append(skip.base)
        return bases


@pytest.mark.parametrize(("encoding", "density"), [("packed", 0.05), ("context", 0.02), ("raw", 0.5)])
def test_every_skip_delta_that_is_due_is_made_and_right(encoding: str, density: float) -> None:
    followed = Followed(70, density)
    for version in range(1, 71):
        bases = followed.go(version, encoding, cut=version % 3 == 0)
        assert sorted(version - base for base in bases) == skip_spans(version, 4)


def test_changes_that_are_not_small_are_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IN_MEMORY", 8)
    followed = Followed(20, 0.6)
    for version in range(1, 21):
        assert sorted(version - base for base in followed.go(version)) == skip_spans(version, 4)
    change = compare(whole(SCHEMA.tensors[0]), *(bag.region(whole(SCHEMA.tensors[0])) for bag in followed.bags[:2]))
    assert isinstance(Reversal.of(change, ArrayFile()).old, np.memmap)


def test_all_arrays_of_a_piece_are_in_one_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IN_MEMORY", 8)
    followed, before = Followed(23, 0.6), len(os.listdir("/proc/self/fd"))
    for version in range(1, 24):
        followed.go(version)
    pieces = sum(map(len, followed.skips._pieces))
    assert pieces == 3 + 1 + 1
    assert len(os.listdir("/proc/self/fd")) - before <= pieces


def test_it_begins_anywhere_and_makes_what_it_has_seen_the_start_of() -> None:
    followed = Followed(40, 0.05, start=18)
    for version in range(19, 41):
        expected = [span for span in skip_spans(version, 4) if version - span >= 18]
        found = sorted(version - base for base in followed.go(version))
        assert set(found) <= set(expected)
        # all short ones that start at a multiple of 4 from 20 on
        assert [s for s in expected if version - s >= 20 and s < 12] == [
            s for s in found if version - s >= 20 and s < 12
        ]


def test_after_a_restart_it_goes_in_long_pieces_and_continues_as_if_it_had_seen_all() -> None:
    followed = Followed(100, 0.03, start=0)
    while (version := followed.skips.next(90)) <= 90 and followed.skips.version != 90:
        followed.go(version)
    for version in range(91, 101):
        assert sorted(version - base for base in followed.go(version)) == skip_spans(version, 4)


def test_a_version_that_does_not_follow_starts_anew() -> None:
    followed = Followed(12, 0.05)
    for version in (1, 2):
        followed.go(version)
    assert followed.go(5) == []
    assert followed.go(6) == []
    assert followed.skips.version == 6
    assert [followed.go(version) for version in (7, 8, 9, 10)] == [[], [6, 5], [], [8]]


def test_nothing_changed() -> None:
    followed = Followed(0, 0.0)
    followed.bags = [followed.bags[0]] * 5
    assert [followed.go(version) for version in (1, 2, 3, 4)] == [[], [0], [0], [2, 1, 0]]
