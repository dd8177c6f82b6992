"""Evaluation over HTTP, against the real rollout server with the policy that ships as version 0 of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from deltawire.cli import app
from deltawire.engines.server import RolloutServer, ServerOptions
from deltawire_wordle.errors import ServerRefused, ServerUnavailable
from deltawire_wordle.evaluate import evaluate
from deltawire_wordle.sampling import ModelSampler, ServerSampler, Spread
from deltawire_wordle.small_policy import FOLDER, GUESSES, WORDS
from deltawire_wordle.wordle import Rules
from deltawire_wordle.wordlists import load

RULES = Rules(load(WORDS), GUESSES)
GAMES = 64


@contextmanager
def rollout_server(run: Path) -> Iterator[str]:
    server = RolloutServer.open(ServerOptions(run=str(run), port=0, name="policy", poll=0.05))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()
        thread.join(120)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = tmp_path_factory.mktemp("evaluate") / "run"
    assert CliRunner().invoke(app, ["publish", str(FOLDER), str(run)]).exit_code == 0
    with rollout_server(run) as address:
        # it listens a little after it has its port
        with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=120) as client:
            while client.get(f"{address}/health").status_code != 200:
                time.sleep(0.05)
        yield address


def test_greedy_play_over_http_is_greedy_play_here(url: str) -> None:
    samplers = ServerSampler(url), ModelSampler.load()
    over_http, here = (evaluate(sampler, RULES, games=24, temperature=0.0) for sampler in samplers)
    assert over_http == here


@pytest.mark.slow
def test_sampled_play_over_two_servers(url: str) -> None:
    """The same server twice: prompts are dealt out, and games that begin alike do not go on alike."""
    both = Spread([ServerSampler(url), ServerSampler(url)])
    samples = both([[1]] * 40, 1.0, 0)
    assert len({sample.guess for sample in samples}) > 10
    assert all(len(sample.tokens) == len(sample.logprobs) for sample in samples)
    assert [sample.tokens for sample in both([[1]] * 40, 1.0, 0)] == [sample.tokens for sample in samples]
    assert 0.1 < evaluate(both, RULES, games=GAMES).solved < 0.6


def test_servers_that_do_not_answer_or_refuse(url: str) -> None:
    with pytest.raises(ServerUnavailable, match="does not answer"):
        ServerSampler("http://127.0.0.1:9")([[1]], 1.0, 0)
    with pytest.raises(ServerRefused, match="answered 400"):
        ServerSampler(url)([[1] * 500], 1.0, 0)
    with pytest.raises(ServerRefused, match="answered 404"):
        ServerSampler(f"{url}/elsewhere")([[1]], 1.0, 0)
