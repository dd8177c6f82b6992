"""The game of Wordle: pure, no I/O.

A guess is answered letter by letter: G green, the letter is here; Y yellow, the word has it elsewhere; X, no (more) of
it. Every guess costs a turn, also one that is no word, so a game always ends. Five letters that are no known word
are coloured all the same and cost reward; anything else is answered XXXXX.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .errors import IllegalMove

LENGTH = 5
GREEN, YELLOW, ABSENT = "G", "Y", "X"

SOLVED = 1.0
EARLY = 0.1
"""Reward for each guess that was left."""
GREENS = 0.2
"""Reward of a lost game for its best guess, if all letters of that were green."""
UNKNOWN = 0.1
"""Taken off the reward, times the share of guesses that are not in the word list."""
_SHAPE = re.compile(f"[a-z]{{{LENGTH}}}")


@dataclass(frozen=True, slots=True)
class Guess:
    word: str
    """The guess in lower case."""
    feedback: str
    """One of G, Y, X for each letter."""
    known: bool
    """Whether it is in the word list."""


@dataclass(frozen=True, slots=True)
class Game:
    secret: str
    limit: int
    """Number of guesses allowed."""
    guesses: tuple[Guess, ...] = ()

    @property
    def solved(self) -> bool:
        return bool(self.guesses) and self.guesses[-1].word == self.secret

    @property
    def left(self) -> int:
        return self.limit - len(self.guesses)

    @property
    def over(self) -> bool:
        return self.solved or not self.left

    @property
    def greens(self) -> int:
        """Of the guess that had most."""
        return max((guess.feedback.count(GREEN) for guess in self.guesses), default=0)

    @property
    def reward(self) -> float:
        """What the game was worth; nothing before it is over."""
        if not self.over:
            return 0.0
        earned = SOLVED + EARLY * self.left if self.solved else GREENS * self.greens / LENGTH
        return earned - UNKNOWN * sum(not guess.known for guess in self.guesses) / len(self.guesses)


@dataclass(frozen=True, slots=True)
class Rules:
    words: tuple[str, ...]
    """Secrets are drawn from these, and only these are known words."""
    limit: int = 6
    """Number of guesses allowed."""
    _known: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.words:
            raise ValueError("a word list needs at least one word")
        for word in self.words:
            if not _SHAPE.fullmatch(word):
                raise ValueError(f"{word[:40]!r} is not a word of {LENGTH} letters a-z")
        if self.limit < 1:
            raise ValueError(f"a game needs at least one guess, not {self.limit}")
        object.__setattr__(self, "_known", frozenset(self.words))

    def game(self, seed: int | None = None) -> Game:
        """A new game: the same seed and word list give the same secret, everywhere."""
        return Game(random.Random(seed).choice(self.words), self.limit)

    def play(self, game: Game, word: str) -> Game:
        """The game after a guess."""
        if game.over:
            raise IllegalMove("the game is over; reset to play another")
        word = word.strip().lower()
        feedback = colours(word, game.secret) if well_formed(word) else ABSENT * LENGTH
        return replace(game, guesses=(*game.guesses, Guess(word, feedback, word in self._known)))


def well_formed(word: str) -> bool:
    return _SHAPE.fullmatch(word) is not None


def colours(guess: str, secret: str) -> str:
    """Greens first; what is left of the secret is then given out as yellow from left to right, each letter once."""
    left = Counter(there for here, there in zip(guess, secret, strict=True) if here != there)
    answer = []
    for here, there in zip(guess, secret, strict=True):
        if here == there:
            answer.append(GREEN)
        elif left[here]:
            left[here] -= 1
            answer.append(YELLOW)
        else:
            answer.append(ABSENT)
    return "".join(answer)


def consistent(words: Sequence[str], guess: str, feedback: str) -> list[str]:
    """The words that could be the secret, given one answer."""
    return [word for word in words if colours(guess, word) == feedback]
