"""examples/pytorch.py and examples/follow.py, one after the other on one folder."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from deltawire.bucket.run import Run

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_one_trains_and_one_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_example(name: str, *arguments: str) -> str:
        """What it prints, run as a program in this process: another would import torch once more."""
        monkeypatch.setattr("sys.argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.syspath_prepend(EXAMPLES)
    run = (tmp_path / "run").as_uri()
    said = run_example("pytorch.py", run, "--steps", "6", "--rest", "0")
    newest = Run.open(run).newest()
    assert said.startswith("step 6 ")
    assert said.endswith(f"version {newest}\n")
    said = run_example("follow.py", run, "--until", str(newest))
    assert said.splitlines()[-1].startswith(f"version {newest}  error 0.")
