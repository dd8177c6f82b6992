"""Common to all encodings: the form of a coded block, and the checks that every stream needs.

An encoding is a module with a `name` and two functions over a block:

    encode(changes, before) -> Coded                 all changes have one dtype and at least one position each
    moves(record, regions, streams) -> [RegionMoves] the changes again, without the base version's weights

`context` has a class, `TiledBlock`, in place of `moves`: its positions depend on the weights. Streams are untrusted:
nothing may be allocated or indexed on their word alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from ..change import Region
from ..dtypes import Bits, read_only
from ..errors import CorruptStream, CountMismatch

BaseBits = Callable[[str], Bits]
"""Flat bits of a tensor of the base version, by name: what the decoder holds."""

Before = Callable[[Region], Bits]
"""The base version's own flat bits of a region: what the encoder diffed against."""


CountedRegions = Sequence[tuple[Region, int]]
"""Regions of a block, and the number of changes in each."""


class StreamRecord(msgspec.Struct, frozen=True, array_like=True):
    """One byte stream of a coded block, zstd-compressed where that made it smaller."""

    raw: int
    """Bytes after decompression."""
    stored: int
    """Bytes in the file; equal to `raw` when stored as it is."""


class BlockRecord(msgspec.Struct, frozen=True):
    """The record of a block in a file's index: enough to check and decode its bytes."""

    encoding: str
    regions: list[tuple[int, int, int, int, int, int]]
    """(tensor number, row, rows, column, columns, changed)."""
    streams: dict[str, StreamRecord]
    """Streams by name, in file order."""
    parameters: dict[str, int] = {}
    hash: str = ""
    """blake3 of the block's bytes as stored, so that a part fetched alone can be checked."""


class Coded(msgspec.Struct, frozen=True):
    """A block as an encoder returns it: named streams in file order, and parameters for the decoder."""

    streams: dict[str, bytes]
    parameters: dict[str, int] = {}
    encoding: str | None = None
    """The encoding of the streams, if it is not that of the encoder that was called."""


Parts = Sequence[tuple[CountedRegions, Coded]]
"""A block as it is stored: in parts that are coded apart, each a block of the file."""


# Our streams are noise with a skewed histogram: all there is to gain is in zstd's entropy coder. Its usual search finds
# short accidental matches that cost more than they save; only long ones (runs, in dense blocks) are looked for.
_ENTROPY_ONLY = zstandard.ZstdCompressionParameters(
    window_log=18,
    hash_log=8,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=1,
    write_content_size=True,
)


_compressors = threading.local()
"""A compressor of each thread: making one takes as long as compressing a small stream."""


def squeeze(streams: Sequence[bytes]) -> list[tuple[StreamRecord, bytes]]:
    """Compress streams where that pays; all in one call, since each call releases the interpreter's lock."""
    if not hasattr(_compressors, "own"):
        _compressors.own = zstandard.ZstdCompressor(compression_params=_ENTROPY_ONLY)
    some = [data for data in streams if data]
    packed = iter(_compressors.own.multi_compress_to_buffer(some) if some else ())
    result = []
    for data in streams:
        stored = data
        if data and len(found := next(packed)) < len(data):
            stored = found.tobytes()
        result.append((StreamRecord(len(data), len(stored)), stored))
    return result


def expand(stream: StreamRecord, stored: bytes, limit: int, what: str) -> bytes:
    """Decompress a stream of at most `limit` bytes, which is what the counts of the block allow."""
    if not 0 <= stream.raw <= limit:
        raise CorruptStream(f"{what} claims {stream.raw} bytes where at most {limit} make sense")
    if stream.stored == stream.raw:
        return stored
    try:
        if zstandard.frame_content_size(stored) != stream.raw:
            raise CorruptStream(f"{what} does not decompress to the {stream.raw} bytes it claims")
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=stream.raw)
    except zstandard.ZstdError as error:
        raise CorruptStream(f"{what} does not decompress: {error}") from None


def check_names(record: BlockRecord, streams: Collection[str], parameters: Collection[str] = ()) -> None:
    """Raise CorruptStream for a block with streams or parameters that its encoding does not know."""
    strange = sorted((record.streams.keys() - set(streams)) | (record.parameters.keys() - set(parameters)))
    if strange:
        raise CorruptStream(f"{record.encoding!r} has no stream or parameter {strange[0]!r:.40}")


def exactly(record: BlockRecord, streams: dict[str, bytes], name: str, limits: tuple[int, int]) -> npt.NDArray[Any]:
    """A stream of the block as bytes, its length checked against what the counts allow."""
    low, high = limits
    data = streams.get(name, b"")
    stream = record.streams.get(name, StreamRecord(0, 0))
    data = expand(stream, data, high, f"stream {name!r}")
    if len(data) < low:
        raise CountMismatch(f"stream {name!r} holds {len(data)} bytes, its counts need {low}")
    return read_only(np.frombuffer(data, np.uint8))
