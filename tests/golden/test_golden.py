"""Golden files: what earlier builds wrote is still what this build writes, and still reads.

A test that fails here means that the format changed. If that is wanted, raise the format version, say so in
docs/format.md and run `python tests/golden/make.py`; if not, it is a bug, and every run out there would be unreadable.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from blake3 import blake3
from safetensors import safe_open

from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.core import full, keys
from deltawire.core.change import whole
from deltawire.core.codecs import ENCODINGS
from deltawire.core.held import Held
from deltawire.core.manifest import parse_manifest, parse_run
from deltawire.models import torch_bits
from deltawire.replica import Replica
from deltawire.store import Store
from support import Bag, applied, opened, same

FOLDER = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("golden_make", FOLDER / "make.py")
assert _spec is not None
assert _spec.loader is not None
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)

NAMES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".json", ".safetensors"))
files = cache(make.files)


def read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def golden_store(store: Store) -> Store:
    store.put(keys.RUN, read("run.json"))
    store.put(keys.manifest(0), read("version-0.json"))
    store.put(keys.manifest(1), read("version-1.json"))
    store.put(keys.anchor(0, make.WRITER), read("anchor.safetensors"))
    store.put(keys.delta(0, 1, make.WRITER), read("delta.packed.safetensors"))
    return store


def test_there_is_a_golden_file_for_every_encoding() -> None:
    found = {path.name for path in FOLDER.glob("*.safetensors")}
    deltas = {f"delta.{encoding}.safetensors" for encoding in ENCODINGS}
    single = {f"bytes.{encoding}.safetensors" for encoding in ("packed", "context")}
    assert found == {"anchor.safetensors", "parts.safetensors", "tiles.context.safetensors", *deltas, *single}
    assert sorted(files()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_this_build_still_writes_the_same_bytes(name: str) -> None:
    if zstandard.ZSTD_VERSION[:2] != (1, 5) and name not in (
        "run.json",
        "anchor.safetensors",
        "parts.safetensors",
        "delta.raw.safetensors",
    ):
        pytest.skip(f"zstd {zstandard.ZSTD_VERSION} may compress the same streams to other bytes")
    assert files()[name] == read(name)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_this_build_still_reads_every_delta(encoding: str) -> None:
    base, expected = make.old(), make.new()
    result, moves = applied(read(f"delta.{encoding}.safetensors"), Bag(make.SCHEMA, base.tensors))
    assert same(result.tensors, expected.tensors)
    assert full.digest_of(base) + moves == full.digest_of(expected)


def test_this_build_still_reads_tiles() -> None:
    blob = read("tiles.context.safetensors")
    base, expected = make.tiled()
    (block,) = opened(blob, make.TILED).blocks
    assert block.record is not None
    assert block.record.encoding == "context"
    assert block.record.streams["levels"].raw > 0, "the rows were made to differ"
    result, moves = applied(blob, Bag(make.TILED, base.tensors))
    assert same(result.tensors, expected.tensors)
    assert full.digest_of(base) + moves == full.digest_of(expected)


@pytest.mark.parametrize("encoding", ["packed", "context"])
def test_this_build_still_reads_fp8_weights(encoding: str) -> None:
    blob = read(f"bytes.{encoding}.safetensors")
    base, expected = make.single_bytes()
    assert {b.record.encoding for b in opened(blob, make.BYTES).blocks if b.record} == {encoding}
    result, moves = applied(blob, Bag(make.BYTES, base.tensors))
    assert same(result.tensors, expected.tensors)
    assert full.digest_of(base) + moves == full.digest_of(expected)


@pytest.mark.parametrize("name", ["anchor.safetensors", "parts.safetensors"])
def test_this_build_still_reads_the_anchor(name: str) -> None:
    blob = read(name)
    file = full.FullFile(lambda start, length: blob[start : start + length], len(blob))
    full.Anchor([file], make.SCHEMA)
    assert full.digest_of(full.ReadBy(make.SCHEMA, file.region)) == full.digest_of(make.old())


def test_this_build_still_checks_parts_alone() -> None:
    blob = read("parts.safetensors")
    file = full.FullFile(lambda start, length: blob[start : start + length], len(blob))
    found = full.needed(file, make.SCHEMA, Held(map(whole, make.SCHEMA.tensors)))
    assert found is not None
    assert len(found) > len(file.tensors), "the largest tensor has several"
    assert b"".join(blob[part.start : part.end] for part in found) == blob[file.header.size :]
    assert all(blake3(blob[part.start : part.end]).hexdigest(length=16) == part.hash for part in found)


def test_this_build_still_reads_the_manifests() -> None:
    info = parse_run(read("run.json"))
    assert info == make.run_info()
    assert (parse_manifest(read("version-0.json"), 0, info), parse_manifest(read("version-1.json"), 1, info)) == (
        make.manifests()
    )


def test_this_build_still_reads_which_base_model_adapters_need() -> None:
    assert parse_run(read("run-adapter.json")) == make.adapter_run()


def test_this_build_still_reads_what_a_version_was_derived_from() -> None:
    assert parse_manifest(read("version-1-derived.json"), 1, make.run_info()) == make.derived()


def test_the_digests_are_pinned() -> None:
    assert str(full.digest_of(make.old())) == "9408533dea8eb6a12bbfa7a9cf85eefa"
    assert str(full.digest_of(make.new())) == "9f84fc002e2b1854f066c21b38b1281d"
    assert make.SCHEMA.hash == "183bc8b6fce7cfc0448e59f164405fd9"


def test_the_golden_run_can_be_followed(store: Store) -> None:
    golden_store(store)
    state = checkout(Run.open(store), 1)
    assert same(state.tensors, make.new().tensors)
    weights = {
        "embed.weight": torch.zeros(12, 9, dtype=torch.bfloat16),
        "layer.bias": torch.zeros(5),
        "layer.scale": torch.zeros(2, 2, 3, dtype=torch.float8_e4m3fn),
        "layer.zero": torch.zeros((), dtype=torch.int8),
        "nothing": torch.zeros(0, 4, dtype=torch.float16),
        "steps": torch.zeros(2, dtype=torch.int64),
    }
    weights["head.weight"] = weights["embed.weight"]
    assert Replica(store).sync(weights) == 1
    expected = make.new().tensors
    assert all(torch_bits(weights[name]).tolist() == bits.tolist() for name, bits in expected.items())


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".safetensors")])
def test_any_safetensors_reader_opens_it(name: str) -> None:
    with safe_open(FOLDER / name, "pt") as file:
        names, metadata = set(file.keys()), file.metadata()
        tensors = {key: file.get_tensor(key) for key in names}
    assert metadata["format"] == "deltawire"
    is_full = name in ("anchor.safetensors", "parts.safetensors")
    assert metadata["sparse"] == ("false" if is_full else "true")
    if is_full:
        assert names == {tensor.name for tensor in make.SCHEMA.tensors}
        assert torch_bits(tensors["embed.weight"]).tolist() == make.old().tensors["embed.weight"].tolist()
    elif name == "delta.raw.safetensors":
        changed = {t.name for t in make.SCHEMA.tensors} - {"nothing"}
        assert names == {f"{n}.{part}" for n in changed for part in ("indices", "values")}
        indices = tensors["embed.weight.indices"]
        assert indices.dtype == torch.int32
        old, new = make.old().tensors["embed.weight"], make.new().tensors["embed.weight"]
        assert indices.tolist() == np.flatnonzero(old != new).tolist()
    else:
        assert "index" in names


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_metadata_of_a_delta(encoding: str) -> None:
    file = opened(read(f"delta.{encoding}.safetensors"), make.SCHEMA)
    changed = sum(
        int((a.reshape(-1, per) != b.reshape(-1, per)).any(axis=1).sum())
        for t in make.SCHEMA.tensors
        for per in (t.units // max(t.elements, 1) or 1,)
        for a, b in ((make.old().tensors[t.name], make.new().tensors[t.name]),)
    )
    assert {k: v for k, v in file.metadata.items() if k != "index_size"} == {
        "format": "deltawire", "version": "1", "sparse": "true", "encoding": encoding, "changed_params": str(changed),
        "base_digest": str(full.digest_of(make.old())), "digest": str(full.digest_of(make.new())),
        "run": make.RUN, "model_version": "1", "base_version": "0", "total_params": str(make.SCHEMA.elements),
        "sparsity": f"{1 - changed / make.SCHEMA.elements:.6f}",
    }  # fmt: skip
