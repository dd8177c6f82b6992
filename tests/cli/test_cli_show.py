"""show: versions, our files, the files of others, and two versions compared with a comparison by hand."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
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


def test_bytes_of_tensors_are_a_column_if_any_are_known(tmp_path: Path) -> None:
    """A block of a delta holds several small tensors."""
    first = {f"layers.{n}.w": Tensor("BF16", (8, 64), bytes(1024)) for n in range(2)}
    for number, tensors in enumerate([first, trained(first, 1, 10)]):
        invoke("publish", write_checkpoint(tmp_path / f"{number}", tensors), tmp_path / "run")
    delta, anchor = (invoke("show", f"{tmp_path / 'run'}@{version}").stdout.splitlines() for version in (1, 0))
    assert [line.split()[-1] for lines in (delta, anchor) for line in lines if "dtype" in line] == ["share", "bytes"]


@pytest.mark.parametrize("encoding", ["packed", "raw"])
def test_steps_are_the_same_however_they_are_found(tmp_path: Path, encoding: str) -> None:
    # without 8-byte weights: of those a packed delta counts the steps of each half
    first = {name: tensor for name, tensor in weights().items() if name != "steps"}
    versions = [first, trained(first, 1, 400)]
    for number, tensors in enumerate(versions):
        folder = write_checkpoint(tmp_path / f"{number}", tensors)
        invoke("publish", folder, tmp_path / "run", "--encoding", encoding)
    expected = Histogram()
    for name, tensor in versions[0].items():
        dtype = lookup(tensor.dtype)
        a, b = (np.frombuffer(version[name].data, dtype.unit) for version in versions)
        expected.add(in_ulps(a[a != b], b[a != b], dtype))
    wanted = {name: (up, down) for name, up, down in expected.rows()}
    run, delta = tmp_path / "run", next((tmp_path / "run").glob("deltas/*"))
    if encoding == "packed":
        assert steps(invoke_json("show", f"{run}@1")) == wanted
        assert steps(invoke_json("show", delta)) == wanted
    else:
        assert invoke_json("show", delta)["steps"] is None
        assert f"deltawire show {run.as_uri()}@0 @1" in invoke("show", f"{run}@1").stdout
    assert steps(invoke_json("show", f"{run}@0", "@1")) == wanted


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
        value = invoke_json("show", tmp_path / encoding)
        assert (value["kind"], value["tensors"], value["steps"]) == ("delta", [], [] if encoding == "packed" else None)
        assert "0 changed" in invoke("show", next((tmp_path / encoding).glob("deltas/*"))).stdout


def test_not_found(tmp_path: Path, run: Path) -> None:
    invoke("show", f"{run}@77", code=4)
    invoke("show", tmp_path / "nothing.safetensors", code=4)
    invoke("show", tmp_path, code=4)


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


# ── two versions ──────────────────────────────────────────────────────────────────────────────────────────────────────


def by_name(value: dict) -> dict[str, dict]:
    return {row["name"]: row for row in value["tensors"]}


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A run of two versions whose difference can be worked out by hand."""
    old = {
        "a": Tensor("BF16", (4,), bf16(1.0, 2.0, -1.0, 0.0)),
        "b": Tensor("F32", (2,), np.array([3.0, 4.0], np.float32).tobytes()),
        "same": Tensor("F16", (3,), np.array([1, 2, 3], np.float16).tobytes()),
        "wide": Tensor("I64", (2,), np.array([1, 5], np.int64).tobytes()),
    }
    # 1.0 → 1.0078125 is one bf16 step, 2.0 → 2.5 is 32 of them; 0.0 → −0.0 one step that changes no number
    new = {
        **old,
        "a": Tensor("BF16", (4,), bf16(1.0078125, 2.5, -1.0, -0.0)),
        "b": Tensor("F32", (2,), np.array([3.0, math.nan], np.float32).tobytes()),
        "wide": Tensor("I64", (2,), np.array([1, 8], np.int64).tobytes()),
    }
    for number, tensors in enumerate((old, new)):
        invoke("publish", write_checkpoint(tmp_path / f"{number}", tensors), tmp_path / "run")
    return tmp_path / "run"


