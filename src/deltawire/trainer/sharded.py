"""Publishing by all ranks of a sharded trainer: each captures, codes and uploads its own part, rank 0 commits.

    publish            on every rank: capture the own part; no word to the others, so nobody waits for anybody
    agree              background: whoever captured fewer publishes takes in what comes next, until all have the same;
                       a rank that is closed says so, and ranks that have more give up
    code, put          each its own part, under a key with its number
    commit             rank 0, once all have put theirs
    settle or keep     all: a version that failed on any rank failed on all, and goes out with the next

What is agreed on is agreed on in this order on every rank, by messages among the background threads.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bucket.replay import find_reference
from ..bucket.run import Run
from ..core import full, keys
from ..core.digest import StateDigest
from ..core.errors import DivergedRun, RunNotFound, SchemaMismatch
from ..core.manifest import Blob, Link, Manifest
from ..core.parallel import ordered_map
from ..core.schema import Schema
from ..core.sparse import DataFile, DeltaWriter, EncodedBlock, encode_block
from ..models import ModelView
from ..store import Store
from .auto import Choice, EncodingChooser
from .background import Background, Job, PublishHandle
from .captures import Capture, Mirror
from .commit import Committer, Companions, put_object
from .detectors import Detector, Found, LostTrack
from .pace import LAST_WAIT, Pace
from .policy import AnchorPolicy
from .resume import OTHER_MODEL, commit_reference, open_reference, rebuild
from .shards import Reader, ShardDetector, Sides, share_out
from .skips import Skips
from .team import Team
from .writer import Published, Skip, anchor_metadata, delta_file, say, tell

log = logging.getLogger("deltawire")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked of the publisher."""

    chooser: EncodingChooser
    policy: AnchorPolicy
    wire_dtype: str | None
    buffers: bool
    skip_every: int | None
    reference: str | None
    files: Companions
    model_name: str
    detector: Detector | None
    # for the tensors of a rank
    on_version: Callable[[Published], object] | None = None


@dataclass(frozen=True, slots=True)
class _Newest:
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class _Terms:
    """What rank 0 knows about the version to be."""

    version: int
    writer: str
    choice: Choice
    committed: int | None
    # the version of an earlier job, which is in the bucket after all
    bases: dict[int, str]
    # digests of the versions that deltas may start from
    digest: StateDigest
    # of the version to be


@dataclass(frozen=True, slots=True)
class _Coded:
    size: int
    changed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Wanted:
    delta: bool
    anchor: bool


@dataclass(frozen=True, slots=True)
class _Put:
    """What one rank has put into the bucket."""

    delta: Blob | None
    anchor: Blob | None
    skip: Blob | None
    skipped: int
    # elements that its skip delta changes
    timings: dict[str, float]


