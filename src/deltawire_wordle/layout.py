"""How a game is laid out as tokens for the small policy: one token per character, and pure functions.

    <bos> c r a n e X Y X X G s h o w s …
          ╰─guess─╯ ╰answer─╯

A prompt is everything so far and ends where a guess is due; the completion is the next GUESS_TOKENS tokens. What the
policy sampled stays in the prompt token for token, also where it spells no word, so that the log-probabilities a
trainer computes are those of what was sampled.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

from .wordle import ABSENT, GREEN, LENGTH, YELLOW

VOCABULARY = ("<pad>", "<bos>", "<eos>", *string.ascii_lowercase, GREEN, YELLOW, ABSENT)
PAD, BOS, EOS = 0, 1, 2
GUESS_TOKENS = LENGTH
_ID = {token: number for number, token in enumerate(VOCABULARY)}

Turn = tuple[Sequence[int], str]
"""The tokens of a guess as sampled, and its feedback as a string of G, Y, X."""


def render(history: Iterable[Turn] = ()) -> list[int]:
    """The prompt after these turns."""
    ids = [BOS]
    for guess, answer in history:
        ids += [*guess, *spell(answer)]
    return ids


def spell(text: str) -> list[int]:
    """Letters and colours as tokens."""
    return [_ID[character] for character in text]


def parse(completion: Sequence[int]) -> str:
    """The guess that these tokens spell. A token that is no letter becomes "?", which no game takes for a word."""
    tokens = (VOCABULARY[token] if 0 <= token < len(VOCABULARY) else "?" for token in completion[:GUESS_TOKENS])
    return "".join(token if token in string.ascii_lowercase else "?" for token in tokens)
