"""A rollout server on transformers and FastAPI, for machines without vLLM: the same replica, the same routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import MissingExtra

if TYPE_CHECKING:
    from ..http import Connections
    from ..live import ServerOptions
    from .server import RolloutServer

__all__ = ["Connections", "RolloutServer", "ServerOptions"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(".server", __name__), name)
    except ImportError as error:
        if error.name is None or error.name.startswith("deltawire"):
            raise
        raise MissingExtra(f"{error.name} is not installed", "serve") from error
