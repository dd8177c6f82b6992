"""One attempt to bring live weights to a version: PLAN, FETCH, STAGE and SWAP, again around what cannot be used."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from ..bucket.fetch import Progress
from ..bucket.references import Resolve
from ..bucket.replay import advance
from ..bucket.run import Run
from ..bucket.walk import TRIES, Delta, FetchedLink, Walker
from ..core.chain import Step
from ..core.digest import StateDigest
from ..core.errors import DAMAGE, DeltawireError, DigestMismatch, MissingBase, StoreUnavailable, VersionNotFound
from ..core.full import Source
from ..core.held import Held, part_of
from ..core.state import State
from .failures import Failures
from .heartbeats import Heartbeats
from .live_weights import LiveWeights
from .target import PartTarget, Update

log = logging.getLogger("deltawire")


class Attempt:
    """Brings live weights to one version, once."""

    def __init__(self, run: Run, want: int, weights: LiveWeights, failures: Failures, heartbeats: Heartbeats) -> None:
        self.timings: dict[str, float] = {}
        """Seconds by phase."""
        self.fetched = 0
        """Bytes."""
        self.rejected: list[tuple[Step, DeltawireError]] = []
        """Links that could not be used, and why."""
        self._run, self._want, self._walker = run, want, Walker(run)
        self._weights, self._failures, self._heartbeats = weights, failures, heartbeats
        self._copy: State | None = None
        """Where the version is made first, if its steps must not be seen in the weights."""
        self._have_strayed = False

    def reach(self, resolve: Resolve, progress: Progress | None) -> None:
        """Bring the weights to the version. Raises the error that no other way avoids.

        The weights are then unchanged, or no version.
        """

        def told(count: int) -> None:
            # a replica that fetches for long must not look abandoned
            self._heartbeats.beat()
            if progress:
                progress(count)

        try:
            walk = self._walker.walk(self._start, self._want, begin=self._begin, progress=told, held=self._held)
            for step, pending in walk:
                try:
                    clock = time.perf_counter()
                    fetched = pending.result()
                    waited = time.perf_counter() - clock
                    verify = min(waited, sum(data.hashing_s for data in fetched.objects))
                    self._note({"fetch": waited - verify, "verify": verify})
                    self.fetched += fetched.bytes
                    self._take(step, fetched, resolve)
                except (*DAMAGE, StoreUnavailable) as error:
                    self._go_round(step, error)
        finally:
            self._heartbeats.done()

    def _start(self) -> int | None:
        start = self._weights.start(self._want)
        return start if self._weights.target.takes_deltas or start == self._want else None

    def _begin(self, steps: list[Step]) -> bool:
        """Prepare for a plan. False if some of it is not to be used."""
        if not self._reserve(steps):
            return False
        # a way that first leads back is gone on a copy: weights in use never fall behind the version they are
        present, target = self._weights.version, self._weights.target
        leads_back = present is not None and steps[0].version < present
        self._copy = State(self._run.schema) if len(steps) > 1 and (leads_back or not target.takes_deltas) else None
        return True

    def _held(self) -> Held | None:
        """The part of the model that the target holds, if it needs no more of the objects."""
        target = self._weights.target
        regions = target.holds() if self._copy is None and isinstance(target, PartTarget) else None
        return None if regions is None else part_of(self._run.schema, regions)

    def _reserve(self, steps: list[Step]) -> bool:
        """Announce in the heartbeat what is about to be read, so that prune leaves it. False if some of it is marked.

        Prune marks and then looks at heartbeats; a replica writes its heartbeat and then looks at the marks: one of the
        two sees the other. A single delta needs no such care: if it is gone, another way is planned.
        """
        if not self._heartbeats.every or (len(steps) == 1 and steps[0].kind == "delta"):
            return True
        self._heartbeats.announce(step.version for step in steps)
        pruned = self._run.pruned()
        if self._want in pruned:
            self._run.forget(self._want)
            raise VersionNotFound(f"version {self._want} of {self._run.store.url} was pruned")
        marked = [step for step in steps if step.version in pruned]
        self._walker.leave_out(marked)
        return not marked

    def _take(self, step: Step, fetched: FetchedLink, resolve: Resolve) -> None:
        """Apply a link to the weights. Where there is a copy, to that; only the last one brings it to the weights."""
        weights = self._weights
        kind: str = step.kind
        size = fetched.bytes
        content: Delta | Source
        if self._copy is not None:
            advance(self._copy, fetched, resolve)
            if step.version != self._want:
                return
            kind, content, size = "copy", self._copy, self.fetched
        elif kind == "delta":
            content = fetched.delta(weights.digest)
        else:
            content = fetched.weights(resolve)
        clock = time.perf_counter()
        update = Update(
            step.version,
            StateDigest.parse(fetched.manifest.digest),
            weights.digest,
            content,
            step.version == self._want,
            self._run.store.url,
        )
        self._note(weights.apply(update))
        took = 1e3 * (time.perf_counter() - clock)
        log.info("%s: v%d  %s  %.2f MB  %.0f ms", self._heartbeats.id, step.version, kind, size / 1e6, took)

    def _go_round(self, step: Step, error: DeltawireError) -> None:
        """Plan again: from what the weights are found to be, or without this link."""
        if isinstance(error, StoreUnavailable) and not self._failures.is_lost(step):
            raise error
        # one other thing that changed the weights explains one mismatch
        if not self._have_strayed and isinstance(error, DigestMismatch) and self._weights.have_strayed():
            self._have_strayed = True
            self._walker.plan_again(error)
        elif step.base is not None and step.base == self._weights.version and self._weights.were_replaced(self._run):
            self._walker.plan_again(error)
        else:
            self.rejected.append((step, error))
            if isinstance(error, StoreUnavailable):
                kind, version = step.kind, step.version
                error = MissingBase(f"the {kind} to version {version} is as good as lost, after {TRIES} tries: {error}")
            self._walker.reject(step, error)

    def _note(self, timings: Mapping[str, float]) -> None:
        for phase, seconds in timings.items():
            self.timings[phase] = self.timings.get(phase, 0.0) + seconds
