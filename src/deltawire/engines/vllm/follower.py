"""The one who decides, in the API server: which version is next, and whether all ranks hold it.

Planning, recovery and heartbeats are the replica's; what differs is how weights are reached: through workers that each
hold a part. Runs in a thread of its own, so that fetching never holds up a request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...bucket.ahead import Parcel
from ...bucket.fetch import Fetched, Progress
from ...bucket.replay import as_anchor, as_delta, checkout, reference_source
from ...bucket.run import Run
from ...bucket.versions import resolve
from ...core import full
from ...core.digest import StateDigest
from ...core.errors import DeltawireError, DigestMismatch, SchemaError
from ...core.manifest import Manifest
from ...replica import Replica
from .workers import NotRestored, TooDense, Workers

log = logging.getLogger("deltawire")

_CHUNK = 8 << 20


class Follower(Replica):
    """A replica whose weights lie in the workers of a vLLM server.

    pin         stay at this version, older ones included
    following   go to every new version; else catch up once and then wait for `sync`
    held        generation is paused until the weights have a name
    on_failure  called when the run turns out to be one that this server can never load
    """

    def __init__(
        self,
        run: str,
        workers: Workers,
        *,
        pin: int | None = None,
        following: bool = True,
        held: bool = True,
        reference: str | None = None,
        heartbeat: float = 10.0,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(run, reference=reference, heartbeat=heartbeat, target=self._open_workers)
        self.workers = workers
        self.pin = pin
        self.guard = ""
        # "patch", or why weights are reloaded in full
        self.syncs = 0
        self.failures = 0
        self.failure = ""
        # of the last sync; empty when that went well
        self.last: dict[str, float] = {}
        # seconds of the last sync that moved the weights, by phase
        self._following = following
        self._held = held
        self._on_failure = on_failure
        self._failed = False
        self._lost = False
        # whether weights that had a name have none any more; generation is paused then
        self._drafted: int | None = None
        # the version that a draft model was loaded beside
        self._told: int | None = None
        # the version that vLLM was told to put on samples
        self._busy = threading.RLock()
        # a sync asked for over HTTP and the loop's own never run at once
        self._stop = threading.Event()

    @property
    def state(self) -> str:
        """starting, healthy, degraded (serves a version, but not the one it should), paused (serves nothing) or failed
        (the run is of another model)."""
        if self._failed:
            return "failed"
        if self._lost:
            return "paused"
        if self._held or self.version is None:
            return "starting"
        return "degraded" if self.reason else "healthy"

    @property
    def reason(self) -> str:
        return self.failure or self.trouble or self._stale_draft

    @property
    def _stale_draft(self) -> str:
        """Not wrong, but slower with every version: fewer of the tokens that a draft proposes are taken."""
        if not self.workers.has_draft or self.version == self._drafted:
            return ""
        return f"draft model is at version {self._drafted}: the run carries no weights for it"

    def live(self) -> tuple[int | None, StateDigest]:
        """The version, and the digest of the weights that tokens are computed with, while nobody writes them."""
        with self._busy:
            return self.version, self.workers.live_digest()

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def loop(self, poll: float) -> None:
        """Catch up, then follow until `stop`. What goes wrong is outlived, and said by `state` and `reason`."""
        while not self._stop.is_set():
            try:
                for _ in self.follow(self.workers, poll=poll, stop=self._stop):
                    pass
            except SchemaError as error:
                # another model: no later version will fit either
                self._went_wrong(error)
                self._failed = True
                log.error("this server cannot follow %s: %s", self.url, error)
                self._on_failure()
                return
            except Exception as error:
                log.exception("following failed, and is tried again")
                self._went_wrong(error)
                self._stop.wait(max(poll, 1.0))

    def stop(self) -> None:
        self._stop.set()

    def _next(self, model: Any, *args: Any) -> int | None:
        if self.pin is not None:
            want = self.pin if self.version != self.pin else None
        elif self.version is not None and not self._following:
            want = None
        else:
            want = super()._next(model, *args)
        if want is None and self.version is not None:
            # it serves what it should: a command that failed since has been answered
            self.failure = ""
        return want

    def command(self, version: int | str | None, *, pin: bool = False) -> None:
        """Go to a version (the newest by default); with `pin`, stay there; a pin of None follows again.

        After an error the pin is what it was, and so are the weights.
        """
        if pin and version is None:
            self.pin = None
            return
        with self._busy:
            # a mistyped version is the caller's mistake, not a failure of this server
            exact = None if version is None else resolve(self._open(), version)
            self._go(self.workers, exact)
            if pin:
                self.pin = exact

    def sync(self, model: Any, version: int | None = None, *, progress: Progress | None = None) -> int:
        with self._busy:
            # a pin that was set while this waited for its turn is obeyed
            return self._go(model, version if self.pin is None else self.pin, progress)

    def _go(self, model: Any, version: int | None, progress: Progress | None = None) -> int:
        with self._busy:
            clock, before = time.perf_counter(), self.version
            self.workers.timings = {}
            try:
                reached = super().sync(model, version, progress=progress)
            except DeltawireError as error:
                self._went_wrong(error)
                raise
            finally:
                self._tell_engine()
            self.failure = ""
            if reached != before:
                self.syncs += 1
                self.last = {**self.timings, **self.workers.timings, "total": time.perf_counter() - clock}
                took = "  ".join(f"{phase} {seconds * 1e3:.0f} ms" for phase, seconds in self.last.items())
                log.info("serving v%d  %s", reached, took)
            return reached

    def _went_wrong(self, error: Exception) -> None:
        self.failures += 1
        self.failure = f"{type(error).__name__}: {error}"
        if isinstance(error, NotRestored):
            self._lost, self.version = True, None

    def _tell_engine(self) -> None:
        """Weights that have a name are served, whatever else went wrong; weights that have lost theirs are not."""
        if self.version is None:
            if self._told is not None and not self._lost:
                self.workers.pause()
                self._lost = True
            return
        if self._told != self.version or self._held or self._lost:
            self.workers.name(self.version, resume=self._held or self._lost)
            self._told, self._held, self._lost = self.version, False, False
            if self._drafted is None:
                self._drafted = self.version
                if self.workers.has_draft:
                    log.warning("the draft model stays at version %d: the run carries no weights for it", self.version)

    def _has_strayed(self, target: Any) -> bool:
        strayed = super()._has_strayed(target)
        # before the way out is looked for: these weights are being served
        self._tell_engine()
        return strayed

    # ── how a replica's steps are gone here ──────────────────────────────────────────────────────────────────────────

    def _open_workers(self, workers: Workers, schema: Any, strict: bool) -> Workers:
        workers.bind(schema)
        self._say_guard()
        return workers

    def _say_guard(self) -> None:
        self.guard = f"reload: {self.workers.refused}" if self.workers.refused else "patch"
        if self.workers.refused:
            log.warning("deltas are refused, every version is reloaded in full: %s", self.workers.refused)

    def _take(self, run: Run, target: Any, parcel: Parcel) -> None:
        manifest, link = parcel.manifest, parcel.link
        if self.workers.refused:
            self._load(target, manifest, checkout(run, manifest.version, resolve=self._resolve))
        elif link.kind == "delta":
            for data in parcel.objects:
                # opened here too: what is wrong with it is then wrong before a worker hears of it
                as_delta(run, manifest, link, data)
            with ExitStack() as spooled:
                paths = [
                    spooled.enter_context(self._spooled(f"{manifest.version}.{number}.delta", _chunks(data)))
                    for number, data in enumerate(parcel.objects)
                ]
                self._swap("delta", paths, manifest)
        elif link.kind == "anchor":
            self._load(target, manifest, as_anchor(run, manifest.version, parcel.objects))
        else:
            self._load(target, manifest, reference_source(run, link, self._resolve))

    def _load(self, target: Any, manifest: Manifest, source: full.Source) -> None:
        """Full weights: as a change of those there are, where these have a name to go back to, else over them."""
        clock = time.perf_counter()
        found = full.digest_of(source)
        if str(found) != manifest.digest:
            raise DigestMismatch(manifest.version, manifest.digest, str(found), "nothing was changed")
        self._note({"decode": time.perf_counter() - clock})
        if self.workers.refused:
            self.workers.reload(source, manifest.version, found)
            self._reached(manifest.version, found)
            self._say_guard()
            return
        anchor = full.anchor(source.schema, source.region, {})
        with self._spooled(f"{manifest.version}.full", anchor.chunks()) as path:
            if self.version is not None:
                try:
                    return self._swap("full", [path], manifest)
                except TooDense as error:
                    log.info("%s", error)
            self.workers.load(path, manifest.version, found)
            self._reached(manifest.version, found)

    def _swap(self, kind: str, paths: list[Path], manifest: Manifest) -> None:
        staged = self.workers.stage(kind, paths, manifest.version, self._digest)
        self._note(staged.timings)
        if str(staged.digest) != manifest.digest:
            self.workers.forget()
            raise DigestMismatch(
                manifest.version,
                manifest.digest,
                str(staged.digest),
                "it does not lead there; nothing was changed",
            )
        try:
            self.workers.swap(staged)
            self._reached(manifest.version, staged.digest)
            if staged.audited:
                self.workers.audit(staged)
                self._note({"audit": staged.timings["audit"]})
        finally:
            self.workers.forget()

    def _reached(self, version: int, digest: StateDigest) -> None:
        # vLLM was told in the pause
        self._digest, self.version, self._told = digest, version, version

    @contextmanager
    def _spooled(self, name: str, chunks: Any) -> Iterator[Path]:
        path = self.workers.spool(name, chunks)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def _chunks(data: Fetched) -> Iterator[bytes]:
    for start in range(0, data.size, _CHUNK):
        yield data.read(start, min(_CHUNK, data.size - start))
