"""Measure how well a policy plays: games in lockstep, one batch of prompts per turn, with any sampler.

python -m deltawire_wordle.evaluate                              the policy that ships, in this process
python -m deltawire_wordle.evaluate --server http://host:8000 --model NAME      what a rollout server holds right now
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from deltawire.errors import DeltawireError

from .layout import render
from .sampling import ModelSampler, Sample, ServerSampler, Spread
from .small_policy import GUESSES, WORDS
from .wordle import Game, Rules
from .wordlists import load

GAMES = 512
WINDOW = 20
"""Steps whose games show how well the policy plays: those of one step are too few."""
Sampler = Callable[[Sequence[Sequence[int]], float, int], list[Sample]]
"""Takes prompts, a temperature (0 is greedy) and a seed; returns a completion for each prompt."""


@dataclass(frozen=True, slots=True)
class Played:
    game: Game
    turns: tuple[tuple[tuple[int, ...], str], ...]
    """The tokens of each guess as sampled, and the feedback."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    games: int
    temperature: float
    seed: int
    solved: float
    """Share of the games that were solved."""
    guesses: float
    """Mean number of guesses, over all games."""
    known: float
    """Share of the guesses that are in the word list."""
    reward: float
    """Mean reward."""


def play(
    sampler: Sampler, games: Sequence[Game], rules: Rules, temperature: float = 1.0, seed: int = 0
) -> list[Played]:
    """Play all games to their end, one guess in each per turn."""
    played = [Played(game, ()) for game in games]
    for turn in range(rules.limit):
        going = [number for number, one in enumerate(played) if not one.game.over]
        if not going:
            break
        samples = sampler([render(played[number].turns) for number in going], temperature, seed * rules.limit + turn)
        for number, sample in zip(going, samples, strict=True):
            game = rules.play(played[number].game, sample.guess)
            turns = (*played[number].turns, (sample.tokens, game.guesses[-1].feedback))
            played[number] = Played(game, turns)
    return played


def evaluate(
    sampler: Sampler, rules: Rules, *, games: int = GAMES, temperature: float = 1.0, seed: int = 0
) -> Evaluation:
    """Every word of the list is the secret equally often (as far as `games` divides)."""
    secrets = [Game(rules.words[number % len(rules.words)], rules.limit) for number in range(games)]
    played = [one.game for one in play(sampler, secrets, rules, temperature, seed)]
    guesses = [guess for game in played for guess in game.guesses]
    return Evaluation(
        games=games,
        temperature=temperature,
        seed=seed,
        solved=sum(game.solved for game in played) / games,
        guesses=len(guesses) / games,
        known=sum(guess.known for guess in guesses) / len(guesses),
        reward=sum(game.reward for game in played) / games,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="How well a policy plays Wordle, sampled and greedy; a line of JSON each."
    )
    parser.add_argument("--policy", help="a checkpoint folder (the policy that ships)")
    parser.add_argument("--server", action="append", help="a rollout server to ask instead; may be given again")
    parser.add_argument("--model", help="the name of the model, for servers that insist")
    parser.add_argument("--words", default=WORDS, help="a list that ships or a file (%(default)s)")
    parser.add_argument("--guesses", type=int, default=GUESSES)
    parser.add_argument("--games", type=int, default=GAMES)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rules = Rules(load(given.words), given.guesses)
    sampler: Sampler
    if given.server:
        token = os.environ.get("DELTAWIRE_TOKEN")
        sampler = Spread([ServerSampler(url, given.model, token=token) for url in given.server])
    else:
        sampler = ModelSampler.load(given.policy)
    try:
        for temperature in (1.0, 0.0):
            found = evaluate(sampler, rules, games=given.games, temperature=temperature, seed=given.seed)
            print(json.dumps(asdict(found)), flush=True)
    except DeltawireError as error:
        raise SystemExit(f"deltawire: {error}") from None


if __name__ == "__main__":
    main()
