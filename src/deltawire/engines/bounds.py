"""The versions that a request accepts, by its headers. The same in all engines.

    deltawire-min-version: 41       this version or a later one
    deltawire-exact-version: 41     this version only

A server that has no such version looks for it and waits, as long as its setting allows, then answers 409 with the
version it has. The bound holds for every token: if a sync during the answer breaks it, a plain answer is a 409 as well,
and a stream ends with the error as its last event.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from .names import EXACT_VERSION_HEADER, MIN_VERSION_HEADER

_ASK_S = 1.0
"""Seconds between two reminders to the follower that somebody waits."""

_VERSION = re.compile(rb"[0-9]{1,18}")


class BadBound(ValueError):
    """Headers that name no bound, or two; answered with a 400."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The versions that a request accepts."""

    header: str
    """MIN_VERSION_HEADER or EXACT_VERSION_HEADER."""
    version: int

    @classmethod
    def of(cls, headers: Iterable[tuple[bytes, bytes]]) -> Bound | None:
        """Read the bound from the headers of a request; None if it has none. Raises BadBound."""
        names = {name.encode(): name for name in (MIN_VERSION_HEADER, EXACT_VERSION_HEADER)}
        found = [(names[name.lower()], value.strip()) for name, value in headers if name.lower() in names]
        if not found:
            return None
        (header, value), *more = found
        if more:
            raise BadBound(f"name one version, in either {MIN_VERSION_HEADER} or {EXACT_VERSION_HEADER}")
        if not _VERSION.fullmatch(value):
            raise BadBound(f"{header} is a version such as 41, not {value[:40].decode('latin-1')!r}")
        return cls(header, int(value))

    def allows(self, version: object) -> bool:
        """Whether tokens of this version are accepted; never those of weights that are no version."""
        if not isinstance(version, int):
            return False
        return version >= self.version if self.header == MIN_VERSION_HEADER else version == self.version

    def may_come(self, version: int | None, pin: int | None) -> bool:
        """Whether a server that has a version and follows the run, or stays at `pin`, may get one that is allowed."""
        if pin is not None:
            return self.allows(pin)
        return version is None or version < self.version

    async def reached(self, follower: Following, present: Callable[[], int | None], seconds: float) -> bool:
        """Wait until the server has a version that this allows; False if it will not, or not within these seconds.

        `present` returns the version that tokens are made with.
        """
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            # an event loop that has ended has no clients either
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        deadline = loop.time() + seconds
        follower.listeners.add(tell)
        try:
            while not self.allows(present()):
                left = deadline - loop.time()
                if left <= 0 or not self.may_come(present(), follower.pin):
                    return False
                follower.hurry(2 * _ASK_S)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), min(left, _ASK_S))
                changed.clear()
            return True
        finally:
            follower.listeners.discard(tell)

    def refusal(self, version: int | None, made_by: str = "", pin: int | None = None) -> dict[str, Any]:
        """The body of the 409: the version the server has, and the versions that made the answer if one was made."""
        wanted = f"version {self.version}" + (" or later" if self.header == MIN_VERSION_HEADER else " only")
        has = f"has version {version}" if version is not None else "has no version"
        during = f" (its tokens were made by {made_by})" if made_by else ""
        if self.allows(version) or self.may_come(version, pin):
            step = "try again, or another server"
        elif pin is not None:
            step = f"it is pinned to version {pin}; ask another server"
        else:
            step = f"it does not go back; ask a server that is pinned to version {self.version}, or for a later version"
        message = f"this request accepts {wanted}{during}, and this server {has}: {step}"
        error = {"message": message, "type": "version_error", "param": self.header, "code": 409, "version": version}
        return {"error": error}


class Following(Protocol):
    """The follower of a server, or what is known here of another process's follower."""

    pin: int | None
    listeners: set[Callable[[], None]]
    """Called whenever the version may have changed, in any thread."""

    @property
    def version(self) -> int | None:
        """The version that is served."""

    def hurry(self, seconds: float) -> None:
        """Look for versions more often for so many seconds, because somebody waits for one."""
