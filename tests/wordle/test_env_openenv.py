"""The real `openenv` client drives our server, from an environment of its own (476 MB, made once per set of pins)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from env_support import wordle_server

from deltawire_wordle.wordle import Rules
from deltawire_wordle.wordlists import load
from environments import environment

SESSIONS = 64


@pytest.fixture(scope="module")
def openenv() -> Path:
    return environment("openenv", ["openenv==0.10.0"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_client_plays(openenv: Path) -> None:
    rules = Rules(load("toy"), 5)
    secrets = {str(seed): rules.game(seed).secret for seed in range(SESSIONS)}
    with wordle_server("--words", "toy", "--guesses", "5") as (url, _):
        script = Path(__file__).with_name("openenv_client.py")
        done = subprocess.run(
            [str(openenv), str(script), url, json.dumps({"secrets": secrets})],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["openenv"] == "0.10.0"
    generic = found["generic"]
    assert generic["left"] == 5
    assert generic["missed"] == ["XXXXX", 0.0, False]
    assert generic["solved"] == ["GGGGG", pytest.approx(1 + 0.3 - 0.05), True]
    assert generic["state"]["guesses"] == ["zzzzz", secrets["0"]]
    assert "EXECUTION_ERROR" in generic["after"]
    assert "reset" in generic["after"]
    assert found["typed"] == [
        {"solved": True, "reward": 1.4, "done": True, "episode": f"episode-{seed}", "secret": secret, "steps": 1}
        for seed, secret in secrets.items()
    ]
    assert found["same_action_fields"]
