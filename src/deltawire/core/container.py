"""safetensors as a container: read and write the header, check every claim it makes, leave the data where it is.

    8 bytes   header length, little endian
    JSON      {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}}, padded to 8 bytes
    data      the tensors, end to end, no gaps and nothing after them

Written by hand because data objects are streamed: they are larger than memory and are read a range at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from . import dtypes
from .errors import HeaderError, TruncatedFile
from .schema import check_name, is_shape
from .typed_json import decode

MAX_HEADER = 48 << 20
"""Half of what safetensors allows. Decoded, a header takes eleven times as much memory."""

PREFIX = 8

Read = Callable[[int, int], bytes]
"""(start, length) → bytes of the file. A memory buffer, a local file or ranged requests."""


def open_file(path: str | os.PathLike[str]) -> tuple[Read, int]:
    """Open a local file for ranged reads; also returns its size. It is closed with the function that reads it."""
    file = open(path, "rb", buffering=0)  # noqa: SIM115

    # pread, not a memory map: a map would count every page of it as our memory
    def read(start: int, length: int) -> bytes:
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length:
            n = os.preadv(file.fileno(), [view[done : done + (1 << 30)]], start + done)
            if n == 0:
                raise TruncatedFile(f"{path} ends at byte {start + done:,}, {length - done:,} bytes early")
            done += n
        return data  # type: ignore[return-value]

    return read, os.fstat(file.fileno()).st_size


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, from the beginning of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a file and where it is, every claim of it checked."""

    metadata: dict[str, str]
    items: dict[str, Item]
    """Tensors by name, in file order."""
    size: int
    """Bytes up to the first data byte."""
    file_size: int


def read_header(read: Read, file_size: int) -> Header:
    """Read and check the header of a file. Nothing is read or allocated on the word of its first eight bytes alone."""
    prefix = read(0, min(PREFIX, file_size))
    if len(prefix) < PREFIX:
        raise TruncatedFile(f"a safetensors file has at least 8 bytes, this one {file_size}")
    claimed = int.from_bytes(prefix[:PREFIX], "little")
    if claimed > MAX_HEADER:
        raise HeaderError(f"the header claims {claimed:,} bytes; at most {MAX_HEADER:,} are read")
    if PREFIX + claimed > file_size:
        raise TruncatedFile(f"the header claims {claimed:,} bytes, the file has {file_size:,} in all")
    size = PREFIX + claimed
    what = "the header of a safetensors file"
    raw = decode(read(PREFIX, claimed), dict[str, msgspec.Raw], what, HeaderError)
    metadata = decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), dict[str, str], what, HeaderError)
    entries = {name: decode(entry, _Entry, what, HeaderError) for name, entry in raw.items()}
    items: dict[str, Item] = {}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].data_offsets):
        check_name(name)
        begin, end = entry.data_offsets
        if begin != position or end < begin:
            raise HeaderError(f"tensor {name!r} covers bytes {begin}–{end}, but the data before it ends at {position}")
        if not is_shape(entry.shape):
            raise HeaderError(f"tensor {name!r} cannot have the shape {str(entry.shape[:20])[:80]}")
        if math.prod(entry.shape) * dtypes.lookup(entry.dtype).size != end - begin:
            raise HeaderError(f"tensor {name!r} is {entry.dtype} {list(entry.shape)} but covers {end - begin} bytes")
        items[name] = Item(name, entry.dtype, entry.shape, size + begin, end - begin)
        position = end
    if size + position > file_size:
        raise TruncatedFile(f"the tensors end at byte {size + position:,}, the file at {file_size:,}")
    if size + position < file_size:
        raise HeaderError(f"{file_size - size - position:,} bytes follow the last tensor")
    return Header(metadata, items, size, file_size)


def build(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data, for tensors in file order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * dtypes.lookup(dtype).size
        header[name] = _Entry(dtype, shape, (position, end))
        position = end
    text = msgspec.json.encode(header)
    # data aligned to 8 bytes, so that a memory map gives aligned tensors
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise HeaderError(f"a header of {len(text):,} bytes is more than a reader accepts; use fewer tensors")
    return len(text).to_bytes(PREFIX, "little") + text
