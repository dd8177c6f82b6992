"""A run derived from a run: each of its versions is the view of one version of the source, and names it.

    follow     the weights of the source are kept in host memory and move along its deltas
    convert    what a delta changed, and blocks whose scale moved (followed.py)
    publish    as a trainer does

Nothing is remembered but what is in the buckets: the newest version of the derived run names the version to continue
from. Whoever has the source can compute any version again and compare (`verify_derived`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..bucket.checkpoint_folder import content
from ..bucket.references import Reference, resolver
from ..bucket.replay import checkout, require_digest
from ..bucket.run import Run
from ..bucket.verify import Problem, Verification
from ..bucket.watch import watch
from ..core import full, keys
from ..core.errors import (
    DAMAGE,
    DigestMismatch,
    DivergedRun,
    Misconfigured,
    PublishFailed,
    RunNotFound,
    RunReplaced,
    SchemaError,
    StoreUnavailable,
    VersionNotFound,
)
from ..core.manifest import File, Manifest, Origin
from ..core.state import State
from ..store import Store
from ..trainer.pending import Published
from ..trainer.publisher import Publisher
from ..views import check_view
from ..views.blocks import Blocks
from ..views.host import BlockView
from .followed import FollowedView, ViewDetector

log = logging.getLogger("deltawire")

OLDEST = -1


class Deriver:
    """Publishes a view of each version of a run. One at a time for a derived run; use as a context manager.

    source = dw.Run.open("s3://runs/chat")
    with dw.Deriver(source, "s3://runs/chat-fp8", "fp8-block") as deriver:
        for published in deriver.follow():
            print(published.version)
    """

    def __init__(
        self, source: Run, run: str | Path | Store, view: str, *, reference: Reference = None, **options: Any
    ) -> None:
        """`options` are those of `Publisher`.

        Raises DivergedRun if the run at the address is derived from another one, or not at all; SchemaMismatch if the
        view converts no tensor of the source; Misconfigured if it has adapters.
        """
        check_view(view, of_adapters=source.info.base is not None)
        self._source, self._view_name, self._resolve = source, view, resolver(reference)
        self._blocks = Blocks(source.schema, view)
        self._files: dict[str, bytes] = {}
        """Companion files of the next version. The publisher reads them when it commits."""
        self._named: tuple[File, ...] | None = None
        self._publisher = Publisher(
            run, view=view, detector=ViewDetector(), files=self._files, group=None, continues=True, **options
        )
        self._state: State | None = None
        self._view: FollowedView | None = None
        # raises where the run is not derived from this source
        _ = self.reached

    def follow(
        self, first: int = OLDEST, *, once: bool = False, poll: float = 1.0, stop: threading.Event | None = None
    ) -> Iterator[Published]:
        """Derive every version of the source, and yield each.

        A new run begins with the source's version `first` or the next one that is there. With `once` it ends at the
        newest version; else a version that cannot be read is skipped, with a warning, and a store that cannot be
        reached is tried again.
        """
        stop = stop or threading.Event()
        since = self.reached if self.reached is not None else max(first, 0) - 1
        if once:
            yield from map(self.derive, _present(self._source, since))
            return
        for version in watch(self._source.store, since, poll=poll, every=True, stop=stop):
            while not stop.is_set():
                try:
                    yield self.derive(version)
                    break
                except (StoreUnavailable, PublishFailed) as error:
                    log.warning("version %d is not derived yet, trying again: %s", version, error)
                    stop.wait(poll)
                except DAMAGE as error:
                    if isinstance(error, RunNotFound | RunReplaced | SchemaError):
                        raise  # later versions would fail in the same way
                    log.warning("version %d cannot be derived and is skipped: %s", version, error)
                    break

    def derive(self, version: int) -> Published:
        """Publish the view of one version, which must be later than the last one."""
        if self._view is None and self.reached is not None:
            self._continue_from(self.reached)
        manifest = self._source.manifest(version)
        self._go_to(version)
        self._take_files(manifest)
        origin = Origin(self._view_name, self._source.info.run, version, manifest.digest)
        assert self._view is not None
        try:
            handle = self._publisher.publish(self._view, step=manifest.step, metrics=manifest.metrics, origin=origin)
            return handle.result()
        except BaseException:
            self._view.compare_all()
            raise

    def close(self) -> None:
        self._publisher.close()

    def __enter__(self) -> Deriver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._publisher.__exit__(kind)

    @property
    def reached(self) -> int | None:
        """The version of the source that was derived last, as the derived run says; None before the first."""
        newest = self._publisher.newest
        if newest is None:
            return None
        origin, source = newest.origin, self._source
        if source.store.url == self._publisher.url:
            raise Misconfigured(f"{source.store.url} is given twice: give the derived run an address of its own")
        if origin is None or (origin.run, origin.view) != (source.info.run, self._view_name):
            what = "is derived from no run" if origin is None else f"is the {origin.view} of the run {origin.run}"
            raise DivergedRun(
                f"version {newest.version} of {self._publisher.url} {what}, and {source.store.url} is the run "
                f"{source.info.run}, of which {self._view_name} was asked for: give the derived run an address of its "
                "own, or name the view that it has"
            )
        return origin.version

    def _continue_from(self, version: int) -> None:
        """Read the version derived last, so that only later deltas need to be converted.

        Where it is gone or gives other weights than it did, the first publish compares with the newest version of the
        derived run.
        """
        try:
            self._go_to(version)
            assert self._view is not None
            self._publisher.resume(self._view)
        except (DivergedRun, *DAMAGE) as error:
            log.warning("not going on from version %d but comparing with the derived run: %s", version, error)
            self._state = self._view = None

    def _go_to(self, version: int) -> None:
        before, view = self._state, self._view
        # until both are at the version: what is half written is none
        self._state = self._view = None
        state = checkout(self._source, version, before, reference=self._resolve, changed=view.note if view else None)
        if view is None or state is not before:
            view = FollowedView(state, self._blocks)
        else:
            view.advance()
        self._state, self._view = state, view

    def _take_files(self, manifest: Manifest) -> None:
        if manifest.files != self._named:
            found = {file.name: b"".join(content(self._source, file)) for file in manifest.files}
            self._named = None
            self._files.clear()
            self._files.update(found)
            self._named = manifest.files


def _present(run: Run, since: int) -> Iterator[int]:
    """Versions after `since` that are there now."""
    pruned = run.pruned()
    return (version for version in run.listed() if version > since and version not in pruned)


def verify_derived(
    run: Run,
    source: Run,
    *,
    first: int | None = None,
    last: int | None = None,
    reference: Reference = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Compute versions of a derived run, from `first` to `last`, from its source again, and compare the digests.

        dw.verify_derived(dw.Run.open("s3://runs/chat-fp8"), dw.Run.open("s3://runs/chat")).ok

    Needs memory for one copy of the source's weights. `progress` is called with versions since the last call, and all.
    Raises Misconfigured if the newest version is not derived from that source at all.
    """
    result = Verification()
    versions = [*_present(run, OLDEST)]
    newest = run.manifest(versions[-1]).origin if versions else None
    if newest is None:
        raise Misconfigured(
            f"{run.store.url} names no run that it is derived from: only runs made by `deltawire derive` do, and they "
            "are named before --source. Compare a view that a trainer published with a derived run by `deltawire show`"
        )
    if newest.run != source.info.run:
        raise Misconfigured(
            f"{run.store.url} is derived from the run {newest.run}, and {source.store.url} is the run "
            f"{source.info.run}: name the run that it was made of after --source"
        )
    versions = [v for v in versions if (first is None or v >= first) and (last is None or v <= last)]
    state = None
    for version in versions:
        manifest = run.manifest(version)
        origin = manifest.origin
        reason = ""
        if origin is None or origin.run != source.info.run:
            reason = f"not derived from the run {source.info.run}"
        else:
            try:
                check_view(origin.view)
                state = checkout(source, origin.version, state, reference=reference)
                require_digest(source.manifest(origin.version), state.digest)
                if str(state.digest) != origin.digest:
                    raise DivergedRun(
                        f"it names the digest {origin.digest} for version {origin.version} of its source, which has "
                        f"{state.digest}"
                    )
                found = str(full.digest_of(BlockView(state, Blocks(source.schema, origin.view))))
                if found != manifest.digest:
                    cause = f"other weights than {origin.view} gives for version {origin.version} of its source"
                    raise DigestMismatch(version, manifest.digest, found, cause)
            except VersionNotFound:
                reason = "the version it is derived from is gone"
            except (DivergedRun, *DAMAGE) as error:
                advice = "derive the run again at another address, and compare"
                result.failure = Problem(version, keys.manifest(version), type(error).__name__, str(error), advice)
                return result
        result.count(reason)
        result.versions += 1
        if progress:
            progress(1, len(versions))
    return result
