"""The interface of an engine, as its target needs it. Each engine has an adapter that provides it."""

from __future__ import annotations

from typing import Protocol

from .channel import Answer


class Engine(Protocol):
    """An engine with one or more ranks, for `Endpoint.open`. Coroutines run in the event loop of its HTTP server."""

    name: str
    """Its name in messages: `vLLM`."""
    source: str
    """Folder or hub name of the checkpoint that it started from."""
    first_rank: int
    """The first rank of this server, where other servers have some of the data-parallel ranks."""
    has_draft: bool
    """Whether a draft model proposes tokens."""

    async def call(self, text: str) -> list[Answer]:
        """Have every `Rank` called with this text, between two steps. Returns their answers in order."""

    async def swap(self, version: str, staged: list[int]) -> Answer:
        """Let the step in flight finish, write what ranks have staged, and go on, as it was before. If a rank fails,
        all are put back. `staged` has a number for each rank: what it must find staged.

        `version` is the name that the weights get; empty, they keep theirs. In the answer: `failure` if it was taken
        back, `lost` if that failed too (the engine then stays stopped), and the seconds of each phase: `stop`,
        `apply`, `prove`, `pause`.
        """

    async def hold(self) -> None:
        """Hold generation; requests wait."""

    async def stop(self) -> None:
        """Stop generation because the weights are no known version, and drop what was computed with them."""

    async def set_version(self, version: str, resume: bool) -> None:
        """Name the weights; with `resume`, let generation go on after `hold` or `stop`."""
