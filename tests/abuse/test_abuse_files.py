"""One abuse per test: a delta with one thing wrong raises the error of that check, and nothing is written.

Each attack meets the file alone (`deltawire.decode`), a replica with nothing to fall back on, and a replica that can
still take an anchor.
"""

from __future__ import annotations

import random
import tracemalloc
from functools import cache

import msgspec
import numpy as np
import pytest
from attacks import ATTACKS, Attack, with_bomb
from forge import ForgedRun, index_of, streams_of, with_index, with_streams

import deltawire as dw
from deltawire.bucket.fetch import fetch
from deltawire.core.codecs import BLOCK_ENCODINGS, ENCODINGS
from deltawire.core.errors import (
    CorruptStream,
    CountMismatch,
    DeltawireError,
    FormatError,
    HashMismatch,
    PositionError,
)
from deltawire.core.manifest import Blob
from deltawire.replica import Replica
from deltawire.store import Store
from support import copy, history, same

every_attack = pytest.mark.parametrize("attack", ATTACKS, ids=str)
# What is shorter than 8 bytes no manifest can name, see test_abuse_manifests; and above the file any encoding will do.
every_attack_in_a_run = pytest.mark.parametrize(
    "attack",
    [a for a in ATTACKS if a.name not in ("empty_file", "seven_bytes") and a.encoding in ("raw", "packed")],
    ids=str,
)


every_bit = pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.slow, id="every bit"), pytest.param(7, id="a bit of every byte")]
)

MEMORY = 64 << 20
"""What refusing a file of a few kilobytes may cost; every bomb here holds 256 MB. A header may be read and parsed."""


@cache
def made(attack: Attack) -> bytes:
    old, new = history(2, changes=7)
    return attack.make(dw.encode(old, new, attack.encoding))


@every_attack
def test_the_file_alone(attack: Attack) -> None:
    old = history(1)[0]
    kept = copy(old)
    blob = made(attack)
    tracemalloc.start()
    try:
        with pytest.raises(attack.error) as caught:
            dw.decode(blob, old)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(caught.value) is attack.error or attack.error is FormatError
    assert str(caught.value), "an error names the thing"
    assert len(str(caught.value)) < 2000, "and does not pour it out"
    assert same(old, kept)
    assert peak < MEMORY + 4 * len(blob)


@every_attack_in_a_run
def test_a_replica_with_nothing_to_fall_back_on(attack: Attack, store: Store) -> None:
    run = ForgedRun(store, attack.encoding)
    live = copy(run.versions[1])
    replica = Replica(store, heartbeat=0)
    assert replica.sync(live, 1) == 1
    run.edit_object(attack.make)
    with pytest.raises(attack.error):
        replica.sync(live)
    assert same(live, run.versions[1])
    assert replica.version == 1
    assert replica.lag == 1


@every_attack_in_a_run
def test_a_replica_recovers_through_the_anchor(attack: Attack, store: Store) -> None:
    run = ForgedRun(store, attack.encoding, last_has_anchor=True)
    live = copy(run.versions[1])
    replica = Replica(store, heartbeat=0)
    assert replica.sync(live, 1) == 1
    run.edit_object(attack.make)
    assert replica.sync(live) == 2
    assert same(live, run.versions[2])


@pytest.mark.parametrize("encoding", BLOCK_ENCODINGS)
def test_no_stream_may_have_another_length(encoding: str) -> None:
    """Whatever an encoding keeps in its streams, their lengths follow from counts that were checked before."""
    old, new = history(2, changes=20)
    blob = dw.encode(old, new, encoding)
    for number in range(len(index_of(blob)["blocks"])):
        streams = streams_of(blob, number)
        for name, data in streams.items():
            for other in (data[:-1], b"", data + b"\0", data + bytes(200_000)):
                if other != data:
                    with pytest.raises((CountMismatch, CorruptStream, PositionError)):
                        dw.decode(with_streams(blob, {**streams, name: other}, number), old)


