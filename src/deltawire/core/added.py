"""Links that are added to versions after their commit, by a keeper: anchors and skip deltas.

A manifest is never rewritten. Links that are made later are announced in pages (`added/<first>-<last>.<mark>.json`),
which are not rewritten either, and in one small index (`added.json`), which is: it names the pages and contains the
newest links itself. Each page covers at least twice the versions of the next one, or they are merged, so there are
O(log n) of them. The index is a hint, like head: where it is lost, the pages are listed.

Skip deltas are made in a pattern of base 4 (`skip_spans`), so that a path between any two versions is short: up through
multiples of 4, 16, 64 …, and down again.

    from 13 to 87:   13 → 16 → 64 → 80 → 84 → 87
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from . import keys
from .errors import ForeignObject, ManifestError
from .manifest import Link, Manifest, RunInfo, Summary, SummaryLink, Version, check_link, parse
from .signing import Endorsement

LEVELS = 6
"""Levels of skip deltas: the units of their spans are 1, 4, 16 … 1024 versions."""

RECENT = 64
"""Links that the index contains before they become a page."""

PAGE_LINKS = 8192
"""Links of a page, at most."""

MAX_PAGES = 256
"""Pages that an index may name: a million versions."""

MAX_DAMAGED = 256
"""Damaged objects that an index names, those of the newest versions."""


class AddedLink(msgspec.Struct, frozen=True, array_like=True):
    """A link, and the version that it leads to."""

    version: Version
    link: Link

    @property
    def way(self) -> tuple[int, str, int | None]:
        return self.version, self.link.kind, self.link.base


class AddedPage(msgspec.Struct, frozen=True, omit_defaults=True):
    """added/<first>-<last>.<mark>.json: links of the versions from `first` to `last`. Written once."""

    run: str
    links: Annotated[tuple[AddedLink, ...], Meta(max_length=PAGE_LINKS)]
    signer: str = ""
    """Public key of the keeper; empty in an unsigned run."""
    delegation: Endorsement | None = None
    """Statement of the run's key that this is a keeper's."""
    signature: str = ""
    """Signature of all bytes before it, see signing.py."""


class AddedIndex(msgspec.Struct, frozen=True, omit_defaults=True):
    """added.json: where the added links are. Replaced with every version that a keeper has dealt with."""

    run: str
    keeper: str
    """Name of the keeper that wrote it, as in its heartbeat."""
    at: float
    """When, by the clock of that keeper."""
    done: Version
    """The newest version that a keeper has dealt with."""
    pages: Annotated[tuple[str, ...], Meta(max_length=MAX_PAGES)] = ()
    """Keys of the pages, oldest first."""
    recent: Annotated[tuple[AddedLink, ...], Meta(max_length=PAGE_LINKS)] = ()
    """Links that are in no page yet."""
    anchor: AddedLink | None = None
    """The newest anchor, which is in a page too."""
    damaged: dict[str, str | None] = {}
    """Data that a keeper could not use: its key, and the etag of what was there, so that prune does not rely on it."""
    signer: str = ""
    delegation: Endorsement | None = None
    signature: str = ""
    """Signature of all bytes before it, as on a page."""


def parse_index(data: bytes, run: RunInfo) -> AddedIndex:
    index = parse(data, AddedIndex, keys.ADDED)
    if index.run != run.run:
        raise ForeignObject(f"{keys.ADDED} belongs to run {index.run[:32]!r}, not to {run.run!r}")
    for key in index.pages:
        if keys.added_range(key) is None:
            raise ForeignObject(f"{keys.ADDED} names {key[:120]!r}, which is not a page of added links")
    anchor = () if index.anchor is None else (index.anchor,)
    if anchor and anchor[0].link.kind != "anchor":
        raise ManifestError(f"{keys.ADDED} names a {anchor[0].link.kind} as its newest anchor")
    _check_links((*index.recent, *anchor), keys.ADDED, (0, keys.MAX_VERSION), run)
    return index


def parse_page(data: bytes, key: str, run: RunInfo) -> AddedPage:
    page = parse(data, AddedPage, key)
    covered = keys.added_range(key)
    if page.run != run.run or covered is None:
        raise ForeignObject(f"{key[:120]} belongs to run {page.run[:32]!r}, not to {run.run!r}")
    _check_links(page.links, key, covered, run)
    return page


def _check_links(links: Sequence[AddedLink], what: str, covered: tuple[int, int], run: RunInfo) -> None:
    first, last = covered
    for added in links:
        if not first <= added.version <= last:
            raise ManifestError(f"{what} names a link to version {added.version}, which does not belong there")
        check_link(added.link, added.version, what, run.schema)
        # a keeper writes each link as one object, under the key of its version
        if [keys.data_version(blob.key) for blob in added.link.objects] != [added.version]:
            raise ManifestError(f"{what} names a link to version {added.version} that is not one object of it")


def in_summaries(versions: Mapping[int, Summary], links: Iterable[AddedLink]) -> dict[int, Summary]:
    """Return summaries with the links that were added later, as `in_manifest` does for a manifest."""
    found = dict(versions)
    for added in links:
        summary, link = found.get(added.version), added.link
        if summary is None or any((x.kind, x.base) == (link.kind, link.base) for x in summary.links):
            continue
        told = SummaryLink(link.kind, link.base, link.bytes, len(link.objects), link.encoding)
        found[added.version] = msgspec.structs.replace(summary, links=(*summary.links, told))
    return found


def in_manifest(manifest: Manifest, links: Iterable[Link]) -> Manifest:
    """Return a manifest with the links that were added later, after its own.

    A link of the same kind and base as one of the manifest is left out: the manifest's own is the one to use.
    """
    own = {(link.kind, link.base) for link in manifest.links}
    more = tuple(link for link in links if (link.kind, link.base) not in own)
    return msgspec.structs.replace(manifest, links=manifest.links + more) if more else manifest


def skip_spans(version: int, levels: int = LEVELS) -> list[int]:
    """Spans of the skip deltas that lead to a version, shortest first.

    Each level has a unit u = 4^level. A multiple of u gets a delta from the multiple of u before it and one from the
    multiple of 4u before it; a multiple of 4u also gets one from each multiple of u since the last.

    A path therefore climbs with one delta per level, takes at most two on its highest level, and descends with one per
    level. All skip deltas together take about ten times the bytes of the trainer's deltas, less where the same weights
    change again.
    """
    found: list[int] = []
    unit = 1
    for _ in range(levels):
        if version == 0 or version % unit:
            break
        rest = version // unit % 4
        found += [m * unit for m in (sorted({1, rest}) if rest else (1, 2, 3))]
        unit *= 4
    return [span for span in found if 1 < span <= version]
