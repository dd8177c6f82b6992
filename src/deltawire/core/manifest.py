"""The small JSON objects of a run: run, manifest, head, pruned versions, tags, writer, heartbeats, roster.

All are read from a bucket and so are untrusted: `parse_*` checks types and meaning before they are used.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from . import keys
from .errors import ForeignObject, ManifestError, ModelTooLarge, UnknownFormat
from .schema import Schema, check_file_name
from .signing import Endorsement, is_public
from .typed_json import decode

FORMAT = 1

SUMMARY_METRICS = 6
"""Metrics that `log` can show without reading the manifest."""

RECENT = 16
"""Summaries that a manifest may carry (history.STRIDE)."""

MAX_LINKS = 64
"""Ways to reach one version; a publisher makes three at most."""

MAX_METRICS = 1000
"""Figures that may go with a version, and as many timings."""

MAX_ROTATIONS = 64
"""Keys that a run may have had before its present one."""

MAX_BASE_DIGESTS = 8
"""State digests of one base model, in different dtypes."""

MAX_FILES = 1000
MAX_FILE = 64 << 20
"""Bytes of one companion file: a config, a tokenizer."""

MAX_ALL_FILES = 1 << 30
"""Bytes of all companion files of a version."""

MAX_HEAD = 128 << 20
"""Bytes of the header and index of a data object."""

MAX_RENEWAL = 60.0
"""Seconds between two renewals of writer.json, at most: a new publisher waits for three of them."""

# What the types below say of numbers, lengths and text is checked when an object is parsed.

Version = Annotated[int, Meta(ge=0, le=keys.MAX_VERSION)]
Hex128 = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
"""A state digest, or the hash of an object."""

Figures = Annotated[dict[str, float], Meta(max_length=MAX_METRICS)]

Kind = Literal["anchor", "delta", "reference"]


class Blob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A data object: where, how large, and the blake3 hash of its bytes."""

    key: str
    size: Annotated[int, Meta(ge=8)]
    hash: Hex128
    head_size: Annotated[int, Meta(ge=0, le=MAX_HEAD)] = 0
    """Header and index, for readers that fetch a part; 0 where there is nothing to check them by."""
    head_hash: str = ""


class Link(msgspec.Struct, frozen=True, omit_defaults=True):
    """One way to reach a version: the full weights, a delta from a base, or a checkpoint everybody can get.

    run.manifest(41).main.bytes     # what a follower fetches for version 41
    """

    kind: Kind
    base: int | None = None
    """The version a delta starts from."""
    objects: tuple[Blob, ...] = ()
    encoding: str = ""
    why: str = ""
    """Why `auto` chose the encoding."""
    changed: int = 0
    """Elements that differ from the base."""
    source: str = ""
    """A reference's folder or hub id."""
    nbytes: Annotated[int, Meta(ge=0)] = 0
    """Bytes of the weights, for a reference."""

    @property
    def bytes(self) -> int:
        """Bytes to fetch for it."""
        return self.nbytes + sum(blob.size for blob in self.objects)


class File(msgspec.Struct, frozen=True):
    """A small file that goes with the weights: config, tokenizer."""

    name: str
    key: str
    size: int
    hash: Hex128


class SummaryLink(msgspec.Struct, frozen=True, array_like=True):
    kind: Kind
    base: int | None
    bytes: int
    objects: int
    encoding: str
    why: str = ""


class Summary(msgspec.Struct, frozen=True, array_like=True):
    """A version in one line: what `deltawire log` shows of it, and what readers choose their way by.

    for version, summary in run.timeline(41).items():
        print(version, summary.changed, summary.main.bytes)
    """

    version: int
    parent: int | None
    digest: str
    created: float
    step: int | None
    changed: int
    links: Annotated[tuple[SummaryLink, ...], Meta(max_length=MAX_LINKS)]
    metrics: dict[str, float] = {}
    """The first few of the manifest's."""

    @property
    def main(self) -> SummaryLink:
        """The link that followers use: the delta from the parent, or else the first one."""
        return _main(self.links, self.parent)


