"""Take a good file apart, change one thing, put it together again so that everything else is right.

Hashes and sizes are made to fit, in the file and in the manifest that names it: what is tested is the check itself, not
the hash that happens to come before it. A writer with a bug, or an attacker with write access, would do the same.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np
import zstandard
from blake3 import blake3

from deltawire.core import keys
from deltawire.core.container import PREFIX
from deltawire.store import ObjectStore, Store
from deltawire.trainer import Publisher
from support import Model, history

Tensors = dict[str, tuple[str, list[int], bytes]]
"""name → (dtype, shape, bytes), in file order"""


# ── safetensors ──────────────────────────────────────────────────────────────────────────────────────────────────────


def split(blob: bytes) -> tuple[dict[str, str], Tensors]:
    size = int.from_bytes(blob[:PREFIX], "little")
    header = json.loads(blob[PREFIX : PREFIX + size])
    metadata = header.pop("__metadata__", {})
    data = blob[PREFIX + size :]
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return metadata, tensors


def join(metadata: dict[str, str], tensors: Tensors, edit: Callable[[dict[str, Any]], None] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    if edit:
        edit(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(PREFIX, "little") + text + b"".join(data for _, _, data in tensors.values())


def with_header(blob: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    metadata, tensors = split(blob)
    return join(metadata, tensors, edit)


def with_metadata(blob: bytes, **changes: str) -> bytes:
    metadata, tensors = split(blob)
    return join({**metadata, **changes}, tensors)


# ── raw ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def with_indices(blob: bytes, name: str, edit: Callable[[np.ndarray], np.ndarray], dtype: str = "I32") -> bytes:
    metadata, tensors = split(blob)
    key = f"{name}.indices"
    found = np.frombuffer(tensors[key][2], np.int32)
    made = np.asarray(edit(found.astype(np.int64)), {"I32": np.int32, "I64": np.int64}[dtype])
    tensors[key] = (dtype, [made.size], made.tobytes())
    values = tensors[f"{name}.values"]
    if made.size != found.size:
        each = len(values[2]) // found.size
        padded = (values[2] * (made.size // found.size + 1))[: made.size * each]
        tensors[f"{name}.values"] = (values[0], [made.size], padded)
    return join(metadata, tensors)


# ── block encodings ──────────────────────────────────────────────────────────────────────────────────────────────────


def index_of(blob: bytes) -> dict[str, Any]:
    metadata, tensors = split(blob)
    stored = tensors["index"][2]
    size = int(metadata["index_size"])
    return json.loads(stored if len(stored) == size else zstandard.ZstdDecompressor().decompress(stored))


def with_index(blob: bytes, index: Any, blocks: dict[int, bytes] | None = None) -> bytes:
    """Another index, stored as it is; and other bytes for some blocks, under their right hash."""
    metadata, tensors = split(blob)
    for number, data in (blocks or {}).items():
        tensors[f"block.{number:05d}"] = ("U8", [len(data)], data)
        index["blocks"][number]["hash"] = blake3(data).hexdigest(length=16)
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    metadata["index_size"] = str(len(text))
    tensors["index"] = ("U8", [len(text)], text)
    return join(metadata, tensors)


def edited_index(blob: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    index = index_of(blob)
    edit(index)
    return with_index(blob, index)


def streams_of(blob: bytes, number: int = 0) -> dict[str, bytes]:
    record = index_of(blob)["blocks"][number]
    data, at, streams = split(blob)[1][f"block.{number:05d}"][2], 0, {}
    for name, (raw, stored) in record["streams"].items():
        piece = data[at : at + stored]
        streams[name] = piece if raw == stored else zstandard.ZstdDecompressor().decompress(piece)
        at += stored
    return streams


def with_streams(blob: bytes, streams: dict[str, bytes], number: int = 0, **record: Any) -> bytes:
    """Other streams in a block, stored as they are, everything that names them adjusted."""
    index = index_of(blob)
    index["blocks"][number].update(record, streams={name: [len(data)] * 2 for name, data in streams.items()})
    return with_index(blob, index, {number: b"".join(streams.values())})


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def _published(encoding: str, last_has_anchor: bool, count: int) -> dict[str, bytes]:
    """The objects of a run, published once for all tests that spoil a copy of it."""
    store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    *versions, last = history(count, changes=7)
    with Publisher(store, encoding=encoding, anchor_ratio=1e9) as publisher:
        for weights in versions:
            publisher.publish(weights).result(120)
    every = 1 if last_has_anchor else None
    with Publisher(store, encoding=encoding, anchor_ratio=1e9, anchor_every=every) as publisher:
        publisher.publish(last).result(120)
    return {item.key: store.get(item.key).data for item in store.list()}


class ForgedRun:
    """A run whose newest version can be spoiled in one place. All its versions are deltas after the anchor of 0."""

    def __init__(
        self, store: Store, encoding: str = "packed", *, last_has_anchor: bool = False, count: int = 3
    ) -> None:
        self.store = store
        self.versions: list[Model] = history(count, changes=7)
        self.last = count - 1
        for key, data in _published(encoding, last_has_anchor, count).items():
            store.put(key, data)

    def manifest(self, version: int | None = None) -> dict[str, Any]:
        return json.loads(self.store.get(keys.manifest(self.last if version is None else version)).data)

    def edit_manifest(self, edit: Callable[[dict[str, Any]], Any], version: int | None = None) -> None:
        version = self.last if version is None else version
        manifest = self.manifest(version)
        replaced = edit(manifest)
        data = replaced if isinstance(replaced, bytes) else json.dumps(manifest).encode()
        self.store.put(keys.manifest(version), data)

    def link(self, kind: str, version: int | None = None) -> dict[str, Any]:
        return next(link for link in self.manifest(version)["links"] if link["kind"] == kind)

    def object(self, kind: str, version: int | None = None) -> bytes:
        return self.store.get(self.link(kind, version)["objects"][0]["key"]).data

    def edit_object(self, edit: Callable[[bytes], bytes], kind: str = "delta", *, honest: bool = True) -> None:
        """Replace an object of the newest version; with `honest`, the manifest gets its new size and hash."""
        entry = self.link(kind)["objects"][0]
        data = edit(self.store.get(entry["key"]).data)
        self.store.put(entry["key"], data)
        if honest:

            def fit(manifest: dict[str, Any]) -> None:
                for link in manifest["links"]:
                    if link["kind"] == kind:
                        link["objects"][0] |= {"size": len(data), "hash": blake3(data).hexdigest(length=16)}

            self.edit_manifest(fit)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def dumps(value: Any) -> bytes:
    return msgspec.json.encode(value)
