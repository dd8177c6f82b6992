"""Targets that hold parts of a model: each fetches what changes its own, and all of them prove a version together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

import deltawire as dw
from deltawire.bucket import parts
from deltawire.core import change, full
from deltawire.core.change import Region, whole
from deltawire.core.codecs.context import cuts
from deltawire.core.digest import StateDigest
from deltawire.core.errors import HashMismatch
from deltawire.core.full import digests_of
from deltawire.core.schema import Schema, TensorSpec
from deltawire.replica.target import write_or_undo
from deltawire.store import Store
from deltawire_wordle.counting import CountingStore
from support import Bag, publish, random_bag
from tiled import moved, tiles_of, weights

SCHEMA = Schema.build([TensorSpec(f"w.{i}", "BF16", (128, 256)) for i in range(4)])
WAIT_S = 60.0


@dataclass(kw_only=True)
class Patch(dw.Staged):
    write: Callable[[], None]
    undo: Callable[[], None] | None


class Part:
    """A target of its own for each process. Sums go through a meeting of all, which breaks where one fails."""

    takes_deltas = True

    def __init__(self, regions: Sequence[Region], meeting: Meeting, number: int) -> None:
        self.regions, self._meeting, self._number = regions, meeting, number
        self.bits = {region: np.zeros(region.units, np.uint16) for region in regions}

    def holds(self) -> Sequence[Region]:
        return self.regions

    def bind(self, run: dw.Run) -> bool:
        return False

    def region(self, region: Region) -> Any:
        home = next(mine for mine in self.regions if mine.meet(region) == region)
        return self.bits[home].reshape(home.rows, home.columns)[region.within(home)].reshape(-1)

    def digest(self) -> StateDigest:
        found = digests_of(lambda _, part: self.region(part), self.regions, [0] * len(self.regions), 1)
        return self._meeting.total(self._number, found[0])

    def stage(self, update: dw.Update) -> Patch:
        changes = update.changes(self, self.regions)
        shift = sum((change.digest() for change in changes), StateDigest())
        update.require(update.before + self._meeting.total(self._number, shift))
        return Patch(update=update, write=partial(self._put, changes, "new"), undo=partial(self._put, changes, "old"))

    def swap(self, staged: Patch) -> None:
        write_or_undo(staged.write, lambda: staged.update.require(self.digest()), staged.undo)

    def _put(self, changes: Sequence[dw.Change], which: str) -> None:
        for item in changes:
            home = next(mine for mine in self.regions if mine.meet(item.region) == item.region)
            rows, columns = item.region.within(home)
            bits = self.bits[home].reshape(home.rows, home.columns)[rows, columns]
            bits[np.unravel_index(item.positions, bits.shape)] = getattr(item, which)


class Meeting:
    def __init__(self, count: int) -> None:
        self._shares = [StateDigest()] * count
        self._barrier = threading.Barrier(count, timeout=WAIT_S)

    def total(self, number: int, share: StateDigest) -> StateDigest:
        self._shares[number] = share
        self._barrier.wait()
        total = sum(self._shares, StateDigest())
        self._barrier.wait()
        return total

    def leave(self) -> None:
        self._barrier.abort()


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Blocks, parts and objects as of a large model."""
    with pytest.MonkeyPatch.context() as patch, tiles_of(1 << 11):
        for function in (change.blocks, change.pieces):
            patch.setattr(function, "__defaults__", (1 << 15,))
        patch.setattr(cuts, "PART_UNITS", 1 << 13)
        patch.setattr(full, "anchor", partial(full.anchor, part=4096))
        patch.setattr(parts, "SMALL", 0)
        patch.setattr(parts, "GAP", 0)
        yield


def bags() -> list[Bag]:
    rng = np.random.default_rng(0)
    found = [Bag(SCHEMA, {t.name: weights(rng, t.dtype, t.shape) for t in SCHEMA.tensors})]
    for _ in range(2):
        last = found[-1].tensors
        found.append(Bag(SCHEMA, {name: moved(rng, bits, np.asarray(0.1)) for name, bits in last.items()}))
    return found


def by_tensor(part: int) -> list[Region]:
    return [whole(tensor) for tensor in SCHEMA.tensors[2 * part : 2 * part + 2]]


def by_rows(part: int) -> list[Region]:
    return [Region(tensor, 64 * part, 64, 0, 256) for tensor in SCHEMA.tensors]


class World:
    def __init__(self, store: Store, cut: Callable[[int], list[Region]], encoding: str) -> None:
        self.bags = bags()
        models = [{t.name: bag.bits(t.name).reshape(t.shape) for t in SCHEMA.tensors} for bag in self.bags]
        publish(store, models, encoding=encoding, anchor_ratio=1e9)
        self.meeting = Meeting(2)
        self.parts = [Part(cut(number), self.meeting, number) for number in range(2)]
        self.stores = [CountingStore(store) for _ in range(2)]
        self.replicas = [dw.Replica(each, heartbeat=0) for each in self.stores]

    def sync(self, version: int) -> list[Any]:
        """Both at the same time; what each returned or raised."""

        def one(number: int) -> Any:
            try:
                return self.replicas[number].sync(self.parts[number], version)
            except BaseException as error:
                self.meeting.leave()
                return error

        with ThreadPoolExecutor(2) as pool:
            return [*pool.map(one, range(2))]

    def holds(self, version: int) -> None:
        for part in self.parts:
            for region, bits in part.bits.items():
                assert np.array_equal(bits, self.bags[version].region(region))


@pytest.mark.parametrize(
    "cut, encoding", [(by_tensor, "context"), (by_rows, "context"), (by_tensor, "packed"), (by_rows, "raw")]
)
def test_parts_follow_together(store: Store, cut: Callable[[int], list[Region]], encoding: str) -> None:
    world = World(store, cut, encoding)
    for version in (0, 1, 2):
        for each in world.stores:
            each.reset()
        assert world.sync(version) == [version, version]
        world.holds(version)
        link = dw.Run.open(store).manifest(version).main
        for each in world.stores:
            ranges = link.bytes if encoding == "raw" and version else 0.75 * link.bytes
            assert each.bytes_in < ranges + 20_000
    assert isinstance(world.parts[0], dw.PartTarget)


def test_all_parts_find_what_something_else_changed_in_one(store: Store) -> None:
    """What both have is no version then: both begin anew, with full weights."""
    world = World(store, by_tensor, "context")
    assert world.sync(1) == [1, 1]
    world.parts[1].bits[world.parts[1].regions[0]][0] ^= 1
    assert world.sync(2) == [2, 2]
    world.holds(2)


def test_what_is_damaged_for_one_part_is_named_there(store: Store) -> None:
    world = World(store, by_tensor, "context")
    assert world.sync(1) == [1, 1]
    (blob,) = dw.Run.open(store).manifest(2).main.objects
    data = store.get(blob.key).data
    store.put(blob.key, data[:-1] + bytes([data[-1] ^ 1]))
    failed = world.sync(2)
    assert sum(isinstance(error, HashMismatch) for error in failed) == 1
    world.holds(1)


def test_a_random_bag_is_no_version(store: Store) -> None:
    world = World(store, by_tensor, "context")
    other = random_bag(SCHEMA, 5)
    for part in world.parts:
        for region in part.regions:
            part.bits[region][:] = other.region(region)
    assert world.sync(2) == [2, 2]
    world.holds(2)
