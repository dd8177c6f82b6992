"""Reads the version that a publisher compares with when it continues a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ..bucket.references import Resolve
from ..bucket.replay import State, checkout, load_folder
from ..bucket.run import Run
from ..core.errors import (
    ChainError,
    DeltawireError,
    FormatError,
    ObjectNotFound,
    ReferenceUnavailable,
    SchemaMismatch,
)
from ..core.manifest import Base

log = logging.getLogger("deltawire")

OTHER_MODEL = "; another model, or the same in another dtype, needs an address of its own"
"""What to do when a model does not fit the run it is published to."""


def check_base(run: Run, base: Base | None) -> None:
    """Raise SchemaMismatch where a run has adapters of another base model. Where a digest is unknown, nothing is."""
    before = run.info.base
    if not (before and base and before.digests and base.digests):
        return
    if not before.same(base):
        raise SchemaMismatch(
            f"the run {run.store.url} has adapters of {before}, and this one is trained on {base}{OTHER_MODEL}"
        )


def rebuild(
    run: Run,
    version: int,
    resolve: Resolve,
    folder: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> State | None:
    """Return a version in memory. None if it cannot be read any more: that must not keep a trainer from going on.

    If `folder` holds a version of the run, only what leads on from it is fetched. `progress` is called with the bytes
    that arrived and the bytes in all.
    """
    log.info("rebuilding version %d from %s to diff against", version, run.store.url)
    try:
        base = None if folder is None else _load(run, folder, version)
        return checkout(run, version, base, resolve=resolve, progress=progress)
    except ReferenceUnavailable:
        raise  # it is somewhere, only not here
    except (FormatError, ChainError, ObjectNotFound) as error:
        log.warning("version %d cannot be rebuilt, the next one will be an anchor: %s", version, error)
        return None


def _load(run: Run, folder: Path, newest: int) -> State | None:
    """Return a checkpoint folder as the version of the run that has its digest. None, with a warning, if none has."""
    try:
        state = load_folder(run, folder)
    except (DeltawireError, OSError) as error:
        log.warning("%s cannot be compared with and is not used: %s", folder, error)
        return None
    state.version = run.identify(state.digest, newest)
    if state.version is None:
        held = f"its state digest is {state.digest}"
        log.warning("%s holds no version of %s (%s) and is not used", folder, run.store.url, held)
        return None
    log.info("%s is version %d, and need not be fetched", folder, state.version)
    return state
