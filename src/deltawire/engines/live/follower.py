"""The follower of an engine: stops generation while the weights are no version, and warns of stale draft models.

Runs in the HTTP server, in a thread of its own, so that fetching never holds up a request.
"""

from __future__ import annotations

import logging
from typing import Any

from ...core.digest import StateDigest
from ...core.errors import SchemaError, SchemaMismatch
from ...store import Store
from ..follower import Follower
from .node import WorkerError
from .target import EngineTarget

log = logging.getLogger("deltawire")


class EngineFollower(Follower):
    """Keeps the weights of an engine at a version of a run, and reports its state."""

    fatal = (SchemaError,)
    target: EngineTarget

    def __init__(self, run: str | Store, target: EngineTarget, **options: Any) -> None:
        super().__init__(run, target, **options)
        self._drafted: int | None = None
        """The version that a draft model was loaded beside."""

    @property
    def state(self) -> str:
        if self.failure is None and self.version is None and self.target.spoiled:
            return "paused"
        if self.failure is None and self.version is not None and self.target.held:
            return "starting"
        return super().state

    @property
    def reason(self) -> str:
        if (found := super().reason) or not self.draft or self.target.drafts or self.version == self._drafted:
            return found
        # results stay correct, but fewer proposed tokens are accepted
        return f"draft model is {self.draft}"

    @property
    def draft(self) -> str:
        """ "follows" if the weights of the engine's draft model are in the run, or at which version they stay; empty
        without a draft model, and before the first version."""
        if not self.target.engine.has_draft or self._drafted is None:
            return ""
        return "follows" if self.target.drafts else f"at version {self._drafted}: the run carries no weights for it"

    def live(self) -> tuple[int | None, StateDigest]:
        if self.target.refused:
            raise SchemaMismatch(
                f"{self.target.engine.name}'s weights cannot be read as a checkpoint here: {self.target.refused}"
            )
        with self.replica.lock:
            return self.version, self.target.live_digest()

    def named(self, version: int | None) -> None:
        """Serve the version; stop serving if the weights are not exactly one version."""
        if version is None:
            if (self.caught_up.is_set() or self.target.spoiled) and not self.target.stopped:
                try:
                    self.target.pause()
                except WorkerError:
                    log.exception("weights that are no version may still be served")
            return
        if self.target.named != version or self.target.held:
            self.target.name(version)
        if not self.caught_up.is_set():
            self._drafted = version
            self.caught_up.set()
            if self.target.engine.has_draft and not self.target.drafts:
                log.warning("the draft model stays at version %d: the run carries no weights for it", version)
