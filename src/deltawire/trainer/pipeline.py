"""Turns publishes into versions: capture → encode → put → commit.

    publish            trainer's thread: capture what changed, or where that is too much to hold, stream it
    agree              background thread: ranks that captured fewer publishes take in further ones, until all are equal
    encode, put        each rank its own part, block by block (writer.py)
    commit             rank 0, once all ranks have put theirs
    settle or keep     a version that failed on one rank failed on all; the next one carries it

`publish` sends nothing to other ranks, so none waits for another. The background threads exchange messages, in the same
order on every rank. A process that publishes alone is a group of one.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bucket.references import find_reference
from ..bucket.replay import State
from ..bucket.run import Run
from ..core import full
from ..core.change import Region, whole
from ..core.digest import StateDigest
from ..core.errors import DivergedRun, RunNotFound, SchemaMismatch
from ..core.full import Source
from ..core.schema import Schema
from ..models import Known, ModelView
from ..store import Store
from .background import Background, Job, PublishHandle
from .captures import Captures, Skips
from .collective import LAST_WAIT, Group, Meeting, Ranks
from .commit import Committer, Companions
from .detectors import Detector, HostDetector, LostTrack, TooLarge, default_detector
from .policy import AnchorPolicy, EncodingChooser
from .resume import OTHER_MODEL, commit_reference, load_base, open_reference, rebuild
from .stream import Stream, Watched
from .writer import Draft, Progress, Published, Skip, VersionWriter, say, tell

log = logging.getLogger("deltawire")

MIN_PENDING = 64 << 20


@dataclass(slots=True)
class Settings:
    """What the user asked of the publisher, explained there; name and files of the model once it is known."""

    chooser: EncodingChooser
    policy: AnchorPolicy
    files: Companions
    wire_dtype: str | None
    buffers: bool
    detector: Detector | None
    skip_every: int | None
    reference: str | None
    model_name: str
    max_pending: int | None
    base: Path | None
    continues: bool
    on_version: Callable[[Published], object] | None


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest version of the run, as rank 0 tells it to all."""

    version: int
    digest: str
    created: float


@dataclass(frozen=True, slots=True)
class _Session:
    """What publishes are compared with and written by. Opened by the first publish; lost when a stream fails."""

    captures: Captures
    writer: VersionWriter


