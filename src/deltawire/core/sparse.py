"""Sparse safetensors: a delta as a file.

A file holds string metadata, an `index` (zstd-compressed JSON: tensors, and per block its regions, streams and hash),
and one byte tensor per block. `raw` files have no index: they are `{name}.indices` and `{name}.values`.
The full specification is docs/format.md.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, TypeVar

import msgspec
from blake3 import blake3

from . import container, keys
from .change import Change, Region, RegionMoves, kind_of, whole
from .codecs import block_encoding, check_encoding, context, raw, work
from .codecs.base import BaseBits, Before, BlockRecord, CountedRegions, Parts, StreamRecord, expand, squeeze
from .codecs.context.cuts import by_rows, counted
from .container import Read
from .digest import StateDigest
from .dtypes import lookup
from .errors import (
    CorruptStream,
    CountMismatch,
    DigestMismatch,
    ForeignObject,
    HashMismatch,
    HeaderError,
    PositionError,
    SchemaMismatch,
    UnknownFormat,
)
from .held import Held, Part
from .manifest import Blob
from .parallel import default_threads, ordered_map, threads_for
from .schema import Schema, TensorSpec
from .temporary import spooling
from .typed_json import decode

FORMAT = "deltawire"
FORMAT_VERSION = "1"
INDEX = "index"
BASE_DIGEST = "base_digest"
DIGEST = "digest"
"""Metadata of a delta: the state digests of the version it starts from and of the version it leads to."""
MAX_INDEX = 48 << 20
MAX_BLOCK_UNITS = 1 << 26
"""Four times what a publisher puts into a block: bounds what decoding one can cost, however well its zeros compress."""
SPOOL_LIMIT = 16 << 20
IN_WORK = 128 << 20
"""Bytes that decoding may hold in all: blocks that are dense are decoded on fewer threads."""
PLACES = 8
"""Parts of the rows and of the columns of tensors whose blocks lie together."""
_DECODED = 24
"""Bytes a change takes on its way: position, old and new bits, and what the decoder needs beside them."""
_COPY = 4 << 20
BATCH_UNITS = 1 << 26
"""Weights that are counted on a device at once, as four blocks of a publisher."""
BATCHES = 6
"""Batches that are encoded at a time."""
COUNTED_BATCHES = 2
"""Batches whose old weights are held at a time: one is copied while another is counted."""

T = TypeVar("T")


class _DeltaIndex(msgspec.Struct, frozen=True):
    tensors: list[TensorSpec]
    blocks: list[BlockRecord]


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A coded block on its way into a file."""

    tensors: list[TensorSpec]
    """The tensors of its regions, in order."""
    records: list[BlockRecord]
    """One for each of its parts; none for `raw`, whose index is its names."""
    parts: list[tuple[str, str, bytes]]
    """(file tensor, dtype, bytes); block encodings use the name ""."""
    changed: int


def encode_block(changes: Sequence[Change], encoding: str, before: Before) -> EncodedBlock:
    """Code one block. Pure and free of shared state: blocks are coded on several threads."""
    changes = [change for change in changes if change.count]
    if not changes or encoding == raw.name:
        return _encoded(changes, encoding, None)
    if encoding == context.name:
        return _encoded(changes, encoding, context.encode(changes, before))
    parts, module = by_rows(changes), block_encoding(encoding)
    return _encoded(changes, encoding, [(counted(part), module.encode(part, before)) for part in parts])


def encode_counted(
    blocks: Sequence[Sequence[Change]], before: Before, threads: int | None = None
) -> Iterator[EncodedBlock]:
    """Code blocks in `context` whose old weights are on a device, in order and on several threads.

    Several blocks are counted at once: a call to the device takes longer than its work there, and threads that take
    turns with it wait for each other.
    """
    pool = ThreadPoolExecutor(threads or default_threads(), thread_name_prefix="deltawire")
    counting = threading.Semaphore(COUNTED_BATCHES)

    def finish(changes: Sequence[Change], parts: Parts) -> EncodedBlock:
        return _encoded(changes, context.name, parts)

    def together(batch: Sequence[Sequence[Change]]) -> list[EncodedBlock]:
        changed = [[change for change in changes if change.count] for changes in batch]
        some = [changes for changes in changed if changes]
        found = iter(context.encode_together(some, before, pool.map, finish, counting))
        return [next(found) if changes else _encoded([], context.name, None) for changes in changed]

    try:
        for found in ordered_map(together, _batches(blocks), BATCHES):
            yield from found
    finally:
        # all its work is done, or its result is not needed any more (see ordered_map)
        pool.shutdown(wait=False)


