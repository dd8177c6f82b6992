"""`encode` and `decode`: a delta as bytes, without a run, for tools and tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .core import full
from .core.change import Block, Change, blocks, compare, digest_shift
from .core.digest import StateDigest
from .core.errors import DigestMismatch, UnknownFormat
from .core.parallel import ordered_map, threads_for
from .core.sparse import BASE_DIGEST, DIGEST, DeltaFile, write_delta
from .models import ModelView, Module, like, tensors_of


def encode(
    old: Module | Mapping[str, Any],
    new: Module | Mapping[str, Any],
    encoding: str = "packed",
    *,
    metadata: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> bytes:
    """Encode the changes from `old` to `new`, bit for bit, as a sparse safetensors file.

        blob = dw.encode(old, new)
        copy = dw.decode(blob, old)             # {name: array}, with the bits of `new`
        assert all((copy[name] == new[name]).all() for name in new)

    Both are `{name: array}` mappings (torch, or numpy with the bits of a bfloat16 as uint16) or torch modules.
    Raises SchemaMismatch unless names, shapes and dtypes are equal.

    encoding   "packed", "context" (smaller, slower) or "raw"
    metadata   stored in the file; unless it names a `model_version` and `base_version`, the delta is from 0 to 1
    threads    the most threads to use; by default one per core that this process may use
    """
    before, after = ModelView(old), ModelView(new)
    schema = before.schema
    schema.require_equal(after.schema, ours="the old model", theirs="the new model")

    def changed(block: Block) -> list[Change]:
        return [compare(region, before.region(region), after.region(region)) for region in block]

    threads = threads_for(schema.elements, threads)
    found = list(ordered_map(changed, blocks(schema), threads))
    count = sum(change.elements for block in found for change in block)
    digest = full.digest_of(before, threads)
    described = {
        "base_version": "0",
        "model_version": "1",
        "total_params": str(schema.elements),
        "sparsity": f"{1 - count / max(schema.elements, 1):.6f}",
        **(metadata or {}),
        BASE_DIGEST: str(digest),
        DIGEST: str(sum(map(digest_shift, found), digest)),
    }
    writer, file = write_delta(found, encoding, before.region, described, threads)
    try:
        return b"".join(file.chunks())
    finally:
        writer.close()


def decode(
    blob: bytes, old: Module | Mapping[str, Any], *, check: bool = True, threads: int | None = None
) -> dict[str, Any]:
    """Apply a delta made by `encode` to `old`, and return the result as new arrays of the same kind, by name.

    `old` itself is not changed. Tied names share one array in the result too.

    Raises FormatError if the bytes are damaged, and DigestMismatch if `old` is not the base of the delta or the result
    is wrong. A file without digests, as other tools write them, is refused unless `check` is False; then the result
    is not verified.
    """
    base = ModelView(old)
    file = DeltaFile(lambda start, length: blob[start : start + length], len(blob), base.schema)
    if file.metadata.get("sparse", "true") != "true":
        raise UnknownFormat("this file is no delta: it holds full weights")
    if check:
        _require(file, BASE_DIGEST, "base_version", full.digest_of(base, threads), "`old` is not what it was made from")
    result = {name: bits.copy() for name, bits in base}
    for _ in file.changes(result.__getitem__, threads, write=True):
        pass
    if check:
        patched = full.ReadBy(base.schema, lambda region: region.cut(result[region.tensor.name]))
        found = full.digest_of(patched, threads)
        hint = "the delta is damaged, or one of several objects of its version: check that out from its run"
        _require(file, DIGEST, "model_version", found, hint)
    templates = tensors_of(old)
    shaped = {name: like(templates[name], bits) for name, bits in result.items()}
    return {name: shaped[base.schema.ties.get(name, name)] for name in templates}


def _require(file: DeltaFile, key: str, version: str, found: StateDigest, hint: str) -> None:
    wanted, number = file.metadata.get(key), file.metadata.get(version, "")
    if wanted is None:
        raise UnknownFormat(
            f"this delta has no {key!r} to check weights by; decode(…, check=False) applies it unchecked"
        )
    if wanted != str(found):
        # Python refuses to read a number of thousands of digits
        at = int(number) if number.isdecimal() and len(number) < 20 else 0
        raise DigestMismatch(at, wanted[:32], str(found), hint)