def test_figures_of_two_versions(pair: Path) -> None:
    value = invoke_json("show", f"{pair}@0", "@v1")
    found = by_name(value)
    a = found["a"]
    assert (a["changed"], a["elements"], a["max_ulps"], a["mean_ulps"]) == (3, 4, 32, pytest.approx(34 / 3))
    assert a["norm"] == pytest.approx(math.hypot(0.0078125, 0.5))
    assert a["relative"] == pytest.approx(math.hypot(0.0078125, 0.5) / math.sqrt(6))
    assert a["steps"] == [{"ulps": "1", "up": 1, "down": 1}, *a["steps"][1:-1], {"ulps": "16–255", "up": 1, "down": 0}]
    assert (found["b"]["changed"], found["b"]["norm"], found["b"]["not_finite"]) == (1, 0.0, 1)
    assert (found["same"]["changed"], found["same"]["max_ulps"]) == (0, None)
    assert (found["wide"]["changed"], found["wide"]["norm"], found["wide"]["max_ulps"]) == (1, 3.0, None)
    assert (value["changed"], value["elements"], value["same"]) == (5, 11, False)
    assert value["norm"] == pytest.approx(math.hypot(0.0078125, 0.5, 3.0))
    back = by_name(invoke_json("show", f"{pair}@1", f"{pair}@0"))
    assert back["a"]["norm"] == a["norm"]


def test_two_versions_for_people(pair: Path) -> None:
    text = invoke("show", f"{pair}@0", "@latest", columns=80).stdout
    assert "run v0 → " in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines() if " changed (" not in line and ":" not in line)
    assert "5 of 11 weights changed (45.5 %)" in text
    assert "1 tensors did not change" in text
    assert "NaN or infinite" in text
    assert "same" in invoke("show", f"{pair}@0", "@1", "--all").stdout
    assert "the same, bit for bit" in invoke("show", f"{pair}@1", "@-1").stdout


def test_versions_folders_and_runs_in_any_pair(run: Path, tmp_path: Path, checkpoints: list[Path]) -> None:
    """Every way to name the same two sets of weights gives the same answer."""
    other = shutil.copytree(run, tmp_path / "other")
    invoke("tag", f"{run}@1", "best")
    sides = ((f"{run}@best", f"{run}@3"), (checkpoints[1], f"{run}@3"), (f"{run}@1", checkpoints[3]),
             (checkpoints[1], checkpoints[3]), (f"{other}@1", f"{run}@3"))  # fmt: skip
    answers = [invoke_json("show", *pair) for pair in sides]
    assert all(answer["tensors"] == answers[0]["tensors"] for answer in answers[1:])
    old, new = read_checkpoint(checkpoints[1]), read_checkpoint(checkpoints[3])
    for name, row in by_name(answers[0]).items():
        unit = {"BF16": np.uint16, "F32": np.uint32, "F8_E4M3": np.uint8, "I64": np.uint64}[row["dtype"]]
        differ = np.frombuffer(old[name].data, unit) != np.frombuffer(new[name].data, unit)
        assert row["changed"] == differ.sum()


def test_models_that_are_not_the_same(run: Path, tmp_path: Path, checkpoints: list[Path]) -> None:
    tensors = read_checkpoint(checkpoints[0])
    tensors["extra"] = tensors.pop("scalar")
    tensors["steps"] = Tensor("I64", (1,), bytes(8))
    value = invoke_json("show", f"{run}@0", write_checkpoint(tmp_path / "else", trained(tensors, 1, changes=0)))
    assert (value["only_old"], value["only_new"], value["other_shape"]) == (["scalar"], ["extra"], ["steps"])
    assert (value["changed"], value["same"]) == (0, False)


def test_wrong_pairs_are_refused(run: Path, checkpoints: list[Path]) -> None:
    invoke("show", f"{run}@0", checkpoints[0] / "model.safetensors", code=2)
    assert "versions 0 to 3" in invoke("show", f"{run}@0", "@9", code=4).stderr
    invoke("show", f"{run}@0", "/nowhere", code=4)


def test_nothing_is_left(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    invoke("show", f"{run}@0", "@3")
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.slow
def test_memory_is_one_copy(tmp_path: Path) -> None:
    size = 200 << 20
    rng = np.random.default_rng(0)
    for _ in range(2):
        tensors = {f"w{i}": Tensor("BF16", (1024, 10240), rng.bytes(20 << 20)) for i in range(10)}
        invoke("publish", write_checkpoint(tmp_path / "in", tensors), tmp_path / "run", "--anchor")
    code = (
        "import resource, sys\nfrom deltawire.cli import app\n"
        "try: app(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)"
    )
    run = tmp_path / "run"
    small = subprocess.run([sys.executable, "-c", code, "log", run, "--json"], capture_output=True, check=True)
    done = subprocess.run(
        [sys.executable, "-c", code, "show", f"{run}@0", "@1", "--json"], capture_output=True, check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert json.loads(done.stdout)["changed"] > 0
    assert int(done.stderr) - int(small.stderr) < 1.8 * size
