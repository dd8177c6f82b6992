"""The store protocol: everything that deltawire needs from a bucket.

Keys are relative to the run's prefix and use `/`. A key that could lead elsewhere (`..`, an empty part, a backslash, a
control character, …) raises UnsafeName in every store. A reader never sees part of an object: a `put` becomes visible
as a whole or not at all. Errors of storage libraries are translated once, in `store/`, into `deltawire.errors`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from deltawire.core.errors import ObjectTooLarge, UnsafeName

LISTED = 1_000_000
"""Most objects of a listing: they are kept in memory, about 300 bytes each."""

TEMP_PREFIX = ".tmp-"
"""Prefix of unfinished local files. No key may use it: such an object would be hidden, and deleted by `sweep`."""

# A file system allows 255 bytes per part; S3 allows 1024 for the whole key, of which a run's prefix needs some.
_MAX_PART_BYTES = 255
_MAX_KEY_BYTES = 900
_UNSAFE = tuple(
    (re.compile(pattern), problem)
    for pattern, problem in (
        (r"\A\Z", "it is empty"),
        ("[\ud800-\udfff]", "it is not valid Unicode"),
        (r"\A/", "it starts with '/'; keys are relative to the run"),
        (r"//|/\Z", "it has an empty part"),
        (r"(?:\A|/)\.\.?(?:/|\Z)", "it has a '.' or '..' part"),
        (rf"(?:\A|/){re.escape(TEMP_PREFIX)}", f"parts that start with {TEMP_PREFIX!r} are kept for unfinished files"),
        (r"\\", "it contains a backslash, which some systems read as '/'"),
        (r"[\x00-\x1f\x7f]", "it contains a control character"),
    )
)
"""Patterns that no key may contain, and why."""


def check_size(where: str, size: int, limit: int | None) -> None:
    """Raise ObjectTooLarge if an object has more than `limit` bytes."""
    if limit is not None and size > limit:
        raise ObjectTooLarge(
            f"{where} has {size:,} bytes; what belongs there has at most {limit:,}: something else wrote it"
        )


def is_transient(status: int) -> bool:
    """Whether an HTTP status may be temporary. 501 is not: the server does not implement the request."""
    return status in (408, 425, 429) or (status >= 500 and status != 501)


SLOW_DOWN_S = 5.0
"""Seconds that a store is left alone when it is overloaded and does not say for how long."""


def rest_after(status: int) -> float | None:
    """Seconds to leave a store alone after an HTTP status that has no Retry-After; None where a retry may come soon."""
    return SLOW_DOWN_S if status in (429, 503) else None


def check_range(start: int, length: int) -> None:
    """Raise ValueError for a range with a negative start or length."""
    if start < 0 or length < 0:
        raise ValueError(f"a range needs start ≥ 0 and length ≥ 0, got {start} and {length}")


def check_listing(where: str, count: int) -> None:
    """Raise ObjectTooLarge beyond LISTED objects: a hostile writer must not exhaust a reader's memory."""
    if count > LISTED:
        raise ObjectTooLarge(f"{where} has more than {LISTED:,} objects, all that a listing may have: delete some")


Chunks = Callable[[], Iterable[bytes | memoryview]]
"""A function that yields the data of a `put` in parts; `Store.put` says what it must keep."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object without its bytes."""

    key: str
    """Relative to the store's root."""
    size: int
    """Bytes."""
    modified: float
    """Seconds since the epoch, by the store's clock."""
    etag: str | None = None
    """Changes whenever the content does; None if the store has no etags."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """An object's bytes and their etag, which belong together."""

    data: bytes
    etag: str | None


Level = tuple[list[str], list[ObjectInfo]]
"""The folders and the objects right below a prefix."""


