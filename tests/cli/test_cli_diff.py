"""diff: what changed between two versions, tensor by tensor, against a comparison by hand."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from cli_support import Tensor, invoke, invoke_json, read_checkpoint, trained, write_checkpoint

from deltawire.core.dtypes import lookup, numbers


def bf16(*numbers: float) -> bytes:
    return (np.array(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


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


def test_figures(pair: Path) -> None:
    value = invoke_json("diff", f"{pair}@0", "@v1")
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
    back = by_name(invoke_json("diff", f"{pair}@1", f"{pair}@0"))
    assert back["a"]["norm"] == a["norm"]


def test_for_people(pair: Path) -> None:
    text = invoke("diff", f"{pair}@latest", columns=80).stdout
    assert "run v0 → " in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines() if " changed (" not in line and ":" not in line)
    assert "5 of 11 weights changed (45.5 %)" in text
    assert "1 tensors did not change" in text
    assert "NaN or infinite" in text
    assert "same" in invoke("diff", f"{pair}@0", "@1", "--all").stdout
    assert "the same, bit for bit" in invoke("diff", f"{pair}@1", "@-1").stdout


def test_versions_folders_and_runs_in_any_pair(run: Path, tmp_path: Path, checkpoints: list[Path]) -> None:
    """Every way to name the same two sets of weights gives the same answer."""
    other = shutil.copytree(run, tmp_path / "other")
    invoke("tag", f"{run}@1", "best")
    sides = ((f"{run}@best", f"{run}@3"), (checkpoints[1], f"{run}@3"), (f"{run}@1", checkpoints[3]),
             (checkpoints[1], checkpoints[3]), (f"{other}@1", f"{run}@3"))  # fmt: skip
    answers = [invoke_json("diff", *pair) for pair in sides]
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
    value = invoke_json("diff", f"{run}@0", write_checkpoint(tmp_path / "else", trained(tensors, 1, changes=0)))
    assert (value["only_old"], value["only_new"], value["other_shape"]) == (["scalar"], ["extra"], ["steps"])
    assert (value["changed"], value["same"]) == (0, False)


def test_wrong_arguments_are_refused(run: Path, checkpoints: list[Path]) -> None:
    invoke("diff", checkpoints[0], code=2)
    assert "is the first" in invoke("diff", f"{run}@0", code=4).stderr
    assert "versions 0 to 3" in invoke("diff", f"{run}@0", "@9", code=4).stderr
    invoke("diff", f"{run}@0", "/nowhere", code=4)


def test_nothing_is_left(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    invoke("diff", f"{run}@0", "@3")
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "BF16"])
def test_numbers_are_those_of_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kinds = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
             "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "BF16": "bfloat16"}  # fmt: skip
    unit = lookup(dtype).unit
    bits = np.arange(1 << (8 * np.dtype(unit).itemsize), dtype=np.uint32).astype(unit)
    view = torch.from_numpy(bits.view(np.int16) if unit is np.uint16 else bits).view(getattr(torch, kinds[dtype]))
    np.testing.assert_array_equal(numbers(bits, lookup(dtype)), view.to(torch.float64).numpy())


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
        [sys.executable, "-c", code, "diff", f"{run}@0", "@1", "--json"], capture_output=True, check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert json.loads(done.stdout)["changed"] > 0
    assert int(done.stderr) - int(small.stderr) < 1.8 * size
