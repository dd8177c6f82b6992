"""What a publisher starts from: a checkpoint that everybody can get, or the newest version, read from the bucket."""

from __future__ import annotations

import logging
from pathlib import Path

from ..bucket.references import find_reference, reference_source
from ..bucket.replay import checkout, load_folder
from ..bucket.run import Run
from ..bucket.walk import TRIES
from ..core import full
from ..core.errors import (
    ChainError,
    DeltawireError,
    FormatError,
    ObjectNotFound,
    ReferenceUnavailable,
    StoreUnavailable,
)
from ..core.manifest import Link
from ..core.state import State
from .pending import Progress

log = logging.getLogger("deltawire")


class Rebuild:
    """Reads weights to compare with."""

    def __init__(self, reference: str | Path | None, base: Path | None) -> None:
        """`reference` is the checkpoint that a new run starts from; `base` a folder that may hold a version of the
        run."""
        self._reference, self._base = None if reference is None else str(reference), base

    def begin(self, run: Run) -> tuple[Link, str] | None:
        """The first version of a run that starts from the reference: how to get it, and its digest."""
        if self._reference is None:
            return None
        link = Link("reference", source=self._reference, nbytes=run.schema.nbytes)
        return link, str(full.digest_of(reference_source(run, link, self._find)))

    def version(self, run: Run, version: int, progress: Progress | None) -> State | None:
        """A version in memory. None if it cannot be read any more: that must not keep a trainer from going on.

        If `base` holds a version of the run, only what leads on from it is fetched.
        """
        log.info("rebuilding version %d from %s to diff against", version, run.store.url)
        fetched = (lambda n, total: progress("fetch", n, total)) if progress else None
        for _ in range(TRIES):
            try:
                return checkout(run, version, self._in_folder(run, version), reference=self._find, progress=fetched)
            except ReferenceUnavailable:
                raise  # it is somewhere, only not here
            except (FormatError, ChainError, ObjectNotFound, StoreUnavailable) as error:
                log.warning("version %d of %s cannot be rebuilt: %s", version, run.store.url, error)
                if not isinstance(error, StoreUnavailable):
                    break
        # objects that the store fails to give again are as good as lost: it has given the run's manifest
        log.warning("the next version of %s will be an anchor", run.store.url)
        return None

    def _in_folder(self, run: Run, newest: int) -> State | None:
        """The folder as the version of the run that has its digest. None, with a warning, if none has."""
        folder = self._base
        if folder is None:
            return None
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

    def _find(self, source: str, most: int) -> Path:
        """Where this publisher was told the reference is, which may differ from what the run calls it."""
        return find_reference(self._reference or source, most)