@pytest.mark.parametrize("encoding", BLOCK_ENCODINGS)
def test_no_stream_may_be_a_bomb(encoding: str) -> None:
    old, new = history(2, changes=20)
    blob = dw.encode(old, new, encoding)
    for name in streams_of(blob):
        tracemalloc.start()
        try:
            with pytest.raises(CorruptStream):
                dw.decode(with_bomb(blob, name), old)
            assert tracemalloc.get_traced_memory()[1] < MEMORY
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("encoding", BLOCK_ENCODINGS)
def test_streams_of_noise(encoding: str) -> None:
    """Kernels index without bounds checks: noise must end in a typed error or in weights of the right shape, never in
    memory that is not theirs. Bytes of every stream, then whole streams, then counts and parameters."""
    old, new = history(2, changes=12)
    kept = copy(old)
    blob = dw.encode(old, new, encoding)
    dice = random.Random(encoding)

    def survive(data: bytes) -> None:
        try:
            result = dw.decode(data, old)
        except DeltawireError:
            return
        assert all(result[n].shape == old[n].shape and result[n].dtype == old[n].dtype for n in old)

    for number in range(len(index_of(blob)["blocks"])):
        streams = streams_of(blob, number)
        for name, data in streams.items():
            for at in dice.sample(range(len(data)), min(len(data), 20)):
                for value in (0, 255, data[at] ^ (1 << dice.randrange(8))):
                    changed = data[:at] + bytes([value]) + data[at + 1 :]
                    survive(with_streams(blob, {**streams, name: changed}, number))
            for _ in range(8):
                survive(with_streams(blob, {**streams, name: dice.randbytes(len(data))}, number))
        parameters = index_of(blob)["blocks"][number]["parameters"]
        for name in parameters:
            for value in (-1, 0, 1, 7, 24, 25, 63, 64, 1 << 31, (1 << 63) - 1, -(1 << 63)):
                survive(with_streams(blob, streams, number, parameters={**parameters, name: value}))
        for entry in range(len(index_of(blob)["blocks"][number]["regions"])):
            for delta in (-1, 1, 2, 50):
                index = index_of(blob)
                index["blocks"][number]["regions"][entry][5] += delta
                survive(with_index(blob, index))
    assert same(old, kept)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_truncated_anywhere(encoding: str) -> None:
    old, new = history(2, changes=3)
    blob = dw.encode(old, new, encoding)
    for length in range(len(blob)):
        with pytest.raises(FormatError):
            dw.decode(blob[:length], old)


@every_bit
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bits_flipped_in_the_file_alone(encoding: str, stride: int) -> None:
    """Without a run there is no hash over the file: a flip may give other weights, but never a crash."""
    old = {"w": np.arange(40, dtype=np.uint16), "f": np.zeros(3, np.float32)}
    new = copy(old)
    new["w"][[3, 30]], new["f"][1] = (4, 0x8000), -0.0
    kept = copy(old)
    blob = bytearray(dw.encode(old, new, encoding))
    for bit in range(0, len(blob) * 8, stride):
        blob[bit >> 3] ^= 1 << (bit & 7)
        try:
            result = dw.decode(bytes(blob), old)
        except DeltawireError:
            pass
        else:
            assert result.keys() == old.keys()
        blob[bit >> 3] ^= 1 << (bit & 7)
    assert same(old, kept)


# which bit it is makes no difference to a hash
@pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.slow, id="every bit"), pytest.param(61, id="a bit of every 8 bytes")]
)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", ["delta", "anchor"])
def test_bits_flipped_in_a_run(encoding: str, kind: str, stride: int, store: Store) -> None:
    """Through a run every flip is HashMismatch, without exception: a reader trusts only the bytes a manifest names."""
    run = ForgedRun(store, encoding, last_has_anchor=kind == "anchor")
    blob = msgspec.convert(run.link(kind)["objects"][0], Blob)
    data = bytearray(run.object(kind))
    for bit in range(0, len(data) * 8, stride):
        data[bit >> 3] ^= 1 << (bit & 7)
        store.put(blob.key, bytes(data))
        with pytest.raises(HashMismatch):
            fetch(store, blob)
        data[bit >> 3] ^= 1 << (bit & 7)
    store.put(blob.key, bytes(data))
    fetch(store, blob).close()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_flipped_bit_never_reaches_a_live_weight(encoding: str, store: Store) -> None:
    run = ForgedRun(store, encoding)
    key = run.link("delta")["objects"][0]["key"]
    data = bytearray(run.object("delta"))
    live = copy(run.versions[1])
    replica = Replica(store, heartbeat=0)
    replica.sync(live, 1)
    for at in range(0, len(data), 11):
        data[at] ^= 1 << (at & 7)
        store.put(key, bytes(data))
        with pytest.raises(HashMismatch):
            replica.sync(live)
        data[at] ^= 1 << (at & 7)
    assert replica.version == 1
    assert same(live, run.versions[1])
    store.put(key, bytes(data))
    assert replica.sync(live) == 2, "what was bad once may have been repaired"
    assert same(live, run.versions[2])
