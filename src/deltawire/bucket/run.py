"""A run in a bucket, read side: what it is, which version is newest, what each version is made of."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec

from ..core import full, history, keys
from ..core.digest import StateDigest
from ..core.errors import (
    DAMAGE,
    AlreadyExists,
    DeltawireError,
    ForeignObject,
    ManifestError,
    ObjectNotFound,
    ObjectTooLarge,
    RolledBack,
    RunNotFound,
    RunReplaced,
    SchemaMismatch,
    StoreError,
    StoreUnavailable,
    Unsupported,
    VersionNotFound,
)
from ..core.manifest import (
    Base,
    Blob,
    File,
    Head,
    Heartbeat,
    Link,
    Manifest,
    Pruned,
    Roster,
    RunInfo,
    Summary,
    Tag,
    dump,
    now,
    parse,
    parse_manifest,
    parse_pruned,
    parse_run,
    ranges_of,
)
from ..core.parallel import REQUESTS, ordered_map
from ..core.schema import Schema
from ..core.settings import gigabytes
from ..store import MirroredStore, ObjectInfo, Store, open_store
from . import versions
from .added import AddedLinks
from .references import OTHER_MODEL, as_run
from .roster import is_fresh
from .trust import KeysLike, RunTrust, Trust

log = logging.getLogger("deltawire")

T = TypeVar("T")


class OfRun(Protocol):
    """A JSON object that says which run it is of."""

    @property
    def run(self) -> str: ...


R = TypeVar("R", bound=OfRun)

MAX_MODEL_GB = 4000.0
"""Default limit on the size of a run's model: 10¹² weights of four bytes."""

KEPT_MANIFESTS = 16 << 20
"""Bytes of manifests that stay in memory: they hardly ever change, so the latest are kept."""

ALL_MANIFESTS = 256 << 20
"""Bytes of all `lean` manifests of a run, as JSON; some 400,000 versions. In memory they take three times as much."""

LOST_MANIFESTS = 1024
"""Number of manifests read in place of lost pages of history; each has summaries of sixteen versions."""

IDENTIFIED = 4096
"""Versions at least that weights of unknown origin are looked for in."""

SUMMARY_BYTES = 160
"""Bytes of a summary in a page of history, about."""

LONG_PAGE = 1024
"""Versions of a page of history from which on a reader that needs a quarter of them at most reads shorter ones instead:
the longest have megabytes."""


