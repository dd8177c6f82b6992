"""What people would try instead of deltawire, on two versions of a checkpoint. For comparison only.

General tools for differences between files, full uploads with Xet's deduplication, and NVIDIA's ModelExpress by its own
functions.

A tool that is not installed is reported as absent: zstd, xdelta3 and bsdiff are Debian packages of these names,
`pip install --target FOLDER modelexpress==0.7.0` and PYTHONPATH=FOLDER bring ModelExpress.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.numpy import save

from _deltas import Bits


@dataclass(frozen=True, slots=True)
class Pair:
    """Two versions of a checkpoint, as safetensors files."""

    old: Path
    new: Path
    folder: Path
    """Where differences go."""


@dataclass(frozen=True, slots=True)
class Tried:
    name: str
    size: int | None
    """Bytes to move; None where the tool is absent."""
    encode_s: float = 0.0
    decode_s: float | None = 0.0
    """None where nothing is decoded."""
    remark: str = ""


def rivals(pair: Pair) -> Iterator[Tried]:
    for level in (1, 19):
        patch = f"--patch-from={pair.old}"
        yield _tool(
            f"`zstd -{level} --patch-from`", pair,
            lambda out, level=level, patch=patch: ["zstd", "-qf", f"-{level}", "--long=27", patch, pair.new, "-o", out],
            lambda out, back, patch=patch: ["zstd", "-qfd", "--long=27", patch, out, "-o", back],
        )  # fmt: skip
    yield _tool(
        "`xdelta3`", pair,
        lambda out: ["xdelta3", "-e", "-f", "-s", pair.old, pair.new, out],
        lambda out, back: ["xdelta3", "-d", "-f", "-s", pair.old, out, back],
    )  # fmt: skip
    yield _tool(
        "`bsdiff`", pair,
        lambda out: ["bsdiff", pair.old, pair.new, out],
        lambda out, back: ["bspatch", pair.old, back, out],
    )  # fmt: skip
    yield _xet(pair)
    yield _model_express(pair)


def _tool(
    name: str, pair: Pair, encode: Callable[[Path], list[Any]], decode: Callable[[Path, Path], list[Any]]
) -> Tried:
    out, back = pair.folder / "difference", pair.folder / "back"
    if shutil.which(encode(out)[0]) is None:
        return Tried(name, None, remark="not installed")
    encode_s = _timed(lambda: subprocess.run(encode(out), check=True))
    decode_s = _timed(lambda: subprocess.run(decode(out, back), check=True))
    if back.read_bytes() != pair.new.read_bytes():
        raise SystemExit(f"{name} did not reproduce the new checkpoint")
    return Tried(name, out.stat().st_size, encode_s, decode_s)


def _xet(pair: Pair) -> Tried:
    """Upload both to a stand-in for the Hub with its own client, which leaves out chunks that are there already."""
    from deltawire.store import open_store

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.hub_stand_in import HubStandIn

    root = pair.folder / "hub"
    with HubStandIn(root) as server, _environment(HF_ENDPOINT=server.endpoint, HF_TOKEN=server.token):
        store = open_store("hf://buckets/me/why-not")
        store.put("model.safetensors", pair.old.read_bytes())
        before = _bytes_in(root)
        seconds = _timed(lambda: store.put("model.safetensors", pair.new.read_bytes()))
        return Tried("full upload, Xet deduplication", _bytes_in(root) - before, seconds, None)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _model_express(pair: Pair) -> Tried:
    """Encoded, written and applied by its own functions: per tensor the XOR of all bytes as a zstd-1 frame."""
    try:
        from importlib.metadata import version

        import numpy as np
        from modelexpress_rl import utils
        from modelexpress_rl.inference import receiver
    except ImportError as error:
        return Tried("ModelExpress", None, remark=f"not installed ({error.name})")
    name = f"ModelExpress {version('modelexpress')}"
    back = pair.folder / "model-express.safetensors"
    shutil.copy(pair.old, back)
    _, locations, _ = utils.index_checkpoint_tensors(back)
    tensors = {key: (start, size) for key, (_, start, size) in locations.items()}
    old, new = np.fromfile(pair.old, np.uint8), np.fromfile(pair.new, np.uint8)
    began = time.perf_counter()
    coded, checksums = {}, {}
    for key, (start, size) in tensors.items():
        delta, changed = utils.compute_delta(new[start : start + size], old[start : start + size])
        if changed:
            coded[key] = utils.compress_delta(delta)
            checksum = utils.checksum_factory("adler32")
            checksum.update(new[start : start + size])
            checksums[key] = checksum.hexdigest()
    shard = save(coded, metadata=checksums)
    encode_s = time.perf_counter() - began
    index = {"checksum_format": "adler32", "compression_format": "zstd"}
    receiving = SimpleNamespace(locations=locations)
    decode_s = _timed(
        lambda: receiver._LocalCheckpoint._apply_shards(
            receiving, {"shard": (shard, list(coded))}, index_metadata=index
        )
    )
    if back.read_bytes() != pair.new.read_bytes():
        raise SystemExit(f"{name} did not reproduce the new checkpoint")
    return Tried(name, len(shard), encode_s, decode_s, "XOR + zstd-1")


def write_pair(old: Bits, new: Bits, folder: Path) -> Pair:
    import torch
    from safetensors.torch import save_file

    for name, bits in (("old", old), ("new", new)):
        tensors = {key: torch.from_numpy(value.view("int16")).view(torch.bfloat16) for key, value in bits.items()}
        save_file(tensors, folder / f"{name}.safetensors")
    return Pair(folder / "old.safetensors", folder / "new.safetensors", folder)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
