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
    from .bucket.run import Run
    from .bucket.watch import wait_for_run, watch
    from .core.change import Change, Region
    from .core.digest import StateDigest
    from .core.errors import DeltawireError
    from .core.full import Source, digest_of
    from .core.schema import Schema
    from .replica import Replica
    from .replica.target import Staged, Target, Update
    from .trainer import Published, Publisher, PublishHandle, adapter, merged

__all__ = [
    "Change",
    "DeltawireError",
    "PublishHandle",
    "Published",
    "Publisher",
    "Region",
    "Replica",
    "Run",
    "Schema",
    "Source",
    "Staged",
    "StateDigest",
    "Target",
    "Update",
    "adapter",
    "decode",
    "digest_of",
    "encode",
    "errors",
    "merged",
    "wait_for_run",
    "watch",
]

__version__ = "0.1.0"

_HOMES = {
    "Change": "core.change",
    "DeltawireError": "core.errors",
    "PublishHandle": "trainer",
    "Published": "trainer",
    "Publisher": "trainer",
    "Region": "core.change",
    "Replica": "replica",
    "Run": "bucket.run",
    "Schema": "core.schema",
    "Source": "core.full",
    "Staged": "replica.target",
    "StateDigest": "core.digest",
    "Target": "replica.target",
    "Update": "replica.target",
    "adapter": "trainer",
    "decode": "api",
    "digest_of": "core.full",
    "encode": "api",
    "errors": "errors",
    "merged": "trainer",
    "wait_for_run": "bucket.watch",
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
