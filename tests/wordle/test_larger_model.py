"""Act two of the demo: its events, with a model so small that it takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire_wordle.larger_model import ENCODINGS, WARM_UP, Options, run
from deltawire_wordle.small_policy import FOLDER

PHASES = ["detect", "encode", "upload", "fetch", "decode", "apply", "prove"]


def test_every_phase_of_every_version_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(tmp_path / "run")
    run(Options(where, model=str(FOLDER), link_mbit_s=1000, steps=2))
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {event["event"]: event for event in events}
    weights = found["model"]["weights"]
    assert 500_000 < weights < 600_000
    assert found["full"]["bytes"] > 2 * weights
    versions = [event for event in events if event["event"] == "version"]
    assert [version["version"] for version in versions] == [1, 2]
    for version in (found["full"], *versions):
        assert [*version["phases"]] == PHASES
        assert all(seconds >= 0 for seconds in version["phases"].values())
        assert version["phases"]["upload"] >= version["bytes"] * 8 / 1e9, "no faster than the link"
    for version in versions:
        assert 0 < version["changed"] < 0.2 * weights, "a usual rate changes few weights"
        assert version["bytes"] < 0.2 * weights
    sizes = {name: one["bytes"] for name, one in found["encodings"]["encodings"].items()}
    assert {*sizes} == {*ENCODINGS}
    assert sizes["context"] < sizes["packed"] < sizes["raw"]
    assert found["done"]["equal"]
    assert verify(Run.open(where)).ok
    assert f"{WARM_UP} steps" in events[2]["text"]
