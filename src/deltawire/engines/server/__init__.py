"""A rollout server on transformers and FastAPI, for machines without vLLM: the same replica, the same routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core.errors import MissingExtra
from ...core.extras import install_command

if TYPE_CHECKING:
    from ..http import Connections
    from .launch import Options, RolloutServer
    from .scheduler import Limits

__all__ = ["Connections", "Limits", "Options", "RolloutServer"]

_HOMES = {"Connections": "launch", "Limits": "scheduler", "Options": "launch", "RolloutServer": "launch"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    except ImportError as error:
        if error.name is None or error.name.startswith("deltawire"):
            raise
        raise MissingExtra(f"{error.name} is not installed: {install_command('serve')}") from error
