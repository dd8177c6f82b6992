"""A delta, decoded once without weights and made ready where the weights are, gives what a fresh load gives."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

from test_placement import Ranks  # noqa: E402

from deltawire import kernels  # noqa: E402
from deltawire.core.digest import StateDigest  # noqa: E402
from deltawire.core.sparse import DeltaClaim  # noqa: E402
from deltawire.engines.live import arrays, messages  # noqa: E402
from deltawire.engines.live import decoder as decoding  # noqa: E402
from deltawire.engines.live.decoder import Decoder, DecoderError, _Process  # noqa: E402
from deltawire.engines.live.messages import Open, Read  # noqa: E402
from deltawire.replica import device, portions  # noqa: E402
from deltawire.replica.device import DeviceShard  # noqa: E402
from support import diff, encoded, moved_bag, random_bag  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_programs")

SIZES = {"hidden": 512, "ffn": 1024, "heads": 8, "kv": 4, "vocab": 512, "layers": 1}


CLAIM = DeltaClaim("a run", 3, 4, StateDigest(1, 2))
SAID = {"run": "a run", "base_version": "3", "model_version": "4"}


def opening(ranks: Ranks) -> Open:
    return Open(ranks.schema, [[piece.region for piece in shard.pieces] for shard in ranks.shards])


@pytest.mark.parametrize("encoding, density", (("raw", 0.01), ("packed", 0.01), ("context", 0.02), ("context", 0.9)))
@pytest.mark.parametrize("world, bias, room", ((1, True, None), (2, False, None), (2, False, 20_000)))
def test_ranks_receive_what_a_delta_changes(
    tmp_path: Path,
    world: int,
    bias: bool,
    room: int | None,
    encoding: str,
    density: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(portions, "_LEAST_CHANGES", 1000)
    ranks = Ranks(world, partial(DeviceShard, room=room), **SIZES, bias=bias)
    fresh = Ranks(world, **SIZES, bias=bias)
    old = random_bag(ranks.schema, 3)
    new = moved_bag(old, 4, density)
    ranks.load(old)
    fresh.load(new)
    before, delta, out = ranks.bytes(), tmp_path / "delta", str(tmp_path / "out")
    delta.write_bytes(encoded(old, diff(old, new), encoding, **SAID))
    process = _Process()
    assert process.call(opening(ranks)) == {}
    read = process.call(Read([str(delta)], CLAIM, out))
    assert "error" not in read
    assert any(read["tiles"]) == (encoding == "context" and density < 0.5)
    patches = []
    for number, shard in enumerate(ranks.shards):
        if read["tiles"][number]:
            sizes = shard.count(arrays.open_arrays(Path(f"{out}.{number}.tiles")))
            arrays.write(Path(f"{out}.{number}.sizes"), {"sizes": sizes})
    assert process.call(messages.DecodeRanks(out)) == {}
    for number, (shard, groups) in enumerate(zip(ranks.shards, ranks.layout.groups, strict=True)):
        counted = read["tiles"][number]
        present = shard.digests(groups)
        patch = shard.receive(
            arrays.open_stored(Path(f"{out}.{number}.moves")),
            read["parts"][number],
            arrays.open_arrays(Path(f"{out}.{number}.tiles")) if counted else {},
            arrays.open_stored(Path(f"{out}.{number}.ranks")) if counted else {},
        )
        shifts = shard.shifts(patch, groups)
        patches.append(patch)
        assert bool(patch._away) == (room is not None)
        assert ranks.bytes()[number] == before[number]
        shard.write(patch)
        assert shard.digests(groups) == {group: present[group] + shifts[group] for group in present}
    assert ranks.bytes() == fresh.bytes()
    assert ranks.digest() == str(new.digest())
    for shard, patch in zip(ranks.shards, patches, strict=True):
        shard.undo(patch)
    assert ranks.bytes() == before


def test_tiles_on_several_ranks_are_left_to_them(tmp_path: Path) -> None:
    """A bias is one tile, of which each rank holds a part."""
    ranks = Ranks(2, DeviceShard, **SIZES)
    old = random_bag(ranks.schema, 3)
    (tmp_path / "delta").write_bytes(encoded(old, diff(old, moved_bag(old, 4, 0.02)), "context", **SAID))
    process = _Process()
    process.call(opening(ranks))
    read = Read([str(tmp_path / "delta")], CLAIM, str(tmp_path / "out"))
    assert process.call(read) == {"cut": True}
    # opened where it is decoded, and nowhere else: so this is where another run's delta is found out
    read.claim = msgspec.structs.replace(CLAIM, run="another")
    assert process.call(read)["error"].startswith("ForeignObject")


def test_a_process_of_its_own_says_what_is_wrong_with_a_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "END_S", 120.0)
    ranks = Ranks(1, DeviceShard, **SIZES)
    (tmp_path / "delta").write_bytes(b"\0" * 100)
    decoder = Decoder(tmp_path, opening(ranks))
    try:
        with pytest.raises(DecoderError, match="HeaderError"):
            decoder.call(Read([str(tmp_path / "delta")], CLAIM, str(tmp_path / "out")), 60)
    finally:
        decoder.close()
    assert decoder._process.returncode == 0


def test_a_process_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "END_S", 0.1)
    decoder = Decoder(tmp_path, opening(Ranks(1, DeviceShard, **SIZES)))
    os.kill(decoder._process.pid, signal.SIGSTOP)
    decoder.close()
    assert decoder._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("band", (1 << 16, 1 << 24))
def test_full_weights_are_compared_where_the_weights_are(monkeypatch: pytest.MonkeyPatch, band: int) -> None:
    monkeypatch.setattr(device, "_BAND", band)
    ranks, fresh = Ranks(2, DeviceShard, **SIZES), Ranks(2, **SIZES)
    old = random_bag(ranks.schema, 7)
    new = moved_bag(old, 8, 0.05)
    ranks.load(old)
    fresh.load(new)
    before = ranks.bytes()
    patches = [shard.compare(new) for shard in ranks.shards]
    assert ranks.bytes() == before
    for shard, patch in zip(ranks.shards, patches, strict=True):
        shard.write(patch)
    assert ranks.bytes() == fresh.bytes()
    for shard, patch in zip(ranks.shards, patches, strict=True):
        shard.undo(patch)
    assert ranks.bytes() == before
    with pytest.raises(kernels.TooMany):
        ranks.shards[0].compare(random_bag(ranks.schema, 9))
