"""The rollout side: stage, apply with undo, prove, follow."""

from .replica import Replica

__all__ = ["Replica"]
