"""A delta as a file: what it holds, and whether it is the one that a manifest names."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from deltawire.core.change import RegionMoves
from deltawire.core.codecs import ENCODINGS
from deltawire.core.digest import StateDigest
from deltawire.core.errors import DigestMismatch, ForeignObject, SchemaMismatch
from deltawire.core.schema import Schema, TensorSpec
from deltawire.core.sparse import BASE_DIGEST, DIGEST, DeltaClaim, DeltaWriter, encode_block, open_delta
from support import Bag, diff, encoded, moved_bag, opened, random_bag

SCHEMA = Schema.build([TensorSpec("a", "BF16", (40, 70)), TensorSpec("b", "F32", (9,))])
CLAIM = DeltaClaim("run", 4, 5, StateDigest(1, 2), StateDigest(3, 4))
SAID = {
    "run": "run",
    "base_version": "4",
    "model_version": "5",
    DIGEST: str(CLAIM.digest),
    BASE_DIGEST: f"{4:016x}{3:016x}",
}


def bags() -> tuple[Bag, Bag]:
    old = random_bag(SCHEMA, 1)
    return old, moved_bag(old, 2, 0.2)


def file_with(**said: str) -> bytes:
    old, new = bags()
    with DeltaWriter("packed") as writer:
        for block in diff(old, new):
            writer.add(encode_block(block, "packed", old.region))
        return b"".join(writer.finish({k: v for k, v in (SAID | said).items() if v}).chunks())


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_blocks_say_what_they_change_before_they_are_read(encoding: str) -> None:
    old, new = bags()
    file = opened(encoded(old, diff(old, new), encoding), SCHEMA)
    for block, changes in zip(file.blocks, file.changes(old.bits), strict=True):
        assert [(c.region.tensor, c.count) for c in changes] == [(r.tensor, count) for r, count in block.regions]
        found = file.read(block)
        if isinstance(found, list):
            assert all(isinstance(moves, RegionMoves) for moves in found)
    live = {name: bits.copy() for name, bits in old.tensors.items()}
    written = [change for changes in file.changes(live.__getitem__, write=True) for change in changes]
    assert all(np.array_equal(live[name], bits) for name, bits in new.tensors.items())
    for change in written:
        change.undo(live[change.region.tensor.name])
    assert all(np.array_equal(live[name], bits) for name, bits in old.tensors.items())


@pytest.mark.parametrize(
    ("said", "claim", "error"),
    [
        ({}, {}, None),
        ({DIGEST: "", BASE_DIGEST: ""}, {}, None),  # the manifest decides
        ({}, {"base_digest": None}, None),
        ({"run": "other"}, {}, ForeignObject),
        ({"base_version": "3"}, {}, ForeignObject),
        ({"model_version": "6"}, {}, ForeignObject),
        ({DIGEST: "0" * 32}, {}, DigestMismatch),
        ({BASE_DIGEST: "0" * 32}, {}, DigestMismatch),
    ],
    ids=str,
)
def test_a_delta_is_the_one_its_manifest_names(said: dict, claim: dict, error: type[Exception] | None) -> None:
    blob = file_with(**said)

    def attempt() -> None:
        expected = msgspec.structs.replace(CLAIM, **claim)
        open_delta(lambda start, length: blob[start : start + length], len(blob), SCHEMA, expected)

    if error is None:
        attempt()
    else:
        with pytest.raises(error):
            attempt()


def test_a_delta_of_another_model_is_refused() -> None:
    other = Schema.build([TensorSpec("a", "BF16", (70, 40)), TensorSpec("b", "F32", (9,))])
    with pytest.raises(SchemaMismatch):
        opened(file_with(), other)
