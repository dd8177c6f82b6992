"""The policy that ships: its files, how it plays, and that it can be made again."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from deltawire_wordle.evaluate import Evaluation, evaluate
from deltawire_wordle.layout import BOS, EOS, VOCABULARY, render, spell
from deltawire_wordle.sampling import ModelSampler, Sample
from deltawire_wordle.small_policy import FOLDER, GUESSES, WORDS, config, load
from deltawire_wordle.wordle import Rules
from deltawire_wordle.wordlists import load as load_words

RULES = Rules(load_words(WORDS), GUESSES)


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


def test_an_evaluation_counts_right() -> None:
    """A sampler that says what it is told: solves at the second guess, or never, or breaks off."""

    def scripted(prompts: object, temperature: float, seed: int) -> list[Sample]:
        words = [["acted", "zzzzz", "gy"], ["alone", "zzzzz", "gy"]][min(seed, 1)]
        return [Sample(tuple(spell(word)), (0.0,) * len(word)) for word in words][: len(list(prompts))]  # type: ignore

    rules = Rules(("alone", "acted", "glass"), 2)
    found = evaluate(scripted, rules, games=3)
    assert found == Evaluation(3, 1.0, 0, pytest.approx(1 / 3), 2.0, pytest.approx(2 / 6), found.reward)
    assert found.reward == pytest.approx((1.0 - 0.1 - 0.1) / 3)