@runtime_checkable
class Store(Protocol):
    """A place that holds the objects of a run. Methods may be called from several threads at once.

    url                  the address, as the user wrote it, without credentials
    creates_exclusively  whether put_if_absent also excludes writers on other machines; if not, a writer claims the run
                         first. This is what the protocol promises; a publisher tests whether the server keeps it
    """

    url: str
    creates_exclusively: bool

    def get(self, key: str, *, limit: int | None = None) -> Fetched:
        """Return the whole object.

        Raises ObjectNotFound if there is none, and ObjectTooLarge, without reading it, beyond `limit` bytes.
        """
        ...

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Fetched | None:
        """Return the object as `get` does, or None if it still has this etag. A conditional request if possible."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`.

        Raises TruncatedFile if the object ends before `start + length`, also where `length` is 0 or both are numbers
        of more than 64 bits, which may come from a hostile header; ObjectNotFound if there is no object; ValueError
        for negative numbers (`check_range`).
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Return size, time and etag without the bytes. Raises ObjectNotFound if there is no object."""
        ...

    def put(self, key: str, data: bytes | Chunks) -> None:
        """Create or replace an object. Durable on return; readers see the old object or the new one, never a mix.

        `data` may be a function that yields the bytes in parts (`Chunks`): it is called once per attempt, so that a
        retry starts at the first byte. A part is bytes or a contiguous memoryview, whose buffer may be reused once the
        next part is requested. An exception of the function reaches the caller unchanged, and nothing becomes visible.
        """
        ...

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Create an object, or raise AlreadyExists. Of several concurrent callers exactly one succeeds."""
        ...

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects whose key starts with `prefix` and is greater than `after`, in key order."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object. No error if there is none."""
        ...


@runtime_checkable
class Announcing(Protocol):
    """A store that announces changes to its readers."""

    def announcements(self, stop: threading.Event) -> Iterator[str]:
        """Yield the keys that others change. An empty key means that something changed, without saying what.

        Best effort: an announcement may be late, repeated or missing, so readers still poll, but less often. An empty
        key comes first, as soon as the connection is open. Ends when `stop` is set. Raises StoreUnavailable if the
        connection breaks (call again), and Unsupported if this store has no announcements.
        """
        ...


@runtime_checkable
class Sweeping(Protocol):
    """A store in which a killed writer leaves unfinished files that no listing shows, and which can delete them."""

    def sweep(self, older_than_s: float = 86_400.0, *, at: float | None = None) -> int:
        """Delete unfinished files that are older than this, and return their number.

        `at` is the current time by the store's clock; by default this machine's.
        """
        ...


@runtime_checkable
class Browsing(Protocol):
    """A store that can list one level, without everything below it."""

    def folders(self, prefix: str = "") -> Level:
        """Return the folders and objects directly below `prefix`, which is empty or ends in "/", in key order.

        Folders are keys that end in "/". A folder that could not be part of a key is left out.
        """
        ...


@runtime_checkable
class Settling(Protocol):
    """A store in which a new object may not be visible at once."""

    settles_s: float
    """Seconds after a put in which others may still get ObjectNotFound."""


@runtime_checkable
class Cached(Protocol):
    """A store that is read through caches of others, one of which may have kept an object that was damaged."""

    def doubt(self, key: str) -> None:
        """Read this object past all caches from now on."""
        ...


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
# The rules are the same for every store, so that a run can move between them.


def check_key(key: str) -> str:
    """Return the key. Raises UnsafeName if a store could take it for another place."""
    if problem := _problem(key):
        raise UnsafeName(f"object key {key!r}: {problem}")
    return key


def is_key(key: str) -> bool:
    return not _problem(key)


def check_prefix(prefix: str) -> str:
    """The folder a list prefix points into: "" or ending in "/". What follows it is compared as text only."""
    folder = prefix[: prefix.rfind("/") + 1]
    if folder:
        check_key(folder[:-1])
    return folder


def _problem(key: str) -> str:
    """Say why this can be no key; empty if it can."""
    for pattern, problem in _UNSAFE:
        if pattern.search(key):
            return problem
    if len(key.encode()) > _MAX_KEY_BYTES:
        return f"it is longer than {_MAX_KEY_BYTES} bytes"
    if max(map(len, key.encode().split(b"/"))) > _MAX_PART_BYTES:
        return f"it has a part longer than {_MAX_PART_BYTES} bytes"
    return ""