class ShardedPublisher:
    """The publisher of one rank. All ranks call the same methods in the same order."""

    def __init__(self, store: Store, group: Any, settings: Settings) -> None:
        self._store, self._settings = store, settings
        # one for the trainer's thread, one for the background's
        self._team, self._crew = Team(group), Team(group)
        self._pace = Pace(self._crew)
        self._shard: keys.Shard = (self._team.rank, self._team.size)
        self._reader = Reader(settings.wire_dtype, settings.buffers)
        self._background = Background(
            self._publish, store.url, forgiving=True, farewell=lambda: self._pace.leave(self._publishes)
        )
        self._skips = Skips(settings.skip_every)
        self._mirror: Mirror | None = None
        self._run: Run | None = None
        self._committer: Committer | None = None
        # on rank 0
        self._start_over = False
        self._publishes = 0
        self.version: int | None = None

    # ── what a trainer calls ─────────────────────────────────────────────────────────────────────────────────────────

    def publish(self, model: Any, step: int | None, metrics: Mapping[str, float], wait: bool) -> PublishHandle:
        began = time.perf_counter()
        self._background.check()
        self._publishes += 1
        view = self._view(model) if self._mirror is not None else self._open(model)
        assert self._mirror is not None
        job = self._background.withdraw()
        try:
            # however dense: the ranks could not turn to another way each on its own
            capture = self._mirror.capture(view, sys.maxsize, job.capture if job else None)
        except BaseException as error:
            self._background.submit(job)
            if isinstance(error, LostTrack):
                raise DivergedRun(f"{error}; open a new Publisher, which compares with the newest version") from None
            raise
        job = job or Job(capture)
        job.capture, job.last = capture, self._publishes
        handle = PublishHandle()
        job.handles.append(handle)
        job.step, job.metrics = step, metrics
        job.held += time.perf_counter() - began
        self._background.submit(job)
        if wait:
            handle.result()
        return handle

    def resume(self, model: Any) -> int:
        self._open(model, must_match=True)
        assert self.version is not None
        return self.version

    def flush(self, timeout: float | None = None) -> None:
        self._background.flush(timeout)

    def close(self, timeout: float | None = None, patience: float = LAST_WAIT) -> None:
        try:
            self._background.close(timeout, self._pace.overdue(patience))
        finally:
            if self._mirror is not None:
                self._mirror.detector.close()

    def refuse_own_thread(self) -> None:
        self._background.refuse_own_thread()

    @property
    def depth(self) -> int:
        return self._background.depth

    # ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _view(self, model: Any) -> ModelView:
        view = self._reader.view(model, self._parts)
        assert self._mirror is not None
        if view.schema != self._local or not self._mirror.detector.suits(view):
            raise SchemaMismatch("this model is cut in another way than the one published before, or lies elsewhere")
        return view

    def _open(self, model: Any, *, must_match: bool = False) -> ModelView:
        """Find out who writes what, and take up the run."""
        team = self._team
        schema = team.together(lambda: self._reader.schema(model))[0]
        held = team.together(lambda: self._hold(model, schema))
        mine = share_out(held, schema)[team.rank]
        self._parts = [part for part in self._parts if part.sides in mine]
        newest = team.first(lambda: self._take_up(schema))
        team.together(lambda: self._take_part(schema))
        bound: list[tuple[ModelView, ShardDetector]] = []
        digests = team.together(lambda: self._bind(model, bound))
        view, detector = bound[0]
        found = str(sum(digests, StateDigest()))
        if must_match and (newest is None or newest.digest != found):
            what = f"at version {newest.version}; these weights are another" if newest else "empty"
            raise DivergedRun(f"{self._store.url} is {what}")
        now = team.together(lambda: detector.load(view))[team.rank]
        self.version = newest.version if newest else None
        self._mirror = Mirror(detector, now)
        if newest is not None and newest.digest != found:
            ahead: list[Found] = []
            if all(team.together(lambda: self._compare(newest.version, detector, view, ahead))):
                # as if an earlier publish had failed: goes out with the first
                self._background.leftover.append(self._mirror.precede(ahead[0]))
            else:
                self._start_over = True
        return view

    def _hold(self, model: Any, schema: Schema) -> list[Sides]:
        ours = self._reader.schema(model)
        if self._team.rank:
            # a rank with an empty shard cannot see what is tied; rank 0 always has a piece of everything
            untied = [tensor for tensor in ours.tensors if tensor.name not in schema.ties]
            Schema.build(untied, schema.ties).require_equal(schema, ours=f"rank {self._team.rank}", theirs="rank 0")
        self._parts = self._reader.parts(model, schema)
        return [part.sides for part in self._parts]

    def _bind(self, model: Any, bound: list[tuple[ModelView, ShardDetector]]) -> StateDigest:
        """A detector for what this rank writes; returns the present weights' share of the digest."""
        view = self._reader.view(model, self._parts)
        self._local = view.schema
        detector = ShardDetector(self._parts, view, self._settings.detector)
        bound.append((view, detector))
        return detector.digest_of(view)

    def _take_up(self, schema: Schema) -> _Newest | None:
        """On rank 0: the run's newest version, made from the reference where there is none yet."""
        settings = self._settings
        try:
            run = Run.open(self._store)
        except RunNotFound:
            run = Run.create(self._store, schema, settings.model_name)
        run.schema.require_equal(schema, ours=f"the run {self._store.url}", theirs="this model", advice=OTHER_MODEL)
        self._committer = Committer(run)
        newest = self._committer.newest
        if newest is None and settings.reference is not None:
            link, weights = open_reference(run, settings.reference, self._find_reference)
            digest = str(full.digest_of(weights))
            newest = commit_reference(self._committer, link, digest, settings.files)
            say(newest, schema.elements)
        return _Newest(newest.version, newest.digest) if newest else None

    def _take_part(self, schema: Schema) -> None:
        self._run = self._committer.run if self._committer else Run.open(self._store)
        self._run.schema.require_equal(
            schema, ours=f"the run {self._store.url}", theirs="this model", advice=OTHER_MODEL
        )

    def _compare(self, version: int, detector: ShardDetector, view: ModelView, found: list[Found]) -> bool:
        """What leads from a version in the bucket to this rank's weights; False if nobody can read it any more."""
        assert self._run is not None
        # for a moment the whole model in memory: deltas are cut by tensors, not by ranks
        state = rebuild(self._run, version, self._find_reference)
        if state is not None:
            found.append(detector.since(state, view))
        return state is not None

    def _find_reference(self, source: str, most: int) -> Path:
        return find_reference(self._settings.reference or source, most)

    # ── the background ───────────────────────────────────────────────────────────────────────────────────────────────

    def _publish(self, job: Job) -> Published:
        """One version, by all ranks. An error on one of them is an error on all, and nothing is lost."""
        assert self._mirror is not None
        assert self._run is not None
        crew, mirror = self._crew, self._mirror
        count, digest = self._agree(job)
        terms = crew.first(lambda: self._terms(count, digest))
        self._background.take_over(job, terms.committed, mirror, self._skips)
        capture, version, choice = job.capture, terms.version, terms.choice
        since = self._skips.since(capture)
        skip = self._skips.draft(mirror, since, capture, version, choice.encoding)
        delta = DeltaWriter(choice.encoding)
        try:
            files: list[DataFile] = []
            coded = crew.together(lambda: self._code(delta, terms, capture, files))
            wanted = crew.first(lambda: self._wanted(version, sum(part.size for part in coded)))
            put = crew.together(lambda: self._put(job, terms, wanted, files[0], skip))
            if put[0].delta is not None and crew.rank == 0:
                own = sum(part.region.units for part in self._parts)
                self._settings.chooser.learn(choice, files[0], own, coded[0].seconds, put[0].timings["delta"])
        finally:
            delta.close()
        manifest = crew.first(lambda: self._commit(job, terms, coded, put, skip))
        self._start_over, self.version = False, version
        self._skips.settle(mirror, capture, version, since)
        published = Published.of(manifest, self._run.schema.elements, len(job.handles))
        tell(self._settings.on_version, published)
        return published

    def _agree(self, job: Job) -> tuple[int, StateDigest]:
        """Make the job end with the same publish on all ranks; returns how many weights changed in all, and the digest.

        Ranks come here at their own time, and the trainer goes on meanwhile. Nobody can give back what was merged, so
        those behind catch up with the one farthest ahead.
        """
        assert self._mirror is not None
        while True:
            heard = self._pace.meet(job.last, job.capture.count, self._mirror.digest_at(job.capture))
            latest = max(rank.publishes for rank in heard)
            if all(rank.publishes == latest for rank in heard):
                return sum(rank.changed for rank in heard), sum((rank.digest for rank in heard), StateDigest())
            while job.last < latest:
                more = self._background.next()
                if more is None:
                    # raises, here and there: those ahead cannot be caught up with any more
                    self._pace.meet(job.last, closed=True)
                assert more is not None
                job.capture = self._mirror.fold(job.capture, more.capture)
                job.handles += more.handles
                job.step, job.metrics, job.held, job.last = more.step, more.metrics, job.held + more.held, more.last

    def _terms(self, count: int, digest: StateDigest) -> _Terms:
        committer = self._committer
        assert committer is not None
        caught_up = committer.catch_up()
        choice = self._settings.chooser.choose(committer.run.schema.elements, count)
        committed = caught_up.version if caught_up else None
        before = (committer.next_version - 1, self._skips.base)
        bases = {v: committer.versions[v].digest for v in before if v in committer.versions}
        return _Terms(committer.next_version, committer.writer, choice, committed, bases, digest)

    def _code(self, delta: DeltaWriter, terms: _Terms, capture: Capture, files: list[DataFile]) -> _Coded:
        assert self._mirror is not None
        assert self._run is not None
        clock, before = time.perf_counter(), self._mirror.before(capture)
        changed = capture.blocks if terms.version else ()
        blocks = ordered_map(lambda changes: encode_block(changes, terms.choice.encoding, before), changed)
        files.append(self._delta_file(delta, blocks, terms.version - 1, terms))
        return _Coded(files[0].size, files[0].changed, time.perf_counter() - clock)

    def _delta_file(self, writer: DeltaWriter, blocks: Iterable[EncodedBlock], base: int, terms: _Terms) -> DataFile:
        assert self._run is not None
        before = terms.bases.get(base, "")
        return delta_file(self._run, writer, blocks, base, terms.version, before, lambda: terms.digest)

    def _wanted(self, version: int, size: int) -> _Wanted:
        assert self._committer is not None
        nbytes = self._committer.run.schema.nbytes
        policy = self._settings.policy
        anchor = policy.wants_anchor(version, size, nbytes, self._committer.versions)
        delta = bool(version) and policy.wants_delta(size, nbytes, anchor) and not self._start_over
        return _Wanted(delta, anchor or not delta)

    def _put(self, job: Job, terms: _Terms, wanted: _Wanted, file: DataFile, skip: Skip | None) -> _Put:
        assert self._mirror is not None
        assert self._run is not None
        detector, version, clock = self._mirror.detector, terms.version, time.perf_counter()
        delta = anchor = skipped = None
        changed = 0
        # a link names at least one object, so rank 0 puts its own even where it holds nothing
        if wanted.delta and (file.changed or self._shard[0] == 0):
            key = keys.delta(version - 1, version, terms.writer, self._shard)
            delta = put_object(self._store, key, file)
        uploaded = time.perf_counter() - clock
        if wanted.anchor and (detector.rectangles or self._shard[0] == 0):  # type: ignore[attr-defined]
            metadata = anchor_metadata(self._run, version)
            whole = full.anchor_of(detector.rectangles, self._mirror.at(job.capture), metadata)  # type: ignore[attr-defined]
            anchor = put_object(self._store, keys.anchor(version, terms.writer, self._shard), whole)
        if skip is not None:
            writer = DeltaWriter(terms.choice.encoding)
            try:
                spanning = self._delta_file(writer, skip.blocks(), skip.base, terms)
                key = keys.delta(skip.base, version, terms.writer, self._shard)
                skipped, changed = put_object(self._store, key, spanning), spanning.changed
            finally:
                writer.close()
        timings = {"held": job.held, "delta": uploaded, "put": time.perf_counter() - clock}
        return _Put(delta, anchor, skipped, changed, timings)

    def _commit(self, job: Job, terms: _Terms, coded: list[_Coded], put: list[_Put], skip: Skip | None) -> Manifest:
        committer, choice = self._committer, terms.choice
        assert committer is not None
        elements = committer.run.schema.elements
        changed = sum(part.changed for part in coded)
        links = []
        deltas = tuple(part.delta for part in put if part.delta)
        if deltas:
            links.append(Link("delta", terms.version - 1, deltas, choice.encoding, choice.why, changed))
        anchors = tuple(part.anchor for part in put if part.anchor)
        if anchors:
            links.append(Link("anchor", None, anchors))
        if skip is not None:
            spanning = tuple(part.skip for part in put if part.skip)
            skipped = sum(part.skipped for part in put)
            links.append(Link("delta", skip.base, spanning, choice.encoding, choice.why, skipped))
        manifest = committer.commit(
            tuple(links),
            digest=str(terms.digest),
            changed=changed if terms.version else elements,
            step=job.step,
            metrics=job.metrics,
            # of the slowest rank
            timings={
                "held": max(part.timings["held"] for part in put),
                "encode": max(part.seconds for part in coded),
                "put": max(part.timings["put"] for part in put),
            },
            files=committer.put_files(self._settings.files),
        )
        say(manifest, elements, len(job.handles))
        return manifest
