"""Hostile `context` and `planes` streams: a typed error, or weights the digest will refuse, and nothing else.

Every hash is made to fit (see forge.py), so it is the codec itself that has to notice.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import zstandard
from forge import edited_index, index_of, streams_of, with_index, with_streams

from deltawire.core.errors import CorruptStream, CountMismatch, FormatError, PositionError
from deltawire.core.schema import Schema, TensorSpec
from support import Bag, applied, diff, encoded
from tiled import always_tiles, moved, weights

STREAMS = ("head", "levels", "sizes", "tiles")
SCHEMA = Schema.build([TensorSpec(name, "BF16", (300, 256)) for name in ("dead", "dense")])


@cache
def models() -> tuple[Bag, Bag]:
    rng = np.random.default_rng(8)
    old = {name: weights(rng, "BF16", (300, 256)) for name in ("dead", "dense")}
    chance = np.repeat(rng.choice([0, 0.01, 0.1], 300), 256)
    new = {"dead": moved(rng, old["dead"], chance), "dense": moved(rng, old["dense"], 0.6)}
    return Bag(SCHEMA, old), Bag(SCHEMA, new)


@cache
def good() -> bytes:
    old, new = models()
    with always_tiles(1 << 13):
        blob = encoded(old, diff(old, new), "context")
    assert index_of(blob)["blocks"][0]["encoding"] == "context"
    assert all(len(data) > 10 for data in streams_of(blob).values())
    return blob


def attack(blob: bytes, base: Bag | None = None) -> type[Exception] | None:
    """The error of a file, None where it decodes; what decodes is at least well formed, and the base is untouched."""
    old = base or models()[0]
    kept = old.copy()
    error: type[Exception] | None = None
    try:
        applied(blob, old)
    except FormatError as raised:
        error = type(raised)
    assert old == kept
    return error


def with_stream(name: str, edit: Callable[[bytes], bytes]) -> bytes:
    streams = streams_of(good())
    return with_streams(good(), {**streams, name: edit(streams[name])})


def put(at: int, *values: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes(values) + data[at + len(values) :]


def test_the_file_to_be_damaged_is_valid() -> None:
    result, _ = applied(good(), models()[0])
    assert result == models()[1]


@pytest.mark.parametrize(
    "edit, error",
    [
        pytest.param(put(0, 2), CorruptStream, id="another version"),
        pytest.param(put(1, 0, 2), CorruptStream, id="fewer exponents than are told apart"),
        pytest.param(put(2, 0), CorruptStream, id="no exponents"),
        pytest.param(put(2, 32), CorruptStream, id="more exponents than classes"),
        pytest.param(put(3, 2), CorruptStream, id="neither leveled nor not"),
        pytest.param(put(3, 0), CorruptStream, id="levels in a block without"),
        pytest.param(put(4, 1), CorruptStream, id="one class"),
        pytest.param(put(4, 33), CorruptStream, id="33 classes"),
        pytest.param(put(5, 3), CorruptStream, id="a spread that is not there"),
        pytest.param(put(42, 0), CorruptStream, id="no step table"),
        pytest.param(put(42, 33), CorruptStream, id="33 step tables"),
        pytest.param(put(43, 0), CorruptStream, id="an empty step table"),
        pytest.param(put(43, 200), FormatError, id="a step table of 200 symbols"),
        pytest.param(lambda data: data[:-1], CountMismatch, id="too short"),
        pytest.param(lambda data: b"", CountMismatch, id="nothing"),
        pytest.param(lambda data: data + b"\0", CountMismatch, id="too long"),
        pytest.param(lambda data: data + bytes(5000), CorruptStream, id="much too long"),
        pytest.param(lambda data: data[:-8] + b"\0" + data[-7:], CorruptStream, id="a grid of no rows"),
        pytest.param(lambda data: data[:-8] + b"\xff\x7f" + data[-7:], CorruptStream, id="a grid of 16 thousand rows"),
        pytest.param(lambda data: data[:-8] + b"\xff" * 6 + data[-7:], CorruptStream, id="a number without end"),
        pytest.param(lambda data: data[:-2] + b"\7" + data[-1:], CorruptStream, id="unknown flags"),
    ],
)
def test_heads(edit: Callable[[bytes], bytes], error: type[Exception]) -> None:
    found = attack(with_stream("head", edit))
    assert found is not None
    assert issubclass(found, error)


@pytest.mark.parametrize(
    "name, edit, error",
    [
        ("sizes", lambda data: data[:-1], CountMismatch),
        ("sizes", lambda data: data + b"\0", CountMismatch),
        ("sizes", lambda data: data * 9, CorruptStream),
        ("sizes", lambda data: bytes([data[0] ^ 1]) + data[1:], CountMismatch),
        ("sizes", lambda data: b"\xff" * len(data), CountMismatch),
        ("tiles", lambda data: data[:-1], CountMismatch),
        ("tiles", lambda data: data + b"\0", CountMismatch),
        ("tiles", lambda data: data + bytes(10_000_000), CorruptStream),
        ("levels", lambda data: data[:-1], CorruptStream),
        ("levels", lambda data: b"", CorruptStream),
        ("levels", lambda data: data + b"\0", CountMismatch),
        ("levels", lambda data: bytes(6) + data[6:], CorruptStream),
        ("levels", lambda data: data[:6] + b"\xff" * 4 + data[10:], CorruptStream),
    ],
)  # fmt: skip
def test_sizes_tiles_and_levels(name: str, edit: Callable[[bytes], bytes], error: type[Exception]) -> None:
    assert attack(with_stream(name, edit)) is error


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_missing(name: str) -> None:
    streams = streams_of(good())
    del streams[name]
    assert attack(with_streams(good(), streams)) is not None


@pytest.mark.parametrize("region", [0, 1])
@pytest.mark.parametrize("claim", [lambda n: n + 1, lambda n: n - 1, lambda n: 1, lambda n: 300 * 256])
def test_counts_that_lie(region: int, claim: Callable[[int], int]) -> None:
    def edit(index: Any) -> None:
        entry = index["blocks"][0]["regions"][region]
        entry[5] = claim(entry[5])

    assert attack(edited_index(good(), edit)) is CountMismatch


def test_every_way_a_tile_can_lie_is_noticed() -> None:
    """Counts past their class, ranks past their run, steps too wide, bytes that end early or go on."""
    rnd, found = random.Random(3), set()
    for _ in range(300):
        at = rnd.randrange(len(streams_of(good())["tiles"]) - 4)
        found.add(attack(with_stream("tiles", put(at, *rnd.randbytes(4)))))
    assert found >= {CorruptStream, CountMismatch, PositionError}


def test_rows_that_did_not_change_cannot() -> None:
    """Their weights are of no chunk's class: a rate that says they change must not send a search past the tile."""
    head = streams_of(good())["head"]
    assert head[6] == 255, "class 0 never changes"
    blob = with_stream("head", put(6, 0))
    assert applied(blob, models()[0])[0] == models()[1]
    blob = with_stream("head", put(6 + 32, head[38] | 0x80))
    assert applied(blob, models()[0])[0] == models()[1]


