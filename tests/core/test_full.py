"""Anchors and checkpoint folders: full weights as safetensors, read a region at a time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import save_file

import deltawire as dw
from deltawire.core import full
from deltawire.core.change import Region, blocks, whole
from deltawire.core.dtypes import lookup
from deltawire.core.errors import SchemaMismatch, TruncatedFile, UnknownFormat, UnsafeName
from deltawire.core.schema import Schema, TensorSpec
from deltawire.models import ModelView
from support import Bag, column_cut, model, random_bag, same, schemas, seeds


def reader(blob: bytes) -> full.FullFile:
    return full.FullFile(lambda start, length: blob[start : start + length], len(blob))


@given(schema=schemas(), seed=seeds, rows=st.integers(1, 4), columns=st.integers(1, 4), units=st.integers(1, 50))
def test_an_anchor_holds_every_bit(schema: Schema, seed: int, rows: int, columns: int, units: int) -> None:
    bag = random_bag(schema, seed)
    anchor = full.anchor(map(whole, schema.tensors), bag.region, {"model_version": "3"})
    blob = b"".join(anchor.chunks())
    assert len(blob) == anchor.size
    assert b"".join(anchor.chunks()) == blob, "a retry must send the same bytes"
    file = reader(blob)
    every = full.Anchor([file], schema)
    assert (file.metadata["sparse"], file.metadata["model_version"]) == ("false", "3")
    for plan in (blocks(schema, units), column_cut(schema, rows, columns)):
        for block in plan:
            for region in block:
                assert file.region(region).tolist() == every.region(region).tolist() == bag.region(region).tolist()


def test_an_anchor_aligns_every_tensor() -> None:
    schema = Schema.build([TensorSpec("a", "U8", (3,)), TensorSpec("b", "F64", (1,)), TensorSpec("c", "BF16", (1,)),
                           TensorSpec("d", "F32", (1,))])  # fmt: skip
    bag = random_bag(schema, 0)
    file = reader(b"".join(full.anchor(map(whole, schema.tensors), bag.region, {}).chunks()))
    assert all(item.start % lookup(item.dtype).size == 0 for item in file.header.items.values())


def test_an_anchor_must_hold_exactly_the_runs_tensors() -> None:
    a, b = TensorSpec("a", "BF16", (4,)), TensorSpec("b", "BF16", (4,))
    bag = random_bag(Schema.build([a]), 0)
    file = reader(b"".join(full.anchor(map(whole, bag.schema.tensors), bag.region, {}).chunks()))
    for other in ([a, b], [], [TensorSpec("a", "F16", (4,))], [TensorSpec("a", "BF16", (2, 2))]):
        with pytest.raises(SchemaMismatch):
            full.Anchor([file], Schema.build(other))


def parts_of(tensor: TensorSpec, rows: int, columns: int) -> list[Region]:
    """A tensor in bands of so many rows, each cut after so many elements."""
    wide = columns * lookup(tensor.dtype).units_per_element
    return [
        Region(tensor, r, min(rows, tensor.rows - r), c, min(wide, tensor.columns - c))
        for r in range(0, tensor.rows, rows)
        for c in range(0, tensor.columns, wide)
    ]


@given(schema=schemas(), seed=seeds, rows=st.integers(1, 4), columns=st.integers(1, 4), writers=st.integers(1, 3))
def test_an_anchor_of_several_objects_holds_every_bit(
    schema: Schema, seed: int, rows: int, columns: int, writers: int
) -> None:
    bag = random_bag(schema, seed)
    parts = [part for tensor in schema.tensors for part in parts_of(tensor, rows, columns)]
    files = [reader(b"".join(full.anchor(parts[i::writers], bag.region, {}).chunks())) for i in range(writers)]
    anchor = full.Anchor(files, schema)
    for plan in (blocks(schema, 7), column_cut(schema, columns, rows)):
        for block in plan:
            for region in block:
                assert anchor.region(region).tolist() == bag.region(region).tolist()


def test_parts_that_leave_something_out_or_hold_it_twice_are_refused() -> None:
    tensor = TensorSpec("a", "BF16", (4, 6))
    schema = Schema.build([tensor])
    bag = random_bag(schema, 0)
    top, bottom = Region(tensor, 0, 2, 0, 6), Region(tensor, 2, 2, 0, 6)
    left, right = Region(tensor, 2, 2, 0, 3), Region(tensor, 2, 2, 3, 3)
    good: list[list[Region]] = [[top, bottom], [top, left, right], [Region(tensor, 0, 4, 0, 6)]]
    bad = [
        [], [top], [bottom], [top, left], [top, right], [top, top], [top, bottom, bottom], [top, left, left],
        [top, Region(tensor, 1, 3, 0, 6)], [top, left, Region(tensor, 2, 1, 3, 3), Region(tensor, 3, 1, 3, 3)],
    ]  # fmt: skip
    for parts, fine in [*((p, True) for p in good), *((p, False) for p in bad)]:
        # each in a file of its own, so that two may have the same name
        files = [reader(b"".join(full.anchor([part], bag.region, {}).chunks())) for part in parts]
        if fine:
            full.Anchor(files, schema)
            continue
        with pytest.raises(SchemaMismatch):
            full.Anchor(files, schema)


@pytest.mark.parametrize(
    "regions",
    [
        "no JSON", "[]", "{}", '{"a@2,0": ["a", 2, 2, 0]}', '{"a@2,0": ["b", 2, 2, 0, 6]}',
        '{"a@2,0": ["a", 1, 2, 0, 6]}', '{"a@2,0": ["a", 2, 2, 0, 5]}', '{"a@2,0": ["a", 2, -2, 0, -6]}',
        '{"a@2,0": ["a", 2, 9223372036854775808000, 0, 6]}',
    ],
)  # fmt: skip
def test_parts_that_are_not_where_they_say_are_refused(regions: str) -> None:
    tensor = TensorSpec("a", "BF16", (4, 6))
    schema = Schema.build([tensor])
    bag = random_bag(schema, 0)
    top, bottom = Region(tensor, 0, 2, 0, 6), Region(tensor, 2, 2, 0, 6)
    files = [full.anchor([part], bag.region, {}) for part in (top, bottom)]
    first, second = (b"".join(file.chunks()) for file in files)
    size = int.from_bytes(second[:8], "little")
    header = json.loads(second[8 : 8 + size])
    header["__metadata__"]["regions"] = regions
    head = json.dumps(header).encode()
    forged = len(head).to_bytes(8, "little") + head + second[8 + size :]
    with pytest.raises(SchemaMismatch):
        full.Anchor([reader(first), reader(forged)], schema)


def test_an_anchor_of_a_later_format_is_refused() -> None:
    bag = random_bag(Schema.build([TensorSpec("a", "BF16", (4,))]), 0)
    blob = b"".join(full.anchor(map(whole, bag.schema.tensors), bag.region, {"version": "2"}).chunks())
    with pytest.raises(UnknownFormat):
        reader(blob)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 700, 1])
def test_a_checkpoint_folder_there_and_back(tmp_path: Path, shard_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full, "SHARD_BYTES", shard_bytes)
    weights = model()
    source = ModelView(weights)
    full.write_checkpoint(tmp_path, source)
    checkpoint = full.Checkpoint(tmp_path)
    checkpoint.schema.require_equal(source.schema, ours="the folder", theirs="the model")
    assert full.digest_of(checkpoint) == full.digest_of(source)
    found = {}
    for path in tmp_path.glob("*.safetensors"):
        # as others read it; as bytes, since numpy has no bf16
        found.update({name: bytes(tensor["data"]) for name, tensor in deserialize(path.read_bytes())})
    assert found == {name: array.tobytes() for name, array in weights.items()}
    assert (tmp_path / full.INDEX_NAME).exists() == (shard_bytes < 1 << 20)


def test_a_folder_that_others_wrote(tmp_path: Path) -> None:
    weights = {name: array for name, array in model().items() if array.dtype != np.uint16}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = full.Checkpoint(tmp_path)
    found = {t.name: np.concatenate([np.empty(0, lookup(t.dtype).unit), *(checkpoint.region(r) for b in
             blocks(Schema.build([t])) for r in b)]) for t in checkpoint.schema.tensors}  # fmt: skip
    assert same(found, weights)


def test_folders_that_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(SchemaMismatch, match=r"no \*.safetensors"):
        full.Checkpoint(tmp_path)
    (tmp_path / full.INDEX_NAME).write_text('{"weight_map": {"a": "../../secret.safetensors"}}')
    with pytest.raises(UnsafeName):
        full.Checkpoint(tmp_path)
    (tmp_path / full.INDEX_NAME).write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(SchemaMismatch, match="is missing"):
        full.Checkpoint(tmp_path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    bag = Bag(Schema.build([TensorSpec("a", "BF16", (4000,))]), {"a": np.zeros(4000, np.uint16)})
    full.write_checkpoint(tmp_path, bag)
    checkpoint = full.Checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(TruncatedFile):
        full.digest_of(checkpoint)


# ── what of a folder is published ────────────────────────────────────────────────────────────────────────────────────


def folder_of(place: Path) -> Path:
    """A checkpoint folder with all that may lie in one."""
    place.mkdir(parents=True)
    save_file({"w": np.zeros(3, np.float32)}, place / "model.safetensors")
    (place / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoModel": "modeling_own.Own"}}')
    (place / "tokenizer.json").write_text('{"text": "auto_map"}')
    (place / "modeling_own.py").write_text("import os")
    (place / "optimizer.pt").write_bytes(b"pickle")
    (place / ".gitattributes").write_text("")
    (place / "runs").mkdir()
    return place


def test_what_is_left_out_of_a_folder_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "step-1")
    (folder / "vocab.txt").write_bytes(b"x" * 101)
    (folder / "lost.json").symlink_to("nowhere.json")
    monkeypatch.setattr(full, "MAX_FILE", 100)
    files = full.companion_files(folder)
    assert sorted(files) == ["config.json", "tokenizer.json"]
    assert full.asks_for_code(files) == ["config.json"]
    assert full.left_out(folder) == {
        "lost.json": "not a file",
        "modeling_own.py": "code never travels",
        "optimizer.pt": "neither safetensors nor a config or tokenizer file",
        "runs": "a folder",
        "vocab.txt": "more than 0 MiB",
    }


def test_a_draft_model_is_a_checkpoint_within_a_checkpoint(tmp_path: Path) -> None:
    """Published with its folder, checked out as one, and what others read of each has the names of its own."""
    weights = {"fc.weight": np.ones((4, 8), np.float32), "draft.fc.weight": np.full((4, 16), 2, np.float32)}
    head = b'{"architectures": ["LlamaForCausalLM"]}'
    with dw.Publisher(tmp_path / "run", files={"config.json": b"{}", "draft.config.json": head}) as publisher:
        publisher.publish(weights).result(60)
    run = dw.Run.open(str(tmp_path / "run"))
    for name in ("out", "again"):
        dw.checkout_folder(tmp_path / name, run, 0)
        for place, own in ((tmp_path / name, "fc.weight"), (tmp_path / name / "draft", "draft.fc.weight")):
            [(found, tensor)] = deserialize((place / "model.safetensors").read_bytes())
            assert (found, bytes(tensor["data"])) == ("fc.weight", weights[own].tobytes())
        assert (tmp_path / name / "draft" / "config.json").read_bytes() == head
        checkpoint = full.Checkpoint(tmp_path / name)
        assert str(full.digest_of(checkpoint)) == run.manifest(0).digest
        with dw.Publisher(tmp_path / "again-run", files=tmp_path / name) as publisher:
            publisher.publish(checkpoint).result(60)
        run = dw.Run.open(str(tmp_path / "again-run"))
    (tmp_path / "out" / "draft" / "own.py").write_text("")
    assert checkpoint.left_out() == {}
    assert full.left_out(tmp_path / "out") == {"draft/own.py": "code never travels"}


def test_a_draft_model_elsewhere_is_refused(tmp_path: Path) -> None:
    folder, away = folder_of(tmp_path / "step-1"), folder_of(tmp_path / "away")
    (folder / "draft").symlink_to(away)
    with pytest.raises(UnsafeName, match="outside the folder"):
        full.companion_files(folder)


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "model.safetensors", full.INDEX_NAME])
def test_a_symlink_out_of_the_folder_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path / "step-1")
    secret = tmp_path / "secret"
    secret.write_text('{"weight_map": {"w": "model.safetensors"}}')
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(UnsafeName, match=f"{name} is a symlink to .*secret"):
        full.companion_files(folder)


def test_a_shard_behind_a_symlinked_folder_is_refused(tmp_path: Path) -> None:
    folder, away = folder_of(tmp_path / "step-1"), folder_of(tmp_path / "away")
    (folder / "model.safetensors").unlink()
    (folder / "part").symlink_to(away)
    (folder / full.INDEX_NAME).write_text('{"weight_map": {"w": "part/model.safetensors"}}')
    with pytest.raises(UnsafeName):
        full.companion_files(folder)


def test_links_within_a_folder_and_into_the_hub_cache_are_followed(tmp_path: Path) -> None:
    """The cache keeps each file once, in `blobs`, and makes a snapshot of links to them."""
    folder = folder_of(tmp_path / "models--me--own" / "snapshots" / "0123")
    blobs = tmp_path / "models--me--own" / "blobs"
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(blobs / name[:6])
        (folder / name).symlink_to(f"../../blobs/{name[:6]}")
    (folder / "again.json").symlink_to("tokenizer.json")
    # and the folder itself may be named by a link
    (tmp_path / "latest").symlink_to(folder)
    assert sorted(full.companion_files(tmp_path / "latest")) == ["again.json", "config.json", "tokenizer.json"]
    assert full.Checkpoint(tmp_path / "latest").schema.elements == 3
    (folder / "config.json").unlink()
    (tmp_path / "other.json").write_text("{}")
    (folder / "config.json").symlink_to("../../../other.json")
    with pytest.raises(UnsafeName):
        full.companion_files(folder)
