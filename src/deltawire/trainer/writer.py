"""Writes a version: encode, put, commit. Every rank encodes and puts what it holds; rank 0 commits.

    begin      rank 0 decides which version it is and how it is encoded
    encode     each rank its own changes, block by block, into a file of its own
    put        delta, perhaps an anchor: each rank under a key with its number
    commit     rank 0, once all ranks have put theirs

A version that fails on one rank fails on all. A process that publishes alone is a group of one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from ..bucket.run import Run
from ..core import full, keys
from ..core.change import Region
from ..core.digest import StateDigest, of_rows
from ..core.dtypes import Bits, lookup
from ..core.errors import DigestMismatch
from ..core.manifest import Blob, Link, Manifest
from ..core.sparse import DataFile, DeltaWriter
from .captures import Capture
from .collective import Group
from .commit import Committer
from .pending import C, PendingVersion, Published
from .policy import AnchorPolicy, Choice, EncodingChooser


@dataclass(frozen=True, slots=True)
class Terms:
    """Facts about a version that all ranks need before they encode it."""

    version: int
    writer: str
    """Mark of the writer in its keys."""
    choice: Choice
    committed: bool
    """Whether an earlier commit, which had failed, turned out to be in the bucket."""
    base: str
    """Digest of the version before, from which a delta starts; empty for the first."""
    alone: bool
    """Whether it follows no version that can be read: it has full weights and no delta."""


@dataclass(frozen=True, slots=True)
class _Put:
    """Objects that one rank has put into the bucket."""

    links: list[Link]
    changed: int
    """Number of changed weights, also where no delta was put."""
    timings: dict[str, float]
    weights: StateDigest | None
    """State digest of the full weights that were put, or the share of this rank in it; None without an anchor."""


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
    ) -> None:
        """`committer` is that of rank 0, None on all others. `regions` are those that this rank writes."""
        self.run = run
        self._group, self._regions = group, regions
        self._committer = cast(Committer, committer)
        """Used within `on_rank_0` only."""
        self._chooser, self._policy = chooser, policy
        self._shard: keys.Shard = (group.rank, group.size)

    def begin(self, changed: int | None, alone: bool) -> Terms:
        """Agree on the next version. `changed` is the number of changed weights where it is known before encoding.
        `alone`: what changed since the version before is unknown."""

        def terms() -> Terms:
            committer = self._committer
            caught_up = committer.catch_up()
            version = committer.next_version
            schema, is_adapter = committer.run.schema, committer.run.info.base is not None
            choice = self._chooser.choose(schema.elements, changed, schema.nbytes if is_adapter else None)
            base = committer.versions[version - 1].digest if version else ""
            return Terms(version, committer.writer, choice, caught_up is not None, base, alone or not version)

        return self._group.on_rank_0(terms)

    def write(self, terms: Terms, pending: PendingVersion[C]) -> Published:
        """Encode, put and commit. Raises on all ranks if it fails on one."""
        group, changes, began = self._group, pending.changes, time.perf_counter()
        # where full weights go out anyway and it is known what changed, no delta is encoded
        no_delta = isinstance(changes, Capture) and terms.choice.full
        alone = terms.alone or no_delta

        def encode() -> tuple[StateDigest | None, StateDigest]:
            base = changes.base()
            for block in () if alone else changes.encode(terms.choice.encoding):
                delta.add(block)
            return base, changes.digest()

        def wanted(size: int) -> tuple[bool, bool]:
            full_size, versions, policy = self.run.schema.nbytes, self._committer.versions_of_key, self._policy
            anchor = policy.wants_anchor(terms.version, size, full_size, versions)
            if anchor and not alone:
                # without waiting for an anchor: a version is committed as soon as its delta is uploaded
                index = self._committer.keeper_index()
                anchor = not policy.leaves_to_keeper(terms.version, size, full_size, versions, index)
            with_delta = not alone and self._policy.wants_delta(size, full_size, anchor)
            return with_delta, anchor or not with_delta

        with DeltaWriter(terms.choice.encoding) as delta:
            encoded = group.together(encode)
            if not terms.alone:
                # every rank compares, so that all of them raise
                _require_equal(terms.version - 1, terms.base, [base for base, _ in encoded])
            digest = sum((reached for _, reached in encoded), StateDigest())
            run, version, elements = self.run.info.run, terms.version, self.run.schema.elements
            file = group.each(lambda: delta.finish_link(run, version - 1, version, terms.base, str(digest), elements))
            pending.timings["encode"] = time.perf_counter() - began
            size = sum(group.exchange(file.size))
            kinds = group.on_rank_0(lambda: wanted(size))
            put = group.together(lambda: self._put(terms, pending, kinds, file))
        if kinds[1]:
            _require_equal(terms.version, str(digest), [each.weights for each in put])
        manifest = group.on_rank_0(lambda: self._commit(terms, pending, digest, put))
        return Published(
            manifest.version,
            manifest.digest,
            manifest.changed,
            sum(link.bytes for link in manifest.links),
            tuple(link.kind for link in manifest.links),
            dict(manifest.timings),
            elements,
            len(pending.handles),
        )

    def _put(self, terms: Terms, pending: PendingVersion[C], kinds: tuple[bool, bool], file: DataFile) -> _Put:
        """Upload what this rank has: a delta, an anchor or both, as `kinds` says.

        Rank 0 puts its files even where it holds nothing: a link names an object.
        """
        version, choice, first = terms.version, terms.choice, self._group.rank == 0
        with_delta, with_anchor = kinds
        links: list[Link] = []
        reached = StateDigest() if with_anchor else None
        size, clock = 0, time.perf_counter()

        def upload(key: str, file: DataFile) -> Blob:
            nonlocal size
            size += file.size

            def chunks() -> Iterator[bytes]:
                for chunk in file.chunks():
                    yield chunk
                    if pending.progress:
                        pending.progress("put", len(chunk), size)

            self.run.store.put(key, chunks)
            return file.blob(key)

        if with_delta and (file.changed or first):
            blob = upload(keys.delta(version - 1, version, terms.writer, self._shard), file)
            links.append(Link("delta", version - 1, (blob,), choice.encoding, choice.why, file.changed))
            elements = sum(r.units // lookup(r.tensor.dtype).units_per_element for r in self._regions)
            self._chooser.learn(choice, file, elements, pending.timings["encode"], time.perf_counter() - clock)
        if with_anchor and (self._regions or first):
            metadata = {"run": self.run.info.run, "model_version": str(version)}
            metadata["total_params"] = str(self.run.schema.elements)
            anchored: dict[Region, StateDigest] = {}

            def weights(region: Region) -> Bits:
                bits, tensor = pending.changes.weights(region), region.tensor
                if region not in anchored:
                    rows = bits.reshape(region.rows, region.columns)
                    anchored[region] = of_rows(tensor.name, rows, region.start, tensor.columns)
                return bits

            whole = full.anchor(self._regions, weights, metadata)
            began = time.perf_counter()
            blob = upload(keys.anchor(version, terms.writer, self._shard), whole)
            reached = sum(anchored.values(), StateDigest())
            self._chooser.learn_link(whole.size, time.perf_counter() - began)
            links.append(Link("anchor", None, (blob,), why=choice.why if choice.full else ""))
        pending.timings["put"] = time.perf_counter() - clock
        # a delta that was not encoded has not counted them
        changes = pending.changes
        changed = changes.result().elements if not file.changed and isinstance(changes, Capture) else file.changed
        return _Put(links, changed, pending.timings, reached)

    def _commit(self, terms: Terms, pending: PendingVersion[C], digest: StateDigest, put: Sequence[_Put]) -> Manifest:
        """On rank 0: commit what all ranks have put."""
        links: dict[str, Link] = {}
        for link in (link for each in put for link in each.links):
            same = links.get(link.kind)
            if same is not None:
                objects, count = same.objects + link.objects, same.changed + link.changed
                link = msgspec.structs.replace(link, objects=objects, changed=count)
            links[link.kind] = link
        changed = self.run.schema.elements if terms.alone else sum(each.changed for each in put)
        # of the slowest rank
        timings = {name: max(each.timings[name] for each in put) for name in pending.timings}
        return self._committer.commit(pending, links.values(), str(digest), changed, timings)


def _require_equal(version: int, expected: str, found: Sequence[StateDigest | None]) -> None:
    """Compare the two digests of a version: that of its chain, and the sum over the weights of all ranks."""
    weights = str(sum((share for share in found if share is not None), StateDigest()))
    if weights != expected:
        raise DigestMismatch(
            version,
            expected,
            weights,
            "what this trainer captured contradicts what it published, so nothing was committed; the next version will "
            "be an anchor",
        )
