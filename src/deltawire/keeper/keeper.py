"""Follow a run, prove every version, and write back what helps readers: anchors, skip deltas, mirrors, less of the old.

A keeper owns nothing. It may be killed at any moment: what it has not announced is garbage, and the next one goes on
after the version that the index names. Without the lease it only follows, up to where the other one is.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from ..bucket.fetch import Progress, fetch
from ..bucket.prune import Retention, prune
from ..bucket.references import resolver
from ..bucket.replay import require_digest
from ..bucket.run import Run
from ..bucket.trust import KeysLike, Trust, link_signer
from ..bucket.versions import address_only
from ..bucket.walk import TRIES, Delta, prefetch
from ..bucket.watch import Watcher, following
from ..core import errors, full, keys
from ..core.added import LEVELS, AddedIndex, AddedLink, in_summaries
from ..core.chain import Step
from ..core.change import Change, whole
from ..core.digest import StateDigest
from ..core.errors import DAMAGE
from ..core.manifest import KEEPER, Blob, Link, Manifest
from ..core.signing import SigningKey
from ..core.sparse import DataFile, DeltaWriter
from ..core.state import State
from ..derive.deriver import Deriver
from ..replica.model import ModelTarget, StagedModel
from ..replica.replica import Replica
from ..store import Store, open_store
from ..trainer.policy import AnchorPolicy
from .announce import announce, tidy
from .lease import LEASE_S, Lease
from .mirror import Mirror
from .roster import EVERY_S, RosterWriter
from .skips import SkipDelta, Skips

log = logging.getLogger("deltawire")

ALIGNED = 16
"""Anchors are made of multiples of this, where skip deltas start and end."""

TOO_FAR_BEHIND = 64
"""Versions behind the newest from which a keeper no longer goes through each: the trainer is faster than it is."""

PRUNE_EVERY_S = 600.0
"""Seconds, at most, between two prunes."""


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """Options of a keeper.

    dw.KeeperOptions(mirrors=("s3://elsewhere/chat",), views=(("fp8-block", "s3://runs/chat-fp8"),))
    """

    anchors: bool = True
    anchor_every: int | None = None
    """An anchor at the latest every so many versions, or sooner if the deltas since the last take as many bytes."""
    levels: int = LEVELS
    """Levels of skip deltas (core/added.py); 0 makes none."""
    encoding: str | None = None
    """Encoding of skip deltas; None: that of the trainer's newest delta."""
    since: int | None = None
    """Version to begin with in a run that had no keeper; None: the last multiple of 16."""
    retention: Retention | None = None
    """Which versions stay; None deletes none."""
    mirrors: tuple[str, ...] = ()
    """Addresses that the run is copied to."""
    views: tuple[tuple[str, str], ...] = ()
    """Runs that are derived from it: (view, address)."""
    lease_s: float = LEASE_S


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """Result of a keeper's work on a version.

    for kept in keeper.once():
        print(kept.version, kept.newest - kept.version, "behind")
    """

    version: int
    newest: int
    working: bool
    """Whether this keeper holds the lease; without it, it only follows."""
    added: tuple[AddedLink, ...] = ()
    bad: tuple[str, ...] = ()
    """Objects that do not prove what their manifest says."""
    seconds: float = 0.0
    bytes: int = 0
    """Bytes of the links that were added."""


