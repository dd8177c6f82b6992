"""Errors of the example that trains: of its environment, its rollout servers, its game."""

from __future__ import annotations

from deltawire.core.errors import DeltawireError


class RLError(DeltawireError):
    """Base of the errors here."""


class IllegalMove(RLError):
    """A step without a game, or after its end."""


class ServerRefused(RLError):
    """An environment or rollout server answered that it will not."""


class ServerUnavailable(RLError):
    """An environment or rollout server does not answer; worth a retry."""
