"""Fetch what the next steps of a plan need while the present one is being applied."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ..core.chain import Step
from ..core.errors import ManifestError
from ..core.manifest import Link, Manifest
from ..core.parallel import ordered_map
from .fetch import CONNECTIONS, Fetched, Progress, fetch
from .run import Run

AHEAD_BYTES = 128 << 20
"""Objects that may wait in memory or on disk, beside the one in use."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """All that a step needs, verified."""

    manifest: Manifest
    link: Link
    objects: list[Fetched]
    """One per object of the link."""

    def close(self) -> None:
        for item in self.objects:
            item.close()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A step whose parcel is on its way."""

    step: Step
    _parcel: Future[Parcel]

    def parcel(self) -> Parcel:
        """Waits for it. Raises here what went wrong with this step's manifest or objects."""
        return self._parcel.result()


def arrivals(
    run: Run, steps: Sequence[Step], progress: Progress | None = None, *, shared: bool = True
) -> Iterator[Arrival]:
    """The steps of a plan in order, each with its objects fetched ahead. A parcel is closed with the next step.

    `shared` as in `fetch`.
    """
    waiting: deque[Arrival] = deque()
    todo = deque(steps)
    pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="deltawire-ahead")
    try:
        while todo or waiting:
            while todo and (not waiting or sum(a.step.bytes for a in waiting) + todo[0].bytes <= AHEAD_BYTES):
                step = todo.popleft()
                waiting.append(Arrival(step, pool.submit(_collect, run, step, progress, shared)))
            yield waiting[0]
            _discard(waiting.popleft())
    finally:
        for arrival in waiting:
            _discard(arrival)
        # no waiting: this may run in the garbage collector, in a thread that holds a lock the workers need
        pool.shutdown(wait=False)


def _collect(run: Run, step: Step, progress: Progress | None, shared: bool) -> Parcel:
    manifest = run.manifest(step.version)
    link = manifest.link(step.kind, step.base)
    if link.bytes != step.bytes:
        # how much is fetched ahead was decided by what history says
        raise ManifestError(
            f"history says that the {step.kind} to version {step.version} has {step.bytes:,} bytes, its manifest says "
            f"{link.bytes:,}"
        )
    parcel = Parcel(manifest, link, [])
    try:
        # one object, or the small ones of many writers
        threads = min(len(link.objects), CONNECTIONS)
        many = len(link.objects)
        for data in ordered_map(
            lambda blob: fetch(run.store, blob, progress, shared=shared, one_of=many), link.objects, threads
        ):
            parcel.objects.append(data)
    except BaseException:
        parcel.close()
        raise
    return parcel


def _discard(arrival: Arrival) -> None:
    """Close the parcel, now or as soon as it is there."""
    if not arrival._parcel.cancel():
        arrival._parcel.add_done_callback(_close)


def _close(future: Future[Parcel]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