class KeptWeights(ModelTarget):
    """A copy of the weights that records what the deltas of a sync have changed."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.changes: list[Change] | None = []
        """Since it was last emptied; None after full weights."""

    def swap(self, staged: StagedModel) -> None:
        super().swap(staged)
        if not isinstance(staged.update.content, Delta):
            self.changes = None
        elif self.changes is not None:
            self.changes += staged.decoded


class Keeper:
    """Keeps one run. Use `keep` in a loop, from one thread.

    keeper = dw.Keeper("s3://runs/chat", dw.KeeperOptions(retention=dw.Retention(last=100)))
    for kept in keeper.follow():
        print(kept.version, kept.bad)
    """

    def __init__(
        self,
        run: str | Path | Store,
        options: KeeperOptions | None = None,
        *,
        id: str | None = None,
        reference: str | Path | None = None,
        trust: Trust | KeysLike | None = None,
        sign: SigningKey | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`trust` as of a Replica. `sign` is the key of this keeper, which a signed run needs (docs/signed.md)."""
        self.id = id or f"keeper-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self.options = options = options or KeeperOptions()
        self._progress = progress
        self.replica = Replica(run, id=self.id, reference=reference, trust=trust)
        self.replica.heartbeats.role = KEEPER
        self.run = self.replica.opened()
        if own := [url for url in options.mirrors if open_store(address_only(url)).url == self.run.store.url]:
            raise errors.Misconfigured(f"{own[0]} is the run itself: a mirror needs an address of its own")
        self._sign, self._signer = sign, link_signer(self.run, sign)
        self._resolve = resolver(reference)
        self.state = State(self.run.schema)
        self._weights = KeptWeights(self.state)
        self._skips = Skips(self.state, max(options.levels, 1))
        self._lease = Lease(self.run, self.id, options.lease_s)
        self._mark = secrets.token_hex(4)
        self._policy = AnchorPolicy(options.anchor_every)
        self._anchored = 0
        """A version that has full weights, as new as known."""
        self._thorough = 0
        """Up to this version each is gone through, however far behind."""
        self._pruned_at = -float("inf")
        self._mirrors: dict[str, Mirror] = {}
        self._lacking: dict[str, dict[str, str | None]] = {url: {} for url in options.mirrors}
        """What each mirror found damaged when it was last updated, as `damaged`."""
        self._derivers: dict[str, Deriver] = {}
        self._side_jobs: dict[str, Future[str]] = {}
        """The latest work on each mirror and view, and what it could not do."""
        self._ending = threading.Event()
        self._threads = ThreadPoolExecutor(len(options.mirrors) + len(options.views) or 1, "deltawire-keeper")
        self._notes: dict[str, str] = {}
        self.bad: list[str] = []
        """All bad objects that were found, in words."""
        self.damaged: dict[str, str | None] = {}
        """Keys of bad objects, each with the etag of what was there: prune must not rely on them."""

    # ── loop ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def follow(self, *, poll: float = 1.0, stop: threading.Event | None = None) -> Iterator[KeptVersion]:
        """Yield each version that was dealt with, until `stop` is set. A failure of the store is logged and retried.

        Raises RunReplaced if another run is at the address, Unsupported if several addresses are given.
        """
        stop = stop or threading.Event()
        newest = None
        # in threads of their own: an anchor may take minutes, and a region be cut off
        for where in (self.run.store, *self.options.mirrors):
            threading.Thread(target=self._write_rosters, args=(where,), name="deltawire-roster", daemon=True).start()
        with Watcher(self.run.store, poll=poll, stop=stop) as watcher:
            while not stop.is_set():
                try:
                    newest = watcher.look(self.run, newest)
                    if newest is not None:
                        yield from self._catch_up(newest, stop)
                    self._note("loop", "")
                except (errors.RunReplaced, errors.SchemaError, errors.Unsupported):
                    raise
                except errors.DeltawireError as error:
                    self._note("loop", f"retrying: {error}")
                    watcher.failed(error)
                self.replica.beat()
                watcher.wait()

    def _write_rosters(self, where: Store | str) -> None:
        """Keep the roster of the replicas whose heartbeats are in one bucket: that of the run, or a mirror of it."""
        writer, what = None, f"the roster of {open_store(where).url}"
        while not self._ending.wait(EVERY_S):
            trouble = ""
            try:
                if self.working:
                    writer = writer or RosterWriter(Run.open(where))
                    writer.update()
            except errors.RunNotFound:
                pass  # a mirror that is not begun
            except errors.DeltawireError as error:
                trouble = f"{what} is not written: {error}"
            self._note(what, trouble)

    def once(self) -> Iterator[KeptVersion]:
        """Do what is due and yield each version that was dealt with."""
        newest = self.run.newest()
        if newest is None:
            raise errors.RunNotFound(f"the run at {self.run.store.url} has no version yet")
        index = self.run.added.index()
        if index is not None and index.done == newest:
            self._lease.hold()  # for mirrors and retention: there is nothing to add
            self.tend(newest, wait=True)
        else:
            yield from self._catch_up(newest, threading.Event(), wait=True)

    def _catch_up(self, newest: int, stop: threading.Event, *, wait: bool = False) -> Iterator[KeptVersion]:
        """Deal with all versions up to the newest, then with mirrors, views and retention (`tend`)."""
        refused = None
        try:
            while not stop.is_set() and (kept := self.keep(newest)) is not None:
                yield kept
        except errors.NotTheSigner as error:
            refused = error
        self.tend(newest, may_prune=refused is None, wait=wait)
        if refused is not None:
            raise refused

    def close(self) -> None:
        """Let another keeper begin at once. The copy of an object to a mirror is broken off."""
        self._ending.set()
        self.replica.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with suppress(errors.StoreError):
            self._lease.release()

    # ── one version ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def version(self) -> int | None:
        """The version of its own weights; None if they have none."""
        return self.replica.version

    @property
    def holder(self) -> str:
        """Name of the keeper that works, as far as known."""
        return self._lease.holder

    @property
    def working(self) -> bool:
        """Whether that is this one."""
        return self._lease.holder == self.id

    def keep(self, newest: int) -> KeptVersion | None:
        """Go to the next version and do what is due for it. None if there is nothing to do up to `newest`."""
        working = self._lease.hold()
        if working and self._skips.version is not None and self._skips.version >= newest:
            return None
        if working and self._signer is not None:
            with suppress(*DAMAGE):
                self.run.manifest(newest)  # its key may be another than that of the last version
            self._signer.delegation()  # before work that could not be announced
        index = self.run.added.index()
        if working and index is not None and index.done > newest and index.done > (self.run.newest() or 0):
            log.warning("%s: no version %d is there that %s says is dealt with", self.id, index.done, keys.ADDED)
            index = self._announce((), newest, newest)
        done = min(index.done, newest) if index is not None else None
        if self._skips.version is None:
            self._begin(newest, done)
        at = self._skips.version or 0
        if done is None:
            done = at
            if working:
                # a trainer sees from now on that there is a keeper
                self._announce((), at, newest)
        goal = newest if working else done
        if at >= goal:
            return None
        clock, came_from = time.perf_counter(), self.version
        # versions that a keeper has dealt with need no second look at each; nor can all be looked at far behind
        far = newest - TOO_FAR_BEHIND if at >= self._thorough else 0
        settled = min(max(done, far), goal)
        version = self._skips.next(settled) if at < settled else following(self.run, at, goal)
        try:
            changes = self._sync(version)
            if came_from != at:
                changes = None  # what led here began with another version
        except DAMAGE as error:
            before = len(self.bad)
            if version not in self.run.pruned():
                for step, why in self.replica.rejected:
                    self._remember_damaged(step, why)
                self._report(f"version {version} cannot be reached: {error}")
            self._skips.start(version)
            if working:
                self._announce((), version, newest)
            return KeptVersion(version, newest, working, bad=tuple(self.bad[before:]))
        try:
            bad = self._prove(version) if version > done else []
            there = {x.way for x in self.run.added.between(version - 1, version)} if version <= done else set()
            added = self._add(version, changes, there, working)
            if working and version > done and self._wants_anchor(version):
                added.append(self._put_anchor(version))
            if working and (added or version > done):
                self._announce(added, version, newest)
        except BaseException:
            # the next attempt begins with what was announced
            self._skips.start(None)
            raise
        size = sum(link.link.bytes for link in added)
        return KeptVersion(
            version, newest, working, tuple(added), tuple(bad), time.perf_counter() - clock, size
        )  # fmt: skip

    def _announce(self, links: Sequence[AddedLink], done: int, newest: int) -> AddedIndex:
        return announce(self.run, self.id, links, done, self._signer, at_most=max(done, newest), damaged=self.damaged)

    def _begin(self, newest: int, done: int | None) -> None:
        """Bring the weights to where the changes of the longest skip deltas begin, as far back as versions are left."""
        since = self.options.since
        if done is None:
            starts = [min(newest - newest % ALIGNED if since is None else since, newest)]
        else:
            starts = [done - done % 4**level for level in range(self._skips.levels - 1, -1, -1)]
            if since is not None and self.version is None:
                log.warning(
                    "%s: --since %d is for a run that had no keeper: one has dealt with versions up to %d, continuing",
                    self.id, since, done,
                )  # fmt: skip
        self._thorough = newest if done is None or since is not None else done
        pruned = self.run.pruned()
        for start in (*starts, newest):
            if start in pruned:
                continue
            try:
                self._sync(start, self._progress)
                self._skips.start(start)
                return
            except DAMAGE as error:
                if start == newest:
                    raise
                log.warning("%s cannot begin with version %d: %s", self.id, start, error)

    def _sync(self, version: int, progress: Progress | None = None) -> list[Change] | None:
        """Go to a version. Returns what the deltas on the way have changed; None where full weights were loaded."""
        for tries in range(1, TRIES + 1):
            self._weights.changes = []
            try:
                self.replica.sync(self._weights, version, progress=progress)
                break
            except DAMAGE:
                if tries == TRIES:
                    raise
        for step, why in self.replica.rejected:
            self._remember_damaged(step, why)
            self._report(f"the {step.kind} to version {step.version} cannot be used: {why}")
        return self._weights.changes

    def _remember_damaged(self, step: Step, why: errors.DeltawireError) -> None:
        """Remember which objects of a link are damaged; none where the store could not be reached."""
        if not isinstance(why, DAMAGE):
            return
        with suppress(*DAMAGE):  # else there is no manifest that names its objects
            objects = self.run.link(self.run.manifest(step.version), step.kind, step.base).objects
            # of several shards the bad ones: once these are repaired, the link can be used
            bad = [*filter(self._is_damaged, objects)] if len(objects) > 1 else []
            for blob in bad or objects:
                self.damaged[blob.key] = self.run.etag(blob.key)

    def _is_damaged(self, blob: Blob) -> bool:
        try:
            fetch(self.run.store, blob, shared=False).close()
            return False
        except DAMAGE:
            return True

    def _report(self, text: str) -> None:
        """Report a bad object, in the heartbeats as long as this process lives."""
        self.bad.append(text)
        self._note("bad object", text)

    def _note(self, what: str, text: str) -> None:
        """Put a problem into the heartbeats, or take it out. It is logged once."""
        if text and self._notes.get(what) != text:
            log.error("%s: %s", self.id, text)
        self._notes[what] = text
        # a copy: threads that write rosters come here too
        self.replica.heartbeats.note = "; ".join(text for text in [*self._notes.values()] if text)

    # ── prove ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _prove(self, version: int) -> list[str]:
        """Prove the links of a version that the sync did not use: a replica may read them."""
        before, manifest = len(self.bad), self.run.manifest(version)
        main = manifest.main
        for link in manifest.links:
            if link.kind == "reference" or (link is main and link.kind == "delta"):
                continue
            step = Step(version, link.kind, link.base, link.bytes)
            for _, pending in prefetch(self.run, [step], shared=False):
                try:
                    fetched = pending.result()
                    if link.kind == "anchor":
                        require_digest(manifest, full.digest_of(fetched.weights(self._resolve)))
                    else:
                        fetched.delta().open()
                except DAMAGE as error:
                    self._remember_damaged(step, error)
                    self._report(f"the {link.kind} to version {version} cannot be used: {error}")
        return self.bad[before:]

    # ── add ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _add(
        self, version: int, changes: list[Change] | None, there: Collection[tuple[int, str, int | None]], working: bool
    ) -> list[AddedLink]:
        """Make the skip deltas that are due and not `there` yet. Without the lease, only take note of the changes."""
        manifest = self.run.manifest(version)
        own = {(version, link.kind, link.base) for link in manifest.links}.union(there)
        added: list[AddedLink] = []
        if changes is None:
            self._skips.start(version)
        else:
            for skip in self._skips.reach(version, changes):
                if working and self.options.levels and (version, "delta", skip.base) not in own:
                    added += self._put_skip(manifest, skip)
        return added

    def _put_skip(self, manifest: Manifest, skip: SkipDelta) -> list[AddedLink]:
        """Encode and upload a skip delta; none where it would save a reader little against full weights."""
        version = manifest.version
        try:
            base = self.run.manifest(skip.base)
        except errors.VersionNotFound:
            return []  # pruned meanwhile
        trainers = manifest.main.encoding
        encoding = self.options.encoding or trainers or "packed"
        digest = StateDigest.parse(base.digest)
        with DeltaWriter(encoding) as delta:
            for block, step in skip.encode(encoding):
                delta.add(block)
                digest += step
            require_digest(manifest, digest)
            run, elements = self.run.info.run, self.run.schema.elements
            file = delta.finish_link(run, skip.base, version, base.digest, manifest.digest, elements)
            if 2 * file.size >= self.run.schema.nbytes:
                return []
            blob = self._put(keys.delta(skip.base, version, self._mark), file)
        return [AddedLink(version, Link("delta", skip.base, (blob,), encoding, changed=file.changed))]

    def _wants_anchor(self, version: int) -> bool:
        every = self.options.anchor_every
        if not self.options.anchors or version % (ALIGNED if every is None or every >= ALIGNED else 1):
            return False
        # by the trainer's rule: deltas of the trainer and anchors of both, from the newest anchor on
        anchors = [x for x in self.run.added.between(self._anchored - 1, version) if x.link.kind == "anchor"]
        versions = in_summaries(self.run.timeline(version, self._anchored), anchors)
        index = self.run.added.index()
        damaged = self.damaged.keys() | (index.damaged.keys() if index else set())
        useless = {keys.data_version(key) for key in damaged if key.startswith(keys.ANCHORS)}
        if version not in versions or version in useless:
            return False  # pruned meanwhile, or readers would still take the anchor that its manifest names
        size = versions[version].main.bytes
        for v, summary in versions.items():
            if v in useless:
                deltas = tuple(link for link in summary.links if link.kind != "anchor")
                versions[v] = msgspec.structs.replace(summary, links=deltas)
        full_links = [v for v, s in versions.items() if any(link.kind != "delta" for link in s.links)]
        self._anchored = max(full_links, default=self._anchored)
        del versions[version]
        return self._anchored < version and self._policy.wants_anchor(
            version, size, self.run.schema.nbytes, versions
        )  # fmt: skip

    def _put_anchor(self, version: int) -> AddedLink:
        schema = self.run.schema
        metadata = {"run": self.run.info.run, "model_version": str(version), "total_params": str(schema.elements)}
        file = full.anchor(map(whole, schema.tensors), self.state.region, metadata)
        return AddedLink(version, Link("anchor", None, (self._put(keys.anchor(version, self._mark), file),)))

    def _put(self, key: str, file: DataFile) -> Blob:
        def chunks() -> Iterator[bytes]:
            for chunk in file.chunks():
                # an upload may take longer than the lease
                self._lease.hold()
                yield chunk

        self.run.store.put(key, chunks)
        return file.blob(key)

    # ── mirrors, views, retention ────────────────────────────────────────────────────────────────────────────────────

    def tend(self, newest: int, *, may_prune: bool = True, wait: bool = False) -> None:
        """Update mirrors and views, and delete what the retention rule lets go. What fails is tried again later.

        wait   until mirrors and views are updated, and only then delete: a mirror may find something damaged. Raises
               what one of them raised

        Until the run's new key has made this a keeper again, mirrors and views go on, and nothing is deleted: what
        keepers added is not trusted meanwhile, and would be taken for garbage.
        """
        if not self.working:
            return
        rule = self.options.retention if may_prune else None
        due = rule is not None and time.monotonic() - self._pruned_at > min(PRUNE_EVERY_S, max(rule.grace / 4, 1.0))
        jobs: dict[str, Callable[[], str]] = {}
        for url in self.options.mirrors:
            jobs[f"the mirror {open_store(url).url}"] = partial(self._copy, url, newest, rule if due else None)
        for view, url in self.options.views:
            jobs[f"the {view} of it at {open_store(url).url}"] = partial(self._derive, view, url, newest)
        for what, work in jobs.items():
            # each in a thread of its own: a region that is cut off delays no other
            before = self._side_jobs.get(what)
            if before is None or before.done():
                failed = before.exception() if before is not None else None
                self._note(what, f"{what} is behind: {failed}" if failed else before.result() if before else "")
                self._side_jobs[what] = self._threads.submit(work)
        if wait:
            wait_for(self._side_jobs.values())
        for found in self._lacking.values():
            self.damaged.update(found)
        if due and rule is not None:
            self._pruned_at = time.monotonic()  # also where it fails: not again at once
            plan = prune(self.run, rule, self.damaged)
            if plan.going:
                tidy(self.run, self.id, self._signer)
        for what, done in self._side_jobs.items() if wait else ():
            self._note(what, done.result())

    def _copy(self, url: str, newest: int, rule: Retention | None) -> str:
        # after a failure, what it holds is looked up again
        mirror = self._mirrors.pop(url, None) or Mirror(self.run, open_store(url), self._ending)
        try:
            mirror.update(newest, rule)
        finally:
            self._lacking[url] = {key: one.etag for key, one in mirror.damaged.items()}
        self._mirrors[url] = mirror
        why = "; ".join(one.why for one in mirror.damaged.values())
        return f"the mirror {mirror.store.url} lacks what is damaged here, until it is repaired: {why}" if why else ""

    def _derive(self, view: str, url: str, newest: int) -> str:
        deriver = self._derivers.pop(url, None) or Deriver(
            self.run, url, view, reference=self._resolve, sign=self._sign
        )
        since = self.options.since
        with ExitStack() as failed:
            failed.push(deriver)  # its thread would hold a copy of the weights
            for _ in deriver.follow(newest if since is None else since, once=True):
                if self._ending.is_set():
                    break
            failed.pop_all()
        self._derivers[url] = deriver
        return ""
