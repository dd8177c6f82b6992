"""Versions as other systems write them, written by hand: every part of one can be made wrong."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import zstandard
from blake3 import blake3
from safetensors import numpy as st

Model = dict[str, np.ndarray]


def xxh3(data: bytes) -> str:
    # not everywhere where versions are written by hand: vLLM's environment has none
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


CHECKSUMS: dict[str, Callable[[bytes], str]] = {
    "xxh3-128": xxh3,
    "blake3": lambda data: blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def model(seed: int = 0) -> Model:
    rng = np.random.default_rng(seed)
    return {
        "embed.weight": rng.integers(0, 1 << 16, (64, 32), np.uint16),
        "layer.0.weight": rng.integers(0, 1 << 16, (48, 32), np.uint16),
        "layer.1.weight": rng.integers(0, 1 << 16, (48, 32), np.uint16),
        "norm.weight": rng.standard_normal(32).astype(np.float32),
    }


def trained(before: Model, seed: int, density: float = 0.02) -> Model:
    rng = np.random.default_rng(seed)
    after = {}
    for name, old in before.items():
        bits = old.view(f"u{old.itemsize}") + (rng.random(old.shape) < density).astype(f"u{old.itemsize}")
        after[name] = bits.view(old.dtype)
    return after


def write_base(folder: Path, weights: Model, index: dict[str, object] | None = None) -> Path:
    """A checkpoint; 16-bit weights are bf16."""
    folder.mkdir(parents=True)
    header: dict[str, object] = {}
    at = 0
    for name, array in weights.items():
        dtype = {"uint16": "BF16", "float32": "F32"}[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    file = "model.safetensors" if index is None else "model-00001-of-00001.safetensors"
    (folder / file).write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in weights.values())
    )
    (folder / "config.json").write_text('{"model_type": "toy"}')
    if index is not None:
        whole = {"metadata": index, "weight_map": dict.fromkeys(weights, file)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    return folder


def packed(old: np.ndarray, new: np.ndarray, encoding: str) -> bytes:
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (old, new))
    if encoding == "xor":
        return compressed((a ^ b).tobytes())
    where = np.flatnonzero(a != b).astype("<u4")
    return compressed(np.array([where.size], "<u4").tobytes() + where.tobytes() + b[where].tobytes())


def compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def write_delta(
    root: Path,
    number: int,
    old: Model,
    new: Model,
    encoding: str = "xor",
    algorithm: str = "xxh3-128",
    *,
    files: int = 1,
    base: int | str | None = None,
    name: str = "",
    version: str = "",
    payloads: Mapping[str, bytes] = {},
) -> Path:
    """What slime writes for a step. `payloads` replace what would be right."""
    folder = root / (name or f"weight_v{number:06d}")
    folder.mkdir(parents=True)
    changed = [key for key in new if new[key].tobytes() != old[key].tobytes()]
    where: dict[str, str] = {}
    for n in range(files):
        # no file without tensors, as of a step that changed nothing
        if not (part := changed[n::files]):
            continue
        file = f"model-{n:05d}-of-{files:05d}.safetensors"
        data = {key: payloads.get(key, packed(old[key], new[key], encoding)) for key in part}
        arrays = {key: np.frombuffer(value, np.uint8) for key, value in data.items()}
        checksums = {key: CHECKSUMS[algorithm](new[key].tobytes()) for key in part}
        (folder / file).write_bytes(st.save(arrays, metadata=checksums))
        where |= dict.fromkeys(part, file)
    metadata = {
        "version": version or f"{number:06d}",
        "base_version": base if isinstance(base, str) else f"{number - 1 if base is None else base:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": algorithm,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": where}))
    return folder


def write_skyrl(root: Path, number: int, old: Model, new: Model) -> Path:
    folder = root / f"delta-{number:08d}"
    folder.mkdir(parents=True)
    file = "delta-rank00000-file000000.safetensors"
    data = {key: packed(old[key], new[key], "xor") for key in new if new[key].tobytes() != old[key].tobytes()}
    if data:
        (folder / file).write_bytes(st.save({key: np.frombuffer(value, np.uint8) for key, value in data.items()}))
    records = [
        {
            "name": key, "dtype": "bfloat16", "shape": new[key].shape, "uncompressed_num_bytes": new[key].nbytes,
            "compressed_num_bytes": len(value), "payload_file": file, "payload_key": key,
            "checksum": xxh3(new[key].tobytes()), "checksum_algorithm": "xxh3-128",
        }
        for key, value in data.items()
    ]  # fmt: skip
    manifest = {
        "version": number,
        "base_version": number - 1,
        "tensors": records,
        "payload_files": [file] if data else [],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
