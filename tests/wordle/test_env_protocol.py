"""One session, as text in and text out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltawire_wordle.env_protocol import LARGEST_MESSAGE, Closed, Session
from deltawire_wordle.wordle import Rules

RULES = Rules(("crane", "eerie", "slate", "geese"), 3)
SEED_OF_SLATE = 7


def tell(session: Session, kind: Any, **data: Any) -> dict[str, Any]:
    return json.loads(session.answer(json.dumps({"type": kind, "data": data} if data else {"type": kind})))


def refusal(session: Session, text: str) -> tuple[str, str]:
    reply = json.loads(session.answer(text))
    assert reply["type"] == "error", reply
    return reply["data"]["code"], reply["data"]["message"]


def test_a_game() -> None:
    session = Session(RULES)
    begun = tell(session, "reset", seed=SEED_OF_SLATE, episode_id="mine")
    assert begun["type"] == "observation"
    assert begun["data"]["done"] is False
    assert begun["data"]["reward"] is None
    assert begun["data"]["observation"]["guesses_left"] == 3

    first = tell(session, "step", guess="crane")["data"]
    assert (first["observation"]["feedback"], first["reward"], first["done"]) == ("XXGXG", 0.0, False)
    unknown = tell(session, "step", guess="zzzzz", metadata={})["data"]["observation"]
    assert (unknown["known"], unknown["guesses_left"]) == (False, 1)
    assert "not in the word list" in unknown["message"]
    state = tell(session, "state")["data"]
    assert (state["episode_id"], state["step_count"], state["secret"]) == ("mine", 2, None)

    last = tell(session, "step", guess="slate")["data"]
    assert (last["observation"]["solved"], last["done"]) == (True, True)
    assert last["reward"] == pytest.approx(1 - 0.1 / 3)
    assert tell(session, "state")["data"]["secret"] == "slate"
    assert refusal(session, '{"type": "step", "data": {"guess": "crane"}}')[0] == "EXECUTION_ERROR"

    tell(session, "reset", seed=SEED_OF_SLATE)
    state = tell(session, "state")["data"]
    assert (state["step_count"], state["secret"]) == (0, None)
    assert state["episode_id"] != "mine"


def test_a_lost_game_names_the_word() -> None:
    session = Session(RULES)
    tell(session, "reset", seed=SEED_OF_SLATE)
    replies = [tell(session, "step", guess=word)["data"] for word in ("crane", "geese", "eerie")]
    assert [reply["done"] for reply in replies] == [False, False, True]
    assert "slate" in replies[-1]["observation"]["message"]


def test_the_end_is_reported() -> None:
    with pytest.raises(Closed):
        Session(RULES).answer('{"type": "close"}')


@pytest.mark.parametrize(
    "text, code, part",
    [
        ("", "INVALID_JSON", "JSON"),
        ("{", "INVALID_JSON", "JSON"),
        ("[" * 4000, "INVALID_JSON", "JSON"),
        ("[]", "VALIDATION_ERROR", "object"),
        ('"reset"', "VALIDATION_ERROR", "object"),
        ("{}", "UNKNOWN_TYPE", "reset, step, state, close"),
        ('{"type": ["reset"]}', "UNKNOWN_TYPE", "known:"),
        ('{"type": "mcp", "data": {}}', "UNKNOWN_TYPE", "known:"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR", "seed"),
        ('{"type": "reset", "data": {"seed": "one"}}', "VALIDATION_ERROR", "seed"),
        ('{"type": "reset", "data": {"seed": 9223372036854775808}}', "VALIDATION_ERROR", "seed"),
        ('{"type": "reset", "data": {"seed": 1e400}}', "INVALID_JSON", "JSON"),
        ('{"type": "reset", "data": []}', "VALIDATION_ERROR", "data"),
        ('{"type": "step"}', "VALIDATION_ERROR", "data"),
        ('{"type": "step", "data": {}}', "VALIDATION_ERROR", "guess"),
        ('{"type": "step", "data": {"guess": 5}}', "VALIDATION_ERROR", "guess"),
        ('{"type": "step", "data": {"guess": "crane", "word": "crane"}}', "VALIDATION_ERROR", "word"),
        ('{"type": "step", "data": {"guess": "' + "a" * 257 + '"}}', "VALIDATION_ERROR", "guess"),
        ('{"type": "step", "data": {"guess": "' + "a" * LARGEST_MESSAGE + '"}}', "VALIDATION_ERROR", "largest"),
        ('{"type": "step", "data": {"guess": "crane"}}', "EXECUTION_ERROR", "reset first"),
    ],
)
def test_errors_are_answered_and_the_session_continues(text: str, code: str, part: str) -> None:
    session = Session(RULES)
    found, message = refusal(session, text)
    assert found == code
    assert part in message
    assert tell(session, "reset")["type"] == "observation"


@given(st.lists(st.one_of(st.text(max_size=60), st.sampled_from([
    '{"type":"reset"}', '{"type":"step","data":{"guess":"crane"}}', '{"type":"step","data":{"guess":"\\ud83e\\udd80"}}',
    '{"type":"state"}', '{"type":"reset","data":{"seed":null,"more":[1]}}', "null", "NaN", '{"type":null}',
])), max_size=12))  # fmt: skip
def test_nothing_a_client_sends_breaks_a_session(messages: list[str]) -> None:
    session = Session(RULES)
    for text in messages:
        assert json.loads(session.answer(text))["type"] in ("observation", "state", "error")
    assert len(tell(session, "state")["data"]["guesses"]) <= RULES.limit
