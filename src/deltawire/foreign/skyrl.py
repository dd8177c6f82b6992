"""Versions of SkyRL: a manifest, written last, and files of XOR deltas compressed with zstd.

delta-00000007/manifest.json                                 tensors with file, shape, sizes and checksums
delta-00000007/delta-rank00000-file000000.safetensors        each tensor as compressed bytes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from deltawire.errors import CountMismatch, ManifestError, SchemaMismatch

from .version import XOR, ForeignVersion, Payload, check_algorithm, identify, open_file

if TYPE_CHECKING:
    from .folders import Folder

MANIFEST = "manifest.json"
MAX_MANIFEST = 64 << 20


class _Record(msgspec.Struct):
    name: str
    shape: tuple[int, ...]
    payload_file: str
    payload_key: str
    checksum: str
    checksum_algorithm: str = "xxh3-128"


class _Manifest(msgspec.Struct):
    version: int
    base_version: int
    tensors: list[_Record] = []


_decoder = msgspec.json.Decoder(_Manifest)


def read(folder: Folder, most: int) -> ForeignVersion | None:
    """The version in a folder; None while its manifest is missing. At most so many tensors."""
    if not folder.has(MANIFEST):
        return None
    where = f"{folder.where}{MANIFEST}"
    data = folder.store.get(folder.prefix + MANIFEST, limit=MAX_MANIFEST).data
    try:
        manifest = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{where} does not parse: {error}") from None
    if manifest.version != folder.number:
        raise ManifestError(f"{where} is of version {manifest.version}")
    records = {record.name: record for record in manifest.tensors}
    if len(records) != len(manifest.tensors):
        raise SchemaMismatch(f"{where} has a tensor twice")
    if len(records) > most:
        raise SchemaMismatch(f"{where} names {len(records):,} tensors; at most {most:,} can be there")
    for algorithm in {record.checksum_algorithm for record in records.values()}:
        check_algorithm(algorithm, where)
    files = {}
    for name in sorted({record.payload_file for record in records.values()}):
        file = open_file(folder.store, folder.prefix + name, folder.size(name))
        files[name] = file, {tensor.name: tensor for tensor in file.tensors}
    payloads = {}
    for name, record in records.items():
        file, tensors = files[record.payload_file]
        place, stored = f"{folder.where}{record.payload_file}", tensors.get(record.payload_key)
        if stored is None:
            raise CountMismatch(f"{place} lacks the tensor {record.payload_key[:80]!r}")
        if stored.dtype != "U8":
            raise SchemaMismatch(f"{place}: tensor {stored.name[:80]!r} is {stored.dtype}, and a delta is bytes")
        payloads[name] = Payload(file, place, stored, record.checksum, record.checksum_algorithm, record.shape)
    folder.check_named({*files})
    named = {(record.payload_file, record.payload_key) for record in records.values()}
    for name, (_, tensors) in files.items():
        for key in tensors:
            if (name, key) not in named:
                raise CountMismatch(f"{folder.where}{name}: tensor {key[:80]!r} is not there by the manifest")
    version, base = str(manifest.version), str(manifest.base_version)
    marks = [version, base, *(text for name in sorted(records) for text in (name, records[name].checksum))]
    if not records:
        # nothing changed: as in indexed.py, only when it was written says which weights these are
        marks += [str(folder.stamp_of({MANIFEST}))]
    nbytes = len(data) + sum(folder.size(name) for name in files)
    return ForeignVersion(folder.name, version, base, XOR, payloads, nbytes, identify(iter(marks)))
