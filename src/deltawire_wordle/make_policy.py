"""Make the policy that ships: imitate synthetic games whose guesses agree with all answers so far.

    python -m deltawire_wordle.make_policy [-o FOLDER]        about a minute

Seeded: the same machine and torch give the same bits again; another CPU may round differently and end a little
elsewhere, as good.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from .evaluate import evaluate
from .layout import PAD, Turn, render, spell
from .sampling import ModelSampler
from .small_policy import FOLDER, GUESSES, WORDS, config, save
from .wordle import LENGTH, Game, Rules, consistent
from .wordlists import load

STEPS = 430
"""Stops early: a policy that solves a third leaves something for reinforcement learning to do."""
BATCH = 64
RATE = 2e-3
THREADS = 1
"""Part of the recipe: how a sum over threads is rounded depends on their number."""


def synthetic_game(rules: Rules, rng: random.Random) -> tuple[list[int], list[bool]]:
    """The tokens of a game in which every guess could still have been the secret, and which of them are guesses."""
    game, candidates = Game(rng.choice(rules.words), rules.limit), list(rules.words)
    turns: list[Turn] = []
    while not game.over:
        game = rules.play(game, rng.choice(candidates))
        last = game.guesses[-1]
        turns.append((spell(last.word), last.feedback))
        candidates = consistent(candidates, last.word, last.feedback)
    ids = render(turns)
    return ids, [at > 0 and (at - 1) % (2 * LENGTH) < LENGTH for at in range(len(ids))]


def batch_of(games: Sequence[tuple[list[int], list[bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded to the longest; what is padding or an answer is not learned."""
    longest = max(len(ids) for ids, _ in games)
    ids = torch.tensor([ids + [PAD] * (longest - len(ids)) for ids, _ in games])
    learned = torch.tensor([mask + [False] * (longest - len(mask)) for _, mask in games])
    return ids, learned


def rate_at(step: int, steps: int) -> float:
    """Up over 50 steps, then down along a cosine to a twentieth."""
    return RATE * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(rules: Rules, steps: int = STEPS, seed: int = 1) -> PreTrainedModel:
    torch.set_num_threads(THREADS)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model: PreTrainedModel = Qwen3ForCausalLM(config())
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    clock = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps)
        ids, learned = batch_of([synthetic_game(rules, rng) for _ in range(BATCH)])
        logits = model(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits[learned[:, 1:]], ids[:, 1:][learned[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}  {time.monotonic() - clock:.0f} s", flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the Wordle policy that ships with deltawire.")
    parser.add_argument("-o", "--out", type=Path, default=FOLDER, help="folder to write (the one that ships)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rules = Rules(load(WORDS), GUESSES)
    model = train(rules, given.steps, given.seed)
    save(model, given.out)
    for temperature in (1.0, 0.0):
        print(json.dumps(asdict(evaluate(ModelSampler(model), rules, temperature=temperature))), flush=True)


if __name__ == "__main__":
    main()
