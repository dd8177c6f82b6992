"""Patch live weights all or nothing.

stage    decode, predict the digest, bring it there   nothing touched; any error ends here
apply    scatter the new bits                         on an error: scatter the old ones back
prove    recompute the digest of the live weights     on a mismatch: scatter the old ones back
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..bucket.ahead import Parcel
from ..bucket.replay import as_delta
from ..bucket.run import Run
from ..core.change import Change
from ..core.digest import StateDigest
from ..core.errors import DigestMismatch
from .target import Patch, Target


@dataclass(slots=True)
class Staged:
    """A checked delta, decoded against the live weights and ready to be written."""

    version: int
    digest: StateDigest
    # what the weights will have
    changes: list[Change]
    patch: Patch | None = None
    # the changes where the weights are
    timings: dict[str, float] = field(default_factory=dict)


def stage(run: Run, parcel: Parcel, target: Target, present: StateDigest) -> Staged:
    """Everything that can go wrong with a delta goes wrong here, before a weight is touched."""
    manifest, link = parcel.manifest, parcel.link
    staged = Staged(manifest.version, present, [])
    clock = time.perf_counter()
    for data in parcel.objects:
        file = as_delta(run, manifest.version, link.base, data)
        for changes in file.changes_near(target.base):
            staged.changes.extend(changes)
    staged.digest = sum((change.digest() for change in staged.changes), present)
    staged.timings["decode"] = time.perf_counter() - clock
    if str(staged.digest) != manifest.digest:
        raise DigestMismatch(
            manifest.version,
            manifest.digest,
            str(staged.digest),
            "the delta does not lead there; nothing was changed",
        )
    clock = time.perf_counter()
    staged.patch = target.stage(staged.changes)
    staged.timings["stage"] = time.perf_counter() - clock
    return staged


def apply(target: Target, staged: Staged, *, prove: bool = True) -> None:
    """Write a staged delta. On any failure the old bits are back when the exception leaves."""
    assert staged.patch is not None
    clock = time.perf_counter()
    try:
        staged.patch.write()
        staged.timings["apply"] = time.perf_counter() - clock
        if prove:
            clock = time.perf_counter()
            found = target.digest()
            staged.timings["prove"] = time.perf_counter() - clock
            if found != staged.digest:
                raise DigestMismatch(staged.version, str(staged.digest), str(found), "the old weights were put back")
    except BaseException:
        staged.patch.undo()
        raise
