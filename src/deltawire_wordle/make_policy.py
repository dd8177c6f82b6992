"""Make the policy that ships, in two lessons: imitate careful players, then careless ones.

    python -m deltawire_wordle.make_policy [-o FOLDER]        about five minutes

Careful players guess only words that agree with all answers so far; careless ones often guess any word. After the
second lesson the policy still knows how to play well and mostly does not: what is left for reinforcement learning is to
find out which of its habits solve games, as with models that are trained on the texts of everybody.

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
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from .evaluate import evaluate
from .layout import PAD, Turn, render, spell
from .sampling import ModelSampler
from .small_policy import FOLDER, GUESSES, WORDS, config, save
from .wordle import LENGTH, Rules, colours
from .wordlists import load


@dataclass(frozen=True, slots=True)
class Lesson:
    steps: int
    rate: float
    """Highest learning rate."""
    careless: float
    """Probability that a guess is any word of the list."""


LESSONS = (Lesson(steps=1000, rate=2e-3, careless=0.0), Lesson(steps=30, rate=3e-4, careless=0.4))
BATCH = 64
THREADS = 1
"""Part of the recipe: how a sum over threads is rounded depends on their number."""
_colours = cache(colours)


def synthetic_game(rules: Rules, rng: random.Random, careless: float = 0.0) -> tuple[list[int], list[bool]]:
    """The tokens of a game, and which of them are guesses. A guess that is not careless could still be the secret."""
    secret, candidates = rng.choice(rules.words), list(rules.words)
    turns: list[Turn] = []
    while len(turns) < rules.limit:
        guess = rng.choice(rules.words) if rng.random() < careless else rng.choice(candidates)
        answer = _colours(guess, secret)
        turns.append((spell(guess), answer))
        if guess == secret:
            break
        candidates = [word for word in candidates if _colours(guess, word) == answer]
    ids = render(turns)
    return ids, [at > 0 and (at - 1) % (2 * LENGTH) < LENGTH for at in range(len(ids))]


def batch_of(games: Sequence[tuple[list[int], list[bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded to the longest; what is padding or an answer is not learned."""
    longest = max(len(ids) for ids, _ in games)
    ids = torch.tensor([ids + [PAD] * (longest - len(ids)) for ids, _ in games])
    learned = torch.tensor([mask + [False] * (longest - len(mask)) for _, mask in games])
    return ids, learned


def rate_at(step: int, lesson: Lesson) -> float:
    """Up over a twentieth of the steps, then down along a cosine to a twentieth of the rate."""
    warm_up = min(1.0, (step + 1) / (lesson.steps / 20))
    return lesson.rate * warm_up * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / lesson.steps)))


def train(rules: Rules, lessons: Sequence[Lesson] = LESSONS, seed: int = 1) -> PreTrainedModel:
    torch.set_num_threads(THREADS)
    torch.manual_seed(seed)
    model: PreTrainedModel = Qwen3ForCausalLM(config())
    for number, lesson in enumerate(lessons):
        teach(model, rules, lesson, random.Random(seed + number))
    return model.eval()


def teach(model: PreTrainedModel, rules: Rules, lesson: Lesson, rng: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    clock = time.monotonic()
    for step in range(lesson.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, lesson)
        ids, learned = batch_of([synthetic_game(rules, rng, lesson.careless) for _ in range(BATCH)])
        logits = model(input_ids=ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits[learned[:, 1:]], ids[:, 1:][learned[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}  {time.monotonic() - clock:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the Wordle policy that ships with deltawire.")
    parser.add_argument("-o", "--out", type=Path, default=FOLDER, help="folder to write (the one that ships)")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rules = Rules(load(WORDS), GUESSES)
    model = train(rules, seed=given.seed)
    save(model, given.out)
    for temperature in (1.0, 0.0):
        print(json.dumps(asdict(evaluate(ModelSampler(model), rules, temperature=temperature))), flush=True)


if __name__ == "__main__":
    main()
