"""Data first, manifest last: the only place that writes versions into a bucket."""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bucket.run import Run
from ..bucket.trust import KeysLike, Trust
from ..core import history, keys
from ..core.added import AddedIndex, AddedLink
from ..core.errors import (
    AlreadyExists,
    Misconfigured,
    NotTheSigner,
    PublishError,
    RolledBack,
    SignatureError,
    StoreError,
    VersionNotFound,
    WriterConflict,
)
from ..core.manifest import Head, Link, Manifest, Summary, dump, now, parse_manifest
from ..core.signing import MANIFEST, NEXT_KEY, Endorsement, SigningKey, check_public, endorsed
from ..store.base import check_size
from .claim import ADVICE, Claim
from .companions import Companions
from .pending import PendingVersion

log = logging.getLogger("deltawire")


@dataclass(frozen=True, slots=True)
class Signing:
    """How a publisher signs its versions."""

    key: SigningKey
    next_key: str
    """Public key that may sign later versions; empty if none is named."""
    trust: Trust
    """Keys of the versions that it continues from, its own included."""

    @classmethod
    def of(cls, given: SigningKey | str | Path | None, next_key: str, trust: KeysLike) -> Signing | None:
        """Return None if neither `given` nor DELTAWIRE_SIGN names a key."""
        key = SigningKey.find(given)
        trust = trust or os.environ.get("DELTAWIRE_TRUST", "")
        if key is None:
            if next_key:
                raise Misconfigured("next_key needs the key that signs now: sign=PATH, or DELTAWIRE_SIGN")
            return None
        others = Trust(trust).keys if trust else []
        return cls(key, next_key and check_public(next_key, "next_key"), Trust([key.public, *others]))


class Committer:
    """Appends versions to a run, of which it has all summaries. One per publisher, used by one thread at a time."""

    def __init__(
        self,
        run: Run,
        files: Companions,
        claim: Claim,
        signing: Signing | None,
        versions: dict[int, Summary],
        newest: Manifest | None,
    ) -> None:
        """`claim` was taken, and `versions` and `newest` were read after that: use `open`."""
        self.run, self._files, self._claim, self._signing = run, files, claim, signing
        self.writer = secrets.token_hex(4)
        self._unsure = ""
        """Mark of a commit from before it is sent until it is known to have happened."""
        self._seen: AddedLink | None = None
        """The newest anchor of a keeper that was found in the bucket."""
        self.versions, self.newest = versions, newest
        self._rotations = _rotations(run, newest, signing)

    @classmethod
    def open(cls, run: Run, files: Companions, claim: Claim, signing: Signing | None = None) -> Committer:
        """Take the run and read its summaries. Raises WriterConflict where another publisher writes to it."""
        if claim.takeover:
            # first: a publisher that may not sign replaces no other
            _rotations(run, _newest(run, signing), signing)
        claim.take(run)
        try:
            if not claim.excludes:
                _keep_run(run)
            newest = _newest(run, signing)
            # the newest is continued from, whatever a list of pruned versions says
            versions = run.timeline(newest.version) | {newest.version: newest.summary()} if newest is not None else {}
            return cls(run, files, claim, signing, versions, newest)
        except BaseException:
            claim.release()
            raise

    @property
    def versions_of_key(self) -> dict[int, Summary]:
        """The versions that a reader with this publisher's key alone can use: none after a rotation."""
        signer = self._signing.key.public if self._signing else ""
        return self.versions if self.newest is None or self.newest.signer == signer else {}

    @property
    def next_version(self) -> int:
        """PublishError where the run has no room for another version."""
        if self.newest is None:
            return 0
        if self.newest.version >= keys.MAX_VERSION:
            raise PublishError(
                f"{self.run.store.url} has no room for another version: its newest, {self.newest.version}, is the last "
                "that can be; publish to another address"
            )
        return self.newest.version + 1

    def commit(
        self, pending: PendingVersion[Any], links: Iterable[Link], digest: str, changed: int, timings: dict[str, float]
    ) -> Manifest:
        """Create the manifest of the next version.

        Raises WriterConflict if another trainer has created it; RunNotFound or RunReplaced if the run was deleted.
        """
        version = self.next_version
        named = self._files.put(self.run.store, self.newest.files if self.newest else (), self.run.schema)
        if history.needs_page(version):
            page = history.Page(self.run.info.run, version, self._summaries(version - history.span(version), version))
            self.run.store.put(keys.history(version), dump(page))
        manifest = Manifest(
            run=self.run.info.run,
            version=version,
            parent=None if self.newest is None else self.newest.version,
            schema=self.run.info.schema_hash,
            digest=digest,
            links=tuple(links),
            created=now(),
            writer=self.writer,
            step=pending.step,
            changed=changed,
            metrics=_finite(pending.metrics, version),
            timings={name: round(value, 6) for name, value in timings.items()},
            files=named,
            recent=self._summaries(history.recent_start(version), version),
            origin=pending.origin,
            signer=self._signing.key.public if self._signing else "",
            rotations=self._rotations,
        )
        key, data = keys.manifest(version), dump(manifest)
        if self._signing is not None:
            data = self._signing.key.seal(MANIFEST, data)
        # a publisher commits nothing that a reader would refuse
        check_size(key, len(data), keys.limit(key))
        manifest = parse_manifest(data, version, self.run.info)
        self._claim.check()
        self._unsure = self.writer
        try:
            # created, never overwritten: two trainers must not share a version
            self.run.store.put_if_absent(key, data)
            self._claim.confirm(key, data)
        except AlreadyExists:
            raise WriterConflict(
                f"another writer committed version {version} of {self.run.store.url} first; {ADVICE}"
            ) from None
        self._committed(manifest)
        if self.run.trust is not None:
            try:
                # after the commit: what is noted and not there would look like a run that was rolled back
                self.run.trust.note(manifest)
            except (Misconfigured, RolledBack) as error:
                log.warning("version %d is committed, but not noted as seen: %s", version, error)
        try:
            self.run.store.put(keys.HEAD, dump(Head(self.run.info.run, version)))
        except StoreError as error:
            # only a hint: readers look one manifest past it
            log.warning("version %d is committed, but head was not moved: %s", version, error)
        _log(manifest, self.run.schema.elements, len(pending.handles))
        return manifest

    def catch_up(self) -> Manifest | None:
        """After a commit that failed or was interrupted: its manifest, if it was created after all."""
        if not self._unsure:
            return None
        try:
            manifest = self.run.manifest(self.next_version)
        except VersionNotFound:
            if self.writer == self._unsure:
                # it may still arrive: what it names must never be written over
                self.writer = secrets.token_hex(4)
            return None
        if manifest.writer != self._unsure:
            return None  # another trainer's: the next commit raises WriterConflict
        log.warning("version %d was committed after all", manifest.version)
        self._committed(manifest)
        return manifest

    def keeper_index(self) -> AddedIndex | None:
        """Return a keeper's index of what it added, in one or two small requests; None if none can be relied on."""
        try:
            index = self.run.added.index()
            if index is None or index.anchor is None or index.anchor == self._seen:
                return index
            (blob,) = index.anchor.link.objects
            if self.run.store.head(blob.key).size != blob.size:
                return None
            self._seen = index.anchor
            return index
        except StoreError as error:
            log.warning("cannot rely on a keeper of %s: %s", self.run.store.url, error)
            return None

    def _committed(self, manifest: Manifest) -> None:
        self.versions[manifest.version] = manifest.summary()
        self.newest = manifest
        # last: where this is interrupted, `catch_up` does it again
        self._unsure = ""

    def _summaries(self, start: int, end: int) -> tuple[Summary, ...]:
        """Those from `start` up to, not including, `end`; pruned ones are missing."""
        # a page may span more numbers than there are versions
        numbers = range(start, end) if end - start <= len(self.versions) else self.versions
        return tuple(self.versions[v] for v in numbers if start <= v < end and v in self.versions)


