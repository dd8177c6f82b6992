"""A version that is made ready in portions gives the bits that one gives which is made ready at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from deltawire import kernels  # noqa: E402
from deltawire.core.change import compare, whole  # noqa: E402
from deltawire.core.schema import Schema, TensorSpec  # noqa: E402
from deltawire.engines.live import arrays  # noqa: E402
from deltawire.models import torch_dtype  # noqa: E402
from deltawire.replica import portions  # noqa: E402
from deltawire.replica.device import DeviceShard, DeviceWeights  # noqa: E402
from deltawire.replica.moves import DevicePieces  # noqa: E402
from deltawire.replica.portions import Patch, Room  # noqa: E402
from deltawire.replica.shard import Piece, PieceChange  # noqa: E402
from deltawire.replica.target import write_or_undo  # noqa: E402
from support import Bag, diff, encoded, moved_bag, opened, random_bag  # noqa: E402

SPECS = [
    TensorSpec("embed", "BF16", (700, 256)),
    *(TensorSpec(f"expert.{n}", "BF16", (64, 96)) for n in range(9)),
    TensorSpec("codes", "F8_E4M3", (300, 300)),
    TensorSpec("scales", "F32", (3, 3)),
    TensorSpec("norm", "BF16", (256,)),
]
SCHEMA = Schema.build(SPECS)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
ROOMS = (None, 0, 500_000)
"""For all of a version, for none of it, and for some."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "_LEAST_CHANGES", 500)


class Model:
    def __init__(self, bag: Bag, device: str, room: int | None) -> None:
        self.live = {
            t.name: torch.from_numpy(bag.bits(t.name).view(np.uint8).copy()).view(torch_dtype(t.dtype)).to(device)
            for t in SCHEMA.tensors
        }
        self.pieces = [Piece(whole(t), self.live[t.name].reshape(whole(t).rows, -1)) for t in SCHEMA.tensors]
        self.shard = DeviceShard(self.pieces, room=room)
        self.groups = [number % 2 for number in range(len(self.pieces))]

    def holds(self, bag: Bag) -> bool:
        return all(
            np.array_equal(self.live[t.name].cpu().view(torch.uint8).numpy(), bag.bits(t.name).view(np.uint8))
            for t in SCHEMA.tensors
        )

    def staged(self, blob: bytes, folder: Path) -> Patch:
        """What a rank does with a delta: the moves of its pieces come in a file."""
        cutter, cut, tiles = DevicePieces([piece.region for piece in self.pieces]), [], []
        file = opened(blob, SCHEMA)
        for block in file.blocks:
            moves, of_block = cutter.cut(file.read(block))
            cut += moves
            tiles += of_block
        parts, made = cutter.join(cut, lambda shapes: arrays.create(folder / "moves", shapes))
        del made
        if not tiles:
            return self.shard.receive(arrays.open_stored(folder / "moves"), parts, {}, {})
        from deltawire.core.codecs.context.decoder import decode_ranks, join_ranks, make_sheet

        sheet = make_sheet(tiles)
        arrays.write(folder / "ranks", join_ranks(tiles, decode_ranks(tiles, self.shard.count(sheet))))
        stored = arrays.open_stored(folder / "moves")
        return self.shard.receive(stored, parts, sheet, arrays.open_stored(folder / "ranks"))

    def expect(self, patch: Patch, old: Bag, new: Bag) -> None:
        """Predict, write, prove, and take back twice: an engine that failed asks all ranks, also those that did."""
        present, shifts = self.shard.digests(self.groups), self.shard.shifts(patch, self.groups)
        assert self.holds(old)
        self.shard.write(patch)
        assert self.holds(new)
        assert self.shard.digests(self.groups) == {group: present[group] + shifts[group] for group in present}
        for _ in range(2):
            self.shard.undo(patch)
            assert self.holds(old)
        self.shard.write(patch)
        assert self.holds(new)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("encoding, density", [("packed", 0.02), ("packed", 0.3), ("raw", 0.02), ("context", 0.02)])
def test_a_delta(tmp_path: Path, device: str, room: int | None, encoding: str, density: float) -> None:
    old = random_bag(SCHEMA, 1)
    new = moved_bag(old, 2, density)
    model = Model(old, device, room)
    patch = model.staged(encoded(old, diff(old, new), encoding), tmp_path)
    assert bool(patch._here) == (room != 0)
    assert bool(patch._away) == (room == 0 or (room is not None and density == 0.3))
    assert (len(patch._here) + len(patch._away) > 2) == (room is not None)
    model.expect(patch, old, new)


