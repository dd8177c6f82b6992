"""Read the links that were added to a run after its versions were committed (core/added.py).

They only help: whatever is damaged in the index or a page is logged and costs requests, never a version. A link is
proven like any other, by the hash of its object and the digest of the version it leads to. That is against errors: who
made the link is known where it is signed, and whoever may sign it is trusted with the weights (trust.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from ..core import keys
from ..core.added import AddedIndex, AddedLink, AddedPage, parse_index, parse_page
from ..core.errors import DeltawireError, ObjectNotFound, ObjectTooLarge, StoreUnavailable, Unsupported
from ..core.manifest import Link
from ..core.parallel import ordered_map
from ..store import ObjectInfo

if TYPE_CHECKING:
    from .run import Run

log = logging.getLogger("deltawire")

R = TypeVar("R", AddedIndex, AddedPage)

REQUESTS = 4
"""Pages that are read at a time."""

PAGES = 32 << 20
"""Bytes of the pages that one plan is made from, the newest first; that is 100,000 links."""

ALL_PAGES = 256 << 20
"""Bytes of all pages of a run, where all are read."""

KEPT_PAGES = 16
"""Pages that stay in memory: they are never rewritten."""

KEPT_LINKS = 1 << 17
"""Links that are remembered for `find`."""


class AddedLinks:
    """The added links of a run. Threads may share it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._index: tuple[str | None, AddedIndex | None] = None, None
        """Etag and content of the index, as last read."""
        self.written: AddedIndex | None = None
        """The index that this process wrote last."""
        self._pages: dict[str, AddedPage] = {}
        self._bytes = 0
        """Bytes of all pages that were read."""
        self._links: dict[tuple[int, str, int | None], Link] = {}
        self._refused = ""
        """Why added links were ignored the last time: that is logged once, not with every version."""

    def index(self) -> AddedIndex | None:
        """Read the index, by a conditional request; None where there is none that can be used."""
        etag, index = self._index
        try:
            got = self._run.store.get_if_changed(keys.ADDED, etag, limit=keys.limit(keys.ADDED))
            if got is not None:
                etag, index = got.etag, None
                index = self._checked(parse_index(got.data, self._run.info), got.data, keys.ADDED)
        except StoreUnavailable:
            raise
        except ObjectNotFound:
            etag = index = None
        except DeltawireError as error:
            if (why := str(error)) != self._refused:
                log.warning("%s: ignoring the added links: %s", self._run.store.url, error)
            self._refused = why
        self._index = etag, index
        return index

    def between(self, first: int, last: int) -> list[AddedLink]:
        """Return the added links to versions after `first` and up to `last`: the index and the pages of these."""
        index = self.index()
        if index is None:
            return []
        anchor = () if index.anchor is None else (index.anchor,)
        return self._remember([*index.recent, *anchor, *self._read(index.pages, first, last)], first, last)

    def listed(self) -> list[AddedLink]:
        """Return the links of all pages that are in the bucket, whatever the index says; none without listings."""
        try:
            pages = self.pages(self._run.store.list(keys.ADDED_PAGES))
        except Unsupported:
            return []
        except ObjectTooLarge as error:
            log.warning("ignoring the added links: %s", error)
            return []
        # the newest first: one that was merged into a later page says the same
        return self._remember(chain.from_iterable([*pages.values()][::-1]), -1, keys.MAX_VERSION)

    def pages(self, listing: Iterable[ObjectInfo]) -> dict[str, tuple[AddedLink, ...]]:
        """Return the links of each page in a listing; none of one that cannot be used.

        Raises ObjectTooLarge beyond ALL_PAGES bytes: what is left out here could be taken for garbage.
        """
        found = {item.key: item.size for item in listing if keys.added_range(item.key) is not None}
        if sum(found.values()) > ALL_PAGES:
            raise ObjectTooLarge(
                f"the pages of added links of {self._run.store.url} take more than {ALL_PAGES:,} bytes, all that is "
                f"read at once: delete those in {keys.ADDED_PAGES} that no keeper wrote"
            )
        return dict(zip(found, ordered_map(self._links_of, found, REQUESTS), strict=True))

    def find(self, version: int, kind: str, base: int | None) -> Link | None:
        """Return a link that was read before."""
        return self._links.get((version, kind, base))

    def page(self, key: str) -> AddedPage:
        if (kept := self._pages.get(key)) is not None:
            return kept
        data = self._run.get(key)
        self._bytes += len(data)
        page = self._checked(parse_page(data, key, self._run.info), data, key)
        self._pages[key] = page
        while len(self._pages) > KEPT_PAGES:
            self._pages.pop(next(iter(self._pages)), None)
        return page

    def _checked(self, record: R, data: bytes, what: str) -> R:
        """Raise SignatureError where only signed links are accepted and these are not."""
        if self._run.trust is not None:
            self._run.trust.check_links(record, data, what)
        return record

    def _read(self, pages: Iterable[str], first: int, last: int) -> list[AddedLink]:
        def covers(key: str) -> bool:
            covered = keys.added_range(key)
            return covered is not None and covered[1] > first and covered[0] <= last

        wanted, before = [key for key in pages if covers(key)], self._bytes
        found: list[AddedLink] = []
        for links in ordered_map(self._links_of, wanted[::-1], REQUESTS):
            found += links
            if self._bytes - before > PAGES:
                log.warning("%s: older added links than fit into %d bytes are left out", self._run.store.url, PAGES)
                break
        return found

    def _links_of(self, page: str) -> tuple[AddedLink, ...]:
        try:
            return self.page(page).links
        except StoreUnavailable:
            raise
        except DeltawireError as error:
            log.warning("%s: ignoring the added links of %s: %s", self._run.store.url, page, error)
            return ()

    def _remember(self, links: Iterable[AddedLink], first: int, last: int) -> list[AddedLink]:
        found: dict[tuple[int, str, int | None], AddedLink] = {}
        for added in links:
            if first < added.version <= last:
                found.setdefault(added.way, added)
        if len(self._links) + len(found) > KEPT_LINKS:
            self._links = {}
        self._links.update((way, added.link) for way, added in found.items())
        return [*found.values()]
