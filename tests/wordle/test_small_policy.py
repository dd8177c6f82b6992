"""The policy that ships: its files, how it plays, and that it can be made again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from deltawire_wordle.evaluate import Evaluation, evaluate, play
from deltawire_wordle.layout import BOS, EOS, VOCABULARY, parse, render, spell
from deltawire_wordle.make_policy import STEPS, synthetic_game, train
from deltawire_wordle.sampling import ModelSampler, Sample
from deltawire_wordle.small_policy import FOLDER, GUESSES, WORDS, config, load, save
from deltawire_wordle.wordle import Game, Rules, consistent
from deltawire_wordle.wordlists import load as load_words

RULES = Rules(load_words(WORDS), GUESSES)


@pytest.fixture(scope="module")
def shipped() -> ModelSampler:
    torch.set_num_threads(1)  # so small a model gains nothing from more, and tests share the cores
    return ModelSampler.load()


def digest(model: torch.nn.Module) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in model.state_dict().values()]


# ── the files ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_is_small_and_loads_as_any_checkpoint_does() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 3_000_000
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.dtype == torch.float32, "training starts from the exact master weights"
    assert 500_000 < sum(p.numel() for p in model.parameters()) < 600_000
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer("craneXYXXG").input_ids == render([(spell("crane"), "XYXXG")])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)


def test_the_recipe_describes_what_ships() -> None:
    kept, made = load().config, config()
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "vocab_size", "eos_token_id"):
        assert getattr(kept, name) == getattr(made, name)
    assert kept.vocab_size == len(VOCABULARY)


# ── how it plays ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_plays_better_than_chance_and_has_much_to_learn(shipped: ModelSampler) -> None:
    """Chance solves 5 of 64; a third is what the demo starts from."""
    found = evaluate(shipped, RULES)
    assert 0.27 < found.solved < 0.40
    assert found.known > 0.8


def test_a_seed_is_a_result(shipped: ModelSampler) -> None:
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


def test_an_evaluation_counts_right() -> None:
    """A sampler that says what it is told: solves at the second guess, or never, or breaks off."""

    def scripted(prompts: object, temperature: float, seed: int) -> list[Sample]:
        words = [["acted", "zzzzz", "gy"], ["alone", "zzzzz", "gy"]][min(seed, 1)]
        return [Sample(tuple(spell(word)), (0.0,) * len(word)) for word in words][: len(list(prompts))]  # type: ignore

    rules = Rules(("alone", "acted", "glass"), 2)
    found = evaluate(scripted, rules, games=3)
    assert found == Evaluation(3, 1.0, 0, pytest.approx(1 / 3), 2.0, pytest.approx(2 / 6), found.reward)
    assert found.reward == pytest.approx((1.0 - 0.1 - 0.1) / 3)


def test_an_early_end_stays_in_the_prompt(shipped: ModelSampler) -> None:
    """Prompts of different lengths in one batch, each answered as if it were alone."""
    prompts = [render([([5, EOS], "XXXXX")]), render([(spell("crane"), "XXXXX")]), render([([5, EOS], "XXXXX")])]
    together = shipped(prompts, 0.0, 0)
    assert [sample.tokens for sample in together] == [shipped([prompt], 0.0, 0)[0].tokens for prompt in prompts]


# ── how it is made ───────────────────────────────────────────────────────────────────────────────────────────────────


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