class Origin(msgspec.Struct, frozen=True):
    """The weights that a version of a derived run was computed from."""

    view: str
    """The function, such as fp8-block."""
    run: str
    """Id of the run it is derived from."""
    version: Version
    digest: Hex128
    """State digest of that version."""


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The commit of a version. Created last and once, never overwritten.

    manifest = run.manifest(41)
    print(manifest.digest, manifest.changed, manifest.metrics)
    """

    run: str
    version: int
    parent: int | None
    schema: str
    """Hash of the run's schema."""
    digest: Hex128
    """State digest of the version's weights."""
    links: Annotated[tuple[Link, ...], Meta(min_length=1, max_length=MAX_LINKS)]
    created: float
    """Seconds since the epoch."""
    writer: str
    format: int = FORMAT
    step: int | None = None
    """The step number of the trainer."""
    changed: int = 0
    """Elements that differ from the parent."""
    metrics: Figures = {}
    """Figures that the trainer wants `log` to show."""
    timings: Figures = {}
    """Seconds: detect, encode, put."""
    files: Annotated[tuple[File, ...], Meta(max_length=MAX_FILES)] = ()
    recent: Annotated[tuple[Summary, ...], Meta(max_length=RECENT)] = ()
    """The versions since the last page of history."""
    origin: Origin | None = None
    """The version that it was derived from; None unless the run is derived."""
    signer: str = ""
    """The public key that signed it; empty in an unsigned run."""
    rotations: Annotated[tuple[Endorsement, ...], Meta(max_length=MAX_ROTATIONS)] = ()
    """How the run's key was passed on, oldest first; the last one may name a key that has signed nothing yet."""
    signature: str = ""
    """Signature of all bytes before it, see signing.py. Checked by readers with trusted keys."""

    def summary(self) -> Summary:
        """Return the version in one line, as later manifests and pages of history carry it."""
        links = tuple(SummaryLink(x.kind, x.base, x.bytes, len(x.objects), x.encoding, x.why) for x in self.links)
        # every summary is read again and again, so it carries a few figures and no long names
        shown = [(name, value) for name, value in self.metrics.items() if len(name) <= 40][:SUMMARY_METRICS]
        return Summary(
            self.version, self.parent, self.digest, self.created, self.step, self.changed, links, dict(shown)
        )

    @property
    def main(self) -> Link:
        """The link that followers use: the delta from the parent, or else the first one."""
        return _main(self.links, self.parent)

    def link(self, kind: str, base: int | None) -> Link:
        """Return the link of this kind from this base, which is None for full weights. ManifestError if there is none.

        Links that were added later are not in a manifest.
        """
        for link in self.links:
            if link.kind == kind and link.base == base:
                return link
        raise ManifestError(f"version {self.version} has no {kind} link from {base}")


L = TypeVar("L", Link, SummaryLink)


def _main(links: Sequence[L], parent: int | None) -> L:
    return next((x for x in links if x.kind == "delta" and x.base == parent), links[0])


class Base(msgspec.Struct, frozen=True, omit_defaults=True):
    """The model that a run's adapters are trained on."""

    model: str
    """Name or path of it, as the adapter's config has it; only for people."""
    digests: Annotated[tuple[Hex128, ...], Meta(max_length=MAX_BASE_DIGESTS)] = ()
    """State digests of its checkpoint: in the trainer's dtype and, where that is wider, in those of 16 bits. Empty if
    the weights of the checkpoint were not in the trainer's memory, as those of a quantised model."""

    def fits(self, digest: str) -> bool | None:
        """Whether a checkpoint with this state digest is the base model; None if that is unknown."""
        return digest in self.digests if self.digests else None

    def same(self, other: Base) -> bool:
        """Whether both are one checkpoint.

        The dtype in memory may be another one, but two models that differ in it are not equal because both round to the
        same. Both have digests.
        """
        return bool(self.fits(other.digests[0]) or other.fits(self.digests[0]))

    def __str__(self) -> str:
        name = self.model[:200] or "a base model that adapter_config.json does not name"
        return f"{name} ({', '.join(self.digests) or 'its digest is unknown'})"


class RunInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """run.json: created once, with the run."""

    run: str
    """Random id: a rerun under the same name is another run."""
    created: float
    schema: Schema
    schema_hash: str
    format: int = FORMAT
    model: str = ""
    """The user's name for the model."""
    base: Base | None = None
    """The base model; None unless this is a run of adapters."""


class Head(msgspec.Struct, frozen=True):
    """head.json: the newest version, as a hint. Only manifests count."""

    run: str
    version: Version


class Pruned(msgspec.Struct, frozen=True):
    """pruned.json: versions that no reader may start with any more. Written before their objects are deleted."""

    run: str
    versions: tuple[tuple[int, int], ...]
    """First and last version of each range, ascending. Runs are pruned from below, so there are few."""

    def __post_init__(self) -> None:
        _check_ranges(self.versions)

    @classmethod
    def of(cls, run: str, versions: Iterable[int]) -> Pruned:
        return cls(run, ranges_of(versions))

    def also(self, versions: Iterable[int]) -> Pruned:
        return self.also_ranges(ranges_of(versions))

    def also_ranges(self, ranges: Iterable[tuple[int, int]]) -> Pruned:
        found: list[tuple[int, int]] = []
        for first, last in sorted((*self.versions, *ranges)):
            if found and first <= found[-1][1] + 1:
                found[-1] = found[-1][0], max(found[-1][1], last)
            else:
                found.append((first, last))
        return Pruned(self.run, tuple(found))

    def without(self, versions: Iterable[int]) -> Pruned:
        found = [*self.versions]
        for first, last in ranges_of(versions):
            parts = (part for a, b in found for part in ((a, min(b, first - 1)), (max(a, last + 1), b)))
            found = [(a, b) for a, b in parts if a <= b]
        return Pruned(self.run, tuple(found))

    def __contains__(self, version: object) -> bool:
        if not isinstance(version, int):
            return False
        # never expanded: a range is untrusted and may be of any length
        at = bisect_right(self.versions, (version, math.inf))
        return at > 0 and version <= self.versions[at - 1][1]

    def extent(self, first: int, end: int) -> range:
        """The versions from `first` up to, not including, `end`, without those at both ends that are pruned."""
        for a, b in self.versions:
            if a <= first <= b:
                first = b + 1
        for a, b in reversed(self.versions):
            if a < end <= b + 1:
                end = a
        return range(first, max(first, end))

    @property
    def last(self) -> int:
        return self.versions[-1][1] if self.versions else -1


class Tag(msgspec.Struct, frozen=True):
    """tags/<name>.json: a name for a version, which prune then keeps.

    run.tags()["best"].version
    """

    run: str
    version: Version
    at: float
    """When it was set: seconds since the epoch, by the clock of the machine that set it."""

    @staticmethod
    def check_name(name: str) -> None:
        """Raise ValueError for what cannot be the name of a tag."""
        keys.tag(name)


class Writer(msgspec.Struct, frozen=True, omit_defaults=True):
    """writer.json: the publisher that writes to the run, renewed while it runs. No clocks are compared: what matters is
    whether the object changes."""

    epoch: Annotated[int, Meta(ge=1, le=1 << 53)]
    """One more than that of the writer before. Of two writers the one with the higher epoch is right."""
    writer: Annotated[str, Meta(max_length=64)]
    """Mark of this publisher."""
    host: Annotated[str, Meta(max_length=256)]
    pid: int
    program: Annotated[str, Meta(max_length=256)]
    """Name of the script or command."""
    held_s: Annotated[float, Meta(ge=0)]
    """Seconds since this publisher took the run. Different in each renewal."""
    renews_s: Annotated[float, Meta(gt=0, le=MAX_RENEWAL)]
    """Seconds between renewals."""
    ended: bool = False
    """Whether the publisher was closed."""

    def __str__(self) -> str:
        minutes, seconds = divmod(int(self.held_s), 60)
        hours, minutes = divmod(minutes, 60)
        days, hours = divmod(hours, 24)
        held = f"{minutes} min" if minutes else f"{seconds} s"
        held = f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else held
        host, program = (
            "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[:80])
            for text in (self.host, self.program)
        )
        return f"{program or 'a program'} on {host or 'an unknown host'} (process {self.pid}, for {held})"


