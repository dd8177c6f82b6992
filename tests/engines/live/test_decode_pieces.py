"""Ranks decode what they hold."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from test_placement import WORLDS, Ranks

from deltawire.core.change import whole
from deltawire.core.codecs import ENCODINGS, context
from deltawire.core.full import FullFile, anchor
from deltawire.core.sparse import DeltaFile
from deltawire.engines.live.decode_pieces import Wanted, compile_decoders
from deltawire.engines.live.placement import open_shard
from deltawire.replica import shard as shards
from deltawire.replica.device import DeviceShard
from deltawire.replica.shard import LiveShard, Piece
from support import diff, encoded, moved_bag, random_bag


@pytest.mark.parametrize("opened", (open_shard, DeviceShard))
@pytest.mark.parametrize("encoding, density", (("raw", 0.01), ("packed", 0.01), ("context", 0.01), ("context", 0.9)))
@pytest.mark.parametrize("world, fp8", [(1, False), (2, False), (4, False), (2, True)])
def test_a_patched_model_is_a_freshly_loaded_one(
    world: int, fp8: bool, encoding: str, density: float, opened: Callable[[Sequence[Piece]], LiveShard]
) -> None:
    """What a GPU does is done here by torch on the CPU: the same code, other kernels below it."""
    ranks, fresh = Ranks(world, opened, fp8=fp8), Ranks(world, fp8=fp8)
    old = random_bag(ranks.schema, 3)
    new = moved_bag(old, 4, density)
    ranks.load(old)
    fresh.load(new)
    before = ranks.bytes()
    changes = ranks.decode(encoded(old, diff(old, new), encoding))
    assert ranks.bytes() == before
    patches = [shard.prepare(mine) for shard, mine in zip(ranks.shards, changes, strict=True)]
    for shard, patch in zip(ranks.shards, patches, strict=True):
        shard.write(patch)
    assert ranks.bytes() == fresh.bytes()
    assert ranks.digest() == str(new.digest())
    for shard, patch in zip(ranks.shards, patches, strict=True):
        shard.undo(patch)
    assert ranks.bytes() == before


def test_ranks_decode_whole_tiles_alone_and_borrow_for_cut_ones() -> None:
    """Where tile lines are shard lines nobody needs anybody; a bias is one tile, of which each rank holds a part."""
    sizes = {"hidden": 512, "ffn": 1024, "heads": 8, "kv": 4, "vocab": 512, "layers": 1}
    for ranks, borrows in ((Ranks(2, **sizes, bias=False), False), (Ranks(2, **sizes), True)):
        old = random_bag(ranks.schema, 5)
        new = moved_bag(old, 6, 0.02)
        ranks.load(old)
        blob = encoded(old, diff(old, new), "context")
        file = DeltaFile(lambda start, length, b=blob: b[start : start + length], len(blob), ranks.schema)
        assert any(block.record is not None and block.record.encoding == context.name for block in file.blocks)
        borrowed = []
        for decoder in ranks.decoders:
            try:
                decoder.delta(file)
            except Wanted as wanted:
                borrowed += wanted.regions
        assert bool(borrowed) == borrows


def test_all_that_cuts_changes_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each encoding, because each has arrays of its own kind."""
    kinds: list[str] = []
    real, read = shards._cut, DeltaFile.read
    monkeypatch.setattr(DeltaFile, "read", lambda *given: (kinds.append("read"), read(*given))[1])
    monkeypatch.setattr(shards, "_cut", lambda *given: (kinds.append("cut"), real(*given))[1])
    compile_decoders()
    assert kinds == ["read", "read", "read", "cut"] * len(ENCODINGS)


def test_old_weights_of_one_piece_are_not_copied() -> None:
    ranks = Ranks(1)
    (region,) = (piece.region for piece in ranks.shards[0].pieces if piece.region.tensor.name == "0.out.weight")
    tracemalloc.start()
    try:
        assert ranks.decoders[0]._old(region, {}) is not None
        assert tracemalloc.get_traced_memory()[1] < region.units
    finally:
        tracemalloc.stop()


@WORLDS
def test_full_weights_are_loaded_or_compared(world: int) -> None:
    ranks, fresh = Ranks(world), Ranks(world)
    old = random_bag(ranks.schema, 7)
    new = moved_bag(old, 8, 0.05)
    ranks.load(old)
    fresh.load(new)
    blob = b"".join(anchor(map(whole, new.schema.tensors), new.region, {}).chunks())
    file = FullFile(lambda start, length: blob[start : start + length], len(blob))
    for shard, decoder in zip(ranks.shards, ranks.decoders, strict=True):
        shard.write(shard.prepare(decoder.full(file)))
    assert ranks.bytes() == fresh.bytes()
    ranks.load(old)
    for shard in ranks.shards:
        shard.load(file)
    assert ranks.bytes() == fresh.bytes()
