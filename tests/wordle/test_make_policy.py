"""How the policy that ships is made."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from test_small_policy import RULES

from deltawire_wordle import make_policy
from deltawire_wordle.evaluate import evaluate
from deltawire_wordle.layout import VOCABULARY, parse
from deltawire_wordle.make_policy import LESSONS, Lesson, synthetic_game, train
from deltawire_wordle.sampling import ModelSampler
from deltawire_wordle.small_policy import FOLDER, load, save
from deltawire_wordle.wordle import consistent


def digest(model: torch.nn.Module) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in model.state_dict().values()]


def test_synthetic_games_are_consistent() -> None:
    rng = random.Random(0)
    for _ in range(50):
        ids, learned = synthetic_game(RULES, rng)
        candidates = list(RULES.words)
        for at in range(1, len(ids), 10):
            guess = parse(ids[at : at + 5])
            assert guess in candidates
            assert learned[at : at + 10] == [True] * 5 + [False] * 5
            answer = "".join(VOCABULARY[token] for token in ids[at + 5 : at + 10])
            candidates = consistent(candidates, guess, answer)
        assert not learned[0]


def test_careless_players_ignore_answers() -> None:
    rng = random.Random(0)
    games = [synthetic_game(RULES, rng, careless=1.0)[0] for _ in range(200)]
    guesses = Counter(parse(ids[at : at + 5]) for ids in games for at in range(1, len(ids), 10))
    assert {*guesses} == {*RULES.words}
    assert max(guesses.values()) < 40, "about 15 times each"


def test_making_it_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_policy, "BATCH", 12)
    lessons = (Lesson(2, 2e-3, 0.0), Lesson(1, 1e-3, 0.5))
    first, second = train(RULES, lessons), train(RULES, lessons)
    assert digest(first) == digest(second)
    assert digest(first) != digest(train(RULES, lessons, seed=2))
    save(first, tmp_path / "made")
    assert digest(load(tmp_path / "made")) == digest(first)
    assert {file.name for file in (tmp_path / "made").iterdir()} == {file.name for file in FOLDER.iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_recipe_makes_what_ships(shipped: ModelSampler) -> None:
    """To the bit on the machine that made it; elsewhere a policy that plays as well."""
    made = ModelSampler(train(RULES, LESSONS))
    assert evaluate(made, RULES).solved == pytest.approx(evaluate(shipped, RULES).solved, abs=0.07)
