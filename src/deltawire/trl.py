"""The name users know: `deltawire.trl.BucketTransfer`, `deltawire.trl.DeltaSyncCallback`."""

from .engines.trl import BucketTransfer, DeltaSyncCallback

__all__ = ["BucketTransfer", "DeltaSyncCallback"]