def _batches(blocks: Sequence[Sequence[Change]]) -> list[list[Sequence[Change]]]:
    """Blocks that follow each other and have one dtype, up to a size."""
    result: list[list[Sequence[Change]]] = []
    last, room = "", 0
    for block in blocks:
        dtype, size = block[0].region.tensor.dtype, sum(change.region.units for change in block)
        if dtype != last or size > room:
            result.append([])
            last, room = dtype, BATCH_UNITS
        result[-1].append(block)
        room -= size
    return result


def _encoded(changes: Sequence[Change], encoding: str, parts: Parts | None) -> EncodedBlock:
    """A block ready for a file; `parts` is None for `raw`, and where nothing changed."""
    changed = sum(change.elements for change in changes)
    tensors = list(dict.fromkeys(change.region.tensor for change in changes))
    if parts is None:
        return EncodedBlock(tensors, [], raw.encode(changes), changed)
    number = {tensor: i for i, tensor in enumerate(tensors)}
    records, stored = [], []
    for counts, coded in parts:
        squeezed = squeeze([*coded.streams.values()])
        streams = dict(zip(coded.streams, (stream for stream, _ in squeezed), strict=True))
        payload = b"".join(data for _, data in squeezed)
        regions = [(number[r.tensor], r.row, r.rows, r.column, r.columns, count) for r, count in counts]
        hash = blake3(payload).hexdigest(length=16)
        records.append(BlockRecord(coded.encoding or encoding, regions, streams, coded.parameters, hash))
        stored.append(("", "U8", payload))
    return EncodedBlock(tensors, records, stored, changed)


class DataFile:
    """A finished data object, ready to be put as often as a store needs it.

    head       its header and index: what must be read to know where the rest is
    body       yields the rest, each time it is called
    body_size  bytes of the rest
    changed    number of changed elements
    threads    number of threads that hash it
    """

    def __init__(
        self, head: bytes, body: Callable[[], Iterator[bytes]], body_size: int, changed: int, threads: int = 1
    ) -> None:
        self.size = len(head) + body_size
        self.head_size = len(head)
        self.head_hash = blake3(head).hexdigest(length=16)
        self.changed = changed
        self._head, self._body, self._threads = head, body, threads
        self._hash = ""

    def chunks(self) -> Iterator[bytes]:
        """Yield all bytes."""
        # threads of its own: those of blake3.AUTO are gone in a forked process, which would wait for them for ever
        everything = blake3(self._head, max_threads=self._threads)
        yield self._head
        for chunk in self._body():
            everything.update(chunk)
            yield chunk
        self._hash = everything.hexdigest(length=16)

    @property
    def hash(self) -> str:
        """Hash of all bytes. Known once they have been put; else they are read for it."""
        if not self._hash:
            for _ in self.chunks():
                pass
        return self._hash

    def blob(self, key: str) -> Blob:
        """The record of it in a manifest."""
        return Blob(key, self.size, self.hash, self.head_size, self.head_hash)


