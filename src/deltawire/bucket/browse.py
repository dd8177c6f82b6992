"""The runs below an address, found one level at a time: their objects are never listed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ..core import keys
from ..core.errors import DeltawireError, Unsupported
from ..core.parallel import REQUESTS, ordered_map
from ..store import Store, open_store
from ..store.base import Browsing
from .run import Run
from .versions import address_only

MAX_FOLDERS = 10_000
"""Folders that are read: untrusted contents of a bucket must not take unlimited time."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run as a listing shows it.

    [found.url for found in dw.runs("s3://runs") if found.newest is not None]
    """

    url: str
    newest: int | None = None
    """Its newest version; None where there is none yet."""
    created: float | None = None
    """When that was published, by the trainer's clock."""
    bytes: int = 0
    """Size of the weights in full."""
    elements: int = 0
    model: str = ""
    stored: int | None = None
    """Bytes of all its objects, where that was asked for."""
    error: str = ""
    """Why it cannot be read; empty where it can."""


def find(store: Store, depth: int) -> list[str]:
    """Prefixes of the runs at most `depth` folders below the address; "" is the address itself.

    A run's own folders are not looked into, but a run may have others below it: one at the root of a bucket has all.
    """
    if not isinstance(store, Browsing):
        raise Unsupported(f"{store.url} cannot list one level at a time")
    browsing: Browsing = store
    found: list[str] = []
    level, looked = [""], 0
    for left in range(depth, -1, -1):
        level = level[: MAX_FOLDERS - looked]
        looked += len(level)
        below: list[str] = []
        for prefix, (folders, objects) in zip(level, ordered_map(browsing.folders, level, REQUESTS), strict=True):
            if any(item.key == prefix + keys.RUN for item in objects):
                found.append(prefix)
                folders = [folder for folder in folders if folder[len(prefix) :] not in keys.FOLDERS]
            if left:
                below += folders
        level = below
    return sorted(found)


def below(store: Store, prefix: str) -> str:
    """The address of a prefix of a store."""
    place, mark, query = store.url.partition("?")
    return place.rstrip("/") + (f"/{quote(prefix.rstrip('/'))}" if prefix else "") + mark + query


def look(url: str, *, stored: bool = False) -> ListedRun:
    """The row of `runs` about one run, in a handful of small requests. Problems are returned, not raised."""
    try:
        run = Run.open(open_store(url))
        newest = run.newest()
        return ListedRun(
            url,
            newest,
            run.manifest(newest).created if newest is not None else None,
            run.schema.nbytes,
            run.schema.elements,
            run.info.model,
            _stored(run.store) if stored else None,
        )
    except DeltawireError as error:
        return ListedRun(url, error=str(error))


def _stored(store: Store) -> int:
    """Bytes of a run's own objects."""
    return sum(
        item.size for item in store.list() if "/" not in item.key or item.key.partition("/")[0] + "/" in keys.FOLDERS
    )


def runs(where: str | Path | Store, depth: int = 3, *, stored: bool = False) -> list[ListedRun]:
    """Find the runs at most `depth` folders below an address. One that cannot be read is listed with the reason.

        for run in dw.runs("s3://runs"):
            print(run.url, run.newest)

    With `stored` also how many bytes each stores, which lists all of its objects.
    """
    store = open_store(address_only(where))
    return [*ordered_map(lambda prefix: look(below(store, prefix), stored=stored), find(store, depth), REQUESTS)]