class Pipeline:
    """Writes the versions of one publisher. With several ranks, all call the same methods in the same order."""

    def __init__(self, store: Store, settings: Settings, group: Any = None) -> None:
        """`group` is the process group that publishes together; None for this process alone."""
        self._store, self._settings = store, settings
        self.together = group is not None
        """Whether this is one of the ranks of a process group, which may be the only one."""
        self._local: WholeModel | Any
        if group is None:
            self._local, self._group, crew = WholeModel(settings, store.url), Group(), Group()
        else:
            from .shards import Shards

            self._local = Shards(settings.wire_dtype, settings.buffers, settings.detector)
            # one for the trainer's thread, one for the background's
            self._group, crew = Ranks(group), Ranks(group)
        self._crew = crew
        self._meeting = Meeting(crew)
        # a rank that raised where others do not would leave them waiting
        self.background = Background(
            self._write,
            store.url,
            forgiving=self.together,
            leave=(lambda: self._meeting.leave(self._publishes)) if self.together else None,
        )
        self._skips = Skips(settings.skip_every)
        self._committer: Committer | None = None
        """Of rank 0, once the run is there."""
        self._session: _Session | None = None
        self._publishes = 0
        self._warned = settings.continues
        self.version: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether something was published or resumed."""
        return self._session is not None

    # ── what a trainer calls ─────────────────────────────────────────────────────────────────────────────────────────

    def publish(
        self,
        model: Any,
        step: int | None,
        metrics: Mapping[str, float],
        wait: bool,
        progress: Progress | None,
    ) -> PublishHandle:
        """Capture what changed and hand it to the background, or publish it here where it must be streamed."""
        began = time.perf_counter()
        self.background.check()
        self._publishes += 1
        source = self._open(model, progress)
        handle = PublishHandle()
        try:
            job = None if self._must_stream(source, wait) else self._capture(source)
        except LostTrack as lost:
            if not self._local.streams:
                raise DivergedRun(f"{lost}; open a new Publisher, which compares with the newest version") from None
            log.warning("%s; comparing with the newest version in %s", lost, self._store.url)
            self._drop()
            source, job = self._open(source, progress), None
        if job is None:
            self._stream(source, handle, step, metrics, began, progress)
            return handle
        job.handles.append(handle)
        job.step, job.metrics, job.last = step, metrics, self._publishes
        job.held += time.perf_counter() - began
        self.background.submit(job)
        return handle

    def resume(self, model: Any) -> int:
        """Take these weights for the run's newest version. Raises DivergedRun if they are not."""
        self._drop()
        self._open(model, must_match=True)
        if self.version is None:
            raise DivergedRun(f"{self._store.url} has no version to resume from")
        return self.version

    def close(self, timeout: float | None = None, patience: float = LAST_WAIT) -> None:
        """`patience`: seconds to wait for ranks that neither publish nor close."""
        try:
            self.background.close(timeout, self._meeting.overdue(patience))
        finally:
            if self._session is not None:
                self._session.captures.detector.close()

    # ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self) -> None:
        """Open the run if it is there. Otherwise the first publish creates it, which knows the schema."""
        if self._committer is None:
            with suppress(RunNotFound):
                self._commit_to(Run.open(self._store))

    def _commit_to(self, run: Run) -> Committer:
        self._committer = Committer(run)
        self.version = self._committer.newest.version if self._committer.newest else None
        return self._committer

    def _open(self, model: Any, progress: Progress | None = None, *, must_match: bool = False) -> Source:
        """The weights to compare. At the first call also: open or create the run, and find what to compare with."""
        if self._session is not None:
            source: Source = self._local.source(model)
            if self._session.captures.detector.suits(source):
                return source
            # the model has moved to another device, or is handed over in another form
            self._drop()
        group = self._group
        schema, source = self._local.open(model, group)
        newest = group.first(lambda: self._take_up(schema, must_match))
        run = group.each(lambda: self._committer.run if self._committer else Run.open(self._store))
        detector = group.each(lambda: self._local.detector(source))
        state, start_over, watched = None, False, source
        if newest is None:
            if progress is not None and detector.writes_parts:
                watched = Watched(source, lambda n: progress("detect", n, schema.nbytes))
        elif (digest := str(sum(group.together(lambda: detector.digest_of(source)), StateDigest()))) != newest.digest:
            if must_match:
                raise DivergedRun(group.first(lambda: self._told_apart(newest, digest)))
            self._warn_once(newest)
            state = self._rebuild(run, newest.version, progress)
            start_over = state is None
        captures = group.each(lambda: self._local.captures(watched, detector, state))
        settings = self._settings
        writer = VersionWriter(
            run, self._committer, self._crew, self._local.regions, settings.chooser, settings.policy, settings.files
        )
        writer.start_over = start_over
        self._session = _Session(captures, writer)
        # as if earlier publishes had failed: the first one carries them
        self.background.leftover = [*captures.pending]
        self.version, self._warned = newest.version if newest else None, True
        return source

    def _take_up(self, schema: Schema, must_match: bool) -> _Newest | None:
        """On rank 0: the run's newest version, made from the reference where there is none yet."""
        settings, url = self._settings, self._store.url
        self.look()
        committer = self._committer
        if must_match and (committer is None or committer.newest is None):
            raise DivergedRun(f"{url} has no version to resume from")
        if committer is None:
            committer = self._commit_to(Run.create(self._store, schema, settings.model_name))
        committer.check_run()
        committer.catch_up()
        committer.run.schema.require_equal(schema, ours=f"the run {url}", theirs="this model", advice=OTHER_MODEL)
        newest = committer.newest
        if newest is None and settings.reference is not None:
            link, weights = open_reference(committer.run, settings.reference, self._find_reference)
            newest = commit_reference(committer, link, str(full.digest_of(weights)), settings.files)
            say(newest, schema.elements)
        return _Newest(newest.version, newest.digest, newest.created) if newest else None

    def _told_apart(self, newest: _Newest, digest: str) -> str:
        """What a user is told whose weights are not the run's newest version."""
        versions = self._committer.versions if self._committer else {}
        same = [version for version, summary in versions.items() if summary.digest == digest]
        what = f"version {same[-1]}" if same else "no version of it"
        return f"{self._store.url} is at version {newest.version}; these weights are {what}"

    def _warn_once(self, newest: _Newest) -> None:
        if not self._warned and self._group.rank == 0:
            log.warning(
                "%s is at version %d, published %s, and these weights are other ones: continuing after it. "
                "If this is another training, stop it and give it an address of its own",
                self._store.url,
                newest.version,
                time.strftime("%Y-%m-%d %H:%M", time.localtime(newest.created)),
            )

    def _rebuild(self, run: Run, version: int, progress: Progress | None) -> State | None:
        """A version as it is in the bucket; None on all ranks if one of them cannot read it."""

        def work() -> State | None:
            told = (lambda n, total: progress("fetch", n, total)) if progress else None
            base = None
            if self._settings.base is not None:
                versions = self._committer.versions if self._committer else run.timeline(version)
                base = load_base(run, self._settings.base, versions)
            return rebuild(run, version, self._find_reference, told, base)

        state = self._group.each(work)
        return state if all(self._group.exchange(state is not None)) else None

    def _find_reference(self, source: str, most: int) -> Path:
        """Where this publisher was told the reference is, which may differ from what the run calls it."""
        return find_reference(self._settings.reference or source, most)

    def _drop(self) -> None:
        """Finish what is on its way, and let the next publish compare with what the bucket has."""
        if self._session is not None:
            self.background.flush()
        self._session, self.background.leftover = None, []

    def _opened(self) -> _Session:
        if self._session is None:
            raise RuntimeError("nothing was published yet")
        return self._session

    # ── capture ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _must_stream(self, source: Source, wait: bool) -> bool:
        """Whether to compare block by block while the caller waits: to save host memory, or where the version to
        compare with came from the bucket and is not yet where the model is."""
        return self._opened().captures.detector.writes_parts and (wait or self._is_elsewhere(source))

    def _is_elsewhere(self, source: Source) -> bool:
        return not (self._settings.detector or default_detector(source)).writes_parts

    def _capture(self, source: Source) -> Job | None:
        """What changed, merged into the job that waits, if one does. None if it is too dense to hold in memory."""
        captures = self._opened().captures
        budget = self._settings.max_pending or max(MIN_PENDING, captures.nbytes // 2)
        job = self.background.withdraw()
        try:
            onto = job.capture if job else None
            capture = captures.capture(source, budget if self._local.streams else sys.maxsize, onto)
        except BaseException as error:
            # what waits must not be lost with it
            self.background.submit(job)
            if isinstance(error, TooLarge):
                return None
            raise
        if job is None:
            return Job(capture)
        job.capture = capture
        return job

    def _stream(
        self,
        source: Source,
        handle: PublishHandle,
        step: int | None,
        metrics: Mapping[str, float],
        began: float,
        progress: Progress | None,
    ) -> None:
        """Compare, encode and take over one block after the other, in the caller's thread: one model copy, no more."""
        self.background.flush()
        if self.background.leftover:
            # the detector is ahead of the bucket by something that was never published
            self._drop()
            source = self._open(source, progress)
        session = self._opened()
        # until the commit the detector is ahead of the bucket; if anything fails, the bucket has what to compare with
        self._session = None
        self._skips.forget()
        nbytes = source.schema.nbytes
        detected = (lambda n: progress("detect", n, nbytes)) if progress else None
        terms = session.writer.begin(None, None)
        draft = Draft(Stream(session.captures, source, detected), step, metrics, progress=progress)
        published = session.writer.write(terms, draft)
        self.version = published.version
        # from here on a detector of the model's own kind can be used: the bucket has what the model has
        if not (session.captures.detector.writes_parts and self._is_elsewhere(source)):
            self._session = session
        published.timings["held"] = time.perf_counter() - began
        handle.succeed(published)
        tell(self._settings.on_version, published)

    # ── encode, put, commit: the background thread ───────────────────────────────────────────────────────────────────

    def _write(self, job: Job) -> Published:
        """Write one version, by all ranks. If it fails, the next one carries what this one should have."""
        session = self._opened()
        captures, writer = session.captures, session.writer
        changed = self._agree(job)
        terms = writer.begin(changed, self._skips.base)
        self._carry_leftover(job, terms.committed)
        capture, version = job.capture, terms.version
        draft = Draft(capture, job.step, job.metrics, {"held": job.held}, publishes=len(job.handles))
        since = self._skips.since(capture, version)
        if since is not None:
            draft.skip = Skip(since[0], lambda encoding: capture.encode(encoding, since[1]))
        published = writer.write(terms, draft)
        self.version = version
        self._skips.settle(captures, capture, version)
        tell(self._settings.on_version, published)
        return published

    def _agree(self, job: Job) -> int:
        """Make the job end with the same publish on all ranks. Returns how many weights changed on all of them.

        Ranks come here at their own time, while training goes on. What was merged cannot be split again, so ranks that
        are behind take in further publishes until they are equal to the one farthest ahead.
        """
        captures = self._opened().captures
        while True:
            heard = self._meeting.meet(job.last, job.capture.count)
            latest = max(rank.publishes for rank in heard)
            if all(rank.publishes == latest for rank in heard):
                return sum(rank.changed for rank in heard)
            while job.last < latest:
                more = self.background.next()
                if more is None:
                    # raises OutOfStep on all ranks: this one is closed
                    self._meeting.meet(job.last, closed=True)
                    raise RuntimeError("ranks that are closed and behind were not noticed")
                job.add(more, captures.fold(job.capture, more.capture))

    def _carry_leftover(self, job: Job, committed: int | None) -> None:
        """Let a job carry what earlier ones could not publish, except for one that was committed after all."""
        captures, leftover = self._opened().captures, self.background.leftover
        if committed is not None and leftover:
            self._skips.settle(captures, leftover.pop(0), committed)
        while leftover:
            job.capture = captures.fold(leftover[-1], job.capture)
            leftover.pop()


class WholeModel:
    """A model that this process holds all of. `shards.Shards` has the same methods for parts of a model."""

    streams = True
    """Whether a change that is too dense to hold is compared while it is encoded."""

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings, self._url = settings, url
        self._known: Known | None = None
        """About the model published last, which is usually the next one too."""
        self._schema: Schema | None = None
        self._bound = False
        self.regions: list[Region] = []
        """What this process writes."""

    def open(self, model: Any, group: Group) -> tuple[Schema, Source]:
        """Find out what this process holds. Returns the checkpoint's schema and the weights held here."""
        self._schema = None
        source = self.source(model)
        self._schema = source.schema
        self.regions = [whole(tensor) for tensor in source.schema.tensors]
        return source.schema, source

    def source(self, model: Any) -> Source:
        """The present weights. Raises SchemaMismatch if this is another model than the one opened."""
        if isinstance(model, full.Checkpoint):
            full.check_links(model.folder)
        if hasattr(model, "schema") and hasattr(model, "region"):
            source: Source = model
        else:
            view = ModelView(model, self._settings.wire_dtype, buffers=self._settings.buffers, known=self._known)
            self._known, source = view.known, view
        if self._schema is not None:
            self._schema.require_equal(
                source.schema, ours=f"the run {self._url}", theirs="this model", advice=OTHER_MODEL
            )
        return source

    def detector(self, source: Source) -> Detector:
        """A detector that is bound to this model."""
        given = self._settings.detector
        if given is None:
            detector = default_detector(source)
            detector.bind(source)
            return detector
        if not self._bound:
            given.bind(source)
            self._bound = True
        if not given.suits(source):
            raise SchemaMismatch(
                f"{type(given).__name__} was made for other tensors than those of this model; "
                "pass the same model to every publish, or a new detector to a new Publisher"
            )
        return given

    def captures(self, source: Source, detector: Detector, state: State | None) -> Captures:
        """What later weights are compared with: a version from the bucket, or these weights where that is None."""
        if state is None:
            return Captures(detector, detector.load(source))
        # in host memory whatever the model is on: the first publish is streamed against it
        return Captures(HostDetector.of(state), state.digest)