class DeltaWriter:
    """Collects coded blocks and makes the file. What does not fit in memory is spooled to a temporary file."""

    def __init__(self, encoding: str) -> None:
        check_encoding(encoding)
        self.encoding = encoding
        self.changed = 0
        self.size = 0
        self._spool: IO[bytes] = tempfile.SpooledTemporaryFile(SPOOL_LIMIT)  # noqa: SIM115 (lives as long as the writer)
        self._pieces: dict[str, list[tuple[int, int]]] = {}
        self._dtypes: dict[str, str] = {}
        self._tensors: dict[TensorSpec, int] = {}
        self._blocks: list[BlockRecord] = []

    def add(self, block: EncodedBlock) -> None:
        for number, (name, dtype, data) in enumerate(block.parts):
            name = name or f"block.{len(self._blocks) + number:05d}"
            self._pieces.setdefault(name, []).append((self.size, len(data)))
            self._dtypes[name] = dtype
            with spooling("a delta"):
                self._spool.write(data)
            self.size += len(data)
        if block.records:
            numbers = [self._tensors.setdefault(tensor, len(self._tensors)) for tensor in block.tensors]
        for record in block.records:
            regions = [(numbers[r[0]], *r[1:]) for r in record.regions]
            self._blocks.append(msgspec.structs.replace(record, regions=regions))
        self.changed += block.changed

    def finish(self, metadata: Mapping[str, str]) -> DataFile:
        everything = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "sparse": "true",
            "encoding": self.encoding,
            "changed_params": str(self.changed),
            **metadata,
        }
        names = [*self._pieces]
        if self._blocks:
            tensors = [*self._tensors]
            order = sorted(range(len(names)), key=lambda number: _place(tensors, self._blocks[number]))
            names = [names[number] for number in order]
        items = [
            (
                name,
                self._dtypes[name],
                (sum(n for _, n in self._pieces[name]) // lookup(self._dtypes[name]).size,),
            )
            for name in names
        ]
        index = b""
        if self.encoding != raw.name:
            plain = msgspec.json.encode(_DeltaIndex(list(self._tensors), self._blocks))
            if len(plain) > MAX_INDEX:
                raise HeaderError(f"an index of {len(plain):,} bytes is more than the {MAX_INDEX:,} a reader accepts")
            ((stream, index),) = squeeze([plain])
            everything["index_size"] = str(stream.raw)
            items.insert(0, (INDEX, "U8", (len(index),)))
        pieces = [piece for name, *_ in items if name != INDEX for piece in self._pieces[name]]
        spool = self._spool

        def body() -> Iterator[bytes]:
            for start, length in pieces:
                spool.seek(start)
                while length:
                    data = spool.read(min(length, _COPY))
                    length -= len(data)
                    yield data

        return DataFile(container.build(items, everything) + index, body, self.size, self.changed)

    def finish_link(self, run: str, base: int, version: int, base_digest: str, digest: str, elements: int) -> DataFile:
        """Finish a delta between two versions of a run whose model has so many elements."""
        return self.finish(
            {
                "run": run,
                "model_version": str(version),
                "base_version": str(base),
                BASE_DIGEST: base_digest,
                DIGEST: digest,
                "total_params": str(max(elements, 1)),
                "sparsity": f"{1 - self.changed / max(elements, 1):.6f}",
            }
        )

    def close(self) -> None:
        self._spool.close()

    def __enter__(self) -> DeltaWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _place(tensors: Sequence[TensorSpec], block: BlockRecord) -> tuple[str, str, list[bool]]:
    """Where a block lies in a file, so that a reader of some rows or columns needs few ranges of it: with the blocks of
    the same kind of tensor, those of the first half of columns first, then of rows; within these by quarters, eighths.
    """
    number, row, _, column, *_ = block.regions[0]
    tensor = tensors[number]
    sides = column * PLACES // max(tensor.columns, 1), row * PLACES // max(tensor.rows, 1)
    bits = [bool(side >> level & 1) for level in reversed(range(PLACES.bit_length() - 1)) for side in sides]
    return (*kind_of(tensor), bits)


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of an opened file: where it is and which regions it changes. Nothing of it was read yet."""

    regions: CountedRegions
    items: tuple[container.Item, ...]
    """The block's bytes; for `raw` indices and values."""
    record: BlockRecord | None
    """None for `raw`."""

    changed: int
    """Number of units it changes."""

    @property
    def work(self) -> int:
        """Units that decoding has to look at."""
        encoding = self.record.encoding if self.record else raw.name
        return work(encoding, sum(region.units for region, _ in self.regions), self.changed)

    def meets(self, held: Held) -> bool:
        """Whether it may change anything of what is held."""
        return any(held.meets(region) for region, _ in self.regions)


class DeltaFile:
    """An opened delta. Opening checks the header and index; `read` reads and checks one block."""

    def __init__(self, read: Read, size: int, schema: Schema | None = None) -> None:
        self._read = read
        self.header = container.read_header(read, size)
        self.metadata = self.header.metadata
        if self.metadata.get("format", FORMAT) != FORMAT or self.metadata.get("version", "1") != FORMAT_VERSION:
            raise UnknownFormat(
                f"this is format {self.metadata.get('format')!r} version {self.metadata.get('version')!r}; "
                f"this build reads {FORMAT!r} version {FORMAT_VERSION}"
            )
        self.encoding = self.metadata.get("encoding", raw.name)
        check_encoding(self.encoding)
        self.blocks = self._raw_blocks(schema) if self.encoding == raw.name else self._indexed_blocks(schema)

    def needed(self, held: Held) -> list[Part] | None:
        """Return the blocks that change anything of what is held. None if blocks cannot be checked alone."""
        found = []
        for block in self.blocks:
            if block.record is None or not block.record.hash:
                return None
            if block.meets(held):
                found.append(Part(block.items[0].start, block.items[0].nbytes, block.record.hash))
        return found

    def read(self, block: BlockRef) -> list[RegionMoves] | context.TiledBlock:
        """Read one block and check it, without the base version.

        Returns its moves, or the tiles of a `context` block, whose positions depend on the weights.
        """
        parts = [self._read(item.start, item.nbytes) for item in block.items]
        record = block.record
        if record is None:
            return raw.moves(block.regions[0][0].tensor, block.items[0].dtype, *parts)
        payload = parts[0]
        if blake3(payload).hexdigest(length=16) != record.hash:
            raise HashMismatch(f"the block at byte {block.items[0].start} does not have the hash its index names")
        streams, at = {}, 0
        for name, stream in record.streams.items():
            streams[name] = payload[at : at + stream.stored]
            at += stream.stored
        if record.encoding == context.name:
            return context.TiledBlock(record, block.regions, streams)
        moves: list[RegionMoves] = block_encoding(record.encoding).moves(record, block.regions, streams)
        return moves

    def changes(
        self, bits: BaseBits, threads: int | None = None, *, write: bool = False, held: Held | None = None
    ) -> Iterator[list[Change]]:
        """Decode all blocks against the base version's bits, on several threads, a few blocks ahead at the most; or
        those alone that change anything of what is held.

        With `write`, each is written to these bits by the thread that decoded it, once all of it was checked. For a
        copy that is dropped on an error: blocks before a bad one are written already.
        """

        def decode(block: BlockRef) -> list[Change]:
            found = self.read(block)
            if not isinstance(found, context.TiledBlock):
                return [(m.apply if write else m.resolve)(bits(m.region.tensor.name)) for m in found]
            changes = found.decode(bits)
            for change in changes if write else ():
                change.write(bits(change.region.tensor.name))
            return changes

        return self.each(decode, threads, held)

    def each(self, visit: Callable[[BlockRef], T], threads: int | None = None, held: Held | None = None) -> Iterator[T]:
        """Visit blocks, on as many threads as decoding them leaves memory for; results in order."""
        blocks = [block for block in self.blocks if held is None or block.meets(held)]
        most = max((block.changed for block in blocks), default=0)
        wanted = threads_for(sum(block.work for block in blocks), threads)
        threads = max(1, min(wanted, IN_WORK // (_DECODED * max(most, 1))))
        return ordered_map(visit, blocks, threads)

    def _raw_blocks(self, schema: Schema | None) -> list[BlockRef]:
        known = schema.by_name() if schema else None
        blocks = []
        for name, (indices, values) in raw.tensors(self.header).items():
            if known is None:
                # a file of another tool, read without its model: all that is known is that indices are below 2^31
                tensor = TensorSpec(name, values.dtype, (1 << 31,))
            elif name not in known:
                raise SchemaMismatch(f"the delta changes {name!r}, which the run's schema does not have")
            else:
                tensor = known[name]
                if values.dtype != raw.value_dtype(tensor):
                    raise SchemaMismatch(f"{name!r} is {tensor.dtype} in the schema but {values.dtype} in the delta")
            count = indices.shape[0]
            if count > tensor.units:
                raise CountMismatch(f"the delta changes {count} units of {name!r}, which has {tensor.units}")
            blocks.append(BlockRef([(whole(tensor), count)], (indices, values), None, count))
        return blocks

    def _indexed_blocks(self, schema: Schema | None) -> list[BlockRef]:
        item = self.header.items.get(INDEX)
        if item is None:
            raise UnknownFormat(f"encoding {self.encoding!r} needs an {INDEX!r}; this file has none")
        claimed = self.metadata.get("index_size", "")
        raw_size = int(claimed) if claimed.isdecimal() and len(claimed) < 12 else -1
        plain = expand(StreamRecord(raw_size, item.nbytes), self._read(item.start, item.nbytes), MAX_INDEX, "the index")
        index = decode(plain, _DeltaIndex, "the index", CorruptStream)
        known = schema.by_name() if schema else None
        for tensor in index.tensors:
            if known is not None and known.get(tensor.name) != tensor:
                raise SchemaMismatch(f"the delta's {tensor.name!r} is not the one of the run's schema")
        # under two numbers the regions of one tensor could overlap unseen
        if len({tensor.name for tensor in index.tensors}) != len(index.tensors):
            raise SchemaMismatch("a tensor stands twice in the delta's index")
        if known is None:
            Schema.build(index.tensors)
        blocks = []
        covered: dict[int, Region] = {}
        for number, record in enumerate(index.blocks):
            item = self.header.items.get(f"block.{number:05d}")
            if item is None or item.dtype != "U8":
                raise HeaderError(f"the index names block {number}, the file has none")
            block_encoding(record.encoding)
            if any(s.stored < 0 or s.raw < s.stored for s in record.streams.values()):
                raise CorruptStream(f"block {number} has a stream of impossible size")
            if sum(s.stored for s in record.streams.values()) != item.nbytes:
                raise CountMismatch(f"the streams of block {number} do not add up to its {item.nbytes} bytes")
            regions = [_region(index.tensors, entry, covered) for entry in record.regions]
            if not regions or len({region.tensor.dtype for region, _ in regions}) != 1:
                raise CorruptStream(f"block {number} must hold regions of exactly one dtype")
            if sum(region.units for region, _ in regions) > MAX_BLOCK_UNITS:
                raise PositionError(f"block {number} covers more than {MAX_BLOCK_UNITS:,} units")
            blocks.append(BlockRef(regions, (item,), record, sum(changed for _, changed in regions)))
        if len(self.header.items) != len(blocks) + 1:
            raise HeaderError("the file holds tensors that its index does not name")
        return blocks


class DeltaClaim(msgspec.Struct, frozen=True):
    """The identity of a delta, by the manifest of its version."""

    run: str
    base: int | None
    version: int
    digest: StateDigest
    """Digest of the weights that the delta leads to."""
    base_digest: StateDigest | None = None
    """Digest of the weights that it is to be applied to; None where there are none."""


def open_delta(read: Read, size: int, schema: Schema, claim: DeltaClaim) -> DeltaFile:
    """Open a delta and check that it is the one that its manifest says it is."""
    file = DeltaFile(read, size, schema)
    said, version = file.metadata, claim.version
    found = (said.get("run"), said.get("base_version"), said.get("model_version"))
    if found != (claim.run, str(claim.base), str(version)):
        run, base, target = (str(value)[:32] for value in found)
        raise ForeignObject(
            f"a delta of version {version} says it is run {run}, {base} → {target}, not {claim.base} → {version}"
        )
    if (digest := said.get(DIGEST, str(claim.digest))) != str(claim.digest):
        what = f"says the delta; or {keys.manifest(version)} lies"
        raise DigestMismatch(version, str(claim.digest), digest[:32], what)
    present = str(claim.base_digest)
    if claim.base_digest is not None and (base := said.get(BASE_DIGEST, present)) != present:
        raise DigestMismatch(claim.base or 0, base[:32], present, "the delta was made from other weights")
    return file


def _region(
    tensors: list[TensorSpec], entry: tuple[int, int, int, int, int, int], covered: dict[int, Region]
) -> tuple[Region, int]:
    """Check one region: inside its tensor, and after everything of that tensor seen before, so that none overlap."""
    number, row, rows, column, columns, changed = entry
    if not 0 <= number < len(tensors):
        raise SchemaMismatch(f"a region names tensor number {number} of {len(tensors)}")
    tensor = tensors[number]
    region = Region(tensor, row, rows, column, columns)
    if min(row, rows, column, columns) < 0 or row + rows > tensor.rows or column + columns > tensor.columns:
        raise PositionError(f"a region of {tensor.name!r} lies outside its {tensor.rows} × {tensor.columns} units")
    if not 0 < changed <= region.units:
        raise CountMismatch(f"a region of {region.units} units of {tensor.name!r} cannot have {changed} changes")
    before = covered.get(number)
    if before is not None:
        same_band = (before.row, before.rows) == (row, rows) and column >= before.column + before.columns
        if not same_band and row < before.row + before.rows:
            raise PositionError(f"regions of {tensor.name!r} overlap or are out of order")
    covered[number] = region
    return region, changed


def write_delta(
    blocks: Iterable[Sequence[Change]],
    encoding: str,
    before: Before,
    metadata: Mapping[str, str],
    threads: int | None = None,
) -> tuple[DeltaWriter, DataFile]:
    """Code blocks on several threads and make the file. Close the writer when the file is no longer needed."""
    writer = DeltaWriter(encoding)
    try:
        for block in ordered_map(lambda changes: encode_block(changes, encoding, before), blocks, threads):
            writer.add(block)
        return writer, writer.finish(metadata)
    except BaseException:
        writer.close()
        raise
