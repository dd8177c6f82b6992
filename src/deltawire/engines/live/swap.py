"""The swap in the schedulers of all engines: write on all ranks or on none, and salt the prefix cache.

Imports nothing heavy: it runs in processes that must not import numba before their engine has set itself up.
"""

from __future__ import annotations

from collections.abc import Callable

from .channel import Answer, Message

KEEP = "keep:"
"""How a client's salt begins that stays the same across versions."""


class Apply(Message):
    """Write what is staged, then prove it. On an error the old bits are back, where they were kept."""

    staged: list[int]
    """The numbers that all ranks gave to what they staged: anything else is not written."""


class Undo(Message):
    """Put the old bits back where they were written over; an error if these are not the weights from before."""

    staged: list[int]


Everywhere = Callable[[str], list[Answer]]
"""Sends the text of a message to all ranks."""


def write_all(everywhere: Everywhere, staged: list[int]) -> Answer:
    """Write what ranks have staged, each what `staged` says. In the answer: `failure` if it was taken back, `lost` if
    that failed too."""
    answers = everywhere(Apply(staged).text())
    if failed := errors(answers):
        return {"failure": failed[0]} | undo_all(everywhere, staged)
    return {phase: max(answer[phase] for answer in answers) for phase in ("apply", "prove")}


def undo_all(everywhere: Everywhere, staged: list[int]) -> Answer:
    """Put the previous weights back on all ranks; `lost` in the answer if that fails."""
    try:
        failed = errors(everywhere(Undo(staged).text()))
    except Exception as error:
        failed = [f"{type(error).__name__}: {error}"]
    return {"lost": failed[0]} if failed else {}


def errors(answers: list[Answer]) -> list[str]:
    """Return what ranks say that failed."""
    return [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]


def salted(own: str | None, salt: str, *others: str | None) -> str | None:
    """Combine the salt of the present weights with a client's own, unless that or another of its salts is to be kept
    across versions."""
    if any(key and key.startswith(KEEP) for key in (own, *others)):
        return own
    return f"{own or ''}@deltawire:{salt}"
