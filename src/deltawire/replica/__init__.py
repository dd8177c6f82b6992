"""The rollout side: stage, apply with undo, prove, follow."""

from .replica import Replica, Synced

__all__ = ["Replica", "Synced"]