@pytest.mark.parametrize("name", STREAMS)
def test_flipped_bytes(name: str) -> None:
    rnd = random.Random(9)
    data = streams_of(good())[name]
    for _ in range(150):
        broken = bytearray(data)
        for _ in range(rnd.choice([1, 1, 3, 20])):
            broken[rnd.randrange(len(broken))] = rnd.randrange(256)
        attack(with_stream(name, lambda _, broken=broken: bytes(broken)))


@pytest.mark.parametrize("name", STREAMS)
def test_noise_zeros_and_ones(name: str) -> None:
    rnd, size = random.Random(10), len(streams_of(good())[name])
    for _ in range(50):
        attack(with_stream(name, lambda _: rnd.randbytes(size)))
    for fill in (b"\0", b"\xff"):
        attack(with_stream(name, lambda _, fill=fill: fill * size))


def test_weights_that_are_not_the_base() -> None:
    rng = np.random.default_rng(11)
    for _ in range(20):
        wrong = {name: weights(rng, "BF16", (300, 256), wild=True) for name in ("dead", "dense")}
        attack(good(), Bag(SCHEMA, wrong))


@pytest.mark.parametrize("name", STREAMS)
def test_bombs(name: str) -> None:
    """A stream that claims, and has, 256 MB: refused before a byte of it is decompressed."""
    size = 256 << 20
    compressor = zstandard.ZstdCompressor().compressobj(size)
    bomb = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(256)) + compressor.flush()
    streams, index = streams_of(good()), index_of(good())
    parts = {**streams, name: bomb}
    record = {key: [len(data)] * 2 for key, data in streams.items()} | {name: [size, len(bomb)]}
    index["blocks"][0]["streams"] = record
    blob = with_index(good(), index, {0: b"".join(parts.values())})
    tracemalloc.start()
    try:
        assert attack(blob) is CorruptStream
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


# ── planes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def planes() -> bytes:
    old, new = models()
    return encoded(old, diff(old, new), "planes")


@pytest.mark.parametrize(
    "edit, error",
    [
        (lambda streams: {"byte0": streams["byte0"]}, CountMismatch),
        (lambda streams: {**streams, "byte1": streams["byte1"][:-1]}, CountMismatch),
        (lambda streams: {**streams, "byte1": streams["byte1"] + b"\0"}, CorruptStream),
        (lambda streams: {**streams, "byte0": bytes(len(streams["byte0"]))}, CountMismatch),
        (lambda streams: {**streams, "byte0": b"\1" * len(streams["byte0"])}, CountMismatch),
    ],
)  # fmt: skip
def test_planes_that_lie(edit: Callable[[dict[str, bytes]], dict[str, bytes]], error: type[Exception]) -> None:
    assert attack(with_streams(planes(), edit(streams_of(planes())))) is error
