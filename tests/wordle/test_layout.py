"""Games as tokens, and the tokenizer that says the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire_wordle.layout import BOS, EOS, PAD, VOCABULARY, parse, render, spell
from deltawire_wordle.small_policy import tokenizer

words = st.text("abcdefghijklmnopqrstuvwxyz", min_size=5, max_size=5)
answers = st.text("GYX", min_size=5, max_size=5)


def test_the_vocabulary() -> None:
    """Golden: a checkpoint is tied to these numbers."""
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 32
    assert (PAD, BOS, EOS) == (0, 1, 2)
    assert spell("azGYX") == [3, 28, 29, 30, 31]


def test_a_prompt() -> None:
    assert render() == [BOS]
    turns = [(spell("crane"), "XYXXG"), (spell("shows"), "GGXXX")]
    assert render(turns) == [BOS, *spell("craneXYXXGshowsGGXXX")]


@given(words)
def test_a_guess_is_what_was_spelled(word: str) -> None:
    assert parse(spell(word)) == word


@pytest.mark.parametrize(
    "tokens, guess",
    [([], ""), ([3, EOS], "a?"), ([3, 29, 4, 0, 5], "a?b?c"), ([99, -1, 3, 3, 3], "??aaa"), ([3] * 9, "aaaaa")],
)
def test_what_is_no_guess_is_no_word(tokens: list[int], guess: str) -> None:
    assert parse(tokens) == guess


@given(st.lists(st.tuples(words, answers), max_size=6))
def test_the_tokenizer_agrees(turns: list[tuple[str, str]]) -> None:
    ids = render((spell(word), answer) for word, answer in turns)
    text = "".join(word + answer for word, answer in turns)
    made = tokenizer()
    assert made(text).input_ids == ids
    assert made.decode(ids, skip_special_tokens=True) == text


def test_a_character_it_does_not_know_is_not_lost() -> None:
    assert tokenizer()("aé!b").input_ids == [BOS, *spell("a"), PAD, PAD, *spell("b")]
