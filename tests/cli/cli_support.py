"""What the tests of the command line are made from: checkpoint folders written and read by hand, commands run."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from deltawire.cli import app, main
from tests import forks

SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8, "I32": 4}


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: bytes


Weights = dict[str, Tensor]


def weights(seed: int = 0, rows: int = 32) -> Weights:
    """A small model of several dtypes, one of which numpy has no name for."""
    rng = np.random.default_rng(seed)

    def tensor(dtype: str, *shape: int) -> Tensor:
        return Tensor(dtype, shape, rng.bytes(math.prod(shape) * SIZES[dtype]))

    return {
        "embed.weight": tensor("BF16", rows, 64),
        "layer.weight": tensor("BF16", 64, 64),
        "layer.bias": tensor("F32", 64),
        "layer.scale": tensor("F8_E4M3", 16, 16),
        "steps": tensor("I64", 3),
        "scalar": tensor("F32"),
    }


def trained(before: Weights, seed: int, changes: int = 20) -> Weights:
    """Some bytes of every tensor get another value."""
    rng = np.random.default_rng(seed)
    after = {}
    for name, tensor in before.items():
        data = bytearray(tensor.data)
        for at in rng.integers(0, len(data), changes):
            data[at] ^= int(rng.integers(1, 256))
        after[name] = Tensor(tensor.dtype, tensor.shape, bytes(data))
    return after


def safetensors_bytes(tensors: Weights, metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(tensor.data)],
        }
        at += len(tensor.data)
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(tensor.data for tensor in tensors.values())


def read_safetensors(path: Path) -> Weights:
    blob = path.read_bytes()
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header.pop("__metadata__", None)
    return {
        name: Tensor(x["dtype"], tuple(x["shape"]), blob[start + x["data_offsets"][0] : start + x["data_offsets"][1]])
        for name, x in header.items()
    }


def write_checkpoint(folder: Path, tensors: Weights, *, shards: int = 1, files: dict[str, str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (files if files is not None else {"config.json": "{}"}).items():
        (folder / name).write_text(text)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
        return folder
    where = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensor for i, (key, tensor) in enumerate(tensors.items()) if i % shards == number}
        (folder / name).write_bytes(safetensors_bytes(part, {"format": "pt"}))
        where.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def read_checkpoint(folder: Path) -> Weights:
    found: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(read_safetensors(path))
    return found


def print_of(tensors: Weights) -> str:
    """A name for a set of weights, to find out which one a folder holds."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype} {tensor.shape} ".encode() + tensor.data)
    return whole.hexdigest()


# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def invoke(*args: object, code: int = 0, columns: int = 160) -> Any:
    """A command in this process, with the exit code it should have."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": str(columns)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.stdout}\n{result.stderr}"
    return result


def invoke_json(*args: object, code: int = 0) -> Any:
    return json.loads(invoke(*args, "--json", code=code).stdout)


def run_until_sigterm(client: Callable[[IO[str], IO[str]], object], *args: object) -> object:
    """The exit code of a command that runs in this thread. Its client reads what it writes (stdout, stderr) in another
    thread, and when it returns, SIGTERM ends the command."""
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()

    def use() -> None:
        try:
            with open(out) as said, open(err) as complained:
                client(said, complained)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    # where the command has ended before, the signal means nothing
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
            patch.setattr(sys, "argv", ["deltawire", *map(str, args)])
            used = pool.submit(use)
            with open(out_end, "w") as stdout, open(err_end, "w") as stderr, pytest.raises(SystemExit) as left:
                patch.setattr(sys, "stdout", stdout)
                patch.setattr(sys, "stderr", stderr)
                main()
            used.result()
    finally:
        signal.signal(signal.SIGTERM, before)
    return left.value.code


def spawn(*args: object, **options: Any) -> subprocess.Popen[str]:
    """A command as a process of its own."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return forks.Popen(
        [sys.executable, "-X", "faulthandler", "-m", "deltawire.cli", *map(str, args)], text=True, **options
    )


def run_app(*args: str) -> None:
    """What a process of `Kill` runs."""
    app(list(args))
