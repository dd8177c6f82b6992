"""derive: a run of fp8 weights beside a run, and verify --source, which computes it again."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cli_support import Tensor, invoke, invoke_json, write_checkpoint

from deltawire.bucket.run import Run
from deltawire.core import keys
from deltawire.core.manifest import dump
from deltawire.store import LocalStore


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("derive")
    rng = np.random.default_rng(0)
    bits = (rng.standard_normal((140, 130)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for step in range(3):
        bits = bits + (rng.random(bits.shape) < 0.02).astype(np.uint16)
        embed = rng.integers(0, 1 << 15, (8, 16), np.uint16)
        place = folder / f"step-{step}"
        model = {"q.weight": ("BF16", bits), "embed_tokens.weight": ("BF16", embed)}
        write_checkpoint(place, {n: Tensor(d, a.shape, a.tobytes()) for n, (d, a) in model.items()})
        invoke("publish", place, folder / "run", "--step", step)
    return folder / "run"


def test_derive_and_compute_again(source: Path, tmp_path: Path) -> None:
    lines = invoke("derive", source, tmp_path / "fp8", "--once", "--json").stdout.splitlines()
    assert [(json.loads(x)["version"], json.loads(x)["source_version"]) for x in lines] == [(0, 0), (1, 1), (2, 2)]
    again = invoke("derive", source, tmp_path / "fp8", "--as", "fp8-block-ue8m0", "--once")
    assert again.stdout == ""
    assert f"nothing to derive: {source} has no version after 2" in again.stderr
    found = invoke_json("verify", tmp_path / "fp8", "--source", source)
    assert (found["ok"], found["recomputed"]) == (True, 3)
    assert "3 versions computed again" in invoke("verify", tmp_path / "fp8", "--source", source).stdout
    assert invoke_json("verify", tmp_path / "fp8", "--source", source, "--from", "1", "--to", "1")["recomputed"] == 1
    assert "leave out one" in invoke("verify", tmp_path / "fp8", "--source", source, "--quick", code=2).stderr
    assert "names no run" in invoke("verify", source, "--source", tmp_path / "fp8", code=2).stderr
    assert "is given twice" in invoke("derive", source, source, "--once", code=2).stderr
    assert "name the run of its bf16" in invoke("derive", tmp_path / "fp8", tmp_path / "2", "--once", code=3).stderr
    shown = invoke_json("show", f"{tmp_path / 'fp8'}@2")
    assert shown["origin"]["version"] == 2
    assert "derived from: version 2" in invoke("show", f"{tmp_path / 'fp8'}@2").stdout


def test_the_first_version_can_be_chosen(source: Path, tmp_path: Path) -> None:
    text = invoke("derive", source, tmp_path / "fp8", "--once", "--from", "latest").stdout
    assert text.startswith("v0 of v2  anchor")


def test_a_wrong_version_ends_verify_with_3(source: Path, tmp_path: Path) -> None:
    invoke("derive", source, tmp_path / "fp8", "--once")
    store = LocalStore(tmp_path / "fp8")
    manifest = Run.open(store).manifest(1)
    assert manifest.origin is not None
    wrong = msgspec.structs.replace(manifest, origin=msgspec.structs.replace(manifest.origin, version=2))
    store.put(keys.manifest(1), dump(wrong))
    result = invoke("verify", tmp_path / "fp8", "--source", source, code=3)
    assert "version 1: versions/000001.json" in result.stdout


def test_an_unknown_view_and_a_run_without_matrices_are_refused(source: Path, tmp_path: Path) -> None:
    assert "known: fp8-block" in invoke("derive", source, tmp_path / "x", "--as", "int4", "--once", code=2).stderr


def test_a_view_is_signed_by_who_derives_it(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_STATE", str(tmp_path / "state"))
    public = invoke("keygen", tmp_path / "keeper.key").stdout.strip()
    invoke("derive", source, tmp_path / "fp8", "--once", "--from", "latest", "--sign", tmp_path / "keeper.key")
    found = invoke_json("verify", tmp_path / "fp8", "--trust", public)
    assert (found["ok"], [signer["key"] for signer in found["signers"]]) == (True, [public])
