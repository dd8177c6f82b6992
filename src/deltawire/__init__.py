"""Move the weights of a model in training to every server that samples from it, through nothing but a bucket.

publisher = dw.Publisher("s3://runs/wordle")      # trainer
publisher.publish(model)

replica = dw.Replica("s3://runs/wordle")          # anywhere else
replica.sync(model)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import costs, errors
    from .api import decode, encode
    from .bucket.addresses import host_and_port
    from .bucket.browse import ListedRun, runs
    from .bucket.checkpoint_folder import CurrentFolder, checkout_folder
    from .bucket.contents import step_sizes, tensor_changes
    from .bucket.prune import PrunePlan, Retention, prune
    from .bucket.replay import checkout
    from .bucket.roster import latest_heartbeats
    from .bucket.run import Run
    from .bucket.trust import Trust, delegate
    from .bucket.verify import Verification, verify
    from .bucket.versions import split_version
    from .bucket.watch import Watcher, wait_for_run, watch
    from .core.change import Change, Region
    from .core.describe import FileContents, TensorDifference, TensorPart, difference
    from .core.digest import StateDigest
    from .core.errors import DeltawireError
    from .core.full import Checkpoint, FullFile, Source, digest_of
    from .core.manifest import Heartbeat, Link, Manifest, Roster, Summary, SyncRecord, Tag
    from .core.schema import Schema, TensorSpec
    from .core.signing import SigningKey
    from .core.state import State
    from .core.ulps import Histogram
    from .derive.deriver import Deriver, verify_derived
    from .keeper.keeper import Keeper, KeeperOptions, KeptVersion
    from .models import ModelView
    from .replica import Replica
    from .replica.replica import Synced
    from .replica.target import PartTarget, Staged, Target, Update
    from .trainer import Published, Publisher, PublishHandle, Shard, adapter, merged_weights

__all__ = [
    "Change",
    "Checkpoint",
    "CurrentFolder",
    "DeltawireError",
    "Deriver",
    "FileContents",
    "FullFile",
    "Heartbeat",
    "Histogram",
    "Keeper",
    "KeeperOptions",
    "KeptVersion",
    "Link",
    "ListedRun",
    "Manifest",
    "ModelView",
    "PartTarget",
    "PrunePlan",
    "PublishHandle",
    "Published",
    "Publisher",
    "Region",
    "Replica",
    "Retention",
    "Roster",
    "Run",
    "Schema",
    "Shard",
    "SigningKey",
    "Source",
    "Staged",
    "State",
    "StateDigest",
    "Summary",
    "SyncRecord",
    "Synced",
    "Tag",
    "Target",
    "TensorDifference",
    "TensorPart",
    "TensorSpec",
    "Trust",
    "Update",
    "Verification",
    "Watcher",
    "adapter",
    "checkout",
    "checkout_folder",
    "costs",
    "decode",
    "delegate",
    "difference",
    "digest_of",
    "encode",
    "errors",
    "host_and_port",
    "latest_heartbeats",
    "merged_weights",
    "prune",
    "runs",
    "split_version",
    "step_sizes",
    "tensor_changes",
    "verify",
    "verify_derived",
    "wait_for_run",
    "watch",
]

__version__ = "0.1.0"

_HOMES = {
    "Change": "core.change",
    "Checkpoint": "core.full",
    "CurrentFolder": "bucket.checkpoint_folder",
    "DeltawireError": "core.errors",
    "Deriver": "derive.deriver",
    "FileContents": "core.describe",
    "FullFile": "core.full",
    "Heartbeat": "core.manifest",
    "Histogram": "core.ulps",
    "Keeper": "keeper.keeper",
    "KeeperOptions": "keeper.keeper",
    "KeptVersion": "keeper.keeper",
    "Link": "core.manifest",
    "ListedRun": "bucket.browse",
    "Manifest": "core.manifest",
    "ModelView": "models",
    "PartTarget": "replica.target",
    "PrunePlan": "bucket.prune",
    "PublishHandle": "trainer",
    "Published": "trainer",
    "Publisher": "trainer",
    "Region": "core.change",
    "Replica": "replica",
    "Retention": "bucket.prune",
    "Roster": "core.manifest",
    "Run": "bucket.run",
    "Schema": "core.schema",
    "Shard": "trainer",
    "SigningKey": "core.signing",
    "Source": "core.full",
    "Staged": "replica.target",
    "State": "core.state",
    "StateDigest": "core.digest",
    "Summary": "core.manifest",
    "SyncRecord": "core.manifest",
    "Synced": "replica.replica",
    "Tag": "core.manifest",
    "Target": "replica.target",
    "TensorDifference": "core.describe",
    "TensorPart": "core.describe",
    "TensorSpec": "core.schema",
    "Trust": "bucket.trust",
    "Update": "replica.target",
    "Verification": "bucket.verify",
    "Watcher": "bucket.watch",
    "adapter": "trainer",
    "checkout": "bucket.replay",
    "checkout_folder": "bucket.checkpoint_folder",
    "costs": "costs",
    "decode": "api",
    "delegate": "bucket.trust",
    "difference": "core.describe",
    "digest_of": "core.full",
    "encode": "api",
    "errors": "errors",
    "host_and_port": "bucket.addresses",
    "latest_heartbeats": "bucket.roster",
    "merged_weights": "trainer",
    "prune": "bucket.prune",
    "runs": "bucket.browse",
    "split_version": "bucket.versions",
    "step_sizes": "bucket.contents",
    "tensor_changes": "bucket.contents",
    "verify": "bucket.verify",
    "verify_derived": "derive.deriver",
    "wait_for_run": "bucket.watch",
    "watch": "bucket.watch",
}


def __getattr__(name: str) -> Any:
    # imported on first use: half a second of numba is too much for `deltawire --help`
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = import_module(f".{_HOMES[name]}", __name__)
    value = globals()[name] = home if _HOMES[name] == name else getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
