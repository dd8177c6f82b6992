"""Writes a version: encode, put, commit. Every rank encodes and puts what it holds; rank 0 commits.

    begin      rank 0 says which version it is and how it is encoded
    encode     each rank its own changes, block by block, into a file of its own
    put        delta, perhaps an anchor, perhaps a skip delta: each rank under a key with its number
    commit     rank 0, once all ranks have put theirs

A version that fails on one rank fails on all. A process that publishes alone is a group of one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..bucket.run import Run
from ..core import full, keys
from ..core.change import Region
from ..core.digest import StateDigest
from ..core.dtypes import lookup
from ..core.manifest import Blob, Link, Manifest
from ..core.sparse import BASE_DIGEST, DIGEST, DataFile, DeltaWriter, EncodedBlock
from .captures import Changes
from .collective import Group
from .commit import Committer, Companions, put_object
from .policy import AnchorPolicy, Choice, EncodingChooser

log = logging.getLogger("deltawire")

Progress = Callable[[str, int, int], None]
"""(phase, bytes since the last call, bytes of the phase as far as known); the phases are "fetch" (of what to diff
against), "detect" and "put"."""


@dataclass(frozen=True, slots=True)
class Published:
    """A committed version, as `PublishHandle.result` returns it and `on_version` gets it."""

    version: int
    digest: str
    """State digest of all its weights."""
    changed: int
    """Number of weights that differ from the version before."""
    bytes: int
    """Bytes uploaded for this version."""
    kinds: tuple[str, ...]
    """What was uploaded: "delta", "anchor", "reference"."""
    timings: dict[str, float]
    """Seconds: held (the training loop was blocked), encode, put."""
    elements: int = 0
    """Number of weights of the model."""
    publishes: int = 1
    """Calls of `publish` that this version carries: more than one where the bucket was slower than the trainer."""

    @classmethod
    def of(cls, manifest: Manifest, elements: int, publishes: int) -> Published:
        return cls(
            manifest.version,
            manifest.digest,
            manifest.changed,
            sum(link.bytes for link in manifest.links),
            tuple(link.kind for link in manifest.links),
            dict(manifest.timings),
            elements,
            publishes,
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Flat figures for a trainer's own log."""
        return {
            **{f"{name}_ms": 1e3 * seconds for name, seconds in self.timings.items()},
            "bytes": self.bytes,
            "changed_percent": 100 * self.density,
            "publishes": self.publishes,
        }

    @property
    def density(self) -> float:
        """Share of the weights that differ from the version before, 0 to 1."""
        return self.changed / max(self.elements, 1)

    def report(self) -> dict[str, float]:
        """Figures under the names `deltawire/…`, as `wandb.log` and `log` of a trackio run take them."""
        return {
            "deltawire/version": float(self.version),
            "deltawire/changed": float(self.changed),
            "deltawire/density": self.density,
            "deltawire/bytes": float(self.bytes),
            **{f"deltawire/{name}_ms": 1e3 * seconds for name, seconds in self.timings.items()},
        }


@dataclass(frozen=True, slots=True)
class Terms:
    """What all ranks must know about the version before they encode it."""

    version: int
    writer: str
    """Mark of the writer in its keys."""
    choice: Choice
    committed: int | None
    """Version of an earlier, failed commit, which turned out to be in the bucket."""
    bases: dict[int, str]
    """Digests of the versions that a delta of this one may start from."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A delta over several versions, to be put beside the ordinary one."""

    base: int
    encode: Callable[[str], Iterator[EncodedBlock]]
    """Given the encoding, the coded blocks of all that changed since the base."""


@dataclass(slots=True)
class Draft:
    """A version on its way: everything about it that is not yet in the bucket."""

    changes: Changes
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    skip: Skip | None = None
    progress: Progress | None = None
    publishes: int = 1


@dataclass(frozen=True, slots=True)
class _Wanted:
    delta: bool
    anchor: bool


