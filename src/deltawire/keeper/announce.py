"""Announce added links (core/added.py): the data is in the bucket, then comes a page, then the index."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ..bucket.run import Run
from ..bucket.trust import LinkSigner
from ..core import keys
from ..core.added import MAX_DAMAGED, PAGE_LINKS, RECENT, AddedIndex, AddedLink, AddedPage
from ..core.errors import DAMAGE
from ..core.manifest import dump, now

log = logging.getLogger("deltawire")


def announce(
    run: Run,
    keeper: str,
    links: Sequence[AddedLink],
    done: int,
    signer: LinkSigner | None = None,
    *,
    at_most: int = keys.MAX_VERSION,
    damaged: Mapping[str, str | None] = MappingProxyType({}),
) -> AddedIndex:
    """Add links to the index, which says that a keeper has dealt with all versions up to `done`.

    at_most   the newest version: an index that says more is wrong, and would keep all keepers from work
    damaged   objects that were found damaged, with their etags

    The index is read again each time, so of two keepers neither undoes what the other one announced before. What two
    announce at the same moment may be lost: then their objects are garbage, and no reader is harmed. Raises RunReplaced
    where there is no index because another run is there now.
    """
    found, written = run.added.index(), run.added.written
    if found is None:
        run.check_present()
    if written is not None and (found is None or found.done < written.done):
        found = written  # the one in the bucket is lost, or not visible yet
    index = found or _recovered(run, keeper, signer)
    recent = {added.way: added for added in (*index.recent, *links)}
    newest = max((x for x in (index.anchor, *links) if x and x.link.kind == "anchor"), key=_version, default=None)
    pages = index.pages
    # an anchor may be all that leads to a version: it is in a page at once, which is found without the index too
    if len(recent) >= RECENT or any(added.link.kind == "anchor" for added in links):
        pages, recent = _with_page(run, pages, [*recent.values()], signer), {}
    done = max(done, min(index.done, at_most))
    bad = _damaged(run, {**index.damaged, **damaged})
    index = AddedIndex(run.info.run, keeper, now(), done, pages, (*recent.values(),), newest, bad)
    _put(run, keys.ADDED, index, signer)
    run.added.written = index
    return index


def tidy(run: Run, keeper: str, signer: LinkSigner | None = None) -> None:
    """Write the pages again without links from or to versions that were pruned."""
    index = run.added.index()
    if index is None:
        return
    links = run.added.between(-1, keys.MAX_VERSION)
    alive = _alive(run, links)
    if 2 * len(alive) >= len(links):
        return
    pages = _put_pages(run, alive, signer)
    damaged = _damaged(run, index.damaged)
    run.added.written = AddedIndex(run.info.run, keeper, now(), index.done, pages, (), index.anchor, damaged)
    _put(run, keys.ADDED, run.added.written, signer)


def _damaged(run: Run, found: dict[str, str | None]) -> dict[str, str | None]:
    """Return the damaged objects of versions that were not pruned, at most MAX_DAMAGED."""
    pruned = run.pruned() if found else ()
    versions = {key: version for key in found if (version := keys.data_version(key)) is not None}
    alive = sorted((v, key) for key, v in versions.items() if v not in pruned)
    return {key: found[key] for _, key in alive[-MAX_DAMAGED:]}


def _version(added: AddedLink) -> int:
    return added.version


def _recovered(run: Run, keeper: str, signer: LinkSigner | None) -> AddedIndex:
    """Make an index of the pages that are there. Without a usable index, all that was announced before is in them.

    They are written again as few pages: most of those that are there were merged into others, and after 10,000 versions
    they are more than an index may name.
    """
    links = _alive(run, run.added.listed())
    newest = max((x for x in links if x.link.kind == "anchor"), key=_version, default=None)
    pages = _put_pages(run, links, signer)
    return AddedIndex(run.info.run, keeper, now(), max(map(_version, links), default=0), pages, (), newest)


def _with_page(run: Run, pages: tuple[str, ...], links: list[AddedLink], signer: LinkSigner | None) -> tuple[str, ...]:
    """Add a page. Older ones that cover less than twice as many versions are merged into it."""

    def covers(found: Sequence[AddedLink]) -> int:
        return max(map(_version, found)) - min(map(_version, found)) + 1

    while pages:
        try:
            older = run.added.page(pages[-1]).links
        except DAMAGE as error:
            log.warning("%s: %s is left out of the index: %s", run.store.url, pages[-1], error)
            pages = pages[:-1]
            continue
        if len(older) + len(links) > PAGE_LINKS or (older and covers(older) >= 2 * covers(links)):
            break
        pages, links = pages[:-1], [*{added.way: added for added in (*older, *links)}.values()]
    alive = _alive(run, links)
    return (*pages, _put_page(run, alive, signer)) if alive else pages


def _alive(run: Run, links: Sequence[AddedLink]) -> list[AddedLink]:
    """The links whose versions were not pruned, in their order."""
    pruned = run.pruned()
    found = [x for x in links if x.version not in pruned and (x.link.base is None or x.link.base not in pruned)]
    return sorted(found, key=_version)


def _put_pages(run: Run, links: list[AddedLink], signer: LinkSigner | None) -> tuple[str, ...]:
    """Write links, in order of their versions, as the fewest pages."""
    starts = range(0, len(links), PAGE_LINKS)
    return tuple(_put_page(run, links[start : start + PAGE_LINKS], signer) for start in starts)


def _put_page(run: Run, links: list[AddedLink], signer: LinkSigner | None) -> str:
    key = keys.added_page(links[0].version, links[-1].version, secrets.token_hex(4))
    _put(run, key, AddedPage(run.info.run, tuple(links)), signer)
    return key


def _put(run: Run, key: str, record: AddedIndex | AddedPage, signer: LinkSigner | None) -> None:
    run.store.put(key, dump(record) if signer is None else signer.seal(record))
