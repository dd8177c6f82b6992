"""A version as people write it: `RUN@41`, `RUN@v41`, `RUN@latest`, `RUN@-2`, and `RUN@best` for a tag.

A tag is a name for a version, an object `tags/<name>.json` of its own. It can be moved and deleted; prune keeps the
version it names.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING

from ..core import keys
from ..core.errors import BadURL, ManifestError, ObjectNotFound, ObjectTooLarge, Unsupported, VersionNotFound
from ..core.manifest import Tag, dump, now
from ..core.parallel import REQUESTS, ordered_map
from ..store import Store

if TYPE_CHECKING:
    from .run import Run

log = logging.getLogger("deltawire")

NEWEST = ("latest", "newest")
_MAX_TAGS = 10_000
_COUNTED = re.compile(r"v?([0-9]{1,18})|(-[1-9][0-9]{0,17})", re.ASCII)
_MARKED = re.compile(r"(.+)@([^/@?]+)", re.DOTALL)


# ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────────


def split_version(text: str) -> tuple[str, str | None]:
    """RUN[@VERSION] → (run, version as written); None where there is none.

        dw.split_version("s3://runs/chat@best")     # ("s3://runs/chat", "best"); `Run.at` opens it too

    The version may stand before or after a `?query`. Only what could be a version or a tag, after the last @ of the
    last part of a path, is one; in an address that itself ends that way, write this @ as %40 in a URL.
    """
    address, query = (text.split("?", 1) if "://" in text and "?" in text else (text, None))[:2]
    rest = "" if query is None else f"?{query}"
    for candidate, after in ((address, rest), (text, "")):
        match = _MARKED.fullmatch(candidate)
        if match and _is_version(match[2], match[1].rpartition("://")[2] if "://" in match[1] else "/"):
            return match[1] + after, match[2]
    return text, None


def _is_version(text: str, before: str) -> bool:
    """`before` is what precedes the @, after the last `://`. Where it has no `/`, the @ may end credentials instead:
    those must stay in the address, which is then refused without being repeated."""
    if "&" in before:
        before = "/"  # another value of the query, not the host of an endpoint
    if "/" not in before and ":" in before and not re.fullmatch(r"[^:]*:[0-9]+|\[[^\]]*\](:[0-9]+)?", before):
        return False
    if _COUNTED.fullmatch(text) or text in NEWEST:
        return True
    return keys.is_tag_name(text) and ("/" in before or ":" in before)


def address_only(where: str | Path | Store) -> str | Store:
    """Return the address of a run. Raises BadURL where a version is written behind it."""
    if not isinstance(where, str):
        return str(where) if isinstance(where, Path) else where
    run, version = split_version(where)
    if version is not None:
        raise BadURL(
            f"this takes a run, not a version of it: leave out @{version}; "
            "if that belongs to the address, write its @ as %40 in a URL (file:///path%40name)"
        )
    return run


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def resolve(run: Run, version: int | str | None) -> int:
    """Return the number of a version that the run has.

    None and "latest" are the newest; -1 is the newest too, -2 the one before it; "41" and "v41" are version 41;
    anything else is a tag. Text may begin with the @ that it has behind an address. Raises VersionNotFound, with the
    versions there are, where the run has no such version.
    """
    return run.anywhere(lambda: _resolve(run, version))


def _resolve(run: Run, version: int | str | None) -> int:
    if isinstance(version, bool) or not isinstance(version, (int, str, NoneType)):
        raise TypeError(f"a version is a number, or text such as 'v41', 'latest' or a tag; not {version!r:.80}")
    text = version.removeprefix("@") if isinstance(version, str) else None
    counted = version if isinstance(version, int) else number(text)
    if counted is None and text is not None and text not in NEWEST:
        if not keys.is_tag_name(text):
            raise VersionNotFound(
                f"{run.store.url}: {text[:80]!r} is not 41, v41, latest, -2 or a tag; {existing(run)}"
            )
        return _existing(run, tagged(run, text).version, f"{text!r} names version ")
    if counted is None or counted < 0:
        newest = run.newest()
        if newest is None:
            raise VersionNotFound(f"the run at {run.store.url} has no version yet")
        back = 0 if counted is None else -1 - counted
        if back > newest:
            raise VersionNotFound(f"{run.store.url}: @{counted} is before its first version; {existing(run)}")
        counted = newest - back
    return _existing(run, counted)


def exact(version: str) -> int | None:
    """The version that is named by its number, as 41 or v41, whether it exists or not; None for any other name."""
    found = number(version)
    return None if found is None or found < 0 else found


def number(text: str | None) -> int | None:
    """Parse "41", "v41" or "-2"; None for anything else."""
    match = _COUNTED.fullmatch(text or "")
    return int(match[1] or match[2]) if match else None


def _existing(run: Run, version: int, said: str = "") -> int:
    try:
        run.manifest(version)
    except VersionNotFound:
        what = f"{said}{version}, which is not there" if said else f"there is no version {version}"
        raise VersionNotFound(f"{run.store.url}: {what}; {existing(run)}") from None
    return version


def existing(run: Run) -> str:
    """Describe the versions and tags of a run, for messages."""
    newest = run.newest()
    if newest is None:
        return "the run has no version yet"
    pruned = run.pruned()
    oldest = next((last + 1 for first, last in pruned.versions if first == 0), 0)
    gaps = any(first > oldest for first, _ in pruned.versions)
    span = f"it has version {newest}" if oldest == newest else f"it has versions {oldest} to {newest}"
    found = ""
    with suppress(Unsupported):  # tags are listed
        found = ", ".join(sorted(tags(run))[:10])
    return span + (" (some between were pruned)" if gaps else "") + (f" and the tags {found}" if found else "")


# ── tags ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def tagged(run: Run, name: str) -> Tag:
    """Read a tag. Raises VersionNotFound where the run has none of this name."""
    if (tag := run.find(keys.tag(name), Tag)) is None:
        raise VersionNotFound(f"{run.store.url} has no tag {name!r}; {existing(run)}")
    return tag


def tags(run: Run, *, strict: bool = False, latest: int | None = None) -> dict[str, Tag]:
    """Read every tag of the run, by name, or the `latest` so many of them.

    One that does not parse is left out with a warning, or is an error with `strict`. Tags of a run that was at this
    address before are left out.
    """
    items = sorted(run.store.list(keys.TAGS), key=lambda item: -item.modified)
    names = [name for item in items if (name := keys.tag_name(item.key)) is not None][:latest]
    names.sort()
    if len(names) > _MAX_TAGS:
        raise ManifestError(f"{run.store.url} has {len(names):,} tags, and at most {_MAX_TAGS:,} are read: delete some")

    def read(name: str) -> Tag | None:
        if not strict:
            return run.hint(keys.tag(name), Tag)
        try:
            return run.find(keys.tag(name), Tag)
        except (ManifestError, ObjectTooLarge) as error:
            raise ManifestError(f"{error}; delete it with `deltawire tag {run.store.url} --delete {name}`") from None

    found = zip(names, ordered_map(read, names, REQUESTS), strict=True)
    return {name: tag for name, tag in found if tag is not None}


def set_tag(run: Run, version: int, name: str) -> Tag | None:
    """Point a tag at a version; returns the tag it replaces.

    Writes the tag and then reads prune's marks; prune marks and then reads the tags: one of the two sees the other.
    """
    key = keys.tag(name)
    try:
        before = tagged(run, name)
    except (VersionNotFound, ManifestError, ObjectTooLarge):
        before = None
    run.store.put(key, dump(Tag(run.info.run, version, now())))
    run.forget(version)
    if version in run.pruned() or not run.exists(version):
        if before is None:
            run.store.delete(key)
        else:
            run.store.put(key, dump(before))
        raise VersionNotFound(f"version {version} of {run.store.url} is being pruned and cannot be tagged any more")
    return before


def delete_tag(run: Run, name: str) -> None:
    """Delete a tag, also one that does not parse. Raises VersionNotFound where there is none of this name."""
    try:
        run.store.head(keys.tag(name))
    except ObjectNotFound:
        raise VersionNotFound(f"{run.store.url} has no tag {name!r}; {existing(run)}") from None
    run.store.delete(keys.tag(name))
