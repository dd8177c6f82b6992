"""What a publisher diffs against when it takes up a run: the newest version from the bucket, or a reference."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..bucket.replay import Resolve, State, Weights, checkout, reference_source
from ..bucket.run import Run
from ..core.errors import ChainError, FormatError, ObjectNotFound, ReferenceUnavailable
from ..core.manifest import Link, Manifest
from .commit import Committer

log = logging.getLogger("deltawire")


def rebuild(run: Run, version: int, resolve: Resolve, progress: Callable[[int], None] | None = None) -> State | None:
    """A version in memory. None if nobody can read it any more: that must not keep a trainer from going on."""
    log.info("rebuilding version %d from %s to diff against", version, run.store.url)
    try:
        return checkout(run, version, resolve=resolve, progress=progress)
    except ReferenceUnavailable:
        raise  # it is somewhere, only not here
    except (FormatError, ChainError, ObjectNotFound) as error:
        log.warning("version %d cannot be rebuilt, the next one will be an anchor: %s", version, error)
        return None


def open_reference(run: Run, reference: str, resolve: Resolve) -> tuple[Link, Weights]:
    """The checkpoint that version 0 points to, in place of an upload."""
    link = Link("reference", source=reference, nbytes=run.schema.nbytes)
    return link, reference_source(run, link, resolve)


def commit_reference(committer: Committer, link: Link, digest: str, files: dict[str, bytes] | None) -> Manifest:
    """Version 0 is a checkpoint that everybody can get: its name and digest travel, its weights do not."""
    return committer.commit(
        (link,), digest=digest, changed=0, step=None, metrics={}, timings={}, files=committer.put_files(files)
    )
