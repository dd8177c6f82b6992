"""Errors of the environment, the rollout servers' clients and the game."""

from __future__ import annotations

from deltawire.errors import DeltawireError


class RLError(DeltawireError):
    """Base of the errors here."""


class IllegalMove(RLError):
    """A step without a game, or after its end."""


class ServerRefused(RLError):
    """An environment or rollout server refused a request."""


class ServerUnavailable(RLError):
    """An environment or rollout server does not answer; a retry may succeed."""
