"""The trainer side: capture, encode in the background, commit."""

from typing import TYPE_CHECKING, Any

from .adapters import adapter, merged_weights
from .detectors import HostDetector
from .pending import Published, PublishHandle
from .publisher import Publisher
from .shard import Shard

if TYPE_CHECKING:
    from .adamw import DeltaAdamW
    from .device import FusedDetector, SnapshotDetector

__all__ = [
    "DeltaAdamW",
    "FusedDetector",
    "HostDetector",
    "PublishHandle",
    "Published",
    "Publisher",
    "Shard",
    "SnapshotDetector",
    "adapter",
    "merged_weights",
]

_NEED_TORCH = {"DeltaAdamW": "adamw", "FusedDetector": "device", "SnapshotDetector": "device"}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_NEED_TORCH[name]}", __name__), name)
