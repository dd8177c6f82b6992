"""What Xet's hashes and files mean, from its public specification (https://huggingface.co/docs/xet).

    chunk   some 64 KiB of a file; its hash is keyed blake3 of the bytes
    xorb    a file of compressed chunks, named by the root of a hash tree over them
    file    a list of terms (xorb, chunks from, chunks to), named by the same tree over all its chunks, keyed once more
    shard   what an upload declares: files with their terms, xorbs with their chunks

Everything a client says of itself is recomputed here from the bytes that arrived; `Refused` says what did not agree.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from blake3 import blake3

from deltawire.core.errors import MissingExtra

_CHUNK_KEY = bytes.fromhex("6697f5775b9550de3135cbaca597181c9de421109beb2b58b4d0b04b93adf229")
_NODE_KEY = bytes.fromhex("017ec5c7a5472996fd946666b48a02e65ddd536f37c76dd2f86352e64a53713f")
_RANGE_KEY = bytes.fromhex("7f1857d6ce56ed66127ff913e7a5c3f3a4cd26d5b5db49e64124987f28fb94c3")
_FILE_KEY = bytes(32)

_MAX_CHUNK = 128 << 10
# The specification says 64 MiB; the client counts chunks without their headers, and so may exceed that by a little.
_MAX_XORB = 65 << 20
_FANOUT = 4
_RECORD = 48
_BOOKEND = b"\xff" * 32
_WITH_RANGE_HASHES, _WITH_METADATA = 1 << 31, 1 << 30


class Refused(Exception):
    """An upload that contradicts itself or its specification."""


@dataclass(frozen=True, slots=True)
class Chunk:
    start: int
    # where its header begins in the xorb
    end: int
    size: int
    # bytes when unpacked
    hash: bytes


@dataclass(frozen=True, slots=True)
class Term:
    xorb: str
    size: int
    # bytes when unpacked
    first: int
    end: int
    # chunks of the xorb, `end` excluded


def text(hash: bytes) -> str:
    """As it is written in addresses: each group of eight bytes reversed."""
    return "".join(hash[at : at + 8][::-1].hex() for at in range(0, 32, 8))


def chunk_hash(data: bytes) -> bytes:
    return blake3(data, key=_CHUNK_KEY).digest()


def tree_hash(leaves: Sequence[tuple[bytes, int]]) -> bytes:
    """The root over (hash, size) pairs. How many children a node has depends on their hashes, three to nine mostly."""
    if not leaves:
        return bytes(32)
    level = list(leaves)
    while len(level) > 1:
        level = [_node(level[first:end]) for first, end in _groups([hash for hash, _ in level])]
    return level[0][0]


def file_hash(leaves: Sequence[tuple[bytes, int]]) -> bytes:
    return blake3(tree_hash(leaves), key=_FILE_KEY).digest() if leaves else bytes(32)


def range_hash(hashes: Sequence[bytes]) -> bytes:
    return blake3(b"".join(hashes), key=_RANGE_KEY).digest()


def _node(children: Sequence[tuple[bytes, int]]) -> tuple[bytes, int]:
    lines = "".join(f"{text(hash)} : {size}\n" for hash, size in children)
    return blake3(lines.encode(), key=_NODE_KEY).digest(), sum(size for _, size in children)


def _groups(hashes: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    first = 0
    while first < len(hashes):
        end = limit = min(first + 2 * _FANOUT + 1, len(hashes))
        for at in range(first + 2, limit):
            if int.from_bytes(hashes[at][24:], "little") % _FANOUT == 0:
                end = at + 1
                break
        yield first, end
        first = end


def read_xorb(file: BinaryIO, size: int, name: str) -> list[Chunk]:
    """Its chunks, each unpacked and hashed, one at a time; Refused where they do not add up to the name."""
    if size > _MAX_XORB:
        raise Refused(f"a xorb of {size} bytes; {_MAX_XORB} is the most")
    chunks: list[Chunk] = []
    at = 0
    while at + 8 <= size:
        head = file.read(8)
        if head[0] != 0:
            break  # the footer, which repeats what the chunks say
        data = unpack(head + file.read(int.from_bytes(head[1:4], "little")))
        end = at + 8 + int.from_bytes(head[1:4], "little")
        if end > size:
            raise Refused("the last chunk of the xorb is cut off")
        chunks.append(Chunk(at, end, len(data), chunk_hash(data)))
        at = end
    if text(tree_hash([(chunk.hash, chunk.size) for chunk in chunks])) != name:
        raise Refused(f"the chunks of xorb {name} have another hash")
    return chunks


def unpack(packed: bytes) -> bytes:
    """A chunk, header and all, as the bytes of the file it came from."""
    length, kind, size = int.from_bytes(packed[1:4], "little"), packed[4], int.from_bytes(packed[5:8], "little")
    body = packed[8:]
    if size > _MAX_CHUNK or len(body) != length:
        raise Refused(f"a chunk of {size} bytes in {len(body)}, said to be {length}")
    if kind == 0:
        data = body
    elif kind in (1, 2):
        data = _unlz4(body, size)
        if kind == 2:
            data = _ungroup(data)
    else:
        raise Refused(f"a chunk with compression {kind}")
    if len(data) != size:
        raise Refused(f"a chunk unpacks to {len(data)} bytes instead of {size}")
    return data


def _unlz4(body: bytes, size: int) -> bytes:
    try:
        import lz4.frame
    except ImportError:
        raise MissingExtra("the Hub stand-in unpacks what it is sent with lz4: pip install lz4") from None
    try:
        return bytes(lz4.frame.LZ4FrameDecompressor().decompress(body, max_length=size + 1))
    except RuntimeError as error:
        raise Refused(f"a chunk does not unpack: {error}") from None


def _ungroup(grouped: bytes) -> bytes:
    """Undo the grouping of every fourth byte."""
    data = bytearray(len(grouped))
    at = 0
    for part in range(4):
        count = len(range(part, len(grouped), 4))
        data[part::4] = grouped[at : at + count]
        at += count
    return bytes(data)


def read_shard(data: bytes, xorbs: dict[str, list[Chunk]]) -> dict[str, tuple[Term, ...]]:
    """File hash → terms, each checked against the chunks that arrived before."""
    if len(data) % _RECORD or len(data) < 3 * _RECORD:
        raise Refused("a shard is a sequence of 48-byte records")
    records = [data[at : at + _RECORD] for at in range(_RECORD, len(data), _RECORD)]
    rows = iter(records)
    files: dict[str, tuple[Term, ...]] = {}
    try:
        while (head := next(rows))[:32] != _BOOKEND:
            flags, count = struct.unpack_from("<II", head, 32)
            terms = tuple(_term(next(rows)) for _ in range(count))
            if not flags & _WITH_RANGE_HASHES:
                raise Refused("a file without range hashes")
            ranges = [next(rows)[:32] for _ in range(count)]
            if flags & _WITH_METADATA:
                next(rows)
            _check_file(head[:32], terms, ranges, xorbs)
            files[text(head[:32])] = terms
        while (head := next(rows))[:32] != _BOOKEND:
            (count,) = struct.unpack_from("<I", head, 36)
            said = [next(rows)[:32] for _ in range(count)]
            if said != [chunk.hash for chunk in _chunks(text(head[:32]), xorbs)]:
                raise Refused(f"the shard says other chunks of xorb {text(head[:32])} than were uploaded")
    except StopIteration:
        raise Refused("the shard ends before its last record") from None
    return files


def _term(row: bytes) -> Term:
    _, size, first, end = struct.unpack_from("<IIII", row, 32)
    return Term(text(row[:32]), size, first, end)


def _chunks(xorb: str, xorbs: dict[str, list[Chunk]]) -> list[Chunk]:
    if xorb not in xorbs:
        raise Refused(f"xorb {xorb} was never uploaded")
    return xorbs[xorb]


def _check_file(hash: bytes, terms: Sequence[Term], ranges: Sequence[bytes], xorbs: dict[str, list[Chunk]]) -> None:
    leaves: list[tuple[bytes, int]] = []
    for term, said in zip(terms, ranges, strict=True):
        chunks = _chunks(term.xorb, xorbs)[term.first : term.end]
        if len(chunks) != term.end - term.first or sum(chunk.size for chunk in chunks) != term.size:
            raise Refused(f"a term of file {text(hash)} does not fit xorb {term.xorb}")
        if range_hash([chunk.hash for chunk in chunks]) != said:
            raise Refused(f"a term of file {text(hash)} has another range hash")
        leaves += [(chunk.hash, chunk.size) for chunk in chunks]
    if file_hash(leaves) != hash:
        raise Refused(f"the chunks of file {text(hash)} have another hash")
