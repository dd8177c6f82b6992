"""`encode` and `decode`: a delta as bytes, for tools and tests. Runs and buckets are built on the same parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .core.change import blocks, compare
from .core.errors import UnknownFormat
from .core.parallel import ordered_map
from .core.sparse import DeltaFile, write_delta
from .models import ModelView, like, require_schema, tensors_of


def encode(
    old: Any,
    new: Any,
    encoding: str = "packed",
    *,
    metadata: Mapping[str, str] | None = None,
    threads: int | None = None,
) -> bytes:
    """What turns `old` into `new`, bit for bit, as a sparse safetensors file.

    Both are `{name: array}` mappings (numpy, a uint16 array being the bits of a bfloat16, or torch) or torch modules,
    with the same names, shapes and dtypes. `metadata` goes into the file; unless it names a `model_version` and
    `base_version`, the delta is from 0 to 1.
    """
    before, after = ModelView(old), ModelView(new)
    require_schema(after, before.schema, "the new model")
    schema = before.schema

    def changed(block: Any) -> Any:
        return [compare(region, before.region(region), after.region(region)) for region in block]

    found = list(ordered_map(changed, blocks(schema), threads))
    count = sum(change.elements for block in found for change in block)
    described = {
        "base_version": "0",
        "model_version": "1",
        "total_params": str(schema.elements),
        "sparsity": f"{1 - count / max(schema.elements, 1):.6f}",
        **(metadata or {}),
    }
    writer, file = write_delta(found, encoding, before.region, described, threads)
    try:
        return b"".join(file.chunks())
    finally:
        writer.close()


def decode(blob: bytes, old: Any, *, threads: int | None = None) -> dict[str, Any]:
    """`old` with the delta applied, as new arrays; `old` itself is not touched. Tied names share their array again."""
    base = ModelView(old)
    file = DeltaFile(lambda start, length: blob[start : start + length], len(blob), base.schema)
    if file.metadata.get("sparse", "true") != "true":
        raise UnknownFormat("this file is no delta: it holds full weights")
    result = {name: bits.copy() for name, bits in base}
    for _ in file.patches(result.__getitem__, threads):
        pass
    templates = tensors_of(old)
    shaped = {name: like(templates[name], bits) for name, bits in result.items()}
    return {name: shaped[base.schema.ties.get(name, name)] for name in templates}
