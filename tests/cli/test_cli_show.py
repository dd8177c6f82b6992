"""show: versions, our files, and the files of others."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from cli_support import (
    Tensor,
    invoke,
    invoke_json,
    read_checkpoint,
    safetensors_bytes,
    trained,
    weights,
    write_checkpoint,
)

from deltawire import encode
from deltawire.bucket.run import Run
from deltawire.core.dtypes import lookup
from deltawire.core.ulps import Histogram, in_ulps
from support import history, publish


def steps(value: dict) -> dict[str, tuple[int, int]]:
    return {row["ulps"]: (row["up"], row["down"]) for row in value["steps"]}


def bf16(*numbers: float) -> bytes:
    return b"".join(struct.pack("<f", number)[2:] for number in numbers)


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_delta_of_a_run(run: Path, checkpoints: list[Path]) -> None:
    value = invoke_json("show", f"{run}@2")
    old, new = (read_checkpoint(checkpoints[step]) for step in (1, 2))
    assert (value["version"], value["parent"], value["kind"], value["encoding"]) == (2, 1, "delta", "packed")
    assert value["step"] == 20
    assert {file["name"] for file in value["files"]} == {"config.json", "tokenizer.json", "chat_template.jinja"}
    for row in value["tensors"]:
        a, b = (np.frombuffer(side[row["name"]].data, lookup(row["dtype"]).unit) for side in (old, new))
        assert row["changed"] == np.count_nonzero(a != b)
        assert row["shape"] == list(old[row["name"]].shape)
    assert sum(map(sum, steps(value).values())) == sum(row["changed"] for row in value["tensors"])


@pytest.mark.parametrize("encoding", ["packed", "raw"])
def test_steps_are_the_same_however_they_are_found(tmp_path: Path, encoding: str) -> None:
    versions = [weights(), trained(weights(), 1, 400)]
    for number, tensors in enumerate(versions):
        folder = write_checkpoint(tmp_path / f"{number}", tensors)
        invoke("publish", folder, tmp_path / "run", "--encoding", encoding)
    expected = Histogram()
    for name, tensor in versions[0].items():
        dtype = lookup(tensor.dtype)
        a, b = (np.frombuffer(version[name].data, dtype.unit) for version in versions)
        expected.add(in_ulps(a[a != b], b[a != b], dtype))
    wanted = {name: (up, down) for name, up, down in expected.rows()}
    delta = next((tmp_path / "run").glob("deltas/*"))
    assert steps(invoke_json("show", delta, "--base", tmp_path / "0")) == wanted
    assert steps(invoke_json("show", f"{tmp_path / 'run'}@1", "--steps")) == wanted
    if encoding == "packed":
        assert steps(invoke_json("show", f"{tmp_path / 'run'}@1")) == wanted
        assert steps(invoke_json("show", delta)) == wanted
    else:
        assert "--steps" in invoke("show", f"{tmp_path / 'run'}@1").stdout
        assert "--base" in invoke("show", delta).stdout


def test_an_anchor_is_shown_by_its_header_alone(run: Path) -> None:
    anchor = next(run.glob("anchors/*"))
    blob = anchor.read_bytes()
    anchor.write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))  # nobody looks at the weights
    value = invoke_json("show", f"{run}@0")
    assert (value["kind"], value["steps"]) == ("anchor", None)
    assert {row["name"]: row["bytes"] for row in value["tensors"]}["steps"] == 24
    assert "layer.weight" in invoke("show", f"{run}@0").stdout


def test_a_changed_header_is_noticed(run: Path) -> None:
    anchor = next(run.glob("anchors/*"))
    anchor.write_bytes(anchor.read_bytes().replace(b"layer.bias", b"layer.biaz"))
    assert "hash" in invoke("show", f"{run}@0", code=3).stderr


def test_a_reference(tmp_path: Path, checkpoints: list[Path]) -> None:
    invoke("publish", checkpoints[1], tmp_path / "run", "--reference", checkpoints[0])
    value = invoke_json("show", f"{tmp_path / 'run'}@0")
    assert value["kind"] == "reference"
    assert len(value["tensors"]) == 6
    assert str(checkpoints[0]) in invoke("show", f"{tmp_path / 'run'}@0").stdout


def test_an_empty_delta(tmp_path: Path) -> None:
    same = history(1)[0]
    for encoding in ("packed", "raw"):
        publish(tmp_path / encoding, [same, same], encoding=encoding)
        value = invoke_json("show", tmp_path / encoding, "--steps")
        assert (value["kind"], value["tensors"], value["steps"]) == ("delta", [], [])
        assert "0 changed" in invoke("show", next((tmp_path / encoding).glob("deltas/*"))).stdout


def test_not_found(tmp_path: Path, run: Path) -> None:
    invoke("show", f"{run}@77", code=4)
    invoke("show", tmp_path / "nothing.safetensors", code=4)
    invoke("show", run, "--base", tmp_path, code=2)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_plain_checkpoint_file(checkpoints: list[Path]) -> None:
    value = invoke_json("show", checkpoints[0] / "model.safetensors")
    assert (value["kind"], value["encoding"], value["metadata"]) == ("full", "", {"format": "pt"})
    assert [row["name"] for row in value["tensors"]] == list(weights())
    assert "changed" not in invoke("show", checkpoints[0] / "model.safetensors").stdout


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "version": "nightly", "sparse": "yes", "encoding": "coo"}])
def test_a_raw_file_of_others(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    """Only indices and values, by any writer: out of order, with metadata that says nothing or something odd."""
    file = tmp_path / "theirs.safetensors"
    tensors = {
        "w.indices": Tensor("I64", (3,), np.array([7, 2, 5], np.int64).tobytes()),
        "w.values": Tensor("BF16", (3,), bf16(1.5, -2.0, float("nan"))),
        "b.indices": Tensor("I32", (2,), np.array([0, 1], np.int32).tobytes()),
        "b.values": Tensor("F32", (2,), np.array([0.25, 4], np.float32).tobytes()),
        "none.indices": Tensor("I32", (0,), b""),
        "none.values": Tensor("F16", (0,), b""),
        "dense": Tensor("F16", (2, 2), bytes(8)),
    }
    file.write_bytes(safetensors_bytes(tensors, metadata))
    value = invoke_json("show", file)
    assert (value["kind"], value["encoding"]) == ("delta", "raw")
    rows = {row["name"]: row for row in value["tensors"]}
    assert {name: row["changed"] for name, row in rows.items()} == {"w": 3, "b": 2, "none": 0, "dense": None}
    assert rows["w"]["indices"] == {"first": 2, "last": 7, "ascending": False, "low": -2.0, "high": 1.5}
    assert rows["b"]["indices"] == {"first": 0, "last": 1, "ascending": True, "low": 0.25, "high": 4.0}
    assert rows["w"]["shape"] is None
    assert "unsorted" in invoke("show", file).stdout


def test_a_raw_file_of_others_beside_its_base(tmp_path: Path) -> None:
    old = np.array([1.0, 1.0, 2.0, -1.0], np.float32)
    base = write_checkpoint(
        tmp_path / "base", {"w": Tensor("BF16", (2, 2), bf16(*old)), "other": Tensor("F32", (1,), bytes(4))}
    )
    bits = np.frombuffer(bf16(*old), np.uint16).copy()
    bits[0] += 1  # away from zero
    bits[3] += 2  # away from zero too, which is down
    file = tmp_path / "theirs.safetensors"
    where = np.array([3, 0], np.int32)
    tensors = {
        "w.indices": Tensor("I32", (2,), where.tobytes()),
        "w.values": Tensor("BF16", (2,), bits[where].tobytes()),
    }
    file.write_bytes(safetensors_bytes(tensors))
    value = invoke_json("show", file, "--base", base)
    assert steps(value) == {"1": (1, 0), "2": (0, 1)}
    assert value["tensors"][0]["elements"] == 4
    assert "50.0 %" in invoke("show", file, "--base", base).stdout


@pytest.mark.parametrize(
    "tensors",
    [
        {"x.indices": Tensor("I32", (1,), bytes(4)), "x.values": Tensor("BF16", (1,), bytes(2))},
        {"w.indices": Tensor("I32", (1,), bytes(4)), "w.values": Tensor("F32", (1,), bytes(4))},
        {"w.indices": Tensor("I32", (1,), b"\xff\xff\xff\x7f"), "w.values": Tensor("BF16", (1,), bytes(2))},
        {"w.indices": Tensor("I32", (1,), b"\xff" * 4), "w.values": Tensor("BF16", (1,), bytes(2))},
    ],
    ids=["no such tensor", "another dtype", "beyond the end", "negative"],
)
def test_a_base_that_does_not_fit(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    base = write_checkpoint(tmp_path / "base", {"w": Tensor("BF16", (4,), bytes(8))})
    (tmp_path / "file").write_bytes(safetensors_bytes(tensors))
    invoke("show", tmp_path / "file", "--base", base, code=3)


def test_a_file_cannot_talk_to_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "file.safetensors"
    file.write_bytes(safetensors_bytes({"[bold]w[/nope]": Tensor("F32", (1,), bytes(4))}, {"note": "\x1b]0;owned\x07"}))
    text = invoke("show", file).stdout
    assert "\x1b" not in text
    assert "[bold]w[/nope]" in text


@pytest.mark.parametrize("blob", [b"", b"not safetensors", b"\xff" * 64, safetensors_bytes(weights())[:-1]])
def test_bad_files(tmp_path: Path, blob: bytes) -> None:
    (tmp_path / "bad").write_bytes(blob)
    assert invoke("show", tmp_path / "bad", code=3).stdout == ""


def test_a_packed_file_with_a_flipped_bit(tmp_path: Path) -> None:
    a, b = history(2, changes=40)
    blob = bytearray(encode(a, b))
    blob[-5] ^= 4
    (tmp_path / "delta").write_bytes(blob)
    assert "hash" in invoke("show", tmp_path / "delta", code=3).stderr


def test_what_a_version_costs_to_look_at(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the header of an anchor is fetched, whatever its size."""
    from deltawire_wordle.counting import CountingStore

    counting = CountingStore(Run.open(str(run)).store)
    monkeypatch.setattr("deltawire.bucket.run.open_store", lambda _: counting)
    invoke("show", f"{run}@0")
    assert counting.bytes_in < 4000


def test_names_keep_the_end_that_tells_them_apart(tmp_path: Path) -> None:
    names = [f"model.language_model.layers.{layer}.self_attention.query_projection.weight" for layer in range(12)]
    tensors = {name: Tensor("BF16", (300, 1000), bytes(600_000)) for name in names}
    invoke("publish", write_checkpoint(tmp_path / "in", tensors), tmp_path / "run")
    text = invoke("show", tmp_path / "run", columns=80).stdout
    for layer in range(12):
        assert f"layers.{layer}.self_attention.query_projection.weight" in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines() if "…" in line)
    wide = invoke("show", tmp_path / "run", columns=160).stdout
    assert all(name in wide for name in names)
