"""checkout: what was published comes out, bit for bit, and a folder appears whole or not at all."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from cli_support import (
    Tensor,
    Weights,
    invoke,
    invoke_json,
    print_of,
    read_checkpoint,
    spawn,
    trained,
    weights,
    write_checkpoint,
)

from deltawire.bucket import checkpoint_folder
from deltawire.bucket.run import Run
from deltawire.core.errors import UnsafeName
from deltawire.core.manifest import dump
from deltawire.trainer import Publisher


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


# ── round trip ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("encoding", ["packed", "raw"])
def test_every_version_comes_out_as_it_went_in(tmp_path: Path, shards: int, encoding: str) -> None:
    run, versions = tmp_path / "run", [weights()]
    while len(versions) < 3:
        versions.append(trained(versions[-1], seed=len(versions)))
    for number, tensors in enumerate(versions):
        files = {"config.json": f"{number}", "tokenizer.model": "pieces", "script.py": "print()", ".hidden.json": "{}"}
        source = write_checkpoint(tmp_path / f"in-{number}", tensors, shards=shards, files=files)
        invoke("publish", source, run, "--encoding", encoding)
    for number, tensors in enumerate(versions):
        out = tmp_path / f"out-{number}"
        value = invoke_json("checkout", f"{run}@{number}", "-o", out)
        assert value["version"] == number
        assert read_checkpoint(out) == tensors
        # code and hidden files stay behind
        assert names(out) == {"model.safetensors", "config.json", "tokenizer.model"}
        assert (out / "config.json").read_text() == f"{number}"


def test_a_large_checkpoint_comes_out_in_shards(
    tmp_path: Path, run: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltawire.core.full.SHARD_BYTES", 5000)
    invoke("checkout", f"{run}@0", "-o", tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == read_checkpoint(checkpoints[0]).keys()
    assert read_checkpoint(tmp_path / "out") == read_checkpoint(checkpoints[0])
    # and such a folder can be published again
    assert (
        invoke_json("publish", tmp_path / "out", tmp_path / "again")["digest"] == Run.open(str(run)).manifest(0).digest
    )


def test_checkout_for_people(tmp_path: Path, run: Path) -> None:
    text = invoke("checkout", run, "-o", tmp_path / "out").stdout
    assert text.startswith(f"v3 → {tmp_path / 'out'}")
    assert Run.open(str(run)).manifest(3).digest in text


# ── whole or not at all ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_with_something_in_it_stays(tmp_path: Path, run: Path, checkpoints: list[Path]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    invoke("checkout", run, "-o", out)  # an empty one is fine
    (out / "notes.txt").write_text("mine")
    assert "--force" in invoke("checkout", run, "-o", out, code=2).stderr
    assert (out / "notes.txt").exists()
    invoke("checkout", f"{run}@1", "-o", out, "--force")
    assert read_checkpoint(out) == read_checkpoint(checkpoints[1])
    assert "notes.txt" not in names(out)


def test_checkout_replaces_only_folders(tmp_path: Path, run: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path)
    for place in ("file", "link"):
        invoke("checkout", run, "-o", tmp_path / place, "--force", code=2)
    assert (tmp_path / "file").read_text() == "mine"


def test_missing_versions(tmp_path: Path, run: Path) -> None:
    invoke("checkout", f"{run}@9", "-o", tmp_path / "out", code=4)
    invoke("checkout", tmp_path / "nothing", "-o", tmp_path / "out", code=4)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("broken", ["deltas/*000003*", "files/*", "anchors/*", "versions/000003.json"])
def test_bad_data_leaves_what_was_there(tmp_path: Path, run: Path, broken: str) -> None:
    out = tmp_path / "out"
    invoke("checkout", f"{run}@0", "-o", out)
    before = print_of(read_checkpoint(out)), names(tmp_path)
    for path in run.glob(broken):
        blob = bytearray(path.read_bytes())
        blob[len(blob) // 2] ^= 1
        path.write_bytes(blob)
    invoke("checkout", run, "-o", out, "--force", code=3)
    assert (print_of(read_checkpoint(out)), names(tmp_path)) == before


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "modeling.py", "weights.bin"])
def test_a_manifest_cannot_bring_its_own_weights_or_code(tmp_path: Path, run: Path, name: str) -> None:
    opened = Run.open(str(run))
    manifest = opened.manifest(3)
    file = manifest.files[0]
    for path in run.glob("versions/000003.json"):
        path.write_bytes(dump(manifest).replace(f'"{file.name}"'.encode(), f'"{name}"'.encode()))
    invoke("checkout", run, "-o", tmp_path / "out", code=3)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UnsafeName), Publisher(tmp_path / "new", files={name: b""}) as publisher:
        publisher.publish({"a": np.zeros(3, np.float32)}, wait=True)


@pytest.mark.parametrize("atomic", [True, False])
def test_replacing_is_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool) -> None:
    if not atomic:
        monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    for name in ("new", "place"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text("")
    checkpoint_folder.move_into(tmp_path / "new", tmp_path / "place", replace=True)
    assert names(tmp_path) == {"place"}
    assert names(tmp_path / "place") == {"new.txt"}


def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    place = tmp_path / "model[1]"
    with checkpoint_folder.scratch(place) as first:
        dead = tmp_path / ".model[1].making-00000000"
        dead.mkdir()
        (dead / "part").write_text("")
        with checkpoint_folder.scratch(place) as second:
            assert names(tmp_path) == {first.name, second.name}
    assert names(tmp_path) == set()


def test_a_killed_checkout_leaves_no_folder(tmp_path: Path) -> None:
    tensors: Weights = {"w": Tensor("BF16", (2048, 2048), np.random.default_rng(0).bytes(8 << 20))}
    invoke("publish", write_checkpoint(tmp_path / "in", tensors), tmp_path / "run")
    process = spawn("checkout", tmp_path / "run", "-o", tmp_path / "out")
    # soon after it has begun to write
    while process.poll() is None and names(tmp_path) == {"in", "run"}:
        time.sleep(0.001)
    process.kill()
    process.communicate()
    if (tmp_path / "out").exists():
        assert read_checkpoint(tmp_path / "out") == tensors
        assert names(tmp_path / "out") == {"model.safetensors", "config.json"}
    invoke("checkout", tmp_path / "run", "-o", tmp_path / "out", "--force")
    assert read_checkpoint(tmp_path / "out") == tensors
    assert names(tmp_path) == {"in", "run", "out"}


def test_a_folder_is_readable_by_others(tmp_path: Path, run: Path) -> None:
    before = os.umask(0o022)
    try:
        invoke("checkout", run, "-o", tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