class Delegated(msgspec.Struct, frozen=True):
    """delegated.json: keepers whose added links a signed run accepts. Each statement carries its own signature."""

    run: str
    keepers: tuple[Endorsement, ...]


class SyncRecord(msgspec.Struct, frozen=True, array_like=True):
    """A sync of a replica, as its heartbeat reports it. Times are by the replica's clock.

    [sync.seconds for sync in beat.syncs if not sync.error]
    """

    version: int
    """The version it went to."""
    previous: int | None
    """The version before; None where the weights had none."""
    at: float
    """When it ended: seconds since the epoch."""
    seconds: float
    bytes: int
    """Bytes fetched."""
    timings: dict[str, float] = {}
    """Seconds by phase: fetch, verify, decode, stage, apply, prove; from engines also pause, audit and others."""
    error: str = ""
    """Why it failed; empty if it did not."""
    times: int = 1
    """How often in a row it failed in this way."""


KEEPER = "keeper"
"""Role of a keeper in its heartbeats."""


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """replicas/<id>.json: the state that a replica reports.

    for _, beat in run.heartbeats():
        ...                         # beat.replica, beat.version, beat.healthy, beat.error
    """

    run: str
    replica: str
    version: Version | None
    """The version whose digest its weights matched."""
    newest: Version | None
    healthy: bool
    at: float
    error: str = ""
    timings: dict[str, float] = {}
    reading: tuple[tuple[int, int], ...] = ()
    """Ranges of versions whose objects it is fetching: prune keeps them while the heartbeat is fresh."""
    syncs: tuple[SyncRecord, ...] = ()
    """The latest syncs, oldest first."""
    address: str = ""
    """Where clients reach its server, host:port; empty where there is none. Untrusted: see `bucket/addresses.py`."""
    role: str = ""
    """KEEPER of a keeper, which serves nobody; empty of all others."""

    @property
    def is_keeper(self) -> bool:
        """Whether a keeper reports, which serves nobody."""
        return self.role == KEEPER

    def __post_init__(self) -> None:
        _check_ranges(self.reading)


class Roster(msgspec.Struct, frozen=True):
    """roster.json: the heartbeats of a large fleet, as a keeper read them.

    if (found := run.roster()) is not None:
        _, roster = found           # roster.replicas, roster.modified
    """

    run: str
    replicas: tuple[Heartbeat, ...]
    """Each with its latest sync at most, without its run, timings and what it reads."""
    modified: tuple[float, ...]
    """When each was written, by the store's clock."""
    left_out: int = 0
    """Number of heartbeats that are not in it."""

    def __post_init__(self) -> None:
        if len(self.replicas) != len(self.modified):
            raise ValueError("a roster has as many times as replicas")
        for beat in self.replicas:
            keys.replica(beat.replica)


T = TypeVar("T")


def dump(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value)


def parse(data: bytes, kind: type[T], what: str) -> T:
    return decode(data, kind, what, ManifestError)


def parse_run(data: bytes, max_model: int | None = None) -> RunInfo:
    """Parse run.json. Raises ModelTooLarge if the run declares more than `max_model` bytes of weights."""
    _check_format(data, keys.RUN)
    info = parse(data, RunInfo, keys.RUN)
    info.schema.check()
    if max_model is not None and info.schema.nbytes > max_model:
        raise ModelTooLarge(
            f"the run declares a model of {info.schema.nbytes / 1e9:,.1f} GB, and {max_model / 1e9:,.1f} GB are "
            "allowed here: set DELTAWIRE_MAX_MODEL_GB if the run is to be trusted with more"
        )
    if info.schema.hash != info.schema_hash:
        raise ManifestError(f"the schema in {keys.RUN} does not have the hash it states")
    return info


