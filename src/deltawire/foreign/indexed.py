"""Versions with a safetensors index: slime, miles, vime, stitch and ModelExpress.

    model.safetensors.index.json     written last; its metadata: version, base_version, delta_encoding (xor or
                                     overwrite), compression_format, checksum_format; weight_map: tensor → file
    model-00000-of-00002.safetensors each tensor as compressed bytes; the header's metadata: tensor → checksum

Without delta_encoding it is a checkpoint, with full weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from deltawire.errors import CountMismatch, ManifestError, SchemaMismatch, UnknownFormat

from .version import FULL, OVERWRITE, XOR, ForeignVersion, Payload, check_algorithm, identify, open_file

if TYPE_CHECKING:
    from .folders import Folder

INDEX, SINGLE, OTHER = "model.safetensors.index.json", "model.safetensors", "manifest.json"
MAX_INDEX = 64 << 20


class _Metadata(msgspec.Struct):
    version: str | int | None = None
    base_version: str | int | None = None
    delta_encoding: str | None = None
    compression_format: str | None = None
    checksum_format: str | None = None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


_decoder = msgspec.json.Decoder(_Index)


def read(folder: Folder, most: int) -> ForeignVersion | None:
    """The version in a folder; None while its index is missing. At most so many tensors."""
    if not folder.has(INDEX):
        if folder.number is not None and folder.has(OTHER):
            raise UnknownFormat(f"{folder.where}{OTHER}: a format of versions that cannot be imported")
        return _single(folder) if folder.number is not None and folder.has(SINGLE) else None
    index = _index(folder)
    metadata, where = index.metadata, f"{folder.where}{INDEX}"
    encoding = metadata.delta_encoding or FULL
    if len(index.weight_map) > most:
        raise SchemaMismatch(f"{where} names {len(index.weight_map):,} tensors; at most {most:,} can be there")
    base = None
    if encoding != FULL:
        if encoding not in (XOR, OVERWRITE):
            raise UnknownFormat(f"{where}: delta_encoding {encoding[:80]!r} is unknown; known: xor, overwrite")
        if metadata.compression_format != "zstd":
            raise UnknownFormat(f"{where}: compression_format {str(metadata.compression_format)[:80]!r} is not zstd")
        if metadata.checksum_format is None or metadata.base_version is None or metadata.version is None:
            raise ManifestError(f"{where}: a delta has version, base_version and checksum_format")
        base = _plain(metadata.base_version)
    version = _named(folder) if metadata.version is None else _plain(metadata.version)
    if folder.number is not None and metadata.version is not None and version != str(folder.number):
        raise ManifestError(f"{where} is of version {version[:80]!r}")
    algorithm = metadata.checksum_format or ""
    if algorithm:
        check_algorithm(algorithm, where)
    return _version(folder, version, base, encoding, algorithm, index.weight_map)


def base_of(folder: Folder) -> str | None:
    base = _index(folder).metadata.base_version if folder.has(INDEX) else None
    return None if base is None else _plain(base)


def _index(folder: Folder) -> _Index:
    where = f"{folder.where}{INDEX}"
    data = folder.store.get(folder.prefix + INDEX, limit=MAX_INDEX).data
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{where} does not parse: {error}") from None


def _plain(version: str | int) -> str:
    """A version as text; numbers without leading zeros."""
    text = str(version)
    return str(int(text)) if text.isascii() and text.isdigit() and len(text) < 16 else text


def _named(folder: Folder) -> str:
    """The version as the name of the folder has it."""
    return folder.name if folder.number is None else str(folder.number)


def _single(folder: Folder) -> ForeignVersion:
    """A checkpoint in one file, without an index."""
    file = open_file(folder.store, folder.prefix + SINGLE, folder.size(SINGLE))
    return _version(folder, _named(folder), None, FULL, "", dict.fromkeys((t.name for t in file.tensors), SINGLE))


def _version(
    folder: Folder, version: str, base: str | None, encoding: str, algorithm: str, weight_map: dict[str, str]
) -> ForeignVersion:
    payloads: dict[str, Payload] = {}
    marks: list[str] = [encoding, version, str(base)]
    nbytes = 0
    for name in sorted({*weight_map.values()}):
        size = folder.size(name)
        file, where = open_file(folder.store, folder.prefix + name, size), f"{folder.where}{name}"
        nbytes += size
        for stored in file.tensors:
            if weight_map.get(stored.name) != name:
                raise SchemaMismatch(f"{where}: tensor {stored.name[:80]!r} is not there by the index")
            if base is not None and stored.dtype != "U8":
                raise SchemaMismatch(f"{where}: tensor {stored.name[:80]!r} is {stored.dtype}, and a delta is bytes")
            mark = file.metadata.get(stored.name, "")
            if algorithm and not mark:
                raise ManifestError(f"{where}: tensor {stored.name[:80]!r} has no checksum")
            payloads[stored.name] = Payload(file, where, stored, mark if algorithm else "", algorithm)
            marks += [stored.name, mark]
    if base is not None:
        folder.check_named({*weight_map.values()})
    if len(payloads) != len(weight_map):
        missing = next(name for name in weight_map if name not in payloads)
        raise CountMismatch(f"{folder.where}{weight_map[missing][:80]} lacks the tensor {missing[:80]!r}")
    if not algorithm or not payloads:
        # nothing says which weights these are: no checksum, or no change to the version before
        marks += [str(folder.stamp_of({*weight_map.values(), INDEX}))]
    return ForeignVersion(folder.name, version, base, encoding, payloads, nbytes, identify(iter(marks)))