@given(room=st.integers(0, 300_000), least=st.integers(1, 3000), density=st.floats(0.0005, 0.5), seed=st.integers(0, 9))
def test_any_room(tmp_path_factory: pytest.TempPathFactory, room: int, least: int, density: float, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(portions, "_LEAST_CHANGES", least)
        old = random_bag(SCHEMA, seed)
        new = moved_bag(old, seed + 1, density)
        model = Model(old, "cpu", room)
        patch = model.staged(encoded(old, diff(old, new), "packed"), tmp_path_factory.mktemp("any"))
        kept = sum(portion.changed.nbytes for portion in patch._here)
        assert kept <= room
        # of a tile there is always one portion
        assert all(p.changed.count <= max(least, 1 << 16) for p in (*patch._here, *patch._away))
        model.expect(patch, old, new)


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("way", ["compared", "changes"])
def test_full_weights_and_changes_of_this_process(way: str, room: int | None) -> None:
    old = random_bag(SCHEMA, 3)
    new = moved_bag(old, 4, 0.1)
    model = Model(old, "cpu", room)
    if way == "compared":
        patch = model.shard.compare(new)
    else:
        changes = [compare(p.region, old.region(p.region), new.region(p.region)) for p in model.pieces]
        patch = model.shard.prepare([PieceChange(number, change) for number, change in enumerate(changes)])
    assert (len(patch._here) + len(patch._away) > 2) == (room is not None)
    model.expect(patch, old, new)


@pytest.mark.parametrize("room", [0, 500_000])
def test_a_portion_that_fails_takes_all_back(tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one of them in turn, also where it has written half of itself."""
    old = random_bag(SCHEMA, 5)
    new = moved_bag(old, 6, 0.3)
    model, failing = Model(old, "cpu", room), [0]
    prepare = kernels.prepare_apply

    def faulty(*args: Any, **options: Any) -> Callable[[], None]:
        write = prepare(*args, **options)

        def fail() -> None:
            write()
            failing[0] -= 1
            if not failing[0]:
                raise RuntimeError("a fault that a test asked for")

        return fail

    monkeypatch.setattr(kernels, "prepare_apply", faulty)
    patch = model.staged(encoded(old, diff(old, new), "packed"), tmp_path)
    count = len(patch._here) + len(patch._away)
    assert count > 4
    for number in range(1, count + 1):
        failing[0] = number
        with pytest.raises(RuntimeError, match="asked for"):
            write_or_undo(lambda: model.shard.write(patch), None, lambda: model.shard.undo(patch))
        assert model.holds(old)
    failing[0] = 0
    model.expect(patch, old, new)


def test_versions_that_are_about_equally_dense_are_cut_alike() -> None:
    """So that what is prepared for their portions is prepared once."""
    room = Room(64 << 20, 2)
    tiles = 400_000
    cuts = {
        tuple(room.cut(np.linspace(0, changes, tiles + 1).astype(np.int64)))
        for changes in range(2_000_000, 3_000_000, 100_000)
    }
    assert len(cuts) == 2
    assert max(map(len, cuts)) == 8


def test_what_changes_little_is_not_cut_as_small_as_what_changes_much() -> None:
    """In an fp8 run, embeddings in bf16 change thirty times as densely as codes."""
    room = Room(64 << 20, 2)
    tiles, dense = 1 << 12, 1 << 5
    changes = np.full(tiles, 50)
    changes[:dense] = 200_000
    ends = np.append(0, np.cumsum(changes))
    found = room.cut(ends)
    edges = [0, *(last for _, last in found)]
    assert found == list(pairwise(edges))
    assert edges[-1] == tiles
    assert all(ends[last] - ends[first] <= room.at_once for first, last in found)
    # tiles of 200,000 changes in pairs, and all others in seven stretches
    assert len(found) == dense // 2 + 7


def test_an_untouched_stretch_is_no_portion() -> None:
    assert Room(0, 2).cut(np.array([0, 0, 0, 900, 900])) == [(2, 3)]


def test_the_default_follows_the_weights() -> None:
    assert portions.room_beside(61 * 10**9, None) == 915_000_000
    assert portions.room_beside(10**9, None) == portions.LEAST_BYTES
    assert portions.room_beside(10**12, 0.25) == 250_000_000


def test_a_model_of_this_process_takes_what_it_needs() -> None:
    weights = {t.name: torch.zeros(t.shape, dtype=torch_dtype(t.dtype)) for t in SCHEMA.tensors}
    pieces = [Piece(whole(t), weights[t.name].reshape(whole(t).rows, -1)) for t in SCHEMA.tensors]
    old, new = (
        Bag(SCHEMA, {t.name: np.full(t.units, fill, f"u{t.unit_size}") for t in SCHEMA.tensors}) for fill in (0, 1)
    )
    model = DeviceWeights(SCHEMA, pieces)
    patch = model.prepare(model.decode([opened(encoded(old, diff(old, new), "raw"), SCHEMA)]))
    assert not patch._away
