"""What the schedulers of all engines do in a swap: write on all ranks or on none, and salt the prefix cache.

Imports nothing heavy: it runs in processes that must not import numba before their engine has set itself up.
"""

from __future__ import annotations

from collections.abc import Callable

from .channel import Answer

KEEP = "keep:"
"""How a client's salt begins that stays the same across versions."""


def write_all(everywhere: Callable[..., list[Answer]], staged: list[int]) -> Answer:
    """Write what ranks have staged, each what `staged` says. In the answer: `failure` if it was taken back, `lost` if
    that failed too."""
    answers = everywhere("apply", staged=staged)
    if failed := errors(answers):
        return {"failure": failed[0]} | undo_all(everywhere, staged)
    return {phase: max(answer[phase] for answer in answers) for phase in ("apply", "prove")}


def undo_all(everywhere: Callable[..., list[Answer]], staged: list[int]) -> Answer:
    """Put the previous weights back on all ranks; `lost` in the answer if that fails."""
    try:
        failed = errors(everywhere("undo", staged=staged))
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
