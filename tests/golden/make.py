"""The golden files: a run of two versions, small enough to read, that every later build must still read and write.

python tests/golden/make.py           rewrite them (only together with a new format version, or a new encoding)
python tests/golden/make.py --check   say which differ, exit 1 if any does

run.json, version-0.json, version-1.json     the JSON objects
anchor.safetensors                           full weights of version 0
parts.safetensors                            the same with hashes of parts, as larger anchors have them
delta.<encoding>.safetensors                 0 → 1, once per encoding
tiles.context.safetensors                    a delta of other weights, enough of them for `context` to cut tiles
bytes.<encoding>.safetensors                 the same of fp8 weights: e4m3 and e5m2, by exponent, in ulps
version-1-derived.json                       a manifest that names what its version was derived from
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from deltawire.core import full, keys
from deltawire.core.change import Region, blocks, compare, whole
from deltawire.core.codecs import ENCODINGS
from deltawire.core.digest import StateDigest
from deltawire.core.dtypes import Bits, lookup
from deltawire.core.manifest import Base, Blob, Link, Manifest, Origin, RunInfo, dump
from deltawire.core.schema import Schema, TensorSpec
from deltawire.core.sparse import BASE_DIGEST, DIGEST, DataFile, write_delta

FOLDER = Path(__file__).parent
RUN = "00c0ffee00c0ffee"
WRITER = "0badcafe"

SCHEMA = Schema.build(
    [
        TensorSpec("embed.weight", "BF16", (12, 9)),
        TensorSpec("layer.bias", "F32", (5,)),
        TensorSpec("layer.scale", "F8_E4M3", (2, 2, 3)),
        TensorSpec("layer.zero", "I8", ()),
        TensorSpec("nothing", "F16", (0, 4)),
        TensorSpec("steps", "I64", (2,)),
    ],
    {"head.weight": "embed.weight"},
)


TILED = Schema.build([TensorSpec("narrow", "BF16", (40, 24)), TensorSpec("wide", "BF16", (300, 256))])


BYTES = Schema.build([TensorSpec("e4m3", "F8_E4M3", (300, 256)), TensorSpec("e5m2", "F8_E5M2", (300, 256))])


class Weights:
    """Bits from a congruential generator: the same for ever, whatever numpy does."""

    def __init__(self, tensors: dict[str, Bits], schema: Schema = SCHEMA) -> None:
        self.schema, self.tensors = schema, tensors

    def region(self, region: Region) -> Bits:
        return region.cut(self.tensors[region.tensor.name])


def numbers() -> Iterator[int]:
    state = 1
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        yield state >> 33


def old() -> Weights:
    tensors, drawn = {}, numbers()
    for tensor in SCHEMA.tensors:
        values = [next(drawn) % (1 << 8 * tensor.unit_size) for _ in range(tensor.units)]
        tensors[tensor.name] = np.array(values, lookup(tensor.dtype).unit)
    return Weights(tensors)


def tiled() -> tuple[Weights, Weights]:
    """Weights as training moves them: small ones more often, by an ulp either way, two rows of three not at all."""
    before, after, drawn = {}, {}, numbers()
    for tensor in TILED.tensors:
        was, now = [], []
        for position in range(tensor.units):
            x = next(drawn)
            octaves = 10 - (x & 1023).bit_length()
            bits = (x >> 10 & 1) << 15 | (122 - octaves) << 7 | x >> 11 & 127
            moves = next(drawn) % 4096 < 64 << octaves and position // tensor.columns % 3 == 0
            was.append(bits)
            now.append(bits + (1 if x >> 18 & 1 else -1) * (2 if x >> 19 & 7 == 0 else 1) if moves else bits)
        before[tensor.name], after[tensor.name] = np.array(was, np.uint16), np.array(now, np.uint16)
    return Weights(before, TILED), Weights(after, TILED)


def single_bytes() -> tuple[Weights, Weights]:
    """fp8 weights as training moves them: small ones more often, by an ulp either way."""
    before, after, drawn = {}, {}, numbers()
    for tensor in BYTES.tensors:
        shift, was, now = lookup(tensor.dtype).exponent_shift, [], []
        for _ in range(tensor.units):
            x = next(drawn)
            octaves = min(10 - (x & 1023).bit_length(), 7)
            bits = (x >> 10 & 1) << 7 | (10 - octaves) << shift | x >> 11 & ((1 << shift) - 1)
            moves = next(drawn) % 8192 < 1 << 2 * octaves >> 3
            was.append(bits)
            now.append(bits + (1 if x >> 18 & 1 else -1) * (2 if x >> 19 & 7 == 0 else 1) if moves else bits)
        before[tensor.name], after[tensor.name] = np.array(was, np.uint8), np.array(now, np.uint8)
    return Weights(before, BYTES), Weights(after, BYTES)


def new() -> Weights:
    """Ulp steps both ways, a sign flip, −0, NaN payloads, infinities, and one of each wide step."""
    tensors = {name: bits.copy() for name, bits in old().tensors.items()}
    embed = tensors["embed.weight"]
    embed[3] += 1
    embed[4] -= 1
    embed[40:48] = 0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x807F
    embed[107] ^= 0x8000
    tensors["layer.bias"][[0, 4]] = 0x7FC00001, 0x80000000
    tensors["layer.scale"][::3] ^= 1
    tensors["layer.zero"][0] ^= 0xFF
    tensors["steps"][1] += 1
    return Weights(tensors)


def delta(encoding: str, pair: tuple[Weights, Weights] | None = None) -> tuple[bytes, DataFile]:
    before, after = pair or (old(), new())
    schema = before.schema
    changes = [[compare(r, before.region(r), after.region(r)) for r in block] for block in blocks(schema)]
    changed = sum(change.elements for block in changes for change in block)
    metadata = {
        "run": RUN,
        "model_version": "1",
        "base_version": "0",
        BASE_DIGEST: str(full.digest_of(before)),
        DIGEST: str(full.digest_of(after)),
        "total_params": str(schema.elements),
        "sparsity": f"{1 - changed / schema.elements:.6f}",
    }
    writer, file = write_delta(changes, encoding, before.region, metadata, threads=1)
    data = b"".join(file.chunks())
    writer.close()
    return data, file


def anchor() -> tuple[bytes, DataFile]:
    metadata = {"run": RUN, "model_version": "0", "total_params": str(SCHEMA.elements)}
    file = full.anchor(map(whole, SCHEMA.tensors), old().region, metadata)
    return b"".join(file.chunks()), file


def parts() -> bytes:
    metadata = {"run": RUN, "model_version": "0", "total_params": str(SCHEMA.elements)}
    return b"".join(full.anchor(map(whole, SCHEMA.tensors), old().region, metadata, part=50).chunks())


def run_info() -> RunInfo:
    return RunInfo(RUN, 1_700_000_000.0, SCHEMA, SCHEMA.hash, model="golden")


def adapter_run() -> RunInfo:
    return msgspec.structs.replace(run_info(), base=Base("org/model", ("0123456789abcdef" * 2, "f" * 32)))


def manifests() -> tuple[Manifest, Manifest]:
    def blob(key: str, file: DataFile) -> Blob:
        return Blob(key, file.size, file.hash, file.head_size, file.head_hash)

    _, whole = anchor()
    first = Manifest(
        RUN, 0, None, SCHEMA.hash, str(full.digest_of(old())),
        (Link("anchor", None, (blob(keys.anchor(0, WRITER), whole),)),),
        1_700_000_001.5, WRITER, changed=SCHEMA.elements,
    )  # fmt: skip
    _, change = delta("packed")
    digest: StateDigest = full.digest_of(new())
    second = Manifest(
        RUN, 1, 0, SCHEMA.hash, str(digest),
        (Link("delta", 0, (blob(keys.delta(0, 1, WRITER), change),), "packed", changed=change.changed),),
        1_700_000_002.25, WRITER, step=100, changed=change.changed, metrics={"reward": 0.5},
        timings={"encode": 0.001}, recent=(first.summary(),),
    )  # fmt: skip
    return first, second


def derived() -> Manifest:
    return msgspec.structs.replace(
        manifests()[1], origin=Origin("fp8-block", "00decade00decade", 41, "0123456789abcdef" * 2)
    )


def files() -> dict[str, bytes]:
    first, second = manifests()
    return {
        "run.json": dump(run_info()),
        "version-0.json": dump(first),
        "version-1.json": dump(second),
        "anchor.safetensors": anchor()[0],
        "parts.safetensors": parts(),
        **{f"delta.{encoding}.safetensors": delta(encoding)[0] for encoding in ENCODINGS},
        "tiles.context.safetensors": delta("context", tiled())[0],
        **{f"bytes.{encoding}.safetensors": delta(encoding, single_bytes())[0] for encoding in ("packed", "context")},
        "version-1-derived.json": dump(derived()),
        "run-adapter.json": dump(adapter_run()),
    }


def main() -> int:
    made = files()
    differ = [
        name for name, data in made.items() if not (FOLDER / name).exists() or (FOLDER / name).read_bytes() != data
    ]
    if "--check" not in sys.argv:
        for name in differ:
            (FOLDER / name).write_bytes(made[name])
    for name in differ:
        print(f"{'differs' if '--check' in sys.argv else 'written'}: {name}")
    return 1 if differ and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
