"""Samples of the policy: seeds and log-probabilities."""

from __future__ import annotations

import pytest
import torch
from test_small_policy import RULES

from deltawire_wordle.evaluate import evaluate, play
from deltawire_wordle.layout import EOS, render, spell
from deltawire_wordle.sampling import ModelSampler, Sample
from deltawire_wordle.wordle import Game


def test_the_same_seed_gives_the_same_games(shipped: ModelSampler) -> None:
    found = evaluate(shipped, RULES, games=32)
    assert evaluate(shipped, RULES, games=32) == found
    assert evaluate(shipped, RULES, games=32, seed=1) != found


def test_log_probabilities_are_those_of_what_was_sampled(shipped: ModelSampler) -> None:
    """As a trainer computes them: over the whole game in one pass."""
    games = [Game(word, RULES.limit) for word in RULES.words[:8]]
    recorded: list[list[Sample]] = []

    def remember(*asked: object) -> list[Sample]:
        recorded.append(shipped(*asked))  # type: ignore[arg-type]
        return recorded[-1]

    for number, one in enumerate(play(remember, games, RULES, 1.0, 0)[:1]):
        ids = torch.tensor([render(one.turns)])
        with torch.no_grad():
            logits = torch.log_softmax(shipped.model(input_ids=ids).logits[0], -1)
        at = 1
        for turn, (tokens, feedback) in enumerate(one.turns):
            found = [logits[at + k - 1, token].item() for k, token in enumerate(tokens)]
            assert found == pytest.approx(recorded[turn][number].logprobs, abs=1e-4)
            at += len(tokens) + len(feedback)


def test_an_early_end_stays_in_the_prompt(shipped: ModelSampler) -> None:
    """Prompts of different lengths in one batch, each answered as if it were alone."""
    prompts = [render([([5, EOS], "XXXXX")]), render([(spell("crane"), "XXXXX")]), render([([5, EOS], "XXXXX")])]
    together = shipped(prompts, 0.0, 0)
    assert [sample.tokens for sample in together] == [shipped([prompt], 0.0, 0)[0].tokens for prompt in prompts]
