"""Find a way to a version, and another where a link of it turns out bad: for live weights and private copies alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from ..core import chain
from ..core.chain import Step
from ..core.errors import (
    ChainError,
    DeltawireError,
    FormatError,
    MissingBase,
    ObjectNotFound,
    SchemaError,
    StoreUnavailable,
)
from ..core.manifest import Summary
from .run import Run

BAD_LINK = (FormatError, SchemaError, ChainError, ObjectNotFound)
"""What makes a reader look for another way to the same version."""


class Walker:
    """Plans ways through a run. Remembers what not to use: make a new one for each attempt, since what was bad the last
    time may have been a bad transfer, or repaired since.

    known   all versions that plans may use; asked of the run, as few as a plan needs, by default
    """

    def __init__(self, run: Run, known: Mapping[int, Summary] | None = None) -> None:
        self._run, self._known = run, known
        self._bad: set[tuple[int, str, int | None]] = set()
        self._renewed: set[int] = set()

    def reach(
        self,
        want: int,
        have: Callable[[], int | None],
        go: Callable[[list[Step]], DeltawireError | None],
        steps: list[Step] | None = None,
    ) -> None:
        """Plan and go until `have()` is `want`. `go` returns what was wrong with the step it could not take, of which
        it has told `renew` or `leave_out`. `steps` is a way that was planned before.

        MissingBase, or the last failure, when no way is left, and after chain.MAX_PLANS of them.
        """
        failure: DeltawireError | None = None
        for _ in range(chain.MAX_PLANS):
            if have() == want:
                return
            try:
                steps = steps or self.plan(have(), want)
            except MissingBase:
                if failure is not None and not isinstance(failure, StoreUnavailable):
                    raise failure from None
                # an object that stays away is as good as lost
                missing = f"no path leads from version {have()} to {want} in {self._run.store.url}"
                raise MissingBase(f"{missing}: {failure}" if failure else missing) from failure
            failure, steps = go(steps) or failure, None
        if have() != want:
            raise chain.gave_up(want, self._run.store.url, failure) from failure

    def plan(self, have: int | None, want: int) -> list[Step]:
        """The cheapest way. Asks for as little history as it takes: the manifest's own, back to `have`, all of it."""
        if self._known is not None:
            return chain.plan(have, want, self._usable(self._known))
        manifest = self._run.manifest(want)
        near = {s.version: s for s in (*manifest.recent, manifest.summary())}
        ways: list[Callable[[], Mapping[int, Summary]]] = []
        if have in near or (have is not None and manifest.parent == have):
            ways.append(lambda: near)
        if have is not None and have < want:
            ways.append(lambda: self._run.timeline(want, since=have))
        for versions in ways:
            try:
                return chain.plan(have, want, self._usable(versions()))
            except MissingBase:
                pass
        return chain.plan(have, want, self._usable(self._run.timeline(want)))

    def leave_out(self, steps: Iterable[Step]) -> None:
        """Plan without these links from now on."""
        self._bad |= {(step.version, step.kind, step.base) for step in steps}

    def leave_out_references(self) -> None:
        """Plan without checkpoints that lie outside the run. For a walker that knows all versions."""
        self._bad |= {(v, "reference", link.base) for v, s in (self._known or {}).items() for link in s.links}

    def renew(self, step: Step) -> bool:
        """Read the manifests of a step anew. True if they were replaced since they were read, once per version: where a
        store cannot create exclusively, that may be why the step does not fit."""
        replaced = {v for v in (step.version, step.base) if v is not None and self._run.renew(v)} - self._renewed
        self._renewed |= replaced
        return bool(replaced)

    def _usable(self, versions: Mapping[int, Summary]) -> Mapping[int, Summary]:
        """Summaries without the links that are left out."""
        if not self._bad:
            return versions
        return {
            v: msgspec.structs.replace(s, links=tuple(x for x in s.links if (v, x.kind, x.base) not in self._bad))
            for v, s in versions.items()
        }
