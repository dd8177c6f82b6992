"""Writing on all ranks or on none, and salts, without an engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from deltawire.engines.live.swap import Apply, Undo, salted, undo_all, write_all

DONE = [{"apply": 1.0, "prove": 0.1}, {"apply": 2.0, "prove": 0.2}]
FAILED = [DONE[0], {"error": "no"}]


def ranks(apply: list[Any], undo: list[Any] | Exception) -> Any:
    def everywhere(text: str) -> list[Any]:
        message = msgspec.json.decode(text, type=Apply | Undo)
        assert message.staged == [7, 8]
        answers = apply if isinstance(message, Apply) else undo
        if isinstance(answers, Exception):
            raise answers
        return answers

    return everywhere


@pytest.mark.parametrize(
    ("apply", "undo", "answer"),
    [
        (DONE, [], {"apply": 2.0, "prove": 0.2}),
        (FAILED, [{}, {}], {"failure": "rank 1: no"}),
        (FAILED, [{"error": "never"}, {}], {"failure": "rank 1: no", "lost": "rank 0: never"}),
        (FAILED, OSError("gone"), {"failure": "rank 1: no", "lost": "OSError: gone"}),
    ],
)
def test_all_ranks_or_none(apply: list[Any], undo: list[Any] | Exception, answer: dict[str, Any]) -> None:
    assert write_all(ranks(apply, undo), [7, 8]) == answer


def test_another_engine_failed() -> None:
    assert undo_all(ranks([], [{}, {}]), [7, 8]) == {}


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (None, (), "@deltawire:3.1"),
        ("mine", (None,), "mine@deltawire:3.1"),
        ("keep:mine", (), "keep:mine"),
        (None, ("keep:mine",), None),
    ],
)
def test_a_clients_salt(own: str | None, others: tuple[str | None, ...], expected: str | None) -> None:
    assert salted(own, "3.1", *others) == expected