class Run:
    """A run in a bucket, for reading.

        run = dw.Run.open("s3://runs/wordle")
        newest = run.manifest(run.newest())
        print(newest.version, newest.step, newest.changed, "of", run.schema.elements)

    Open with `Run.open`, make with `Run.create`; threads may share it.

    Most tools need `newest`, `resolve`, `manifest`, `timeline`, `tags` and `heartbeats`; `dw.checkout` reads weights.
    """

    def __init__(self, store: Store, info: RunInfo, etag: str | None = None, trust: Trust | None = None) -> None:
        self.store = store
        self.info = info
        self.schema = info.schema
        self.trust: RunTrust | None = None if trust is None else trust.of_run(store.url, info.run)
        """Checks signatures; None where no key is trusted, so that none is checked."""
        self._etag = etag
        """Etag of run.json, where it was read."""
        self._manifests: dict[int, tuple[Manifest, int]] = {}
        """The latest manifests, each with the number of bytes it was read from."""
        self._manifest_bytes = 0
        """Bytes that those were read from."""
        self._newest = -1
        """What `newest` found the last time."""
        self._lock = threading.Lock()
        self.added = AddedLinks(self)
        """Links that were added after the versions were committed."""

    def check_kind(self, is_adapter: bool | None) -> None:
        """Raise SchemaMismatch if the run has adapters and some weights are full ones, or the reverse.

        For weights that do not have the run's schema, since that is then why; None where their kind is unknown.
        """
        base, url = self.info.base, self.store.url
        if base is not None and is_adapter is False:
            raise SchemaMismatch(
                f"{url} has adapters of {base}, and these are full weights: publish them to a run of their own. To "
                f"follow the adapters, start a server with --adapter policy={url}, or sync adapter(model)"
            )
        if base is None and is_adapter:
            raise SchemaMismatch(
                f"{url} has full weights, and this is an adapter: publish it to a run of its own, and follow that one"
            )

    def weights_in(self, folder: str | os.PathLike[str]) -> full.Source:
        """Open a checkpoint folder as weights of this run. Raises SchemaMismatch where it has other tensors.

        run.weights_in("models/chat")
        """
        checkpoint = full.Checkpoint(folder)
        try:
            return as_run(checkpoint, self.schema, f"the checkpoint {checkpoint.folder}", OTHER_MODEL)
        except SchemaMismatch:
            self.check_kind((checkpoint.folder / full.ADAPTER_CONFIG).is_file())
            raise

    @classmethod
    def open(
        cls, where: str | Store, *, max_model_gb: float | None = None, trust: Trust | KeysLike | None = None
    ) -> Run:
        """Open a run. An address with a version behind it is refused: see `at`.

        Raises ModelTooLarge if it declares a larger model than `max_model_gb`, which is DELTAWIRE_MAX_MODEL_GB, or
        4000, by default. With `trust`, by default DELTAWIRE_TRUST, only versions that are signed by one of these keys
        are read.
        """
        trusted = Trust.of(trust)
        store = open_store(versions.address_only(where))
        limit = gigabytes("DELTAWIRE_MAX_MODEL_GB", MAX_MODEL_GB) if max_model_gb is None else int(max_model_gb * 1e9)

        def read() -> Run:
            try:
                found = store.get(keys.RUN, limit=keys.limit(keys.RUN))
            except ObjectNotFound:
                raise RunNotFound(
                    f"there is no run at {store.url}: publish to it first, or check the address"
                ) from None
            if trusted is None:
                _warn_of_unsigned(store)
            run = cls(store, parse_run(found.data, limit), found.etag, trusted)
            if trusted is not None and isinstance(store, MirroredStore):
                # which bucket has the run that is meant, only its signatures tell
                run._find_newest()
            return run

        return anywhere(store, read, lambda mirrors: mirrors.leave(another_run=True))

    @classmethod
    def at(cls, where: str, *, trust: Trust | KeysLike | None = None) -> tuple[Run, int]:
        """Open the run of RUN[@VERSION] and find the version, the newest where none is written.

        run, version = dw.Run.at("s3://runs/chat@best")
        """
        address, version = versions.split_version(where)
        run = cls.open(open_store(address), trust=trust)
        return run, run.resolve(version)

    @classmethod
    def create(
        cls,
        where: str | Store,
        schema: Schema,
        model: str = "",
        trust: Trust | None = None,
        base: Base | None = None,
    ) -> Run:
        """Create a run, with `base` one of adapters.

        If two create it at once, exactly one succeeds, and the other opens that run.

        Raises ForeignObject if there are versions without run.json: two runs must not be mixed.
        """
        store = open_store(where)
        if next(iter(store.list(keys.VERSIONS)), None) is not None:
            try:
                return cls.open(store, trust=trust)
            except RunNotFound:
                raise ForeignObject(
                    f"{store.url} holds versions of a run whose {keys.RUN} is gone; "
                    "remove what is left of it, or publish to another address"
                ) from None
        info = RunInfo(secrets.token_hex(8), now(), schema, schema.hash, model=model, base=base)
        # first: a signed run that was here may be missing
        run = cls(store, info, trust=trust)
        try:
            store.put_if_absent(keys.RUN, dump(info))
        except AlreadyExists:
            return cls.open(store, trust=trust)
        return run

    def check_present(self) -> None:
        """Raise RunNotFound or RunReplaced if this run has been deleted meanwhile. One conditional request."""
        try:
            found = self.store.get_if_changed(keys.RUN, self._etag, limit=keys.limit(keys.RUN))
        except ObjectNotFound:
            raise RunNotFound(
                f"the run at {self.store.url} is gone: it was deleted while it was in use; "
                "restore it, or start a new publisher, which makes a new run"
            ) from None
        if found is None:
            return
        if (there := parse_run(found.data).run) != self.info.run:
            raise RunReplaced(
                f"{self.store.url} holds another run now ({there}, this one was {self.info.run}); "
                "open it again, or use an address of its own"
            )
        self._etag = found.etag

    # ── small objects ────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, key: str) -> bytes:
        """Read a JSON object. Raises ObjectTooLarge if it is larger than the limit of its kind."""
        return self.store.get(key, limit=keys.limit(key)).data

    def find(self, key: str, kind: type[R]) -> R | None:
        """Read an object of this run; None if it is missing, or belongs to a run that was at this address before.

        Raises ManifestError or ObjectTooLarge if it is damaged.
        """
        try:
            found = parse(self.get(key), kind, key)
        except ObjectNotFound:
            return None
        return found if found.run == self.info.run else None

    def hint(self, key: str, kind: type[R]) -> R | None:
        """Read an object of this run that nothing depends on. A damaged one is logged and read as None."""
        try:
            return self.find(key, kind)
        except (ManifestError, ObjectTooLarge) as error:
            log.warning("ignoring %s: %s", key, error)
            return None

    # ── names of versions ────────────────────────────────────────────────────────────────────────────────────────────

    def resolve(self, version: int | str | None, *, early: bool = False) -> int:
        """Return the number of a version: 41, "v41", "latest", -2 for the last but one, or a tag; None is the newest.

        Raises VersionNotFound, with the versions there are, where the run has no such version. With `early`, one that
        is named by its number need not exist yet.
        """
        if early and isinstance(version, str) and (exact := versions.exact(version)) is not None:
            return exact
        return versions.resolve(self, version)

    def tags(self, *, latest: int | None = None) -> dict[str, Tag]:
        """Read the tags of the run, by name, or the `latest` so many. A damaged one is left out with a warning."""
        return versions.tags(self, latest=latest)

    def tag(self, version: int, name: str) -> Tag | None:
        """Name a version, which prune then keeps. Returns the tag that had the name before.

            run.tag(41, "best")

        Raises ValueError for what cannot be a name, VersionNotFound for a version that is being pruned.
        """
        return versions.set_tag(self, version, name)

    def untag(self, name: str) -> None:
        """Delete a tag. Raises ValueError for what cannot be a name, VersionNotFound where there is none."""
        versions.delete_tag(self, name)

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def heartbeats(
        self, items: Iterable[ObjectInfo] | None = None
    ) -> Iterator[tuple[ObjectInfo, Heartbeat | DeltawireError | None]]:
        """Read what replicas report, several at a time. Untrusted: who can write the bucket can write any of them.

            for item, beat in run.heartbeats():
                ...                         # item.modified, beat.replica, beat.version, beat.healthy

        `items` are the objects to read, by default all there are. One that is damaged has its error in its place; None
        stands for one that is gone, of another run, or under the name of another replica.
        """

        def one(item: ObjectInfo) -> Heartbeat | DeltawireError | None:
            try:
                beat = self.find(item.key, Heartbeat)
            except (ManifestError, ObjectTooLarge) as error:
                return error
            return beat if beat is not None and item.key == f"{keys.REPLICAS}{beat.replica}.json" else None

        wanted = [*(self.heartbeat_objects() if items is None else items)]
        return zip(wanted, ordered_map(one, wanted, REQUESTS), strict=True)

    def roster(self) -> Roster | None:
        """Read the heartbeats of a large fleet from the one object in which a keeper writes them. Untrusted, too.

        if run.roster_object() is not None and (roster := run.roster()) is not None:
            print(len(roster.replicas), "replicas")
        """
        return self.hint(keys.ROSTER, Roster)

    def roster_object(self) -> ObjectInfo | None:
        """The object of the roster, without reading it; None if there is none that a keeper wrote within a minute."""
        try:
            item = self.store.head(keys.ROSTER)
        except ObjectNotFound:
            return None
        return item if is_fresh(item.modified) else None

    def heartbeat_objects(self) -> list[ObjectInfo]:
        """List the heartbeats in the bucket, without reading them: one request per thousand."""
        return [*self.store.list(keys.REPLICAS)]

    # ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def anywhere(self, work: Callable[[], T]) -> T:
        """Call a function that reads the run; if the bucket in use is damaged, once more with the next one."""

        def leave(mirrors: MirroredStore) -> None:
            mirrors.leave()
            # the next bucket may have other manifests
            with self._lock:
                # not cleared: threads that still read the bucket before put what they find there into the old one
                self._manifests, self._manifest_bytes = {}, 0
                self._newest = -1
            self.added = AddedLinks(self)

        return anywhere(self.store, work, leave)

    def newest(self) -> int | None:
        """Find the newest committed version, in O(log n) requests whatever head says; three or four where it is right.

        Versions are committed one after the other, prune marks a version in pruned.json before its manifest goes, and
        no mark is removed once that is gone. So a version up to the newest has a manifest, or is marked by the time its
        manifest is missed; one above the newest has neither. Hence "is there or was pruned" holds up to the
        newest version and nowhere above it: a search that doubles its stride and then halves the gap finds the last
        version for which it holds. Prune never takes the newest one, so that version has a manifest. Where it has none,
        pruned.json is wrong, and the manifests are listed. A store without listings is searched from the first version
        on where head is wrong, and where pruned.json is too, head decides.

        Raises RolledBack if a signed run ends before a version that was seen here.
        """
        return self.anywhere(self._find_newest)

    def _find_newest(self) -> int | None:
        found = self.head_hint()
        if found is None or not self.exists(found):
            found = self._newest_listed(-1)
        if found is not None:
            low, stride = found, 1
            # a head that did not fall behind what was found before is right or a little late: nothing is pruned between
            follows = 0 <= self._newest <= found
            while self.exists(low + stride) or (not follows and low + stride in self.pruned()):
                low, stride, follows = low + stride, 2 * stride, False
            high = low + stride
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self.exists(middle) or middle in self.pruned() else (low, middle)
            found = low if self.exists(low) else self._newest_listed(found)
            found = None if found == -1 else found
            self._newest = -1 if found is None else found
        if self.trust is not None:
            self.trust.check_newest(found)
        return found

    def _newest_listed(self, otherwise: int) -> int | None:
        """Return the newest version by a listing; `otherwise` where the store has none."""
        try:
            return max(self.listed(), default=None)
        except Unsupported:
            return otherwise

    def head_hint(self) -> int | None:
        """Return the version that head.json names; None if it is missing, unreadable or invalid."""
        try:
            head = self.hint(keys.HEAD, Head)
        except StoreError as error:
            log.warning("ignoring %s: %s", keys.HEAD, error)
            return None
        return None if head is None else head.version

    def listed(self) -> list[int]:
        """List every version that has a manifest: one request per thousand."""
        found = (keys.version_of(item.key) for item in self.store.list(keys.VERSIONS))
        return sorted(version for version in found if version is not None)

    def exists(self, version: int) -> bool:
        """Whether the run has this version now. Raises ManifestError if its manifest is damaged."""
        if version in self._manifests:
            return True
        if version > keys.MAX_VERSION:
            return False
        try:
            self.manifest(version)
        except VersionNotFound:
            return False
        return True

    def manifest(self, version: int) -> Manifest:
        """Read the manifest of a version, once: the latest ones are kept in memory.

        Raises VersionNotFound if there is none, ManifestError or ForeignObject if it is damaged, and with trusted keys
        SignatureError if none of them has signed it.
        """
        manifests = self._manifests
        if (kept := manifests.get(version)) is not None:
            return kept[0]
        if version is None or isinstance(version, str):
            raise TypeError(f"a version is a number here: run.resolve({version!r}) returns that of a name")
        if not 0 <= version <= keys.MAX_VERSION:
            raise VersionNotFound(f"versions count from 0 and have at most 18 digits; {version} cannot be one")
        try:
            data = self.get(keys.manifest(version))
        except ObjectNotFound:
            raise VersionNotFound(f"{self.store.url} has no version {version}, or it was pruned") from None
        manifest = parse_manifest(data, version, self.info)
        if self.trust is not None:
            self.trust.check_manifest(manifest, data)
        with self._lock:
            if manifests is not self._manifests:
                return manifest
            # another thread may have read it meanwhile
            self._forget(version)
            manifests[version] = manifest, len(data)
            self._manifest_bytes += len(data)
            while self._manifest_bytes > KEPT_MANIFESTS:
                # a follower lives for as long as the training: what it read first goes first
                self._forget(next(iter(manifests)))
        return manifest

    def link(self, manifest: Manifest, kind: str, base: int | None) -> Link:
        """Return a link of a version: one of its manifest, or else one that was added later."""
        try:
            return manifest.link(kind, base)
        except ManifestError:
            if (added := self.added.find(manifest.version, kind, base)) is None:
                raise
            return added

    def forget(self, version: int) -> Manifest | None:
        """Drop a manifest from memory, so that it is read again. Returns the one that was kept."""
        with self._lock:
            return self._forget(version)

    def _forget(self, version: int) -> Manifest | None:
        manifest, size = self._manifests.pop(version, (None, 0))
        self._manifest_bytes -= size
        return manifest

    def check_kept(self, version: int) -> None:
        """Raise RolledBack if a signed version is gone, with all that came after it. Unsigned runs cost no request.

        Of several buckets the first that has the version is read from then on. None may have it while mirrors are
        behind: that is no rollback, and nobody goes below `version`.
        """
        if not isinstance(self.store, MirroredStore):
            if self.trust is not None:
                self.forget(version)
                self.newest()
            return

        def look() -> None:
            self.forget(version)
            if not self.exists(version) and ((newest := self._find_newest()) is None or newest < version):
                raise RolledBack(f"{self.store.url} ends before version {version}, which was seen before")

        with suppress(RolledBack):
            self.anywhere(look)

    def manifests(self, versions: Iterable[int]) -> Iterator[tuple[int, Manifest | DeltawireError]]:
        """Read many manifests, several at a time; where one is damaged, its error comes in its place.

        Raises ObjectTooLarge where all of them exceed 256 MiB, without what only people read (`recent`, `metrics`,
        `timings`). A caller that keeps them drops that too.
        """
        left = ALL_MANIFESTS
        for version, found in read_each(self.manifest, versions):
            if isinstance(found, Manifest):
                left -= len(dump(lean(found)))
                if left < 0:
                    raise ObjectTooLarge(
                        f"the manifests up to version {version} take more than {ALL_MANIFESTS:,} bytes, all that is "
                        "read at once: remove versions that are not needed"
                    )
            yield version, found

    def timeline(self, newest: int | None = None, since: int = 0) -> dict[int, Summary]:
        """Return summaries from `since` to `newest`, by version, in O(log n) requests; pruned versions are left out.

        `newest` is by default the newest version; without any version the result is empty. Where pages of history are
        lost, manifests are read in their place, each with summaries of sixteen versions. Beyond 32 MiB of pages
        (100,000 versions and more), or 1024 such manifests, older versions are left out with a warning.
        """
        if newest is None and (newest := self.newest()) is None:
            return {}
        manifest, gone = self.manifest(newest), self.pruned()
        found = {s.version: s for s in _Past(self, gone).before(newest, since)}
        # a manifest may be signed, a page is not
        found.update((s.version, s) for s in (*manifest.recent, manifest.summary()))
        return {v: found[v] for v in sorted(found) if since <= v <= newest and v not in gone}

    def identify(self, digest: StateDigest, newest: int) -> int | None:
        """Return the newest version up to `newest` that has this digest; None if none has.

        Of a long run no more versions are read than cost about as many bytes as full weights, and 4,096 at least.
        """
        wanted, read = str(digest), newest + 1
        oldest = max(newest - max(IDENTIFIED, self.schema.nbytes // SUMMARY_BYTES), 0)
        for since in history.reaches(newest, oldest):
            for version, summary in reversed(self.timeline(newest, since).items()):
                # a summary is only what a page of history says: the manifest decides
                if version < read and summary.digest == wanted and self.manifest(version).digest == wanted:
                    return version
            read = since
        return None

    def page(self, end: int) -> history.Page:
        """Read the page of history that ends before version `end`."""
        return self._parse_page(end, self.get(keys.history(end)))

    def _parse_page(self, end: int, data: bytes) -> history.Page:
        page = parse(data, history.Page, keys.history(end))
        if (page.run, page.end) != (self.info.run, end):
            raise ManifestError(f"{keys.history(end)} is page {page.end} of run {page.run[:32]!r}")
        return page

    def pruned(self) -> Pruned:
        """Read which versions are pruned, or about to be: `41 in run.pruned()`."""
        try:
            return parse_pruned(self.get(keys.PRUNED), self.info)
        except ObjectNotFound:
            return Pruned(self.info.run, ())

    def etag(self, key: str) -> str | None:
        """Return the etag of an object; None if there is no object."""
        try:
            return self.store.head(key).etag
        except ObjectNotFound:
            return None

    def age(self, key: str) -> float | None:
        """Return the seconds since an object was written, by the store's clock; None if there is no object.

        Compares with an object that is written for the purpose. None as well where another reader of the clock has
        deleted that one: ask again later.
        """
        self.store.put(keys.CLOCK, b"{}")
        try:
            return self.store.head(keys.CLOCK).modified - self.store.head(key).modified
        except ObjectNotFound:
            return None
        finally:
            self.store.delete(keys.CLOCK)


_unsigned: set[str] = set()
"""Addresses of which `_warn_of_unsigned` has said what there is to say."""


def _warn_of_unsigned(store: Store) -> None:
    """Warn once of an address on the web that is read without a trusted key."""
    url = next(web_addresses(store), None)
    if url is not None and url not in _unsigned:
        _unsigned.add(url)
        log.warning(
            "%s is read without a trusted key: whoever serves that address decides what the weights are. Sign the run, "
            "and name its public key (--trust, DELTAWIRE_TRUST; docs/signed.md)",
            url,
        )


def web_addresses(store: Store) -> Iterator[str]:
    """Yield the addresses of a store that are on the web, behind caches of others."""
    urls = store.urls if isinstance(store, MirroredStore) else [store.url]
    return (url for url in urls if url.startswith(("http://", "https://")))


def anywhere(store: Store, work: Callable[[], T], leave: Callable[[MirroredStore], object]) -> T:
    """Do what reads a run. Where it fails because of what is in a bucket, do it once more with each other bucket.

    Raises the first error, which then says what was wrong in each. `leave` makes the next bucket the one in use.
    """
    if not isinstance(store, MirroredStore):
        return work()
    failures: dict[str, DeltawireError] = {}
    try:
        for _ in store.urls:
            try:
                done = work()
                for url, error in failures.items():
                    log.warning("%s cannot be used for now: %s", url, error)
                return done
            except (*DAMAGE, StoreError) as error:
                if error.everywhere or isinstance(error, StoreUnavailable):
                    raise
                failures.setdefault(store.current.url, error)
                leave(store)
    finally:
        if failures:
            store.may_return()
    said = [f"{url}: {failures.get(url, 'no answer, or not the same run')}" for url in store.urls]
    first = next(iter(failures.values()))
    first.args, first.everywhere = (f"none of {len(said)} buckets can be used: {'; '.join(said)}",), True
    raise first


def read_each(read: Callable[[int], T], numbers: Iterable[int]) -> Iterator[tuple[int, T | DeltawireError]]:
    """Read many small objects, several at a time; where one is damaged, its error comes in its place."""

    def one(number: int) -> T | DeltawireError:
        try:
            return read(number)
        except DAMAGE as error:
            return error

    wanted = list(numbers)
    return zip(wanted, ordered_map(one, wanted, REQUESTS), strict=True)


def lean(manifest: Manifest) -> Manifest:
    """Return a manifest without what only people read."""
    return msgspec.structs.replace(manifest, recent=(), metrics={}, timings={})


def blobs(manifest: Manifest) -> Iterator[Blob | File]:
    """Every object that a manifest names."""
    yield from manifest.files
    for link in manifest.links:
        yield from link.objects


def ranges(versions: Iterable[int]) -> str:
    """Numbers as text for people: 1–3, 7."""
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in ranges_of(versions))


class _Past:
    """Reads summaries of older versions, newest first, within limits on bytes and requests.

    A page that ends at E contains what the manifest before E and the pages before it contain together: so where a page
    is lost, the newest manifest below its end is read, and the pages that lead on from there. The bucket is listed
    first, once, so that nothing missing is requested, however large a number a hostile manifest has. Where it cannot be
    listed, what is missing is requested too, within the same limit.

    The same takes the place of a long page of which little is needed. What is pruned is not needed.
    """

    def __init__(self, run: Run, pruned: Pruned) -> None:
        self._run, self._pruned = run, pruned
        self._room = keys.LIMITS[keys.HISTORY]
        self._reads = LOST_MANIFESTS
        self._listing: tuple[Sequence[int], set[str] | None] | None = None
        """Versions in ascending order, and the keys of pages; None where those are unknown."""

    def before(self, version: int, since: int) -> Iterator[Summary]:
        """Yield the versions from `since` to the last multiple of 16 up to `version`."""
        for end in history.pages(version, since):
            needed = self._pruned.extent(max(end - history.span(end), since), end)
            if not needed:
                continue
            if history.span(end) >= LONG_PAGE and 4 * (end - needed.start) <= history.span(end):
                with suppress(*DAMAGE):
                    last = self._run.manifest(needed[-1])
                    yield from (*last.recent, last.summary())
                    yield from self.before(last.version, needed.start)
                    continue
            page = self._page(end)
            if page is not None:
                yield from page.versions
            else:
                yield from self._lost(needed.start, needed.stop)

    def _page(self, end: int) -> history.Page | None:
        key = keys.history(end)
        if self._listing is not None and self._listing[1] is not None and key not in self._listing[1]:
            return None
        try:
            data = self._run.store.get(key, limit=self._room).data
            self._room -= len(data)
            return self._run._parse_page(end, data)
        except (ObjectNotFound, ManifestError, ObjectTooLarge) as error:
            log.warning("cannot use %s (%s): reading manifests instead", key, error)
            return None

    def _lost(self, first: int, end: int) -> Iterator[Summary]:
        """Yield the versions from `first` up to, not including, `end`."""
        if self._listing is None:
            self._listing = self._list()
        listed = self._listing[0]
        while (at := bisect_left(listed, end) - 1) >= 0 and (version := listed[at]) >= first:
            if not self._reads:
                log.warning(
                    "%s: versions before %d are left out, too much of history is lost", self._run.store.url, end
                )
                return
            self._reads -= 1
            try:
                manifest = self._run.manifest(version)
            except DAMAGE:
                end = version
                continue
            yield from (*manifest.recent, manifest.summary())
            yield from self.before(version, first)
            return

    def _list(self) -> tuple[Sequence[int], set[str] | None]:
        try:
            pages = {item.key for item in self._run.store.list(keys.HISTORY)}
            return self._run.listed(), pages
        except Unsupported:
            return range(keys.MAX_VERSION), None
