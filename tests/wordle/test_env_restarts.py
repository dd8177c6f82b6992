"""The games of examples/wordle_trl.py while their environment, a process of its own, is killed and comes back."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from env_support import wordle_server

from deltawire_wordle.processes import free_port

pytest.importorskip("transformers")

GAMES = 24


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, without TRL: what plays needs nothing of it."""
    names = {
        "trl.experimental.async_grpo": ("AsyncGRPOConfig", "AsyncGRPOTrainer"),
        "datasets": ("Dataset",),
        "deltawire.trl": ("BucketTransfer",),
    }
    for package in ("trl", "trl.experimental"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for name, wanted in names.items():
        module = ModuleType(name)
        for one in wanted:
            setattr(module, one, object)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    # forgotten afterwards
    monkeypatch.setitem(sys.modules, "wordle_trl", ModuleType("wordle_trl"))
    del sys.modules["wordle_trl"]
    return importlib.import_module("wordle_trl")


def environment() -> tuple[str, Any]:
    """Its address, and how to start it there; again after it was killed."""
    port = str(free_port())
    return f"http://127.0.0.1:{port}", lambda: wordle_server("--port", port, "--words", "toy", "--guesses", "5")


def test_games_go_on_at_once_after_a_restart(example: Any) -> None:
    url, start = environment()
    games = [example.Wordle(url) for _ in range(GAMES)]
    with start() as (_, process):
        for game in games:
            game.reset(7)
        process.kill()
        process.wait()
    with start():
        # one finds out while it is played, the others when the next game begins
        with pytest.raises(ValueError, match="the game was lost"):
            games[0].guess("crane")
        assert games[0].get_reward() is None
        began = time.monotonic()
        # one after the other, as TRL does
        for game in games:
            assert "5 guesses left" in game.reset(7)
        took = time.monotonic() - began
        assert "4 guesses left" in games[-1].guess("crane")
    assert took < GAMES / 4, f"{GAMES} games began again in {took:.1f} s"


def test_an_environment_that_is_gone_is_waited_for(example: Any, caplog: pytest.LogCaptureFixture) -> None:
    url, start = environment()
    game, begun = example.Wordle(url), threading.Event()
    with start() as (_, process):
        game.reset(7)
        process.kill()
        process.wait()

    def reset() -> None:
        game.reset(7)
        begun.set()

    with caplog.at_level(logging.WARNING, "deltawire"):
        threading.Thread(target=reset, daemon=True).start()
        assert not begun.wait(2.5 * example.RETRY_S), "there is nothing to play on"
        (said,) = caplog.messages
        assert said.startswith(f"no new games until the environment is back: the environment at {url} does not answer")
        with start():
            assert begun.wait(10)
    assert caplog.messages[1:] == [f"the environment at {url} is back"]
