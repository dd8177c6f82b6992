"""How the policy that ships is made."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from test_small_policy import RULES

from deltawire_wordle.evaluate import evaluate
from deltawire_wordle.layout import VOCABULARY, parse
from deltawire_wordle.make_policy import STEPS, synthetic_game, train
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


def test_making_it_is_deterministic(tmp_path: Path) -> None:
    first, second = train(RULES, steps=3), train(RULES, steps=3)
    assert digest(first) == digest(second)
    assert digest(first) != digest(train(RULES, steps=3, seed=2))
    save(first, tmp_path / "made")
    assert digest(load(tmp_path / "made")) == digest(first)
    assert {file.name for file in (tmp_path / "made").iterdir()} == {file.name for file in FOLDER.iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_recipe_makes_what_ships(shipped: ModelSampler) -> None:
    """To the bit on the machine that made it; elsewhere a policy that plays as well."""
    made = ModelSampler(train(RULES, STEPS))
    assert evaluate(made, RULES).solved == pytest.approx(evaluate(shipped, RULES).solved, abs=0.07)
