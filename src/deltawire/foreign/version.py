"""A version as another system wrote it, and the weights that it makes of the version before.

    inflate     zstd, into memory of exactly the size that the tensor has
    patch       xor with the old bytes, or new bytes at positions
    compare     the checksum of the new tensor; only then is a byte of it used

Files are untrusted: whatever is wrong with one raises an error that names the file and the tensor.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3

from deltawire import FullFile, Region, Schema, Source, TensorSpec
from deltawire.errors import (
    CorruptStream,
    FormatError,
    HashMismatch,
    MissingExtra,
    PositionError,
    SchemaError,
    SchemaMismatch,
    UnknownFormat,
)
from deltawire.store import Store

Bytes = npt.NDArray[np.uint8]

XOR, OVERWRITE, FULL = "xor", "overwrite", "full"
MAX_WINDOW = 1 << 27
"""Bytes that a zstd frame may refer back: what zstd itself allows by default."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Where a tensor of a version is."""

    file: FullFile
    where: str
    """Address of the file, for messages."""
    stored: TensorSpec
    """What holds it there: its bytes, or those of a delta."""
    checksum: str = ""
    """Of the new tensor; empty where the file has none."""
    algorithm: str = ""
    shape: tuple[int, ...] | None = None
    """Shape of the tensor, where it is stated."""


@dataclass(frozen=True, slots=True)
class ForeignVersion:
    """A version that is complete, with its headers read and checked."""

    name: str
    """Of its folder."""
    version: str
    """What it calls itself."""
    base: str | None
    """The version that it builds on; None where it has full weights."""
    encoding: str
    """XOR, OVERWRITE or FULL."""
    payloads: Mapping[str, Payload]
    """By tensor. A delta has only those that changed."""
    nbytes: int
    """Of its files."""
    identity: int
    """Differs between two versions of the same number; 48 bits of a hash."""

    def schema(self) -> Schema:
        """That of full weights."""
        files = {payload.where: payload.file for payload in self.payloads.values()}
        return Schema.build(tensor for file in files.values() for tensor in file.tensors)


def identify(texts: Iterator[str]) -> int:
    """The identity of a version: 48 bits, which a metric holds exactly."""
    digest = blake3()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return int.from_bytes(digest.digest(length=6), "little")


def open_file(store: Store, key: str, size: int) -> FullFile:
    """A safetensors file in a store, with its header checked."""
    with naming(f"{store.url}: {key}"):
        return FullFile(lambda start, length: store.get_range(key, start, length), size)


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Let errors about contents begin with where those are."""
    try:
        yield
    except (FormatError, SchemaError) as error:
        raise type(error)(f"{where}: {error}") from None


def check_algorithm(algorithm: str, where: str) -> None:
    """UnknownFormat for a checksum that is not known, MissingExtra for one that needs an extra."""
    with naming(where):
        checksum(algorithm, b"")


def checksum(algorithm: str, data: Any) -> str:
    if algorithm == "xxh3-128":
        try:
            import xxhash
        except ImportError:
            raise MissingExtra(
                "these versions have xxh3-128 checksums, and xxhash is not installed: pip install xxhash"
            ) from None
        return xxhash.xxh3_128_hexdigest(data)
    if algorithm == "blake3":
        return blake3(data).hexdigest()
    if algorithm == "adler32":
        return f"{zlib.adler32(data):08x}"
    if algorithm == "sha256":
        return hashlib.sha256(data).hexdigest()
    raise UnknownFormat(f"checksum {algorithm[:80]!r} is unknown; known: xxh3-128, blake3, adler32, sha256")


class Patched:
    """The weights of a version: a source that reads, patches and checks one tensor at a time."""

    def __init__(
        self,
        version: ForeignVersion,
        base: Source | None,
        advance: Callable[[int, int], object] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`base` has the weights of the version before; None for a run that begins with full weights. `advance` is
        called with bytes of tensors that were patched since the last call, and all; `check` after the last tensor of a
        version without checksums, to raise an error if its files have changed meanwhile.

        SchemaMismatch if the version has tensors that the base has not, or full weights of another model.
        """
        self._version, self._base, self._advance, self._check = version, base, advance, check
        self.schema: Schema = version.schema() if base is None else base.schema
        if version.encoding == FULL:
            with naming(version.name):
                self.schema.require_equal(version.schema(), ours="the run", theirs="this version")
        known = self.schema.by_name()
        for name, payload in version.payloads.items():
            where = f"{payload.where}: tensor {name[:80]!r}"
            if name not in known:
                raise SchemaMismatch(f"{where} is not one of the {len(known):,} tensors of the base")
            if payload.shape is not None and payload.shape != known[name].shape:
                raise SchemaMismatch(f"{where} has shape {list(payload.shape)[:9]}, the base {[*known[name].shape]}")
        self._nbytes = sum(known[name].nbytes for name in version.payloads)
        self._held: dict[str, _Tensor] = {name: _Tensor(known[name].units) for name in version.payloads}
        self._memory = _Memory()
        self._unchecked = {name for name, payload in version.payloads.items() if not payload.algorithm}
        """Tensors without a checksum that were not read yet."""

    def region(self, region: Region) -> npt.NDArray[Any]:
        held = self._held.get(region.tensor.name)
        if held is None:
            assert self._base is not None
            return self._base.region(region)
        with held.lock:
            if held.units is None:
                held.units = self._patched(region)
            units = held.units
            held.left -= region.units
            if held.left <= 0:
                # every region of it was asked for
                held.units, held.left = None, region.tensor.units
        return region.cut(units)

    def _patched(self, region: Region) -> npt.NDArray[Any]:
        """The new units of the region's whole tensor."""
        tensor = region.tensor
        payload, encoding = self._version.payloads[tensor.name], self._version.encoding
        with naming(f"{payload.where}: tensor {tensor.name[:80]!r}"):
            stored = payload.stored
            whole = Region(stored, 0, stored.rows, 0, stored.columns)
            if encoding == FULL:
                new: Bytes = payload.file.region(whole).view(np.uint8)
            else:
                assert self._base is not None
                limit = tensor.nbytes if encoding == XOR else 4 + 5 * tensor.nbytes
                if stored.nbytes > limit + (limit >> 7) + (1 << 16):
                    raise CorruptStream(f"{stored.nbytes:,} bytes compressed, and {tensor.nbytes:,} of the tensor")
                old = self._base.region(Region(tensor, 0, tensor.rows, 0, tensor.columns)).view(np.uint8)
                patch = _xor if encoding == XOR else _overwrite
                new = self._memory.lend(tensor.nbytes)
                patch(_Frame(payload.file.region(whole)), old, new)
            if payload.algorithm and (found := checksum(payload.algorithm, new.data)) != payload.checksum:
                raise HashMismatch(
                    f"{payload.algorithm} {found} instead of {payload.checksum[:80]!r}: the file is damaged, or it "
                    f"builds on other weights than {self._version.base or 'its own'}"
                )
        if self._check is not None and self._unchecked:
            # atomic: threads read other tensors meanwhile
            self._unchecked.discard(tensor.name)
            if not self._unchecked:
                self._check()
        if self._advance is not None:
            self._advance(tensor.nbytes, self._nbytes)
        return new.view(f"u{tensor.unit_size}")