def parse_manifest(data: bytes, version: int, run: RunInfo) -> Manifest:
    """Parse the manifest of a version of this run. Raises if it contradicts the version, the run or itself."""
    what = keys.manifest(version)
    _check_format(data, what)
    manifest = parse(data, Manifest, what)
    if manifest.run != run.run or manifest.schema != run.schema_hash:
        raise ForeignObject(f"{what} belongs to run {manifest.run[:32]!r}, not to {run.run!r}")
    if manifest.version != version:
        raise ManifestError(f"{what} says it is version {manifest.version}")
    if (manifest.parent is None) != (version == 0) or (
        manifest.parent is not None and not 0 <= manifest.parent < version
    ):
        raise ManifestError(f"{what} cannot have the parent {manifest.parent}")
    if manifest.signer and not is_public(manifest.signer):
        raise ManifestError(f"{what} names {manifest.signer[:80]!r} as its signer, which is no public key")
    for link in manifest.links:
        check_link(link, version, what, run.schema)
    _check_distinct(what, "a link", [(link.kind, link.base) for link in manifest.links])
    # an object that is named forty times would be fetched forty times
    _check_distinct(what, "an object", [blob.key for link in manifest.links for blob in link.objects])
    _check_files(manifest.files, what)
    return manifest


def _check_distinct(what: str, thing: str, names: list[Any]) -> None:
    if len(set(names)) != len(names):
        raise ManifestError(f"{what} names {thing} twice")


def _check_files(files: tuple[File, ...], what: str) -> None:
    for file in files:
        check_file_name(file.name)
        if not keys.is_file(file.key):
            raise ForeignObject(f"{what} names {file.key[:120]!r}, which is not a file of this run")
        if file.key != keys.file(file.hash) or not 0 <= file.size <= MAX_FILE:
            raise ManifestError(
                f"{what} names the file {file.name[:80]!r} of {file.size:,} bytes; at most {MAX_FILE:,} may go with "
                "the weights, under a key that is their hash"
            )
    _check_distinct(what, "a file", [file.name for file in files])
    if sum(file.size for file in files) > MAX_ALL_FILES:
        raise ManifestError(f"{what} names more than {MAX_ALL_FILES:,} bytes of files")


def check_link(link: Link, version: int, what: str, schema: Schema) -> None:
    """Raise ManifestError or ForeignObject if this cannot be a link of the version. `what` is the record it is in."""
    if (link.base is not None) != (link.kind == "delta"):
        raise ManifestError(f"{what} has a {link.kind} link with base {link.base}")
    if link.base is not None and not 0 <= link.base < version:
        raise ManifestError(f"{what} has a delta from version {link.base}")
    if (link.kind == "reference") != bool(link.source) or (link.kind == "reference") == bool(link.objects):
        raise ManifestError(f"{what} has a {link.kind} link that names neither objects nor a source, or both")
    for blob in link.objects:
        keys.check_data(blob.key)
    # a delta larger than the full weights is never published
    if link.bytes > 2 * schema.nbytes + (64 << 20):
        raise ManifestError(
            f"{what} has a {link.kind} of {link.bytes:,} bytes; for a model of {schema.nbytes:,} bytes that cannot be"
        )


class _Format(msgspec.Struct):
    format: int = FORMAT


def _check_format(data: bytes, what: str) -> None:
    found = parse(data, _Format, what).format
    if found != FORMAT:
        raise UnknownFormat(f"{what} has format {found}; this build reads {FORMAT}: upgrade deltawire")


def parse_pruned(data: bytes, run: RunInfo) -> Pruned:
    pruned = parse(data, Pruned, keys.PRUNED)
    if pruned.run != run.run:
        raise ManifestError(f"{keys.PRUNED} belongs to another run")
    return pruned


def _check_ranges(found: tuple[tuple[int, int], ...]) -> None:
    """Raise ValueError, which makes a JSON object not parse, unless these are ascending ranges of versions."""
    end = -1
    for first, last in found:
        if not end < first <= last <= keys.MAX_VERSION:
            said = f"{first} to {last}"[:40]
            raise ValueError(f"it names the versions {said}: not a range of versions, or not after the one before")
        end = last


def ranges_of(versions: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Numbers as ascending ranges (first, last), both included."""
    found: list[tuple[int, int]] = []
    for version in sorted(set(versions)):
        if found and found[-1][1] == version - 1:
            found[-1] = found[-1][0], version
        else:
            found.append((version, version))
    return tuple(found)


def now() -> float:
    return round(time.time(), 3)
