"""The fault soak for seconds and for a minute. `make soak` is the long one; docs/soak.md says what happens in it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from soak.adversary import KINDS, faults
from soak.judge import Judge
from soak.ledger import Ledger
from tests import forks

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "minutes, pace, replicas",
    [
        pytest.param(0.1, 0.35, 2, id="seconds"),
        pytest.param(0.75, 1.5, 12, marks=pytest.mark.slow, id="a minute"),
    ],
)
def test_faults(tmp_path: Path, minutes: float, pace: float, replicas: int) -> None:
    done = forks.run(
        [sys.executable, "-m", "soak", "--minutes", str(minutes), "--pace", str(pace), "--replicas", str(replicas),
         "--seed", "20261115",
         "--json", str(tmp_path / "result.json"), "--keep", str(tmp_path / "soak")],
        cwd=ROOT, timeout=880, env={**os.environ, "PYTHONPATH": _path()},
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text()) if (tmp_path / "result.json").exists() else {}
    assert result.get("failures") == [], done.stdout + done.stderr
    assert result["wrong_states"] == 0
    assert result["states_checked"] > 0
    assert result["faults"] > 0
    assert done.returncode == 0


def judged(folder: Path, *served: tuple[int, int, str]) -> Judge:
    """A replica served these (version, state, hash); the trainer had states 1 and 2, published as versions 0 and 1."""
    trainer = Ledger(folder / "1")
    for state in (1, 2):
        trainer.note("state", state=state, hash=f"hash {state}")
        trainer.note("published", version=state - 1, state=state)
    replica = Ledger(folder / "0")
    for version, state, hash in served:
        replica.note("serves", version=version, state=state, hash=hash)
    conductor = SimpleNamespace(
        ledger=lambda client: folder / str(client),
        trainer_client=1,
        options=SimpleNamespace(replicas=1),
        outcome=SimpleNamespace(failures=[]),
    )
    judge = Judge(conductor)  # type: ignore[arg-type]
    assert judge._check_states() == len(served)
    return judge


def test_the_judge_finds_nothing_where_nothing_is_wrong(tmp_path: Path) -> None:
    judge = judged(tmp_path, (0, 1, "hash 1"), (1, 2, "hash 2"))
    assert (judge.wrong, judge.failures) == (0, [])


@pytest.mark.parametrize(
    "served",
    [
        pytest.param((1, 2, "hash 1"), id="other weights than the trainer had"),
        pytest.param((1, 3, "hash 3"), id="a state the trainer never had"),
        pytest.param((1, 1, "hash 1"), id="good weights of another version"),
    ],
)
def test_the_judge_finds_a_wrong_state(tmp_path: Path, served: tuple[int, int, str]) -> None:
    assert judged(tmp_path, (0, 1, "hash 1"), served).wrong == 1


def test_the_judge_finds_a_step_back(tmp_path: Path) -> None:
    assert judged(tmp_path, (1, 2, "hash 2"), (0, 1, "hash 1")).failures == ["replica-0 went back from 1 to 0"]


def _path() -> str:
    return os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_a_seed_gives_the_same_faults_and_every_kind_of_them() -> None:
    first = [fault for fault, _ in zip(faults(7, 2.0), range(100), strict=False)]
    assert first == [fault for fault, _ in zip(faults(7, 2.0), range(100), strict=False)]
    assert first != [fault for fault, _ in zip(faults(8, 2.0), range(100), strict=False)]
    assert {fault.kind for fault in first[: len(KINDS)]} == set(KINDS)
    assert "fill disk" not in {
        fault.kind for fault, _ in zip(faults(7, 2.0, frozenset({"fill disk"})), range(100), strict=False)
    }