@dataclass(frozen=True, slots=True)
class _Put:
    """What one rank has put into the bucket."""

    changed: int
    delta: Blob | None
    anchor: Blob | None
    skip: Blob | None
    skip_changed: int
    timings: dict[str, float]


class VersionWriter:
    """Writes versions of a run, one after the other. All ranks call the same methods in the same order."""

    def __init__(
        self,
        run: Run,
        committer: Committer | None,
        group: Group,
        regions: Sequence[Region],
        chooser: EncodingChooser,
        policy: AnchorPolicy,
        files: Companions,
    ) -> None:
        """`committer` is that of rank 0, None on all others. `regions` are those that this rank writes."""
        self._run, self._committer, self._group, self._regions = run, committer, group, regions
        self._chooser, self._policy, self._files = chooser, policy, files
        self._shard: keys.Shard = (group.rank, group.size)
        self.start_over = False
        """The version before cannot be read: the next one stands alone, as an anchor."""

    def begin(self, changed: int | None, skip_base: int | None) -> Terms:
        """Agree on the next version. `changed` is the number of changed weights where it is known before encoding."""

        def terms() -> Terms:
            committer = self._rank_0()
            caught_up = committer.catch_up()
            version = committer.next_version
            choice = self._chooser.choose(committer.run.schema.elements, changed)
            bases = {v: committer.versions[v].digest for v in (version - 1, skip_base) if v in committer.versions}
            return Terms(version, committer.writer, choice, caught_up.version if caught_up else None, bases)

        return self._group.first(terms)

    def write(self, terms: Terms, draft: Draft) -> Published:
        """Encode, put and commit. Raises on all ranks if it fails on one."""
        group, began = self._group, time.perf_counter()
        with DeltaWriter(terms.choice.encoding) as delta:
            digest = sum(group.together(lambda: self._encode(terms, draft, delta)), StateDigest())
            metadata = self._metadata(terms, terms.version - 1, digest, delta.changed)
            file = group.each(lambda: delta.finish(metadata))
            draft.timings["encode"] = time.perf_counter() - began
            size = sum(group.exchange(file.size))
            wanted = group.first(lambda: self._wanted(terms.version, size))
            put = group.together(lambda: self._put(terms, draft, digest, wanted, file))
        manifest = group.first(lambda: self._commit(terms, draft, digest, put))
        self.start_over = False
        return Published.of(manifest, self._run.schema.elements, draft.publishes)

    def _encode(self, terms: Terms, draft: Draft, delta: DeltaWriter) -> StateDigest:
        # the first version has full weights alone, and so has one that starts over
        if terms.version and not self.start_over:
            for block in draft.changes.encode(terms.choice.encoding):
                delta.add(block)
        return draft.changes.digest()

    def _wanted(self, version: int, size: int) -> _Wanted:
        full_size, versions = self._run.schema.nbytes, self._rank_0().versions
        anchor = self._policy.wants_anchor(version, size, full_size, versions)
        delta = bool(version) and self._policy.wants_delta(size, full_size, anchor) and not self.start_over
        return _Wanted(delta, anchor or not delta)

    def _put(self, terms: Terms, draft: Draft, digest: StateDigest, wanted: _Wanted, file: DataFile) -> _Put:
        """Upload what this rank has. Rank 0 puts its files even where it holds nothing: a link names an object."""
        store, version, first = self._run.store, terms.version, self._group.rank == 0
        size, clock = 0, time.perf_counter()
        delta = anchor = skip = None
        skip_changed = 0

        def progress(n: int) -> None:
            if draft.progress:
                draft.progress("put", n, size)

        if wanted.delta and (file.changed or first):
            size += file.size
            delta = put_object(store, keys.delta(version - 1, version, terms.writer, self._shard), file, progress)
            elements = sum(r.units // lookup(r.tensor.dtype).units_per_element for r in self._regions)
            uploaded = time.perf_counter() - clock
            self._chooser.learn(terms.choice, file, elements, draft.timings["encode"], uploaded)
        if wanted.anchor and (self._regions or first):
            metadata = {"run": self._run.info.run, "model_version": str(version)}
            metadata["total_params"] = str(self._run.schema.elements)
            whole = full.anchor_of(self._regions, draft.changes.weights, metadata)
            size += whole.size
            anchor = put_object(store, keys.anchor(version, terms.writer, self._shard), whole, progress)
        if draft.skip is not None:
            base = draft.skip.base
            with DeltaWriter(terms.choice.encoding) as writer:
                for block in draft.skip.encode(terms.choice.encoding):
                    writer.add(block)
                spanning = writer.finish(self._metadata(terms, base, digest, writer.changed))
                skip = put_object(store, keys.delta(base, version, terms.writer, self._shard), spanning)
                skip_changed = spanning.changed
        draft.timings["put"] = time.perf_counter() - clock
        return _Put(file.changed, delta, anchor, skip, skip_changed, draft.timings)

    def _metadata(self, terms: Terms, base: int, digest: StateDigest, changed: int) -> dict[str, str]:
        total = max(self._run.schema.elements, 1)
        return {
            "run": self._run.info.run,
            "model_version": str(terms.version),
            "base_version": str(base),
            BASE_DIGEST: terms.bases.get(base, ""),
            DIGEST: str(digest),
            "total_params": str(total),
            "sparsity": f"{1 - changed / total:.6f}",
        }

    def _commit(self, terms: Terms, draft: Draft, digest: StateDigest, put: Sequence[_Put]) -> Manifest:
        committer, choice, elements = self._rank_0(), terms.choice, self._run.schema.elements
        changed = sum(each.changed for each in put)
        deltas = tuple(each.delta for each in put if each.delta)
        anchors = tuple(each.anchor for each in put if each.anchor)
        skips = tuple(each.skip for each in put if each.skip)
        links = []
        if deltas:
            links.append(Link("delta", terms.version - 1, deltas, choice.encoding, choice.why, changed))
        if anchors:
            links.append(Link("anchor", None, anchors))
        if draft.skip is not None:
            skip_changed = sum(each.skip_changed for each in put)
            links.append(Link("delta", draft.skip.base, skips, choice.encoding, choice.why, skip_changed))
        manifest = committer.commit(
            tuple(links),
            digest=str(digest),
            changed=changed if terms.version and not self.start_over else elements,
            step=draft.step,
            metrics=draft.metrics,
            # of the slowest rank
            timings={name: max(each.timings[name] for each in put) for name in draft.timings},
            files=committer.put_files(self._files),
        )
        say(manifest, elements, draft.publishes)
        return manifest

    def _rank_0(self) -> Committer:
        if self._committer is None:
            raise RuntimeError("only rank 0 knows the versions of the run")
        return self._committer


def tell(listener: Callable[[Published], object] | None, published: Published) -> None:
    """Call a user's `on_version`. What it raises is logged; on the publisher's own thread that includes sys.exit()."""
    if listener is None:
        return
    try:
        listener(published)
    except BaseException as error:
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise
        log.exception("on_version failed for version %d, which is published all the same", published.version)


def say(manifest: Manifest, elements: int, publishes: int = 1) -> None:
    """One line per version."""
    kinds = "+".join(link.kind for link in manifest.links)
    size = sum(blob.size for link in manifest.links for blob in link.objects)
    times = "  ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in manifest.timings.items())
    parent = f" ← v{manifest.parent}" if manifest.parent is not None else ""
    share = 100 * manifest.changed / max(elements, 1)
    merged = f"  {publishes} publishes" if publishes > 1 else ""
    mb = size / 1e6
    log.info("v%d%s  %s  %.2f %% changed  %.1f MB  %s%s", manifest.version, parent, kinds, share, mb, times, merged)