def _newest(run: Run, signing: Signing | None) -> Manifest | None:
    """Manifest of the newest version; None before the first. Raises NotTheSigner where its signature is not good."""
    try:
        version = run.newest()
    except SignatureError as error:
        if signing is None:
            raise
        raise NotTheSigner(
            f"{error}. Sign with the run's own key, and after a rotation name the key before (trust=, or "
            "DELTAWIRE_TRUST); remove versions that are forged; an unsigned run cannot be signed later"
        ) from error
    return None if version is None else run.manifest(version)


def _rotations(run: Run, newest: Manifest | None, signing: Signing | None) -> tuple[Endorsement, ...]:
    """Return the rotations to state in the next versions. Raises NotTheSigner if this key may not sign them."""
    if signing is None:
        if newest is not None and newest.signer:
            raise NotTheSigner(
                f"version {newest.version} of {run.store.url} is signed by {newest.signer}: publish with that key "
                "(sign=PATH, or DELTAWIRE_SIGN), or to an address of its own"
            )
        return ()
    key, next_key = signing.key, signing.next_key
    found = () if newest is None else newest.rotations
    before = {key.public} if newest is None else {newest.signer}
    if key.public not in endorsed(NEXT_KEY, run.info.run, before, found):
        raise NotTheSigner(
            f"{run.store.url} is signed by {newest.signer if newest else ''}, which has not named {key.public} as the "
            "next key: publish a version with the old key and next_key= first"
        )
    if next_key in ("", key.public) or (found and (found[-1].by, found[-1].key) == (key.public, next_key)):
        return found
    return (*found, key.endorse(NEXT_KEY, run.info.run, next_key))


def _keep_run(run: Run) -> None:
    """Where two trainers create a run at once, make run.json that of the trainer that holds the claim."""
    if Run.open(run.store).info.run == run.info.run:
        return
    if run.listed():
        raise WriterConflict(f"another trainer created {run.store.url} meanwhile; start this one again")
    run.store.put(keys.RUN, dump(run.info))


def _finite(metrics: Mapping[str, float], version: int) -> dict[str, float]:
    """JSON has no NaN and no infinity: a manifest with one could not be read again."""
    if lost := [name for name, value in metrics.items() if not math.isfinite(value)]:
        log.warning("version %d goes without the metric %s, which is %s", version, lost[0], metrics[lost[0]])
    return {name: value for name, value in metrics.items() if name not in lost}


def _log(manifest: Manifest, elements: int, publishes: int) -> None:
    """Log one line per version."""
    kinds = "+".join(link.kind for link in manifest.links)
    times = "  ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in manifest.timings.items())
    parent = f" ← v{manifest.parent}" if manifest.parent is not None else ""
    share = 100 * manifest.changed / max(elements, 1)
    merged = f"  {publishes} publishes" if publishes > 1 else ""
    mb = sum(blob.size for link in manifest.links for blob in link.objects) / 1e6
    log.info("v%d%s  %s  %.2f %% changed  %.2f MB  %s%s", manifest.version, parent, kinds, share, mb, times, merged)
