"""Patch live weights all or nothing.

stage    decode, bring it there, predict the digest   nothing touched; any error ends here
apply    scatter the new bits                         on an error: scatter the old ones back
prove    recompute the digest of the live weights     on a mismatch: scatter the old ones back
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ..bucket.ahead import Parcel
from ..bucket.replay import as_delta
from ..bucket.run import Run
from ..core.digest import StateDigest
from ..core.errors import DigestMismatch
from .target import Patch, Target


@dataclass(slots=True)
class Staged:
    """A checked delta, decoded against the live weights and ready to be written."""

    version: int
    digest: StateDigest
    # what the weights will have
    patch: Patch
    # the changes, where the weights are
    timings: dict[str, float]


def stage(run: Run, parcel: Parcel, target: Target, present: StateDigest) -> Staged:
    """Everything that can go wrong with a delta goes wrong here, before a weight is touched."""
    manifest, link = parcel.manifest, parcel.link
    clock = time.perf_counter()
    decoded: list[Any] = []
    for data in parcel.objects:
        decoded.extend(target.decode(as_delta(run, manifest, link, data, present)))
    timings = {"decode": time.perf_counter() - clock}
    clock = time.perf_counter()
    patch = target.stage(decoded)
    digest = present + patch.moved
    timings["stage"] = time.perf_counter() - clock
    if str(digest) != manifest.digest:
        raise DigestMismatch(
            manifest.version, manifest.digest, str(digest), "the delta does not lead there; nothing was changed"
        )
    return Staged(manifest.version, digest, patch, timings)


def apply(target: Target, staged: Staged, *, prove: bool = True) -> None:
    """Write a staged delta. On any failure the old bits are back when the exception leaves."""
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
