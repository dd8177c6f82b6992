"""What a publisher diffs against when it takes up a run: the newest version from the bucket, or a reference."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from ..bucket.references import Resolve, Weights, as_run, reference_source
from ..bucket.replay import State, checkout
from ..bucket.run import Run
from ..core import chain, full
from ..core.errors import ChainError, DeltawireError, FormatError, ObjectNotFound, ReferenceUnavailable
from ..core.manifest import Link, Manifest, Summary
from .commit import Committer, Companions

log = logging.getLogger("deltawire")

OTHER_MODEL = "; another model, or the same in another dtype, needs an address of its own"
"""What to do when a model does not fit the run it is published to."""


def rebuild(
    run: Run,
    version: int,
    resolve: Resolve,
    progress: Callable[[int, int], None] | None = None,
    base: State | None = None,
) -> State | None:
    """A version in memory. None if nobody can read it any more: that must not keep a trainer from going on.

    `base` is a version that is here already: only what leads on from it is fetched. `progress` is told the bytes that
    arrived and the bytes in all.
    """
    log.info("rebuilding version %d from %s to diff against", version, run.store.url)
    try:
        steps = chain.plan(base.version if base else None, version, run.timeline(version))
        total = sum(step.bytes for step in steps if step.kind != "reference")
        told = (lambda n: progress(n, total)) if progress else None
        return checkout(run, version, base, resolve=resolve, progress=told, steps=steps)
    except ReferenceUnavailable:
        raise  # it is somewhere, only not here
    except (FormatError, ChainError, ObjectNotFound) as error:
        log.warning("version %d cannot be rebuilt, the next one will be an anchor: %s", version, error)
        return None


def load_base(run: Run, folder: str | Path, versions: Mapping[int, Summary]) -> State | None:
    """A checkpoint folder as the version of the run that it is, by its digest. None, with a warning, if it is none."""
    try:
        state = State(run.schema)
        state.load(as_run(full.Checkpoint(folder), run.schema, f"the folder {folder}"))
    except (DeltawireError, OSError) as error:
        log.warning("%s cannot be compared with and is not used: %s", folder, error)
        return None
    found = str(state.digest)
    for version in sorted(versions, reverse=True):
        # a summary is only what a history page says; the manifest decides
        if versions[version].digest == found and run.manifest(version).digest == found:
            log.info("%s is version %d, and need not be fetched", folder, version)
            state.version = version
            return state
    log.warning("%s holds no version of %s (its state digest is %s) and is not used", folder, run.store.url, found)
    return None


def open_reference(run: Run, reference: str, resolve: Resolve) -> tuple[Link, Weights]:
    """The checkpoint that version 0 points to, in place of an upload."""
    link = Link("reference", source=reference, nbytes=run.schema.nbytes)
    return link, reference_source(run, link, resolve)


def commit_reference(committer: Committer, link: Link, digest: str, files: Companions) -> Manifest:
    """Version 0 is a checkpoint that everybody can get: its name and digest travel, its weights do not."""
    return committer.commit(
        (link,), digest=digest, changed=0, step=None, metrics={}, timings={}, files=committer.put_files(files)
    )
