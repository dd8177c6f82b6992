"""Turns publishes into versions: capture → encode → put → commit.

    publish            training thread: capture what changed, or where that is too much to hold, stream it
    agree              background thread: ranks with fewer publishes merge further ones, until all are equal
    encode, put        each rank its own part, block by block (writer.py)
    commit             rank 0, once all ranks have put theirs
    settle or keep     a version that failed on one rank failed on all; the next one carries it

`publish` sends nothing to other ranks, so none waits for another. The background threads exchange messages, in the same
order on every rank. A process that publishes alone is a group of one.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ..bucket.references import OTHER_MODEL
from ..bucket.run import Run
from ..core.digest import StateDigest
from ..core.errors import (
    DigestMismatch,
    DivergedRun,
    Misconfigured,
    MissingBase,
    OutOfStep,
    PublishFailed,
    RunNotFound,
    SchemaError,
    SchemaMismatch,
    VersionNotFound,
)
from ..core.full import ReadBy, Source
from ..core.manifest import Base, Manifest
from ..core.schema import Schema
from ..core.state import State
from ..models import Model
from ..store import Store
from .adapters import Adapter
from .background import LAST_IS_MISSING, Background, CapturedVersion
from .captures import Captures, Stream, counted
from .claim import Claim
from .collective import LAST_WAIT, RESTART, Group, Lockstep, Ranks
from .commit import Committer, Signing
from .companions import Companions
from .detectors import Detector, SnapshotLost, TooLarge
from .local import LocalModel
from .pairs import NOTHING, OneByOne, Pairs, is_pairs
from .pending import PendingVersion, Progress, Published
from .policy import AnchorPolicy, EncodingChooser
from .rebuild import Rebuild
from .shard import HeldShards
from .writer import VersionWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("deltawire")


def most_pending(nbytes: int) -> int:
    """Bytes that a capture may hold while it waits, of a model of so many: a denser change is streamed."""
    return max(64 << 20, nbytes // 2)


@dataclass(frozen=True, slots=True)
class _Session:
    """The captures and the writer of an open run. Made by the first publish; dropped when a stream fails."""

    captures: Captures
    writer: VersionWriter


class Pipeline:
    """Writes the versions of one publisher. With several ranks, all call the same methods in the same order."""

    def __init__(
        self,
        store: Store,
        local: LocalModel,
        rebuild: Rebuild,
        files: Companions,
        claim: Claim,
        signing: Signing | None,
        chooser: EncodingChooser,
        policy: AnchorPolicy,
        on_version: Callable[[Published], object] | None,
        *,
        warn: bool,
        group: ProcessGroup | None = None,
        one_by_one: bool = False,
    ) -> None:
        """`group` is the process group that publishes together; None for this process alone. `warn`: say so where the
        first weights are not the run's newest version. `one_by_one`: what a group publishes are pairs that all of its
        ranks get, and that rank 0 writes."""
        self._store, self._rebuild, self._files = store, rebuild, files
        self._claim, self._signing, self._on_version = claim, signing, on_version
        self._chooser, self._policy = chooser, policy
        self._trust = signing.trust if signing else None
        self.together = group is not None
        """Whether this is one of the ranks of a process group, which may be the only one. However dense a change is,
        ranks capture it: one alone cannot decide to stream."""
        # one group for the training thread, one for the background thread
        if group is None:
            self._local, self._group, self._writing_group = local, Group(), Group()
        else:
            ranks = Ranks(group)
            self._group, self._writing_group = ranks, Ranks(group, ranks)
            self._local = local if one_by_one else local.sharded()
        self.one_by_one = one_by_one
        self._lockstep = Lockstep(self._writing_group)
        self._publishes = 0
        leave = (lambda: self._lockstep.leave(self._publishes)) if self.together else None
        self.background = Background(self._write, store.url, leave, self._writing_group.part)
        self._committer: Committer | None = None
        """Of rank 0, once the run is there."""
        self._session: _Session | None = None
        self._only_read = False
        """Whether the session was opened by `weights`."""
        self._warn = warn
        self.version: int | None = None
        """The newest committed version."""
        self._distrusted = False
        """Whether the next version is an anchor, whatever the bucket has: what was captured contradicted it."""

    @property
    def is_open(self) -> bool:
        """Whether something was published or resumed."""
        return self._session is not None and not self._only_read

    @property
    def newest(self) -> Manifest | None:
        """Of rank 0: the newest committed version."""
        return self._committer.newest if self._committer else None

    def publish(self, model: Model | Pairs, pending: PendingVersion[Any], wait: bool) -> None:
        """Capture what changed and submit it to the background, or publish it here where it must be streamed."""
        # first: a publish that is interrupted counts on the other ranks
        self._publishes += 1
        began = time.perf_counter()
        self.background.check()
        pending.last_publish = self._publishes
        source = self._open(self._taken(model, pending.step), pending.progress, step=pending.step)
        try:
            # streamed to save host memory, or where the version to compare with came from the bucket and is not yet
            # where the model is
            in_host_memory = not self.together and self._opened().captures.detector.in_host_memory
            streams = in_host_memory and (wait or self._local.is_elsewhere(source))
            if not streams and self._capture(source, pending, began):
                return
        except SnapshotLost as lost:
            cure = "the next version has full weights" if self.together else "comparing with the newest version"
            log.warning("%s: %s; %s", self._store.url, lost, cure)
            source = self._reopen(source, pending.progress)
            if self.together and self._capture(source, pending, began):
                return
        self._stream(source, pending, began)

    def resume(self, model: Model | Pairs) -> int:
        """Take these weights for the run's newest version. Raises DivergedRun if they are not."""
        self._drop()
        self._open(self._taken(model, None), must_match=True)
        if self.version is None:
            raise DivergedRun(f"{self._store.url} has no version to resume from")
        return self.version

    def weights(self, *, shared: bool) -> Source:
        """The weights captured last, or the run's newest version. `shared`: several ranks will publish."""
        if self.together or shared or self._local.view is not None:
            raise Misconfigured(
                f"{self._store.url}: weights that several ranks hold, or a view, cannot be read from a publisher"
            )
        self.background.check()
        if self._session is None or not self._session.captures.known:
            self._drop()
            self._open_newest()
        session = self._opened()
        return ReadBy(session.writer.run.schema, session.captures.detector.region)

    def close(self, timeout: float | None = None, patience: float = LAST_WAIT) -> None:
        """`patience`: seconds to wait for ranks that neither publish nor close."""
        session = self._session
        try:
            closed = self.background.close(timeout, self._lockstep.overdue(patience))
            if closed and session is not None and session.captures.pending:
                raise PublishFailed(f"publishing to {self._store.url} failed before. {LAST_IS_MISSING}")
        finally:
            # else uploads go on, and another `close` waits for them
            if self.background.closed:
                try:
                    if session is not None:
                        session.captures.detector.close()
                finally:
                    self._claim.release()
        # a closed publisher holds no copy of the model, perhaps on a GPU
        self._session = None

    def _taken(self, model: Model | Pairs, step: int | None) -> Model:
        """Weights that come one by one as a source, once all are there; other models as they are.

        Ranks agree on names, dtypes and shapes before anything counts as captured. Bits are not compared: those of rank
        0 are published. A rank to which nothing comes only takes part in what the iterator does.
        """
        if self.together and is_pairs(model) != self.one_by_one:
            raise SchemaMismatch(
                "where several ranks publish together, one publisher takes either a model or weights that come one by "
                "one: make a second one for the other kind, at another address"
            )
        if not is_pairs(model):
            return cast(Model, model)
        group = self._group
        with group.all_or_none():
            self._require_same_publish(model, step)
            group.on_rank_0(self.open_run)
            schema = self._committer.run.schema if self._committer else None
            captures = self._session.captures if self._session else None
            held = captures.detector if captures and captures.known else None
            source = self._local.one_by_one(schema, held, keeps=group.rank == 0)

            def take() -> str:
                source.read(model, to_the_end=group.size > 1)
                # a generator may have forked this process, and the child goes on here
                self.background.refuse_own_thread()
                return source.came.hash

            if len({*group.together(take)} - {NOTHING.hash}) > 1:
                came = [(rank, schema) for rank, schema in enumerate(group.exchange(source.came)) if schema.tensors]
                try:
                    for rank, other in came:
                        came[0][1].require_equal(other, ours="rank 0", theirs=f"rank {rank}")
                except SchemaMismatch as error:
                    raise group.agreed(error) from None
        return source

    # ── opening ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def open_run(self) -> None:
        """Open the run if it is there. Otherwise the first publish creates it, which knows the schema."""
        if self._committer is None:
            with suppress(RunNotFound):
                self._commit_to(Run.open(self._store, trust=self._trust))

    def _commit_to(self, run: Run) -> Committer:
        self._committer = Committer.open(run, self._files, self._claim, self._signing)
        self.version = self._committer.newest.version if self._committer.newest else None
        return self._committer

    def _open(
        self, model: Model, progress: Progress | None = None, *, step: int | None = None, must_match: bool = False
    ) -> Source:
        """The weights to compare. At the first call also: open or create the run, and find what to compare with."""
        with self._group.all_or_none():
            if self._session is None or self._local.view is not None:
                self._require_same_publish(model, step)
            return self._open_by_all(model, progress, must_match)

    def _require_same_publish(self, model: Model | Pairs, step: int | None) -> None:
        """Before ranks read each other's weights: raise OutOfStep on all of them if these are of different steps, or
        handed in as different things."""
        shards = isinstance(model, HeldShards)
        kind = "shards" if shards else "weights one by one" if is_pairs(model) else "a model"
        heard = self._group.exchange((self._publishes, step, kind))
        if len({*heard}) > 1:
            calls = ", ".join(
                f"rank {n}: publish {count} of {what}, step={at}" for n, (count, at, what) in enumerate(heard)
            )
            error = OutOfStep(f"ranks publish different things together ({calls}): was one interrupted? {RESTART}")
            self.background.give_up(error)
            raise self._group.agreed(error)

    def _open_by_all(self, model: Model, progress: Progress | None, must_match: bool) -> Source:
        if self._session is not None:
            self._only_read = False
            source = self._local.source(model)
            if self._session.captures.detector.suits(source):
                return source
            # the model has moved to another device, or is passed in another form
            if self.together:
                raise SchemaMismatch("this model lies elsewhere than the one published before")
            self._drop()
        group = self._group
        schema, source = self._local.open(model, group)
        base = self._base(model)
        nameless = isinstance(model, (Mapping, OneByOne))
        is_adapter = self._files.base_name is not None or (None if nameless else False)
        newest = group.on_rank_0(lambda: self._newest(schema, base, must_match, is_adapter))
        run = group.each(lambda: self._committer.run if self._committer else Run.open(self._store, trust=self._trust))
        detector = group.each(lambda: self._local.detector(source))
        state, alone, read = None, False, source
        if newest is None:
            # shards are read twice, so their bytes would count twice
            in_parts = detector.in_host_memory and not isinstance(source, OneByOne)
            if progress is not None and not self.together and in_parts:
                read = counted(source, lambda n: progress("detect", n, schema.nbytes))
        elif self._differs(newest, source, detector, must_match):

            def version() -> State | None:
                if self._distrusted:
                    return None
                # a rank that holds nothing has nothing to compare
                held = source.schema.tensors or not self.together
                return self._rebuild.version(run, newest.version, progress) if held else State(source.schema)

            state = group.each(version)
            # on all ranks if one of them cannot read it
            alone = not all(group.exchange(state is not None))
            state = None if alone else state
        if state is not None and not self.together:
            # in host memory wherever the model is: the first publish is streamed against it
            captures = Captures(detector.holding(state), state.digest)
        else:
            captures = group.each(lambda: self._captures(read, detector, state, alone))
        self._begin(captures, run, newest)
        return source

    def _begin(self, captures: Captures, run: Run, newest: Manifest | None) -> None:
        """Open the session: these captures follow the run's newest version."""
        writer = VersionWriter(
            run, self._committer, self._writing_group, self._local.regions, self._chooser, self._policy
        )
        self.version, self._warn = newest.version if newest else None, False
        self._session, self._only_read, self._distrusted = _Session(captures, writer), False, False

    def _open_newest(self) -> None:
        """Compare with the run's newest version, without a model that has these weights."""
        self.open_run()
        committer, url = self._committer, self._store.url
        if committer is None or committer.newest is None:
            raise VersionNotFound(f"{url} has no version yet")
        self._claim.check()
        committer.catch_up()
        state = self._rebuild.version(committer.run, committer.newest.version, None)
        if state is None:
            raise MissingBase(f"version {committer.newest.version} of {url} cannot be read: publish full weights")
        self._local.open(state, self._group)
        held = self._local.detector(state).holding(state)
        self._begin(Captures(held, state.digest), committer.run, committer.newest)
        self._only_read = True

    def _reopen(self, source: Source, progress: Progress | None) -> Source:
        """Compare with the newest version in the bucket again, where the detector's own weights are unknown."""
        if not self.together:
            self._drop()
            return self._open(source, progress)
        # by this rank alone and without waiting: others may be waiting for its publish. They hear of it with the next
        # version, which has full weights; what is in flight fails on all ranks
        session = self._opened()
        session.captures.abandon()
        captures = self._captures(source, session.captures.detector, None, alone=True)
        self._session, self._distrusted = _Session(captures, session.writer), False
        return source

    def _captures(self, source: Source, detector: Detector, state: State | None, alone: bool) -> Captures:
        """Let the detector hold these weights. `state` is a version that they follow; `alone`: none can be read."""
        plan, digest = self._local.plan(detector), detector.load(source)
        if plan is not None:
            digest = self._local.digest(source, detector)
        captures = Captures(detector, digest, plan, alone=alone)
        if state is not None:
            captures.follow(state)
        return captures

    def _base(self, model: Model) -> Base | None:
        """The base model of an adapter, as run.json names it; None for all other weights.

        One that is not in memory is read only for a new run.
        """
        name = self._files.base_name
        if name is None or (self._committer and not isinstance(model, Adapter)):
            return None
        try:
            return Base(name, self._local.base_digests(model, name, self._group))
        except SchemaError as error:
            if self._group.rank == 0:
                log.warning(
                    "servers cannot check that their base model is the one that the adapters in %s need: the digest of "
                    "%s is unknown, %s",
                    self._store.url,
                    repr(name) if name else "the base model",
                    error,
                )
            return Base(name)

    def _newest(self, schema: Schema, base: Base | None, must_match: bool, is_adapter: bool | None) -> Manifest | None:
        """On rank 0: the run's newest version, made from the reference where there is none yet. `is_adapter` is None
        where that is unknown."""
        url = self._store.url
        self.open_run()
        committer = self._committer
        if must_match and (committer is None or committer.newest is None):
            raise DivergedRun(f"{url} has no version to resume from")
        if committer is None:
            committer = self._commit_to(Run.create(self._store, schema, self._files.model_name, self._trust, base))
        self._claim.check()
        committer.catch_up()
        if committer.run.schema != schema:
            committer.run.check_kind(is_adapter)
        committer.run.schema.require_equal(schema, ours=f"the run {url}", theirs="this model", advice=OTHER_MODEL)
        before = committer.run.info.base
        # where a digest is unknown, nothing is checked
        if before and base and before.digests and base.digests and not before.same(base):
            raise SchemaMismatch(
                f"the run {url} has adapters of {before}, and this one is trained on {base}{OTHER_MODEL}"
            )
        if committer.newest is None and (begin := self._rebuild.begin(committer.run)) is not None:
            # a checkpoint that everybody can get: its name and digest are published, its weights are not
            link, digest = begin
            committer.commit(PendingVersion(None, {}, None, None), [link], digest, 0, {})
        return committer.newest

    def _differs(self, newest: Manifest, source: Source, detector: Detector, must_match: bool) -> bool:
        """Whether these weights are not the run's newest version. That is logged, or raises DivergedRun."""
        group, url = self._group, self._store.url
        digest = str(sum(group.together(lambda: self._local.digest(source, detector)), StateDigest()))

        def message() -> str:
            versions = self._committer.versions if self._committer else {}
            same = [version for version, summary in versions.items() if summary.digest == digest]
            what = f"version {same[-1]}" if same else "no version of it"
            next_step = "load that version, or call publish, which continues after it"
            return f"{url} is at version {newest.version}; these weights are {what}: {next_step}"

        if digest == newest.digest:
            return False
        if must_match:
            raise group.agreed(DivergedRun(group.on_rank_0(message)))
        if self._warn and group.rank == 0 and not self._claim.follows_own:
            log.warning(
                "%s is at version %d, published %s, and these weights are other ones: continuing after it. "
                "If this is another training, stop it and give it an address of its own",
                url,
                newest.version,
                time.strftime("%Y-%m-%d %H:%M", time.localtime(newest.created)),
            )
        return True

    def _drop(self) -> None:
        """Finish what is in flight, and let the next publish compare with what the bucket has."""
        if self._session is not None:
            with suppress(PublishFailed):  # that comparison finds what failed, too
                self.background.flush()
        self._session = None

    def _opened(self) -> _Session:
        if self._session is None:
            raise RuntimeError("nothing was published yet")
        return self._session

    # ── capture ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _capture(self, source: Source, pending: CapturedVersion, began: float) -> bool:
        """Submit what changed, merged with the version that waits. False, and nothing done, if it is too dense."""
        captures = self._opened().captures
        budget = sys.maxsize if self.together else most_pending(source.schema.nbytes)
        waiting = self.background.waiting
        if waiting is not None:
            # a trainer faster than merging waits here, so that captures do not pile up
            waiting.changes.result()
        try:
            pending.changes = captures.capture(source, budget)
        except TooLarge:
            return False
        # nothing is reported from the background, where the caller does not wait
        pending.timings["held"], pending.progress = time.perf_counter() - began, None
        self.background.submit(pending, captures.fold)
        return True

    def _stream(self, source: Source, pending: PendingVersion[Stream], began: float) -> None:
        """Compare and encode block by block in the caller's thread, with one copy of the model and no more."""
        progress = pending.progress
        self.background.flush()
        captures = self._opened().captures
        if captures.pending or captures.lost:
            # the detector is ahead of the bucket by something that was never published
            self._drop()
            source = self._open(source, progress)
        session = self._opened()
        # until the commit the detector is ahead of the bucket; if anything fails, the bucket has what to compare with
        self._session = None
        nbytes = source.schema.nbytes
        detected = (lambda n: progress("detect", n, nbytes)) if progress else None
        pending.changes = Stream(session.captures, source, detected)
        terms = session.writer.begin(None, session.captures.alone)
        with self._two_answers(session.captures):
            published = session.writer.write(terms, pending)
        self.version, session.captures.alone = published.version, False
        # from here on a detector of the model's own kind can be used: the bucket has what the model has
        if not (session.captures.detector.in_host_memory and self._local.is_elsewhere(source)):
            self._session = session
        published.timings["held"] = time.perf_counter() - began
        pending.succeed(published)
        self._tell(published)

    # ── encode, put, commit: the background thread ───────────────────────────────────────────────────────────────────

    def _write(self, pending: CapturedVersion) -> Published:
        """Write one version, by all ranks. If it fails, the next one carries what this one should have."""
        writer = self._opened().writer
        changed, alone = self._agree(pending)
        capture = pending.changes
        captures = capture.owner
        terms = writer.begin(changed, alone)
        with self._two_answers(captures):
            # on all ranks or on none: a rank may find that its captures were given up meanwhile
            self._writing_group.each(lambda: captures.carry_older(capture, terms.committed))
            published = writer.write(terms, pending)
        self.version = terms.version
        captures.settle(capture)
        self._tell(published)
        return published

    @contextmanager
    def _two_answers(self, captures: Captures) -> Iterator[None]:
        """Drop what was captured where the chain and the weights give a version two digests."""
        try:
            yield
        except DigestMismatch:
            self._distrusted = True
            captures.abandon()
            raise

    def _agree(self, pending: CapturedVersion) -> tuple[int, bool]:
        """Merge publishes until the version ends with the same one on all ranks. Returns how many weights changed
        on all of them, and whether one of them does not know since which version.

        Ranks call this at their own time, while training goes on. What was merged cannot be split again, so ranks that
        are behind merge further publishes until they are equal to the one farthest ahead.
        """
        while True:
            changes = pending.changes
            changed, alone = changes.result().count, changes.owner.alone
            reports = self._lockstep.report(pending.last_publish, changed, alone=alone, step=pending.step)
            latest = max(rank.publishes for rank in reports)
            if all(rank.publishes == latest for rank in reports):
                return sum(rank.changed for rank in reports), any(rank.alone for rank in reports)
            while pending.last_publish < latest:
                more = self.background.next()
                if more is None:
                    # raises OutOfStep on all ranks: this one is closed
                    self._lockstep.report(pending.last_publish, closed=True)
                    raise RuntimeError("ranks that are closed and behind were not noticed")
                first = pending.changes
                pending.merge(more)
                more.changes.owner.fold(first, more.changes)

    def _tell(self, published: Published) -> None:
        """Call the user's `on_version`. What it raises is logged; on the background thread that includes sys.exit()."""
        if self._on_version is None:
            return
        try:
            self._on_version(published)
        except BaseException as error:
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise
            log.exception("on_version failed for version %d, which is published all the same", published.version)