class _Tensor:
    """A tensor while its regions are being asked for."""

    def __init__(self, units: int) -> None:
        self.lock, self.left = threading.Lock(), units
        self.units: npt.NDArray[Any] | None = None


class _Memory:
    """Memory of tensors that nobody reads any more, for the next ones: new pages cost more than the patch."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []

    def lend(self, nbytes: int) -> Bytes:
        """So many bytes, until the array and all its views are gone."""
        memory = self._free.pop() if self._free else None
        if memory is None or memory.size < nbytes:
            memory = np.empty(nbytes, np.uint8)
        # over a memoryview: views of an array over an array would keep the lower one only
        lent = np.frombuffer(memory.data, np.uint8, nbytes)
        weakref.finalize(lent, self._free.append, memory)
        return lent


class _Frame:
    """A zstd frame that is never inflated past what is asked for."""

    def __init__(self, data: Any) -> None:
        self._reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(data.data)

    def fill(self, numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The next so many numbers."""
        view, done = numbers.data.cast("B") if numbers.size else memoryview(b""), 0
        while done < len(view):
            n = self._read(view[done:])
            if n == 0:
                raise CorruptStream(f"the zstd frame ends {len(view) - done:,} bytes early")
            done += n
        return numbers

    def end(self) -> None:
        if self._read(memoryview(bytearray(1))):
            raise CorruptStream("the zstd frame has more bytes than the tensor takes")

    def _read(self, view: memoryview) -> int:
        try:
            return self._reader.readinto(view)
        except zstandard.ZstdError as error:
            raise CorruptStream(f"not a zstd frame that can be read: {error}") from None


def _xor(frame: _Frame, old: Bytes, new: Bytes) -> None:
    frame.fill(new)
    frame.end()
    np.bitwise_xor(new, old, out=new)


def _overwrite(frame: _Frame, old: Bytes, new: Bytes) -> None:
    count = int(frame.fill(np.empty(1, "<u4"))[0])
    if count > old.size:
        raise CorruptStream(f"{count:,} changed bytes of {old.size:,}")
    positions, values = frame.fill(np.empty(count, "<u4")), frame.fill(np.empty(count, np.uint8))
    frame.end()
    if count and not (positions[:-1] < positions[1:]).all():
        raise PositionError("changed positions are not ascending")
    if count and positions[-1] >= old.size:
        raise PositionError(f"position {int(positions[-1]):,} is beyond the {old.size:,} bytes of the tensor")
    np.copyto(new, old)
    new[positions] = values
