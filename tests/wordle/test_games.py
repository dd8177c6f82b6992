"""Rollout workers with a real environment and a real rollout server: versions on samples, absences outlived."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from env_support import wordle_server
from test_evaluate import rollout_server

from deltawire.trainer import Publisher
from deltawire_wordle import games, small_policy
from deltawire_wordle.games import Games
from deltawire_wordle.grpo import RolloutGroup, Rollouts, Settings
from deltawire_wordle.processes import free_port
from deltawire_wordle.train import wait_for

SETTINGS = Settings(secrets=2, games=4, workers=2, staleness=1)
GAME = ("--words", "toy", "--guesses", "5")


def take(rollouts: Rollouts, count: int) -> list[RolloutGroup]:
    found: list[RolloutGroup] = []
    deadline = time.monotonic() + 200
    while len(found) < count:
        assert time.monotonic() < deadline, "no games"
        group = rollouts.take()
        if group is not None:
            found.append(group)
    return found


@pytest.mark.timeout(300)
def test_games_through_the_real_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(games, "REST_S", 0.1)
    run, model, port = tmp_path / "run", small_policy.load(), str(free_port())
    with Publisher(run, wire_dtype="bf16", files=small_policy.FOLDER) as publisher:
        publisher.publish(model, wait=True)
        with rollout_server(run) as url:
            wait_for([url], 0)
            with (
                wordle_server(*GAME, "--port", port) as (environment, process),
                Rollouts([url], Games(environment, SETTINGS), SETTINGS) as rollouts,
            ):
                for group in take(rollouts, 3):
                    _check(group, model, {0})
                # no more is played than could be trained on in time; and no game is under way any more
                while rollouts.waiting < SETTINGS.ahead:
                    time.sleep(0.05)
                with torch.no_grad():
                    for weights in model.parameters():
                        weights *= 1.001
                publisher.publish(model, wait=True)
                wait_for([url], 1)
                take(rollouts, SETTINGS.ahead)  # begun before
                for group in take(rollouts, 2):
                    _check(group, model, {1})
                process.send_signal(signal.SIGKILL)
                process.wait()
                with wordle_server(*GAME, "--port", port):
                    take(rollouts, 2 * SETTINGS.ahead)
    said = [record.getMessage() for record in caplog.records if record.name == "deltawire"]
    assert any(text.startswith("retrying until the environment is available") for text in said)
    assert f"the environment {environment} is available again" in said


def _check(group: RolloutGroup, model: torch.nn.Module, versions: set[int]) -> None:
    """The server's log-probs are those of the version it names: the trainer's own weights, rounded as they travel."""
    rounded = small_policy.load()
    rounded.load_state_dict({name: t.to(torch.bfloat16).float() for name, t in model.state_dict().items()})
    assert len(group.rollouts) == SETTINGS.games
    for rollout in group.rollouts:
        assert rollout.versions == versions
        ids = torch.tensor([rollout.tokens])
        with torch.no_grad():
            logprobs = torch.log_softmax(rounded(input_ids=ids[:, :-1]).logits, -1).gather(2, ids[:, 1:, None])[0, :, 0]
        for mine, theirs, sampled in zip(logprobs, rollout.logprobs[1:], rollout.sampled[1:], strict=True):
            assert not sampled or float(mine) == pytest.approx(theirs, abs=1e-4)
