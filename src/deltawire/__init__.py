"""Move the weights of a model in training to every server that samples from it, through nothing but a bucket.

publisher = dw.Publisher("s3://runs/wordle")      # trainer
publisher.publish(model)

replica = dw.Replica("s3://runs/wordle")          # anywhere else
replica.sync(model)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors
    from .api import decode, encode
    from .bucket.watch import watch
    from .core.errors import DeltawireError
    from .replica import Replica
    from .trainer import Published, Publisher, PublishHandle

__all__ = [
    "DeltawireError",
    "PublishHandle",
    "Published",
    "Publisher",
    "Replica",
    "decode",
    "encode",
    "errors",
    "watch",
]

__version__ = "0.1.0"

_HOMES = {
    "DeltawireError": "core.errors",
    "PublishHandle": "trainer",
    "Published": "trainer",
    "Publisher": "trainer",
    "Replica": "replica",
    "decode": "api",
    "encode": "api",
    "errors": "errors",
    "watch": "bucket.watch",
}


def __getattr__(name: str) -> Any:
    # imported on first use: half a second of numba is too much for `deltawire --help`
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = import_module(f".{_HOMES[name]}", __name__)
    value = globals()[name] = home if name == "errors" else getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
