"""The store protocol: all that deltawire asks of a bucket.

Keys are relative to the run's prefix and use `/`; one that could mean another place (`..`, an empty part, a backslash,
a control character, …) is UnsafeName in every store. A reader never sees part of an object: a `put` becomes visible
whole or not at all. Lower-layer errors are translated once, here in `store/`, into `deltawire.core.errors`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from deltawire.core.errors import ObjectTooLarge


def check_size(where: str, size: int, limit: int | None) -> None:
    """ObjectTooLarge, before a byte of it is read."""
    if limit is not None and size > limit:
        raise ObjectTooLarge(
            f"{where} has {size:,} bytes; what belongs there has at most {limit:,}: somebody else wrote it"
        )


LISTED = 1_000_000
"""Objects that a listing may have: they are held in memory, some 300 bytes each."""


def check_listing(where: str, count: int) -> None:
    """Before more than LISTED objects are held: whoever can write to a bucket must not fill a reader's memory."""
    if count > LISTED:
        raise ObjectTooLarge(f"{where} has more than {LISTED:,} objects, all that a listing may have: delete some")


Chunks = Callable[[], Iterable[bytes | memoryview]]
"""What `put` streams: called once per attempt, so that a retry starts from the first byte again.

A chunk is bytes or a contiguous memoryview; its buffer may be filled anew once the next chunk is asked for. What the
producer raises reaches the caller of `put` unchanged, and nothing becomes visible.
"""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    # relative to the store's root
    size: int
    # bytes
    modified: float
    # seconds since the epoch, by the store's clock
    etag: str | None = None
    # changes whenever the content does; None where the store has no such thing


@dataclass(frozen=True, slots=True)
class Fetched:
    data: bytes
    etag: str | None


Level = tuple[list[str], list[ObjectInfo]]
"""The folders and the objects right below a prefix."""


@runtime_checkable
class Store(Protocol):
    url: str
    """Where this store is, as the user named it, without credentials."""

    creates_exclusively: bool
    """Whether put_if_absent holds against writers on other machines. Where not, a writer must claim the run first.

    What a protocol promises; a publisher tries whether the server behind it keeps the promise."""

    def get(self, key: str, *, limit: int | None = None) -> Fetched:
        """The whole object. ObjectNotFound if there is none; ObjectTooLarge, unread, beyond `limit` bytes."""
        ...

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Fetched | None:
        """As `get`, or None when it still has this etag (a conditional request where the store knows one)."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`. TruncatedFile when the object ends before that."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size and etag without the bytes. ObjectNotFound if there is none."""
        ...

    def put(self, key: str, data: bytes | Chunks) -> None:
        """Create or replace. Durable when it returns; other readers see the old object or the new one, never a mix."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Create, or AlreadyExists. Of any number of concurrent callers exactly one succeeds."""
        ...

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in key order, those greater than `after` only."""
        ...

    def delete(self, key: str) -> None:
        """Remove; no error when it is already gone."""
        ...


@runtime_checkable
class Announcing(Protocol):
    """A store that tells its readers when something changed, so that they need not ask."""

    def announcements(self, stop: threading.Event) -> Iterator[str]:
        """Keys as others change them, for as long as the store talks; an empty one means "something, look yourself".

        Best effort: late, twice or not at all, so a reader goes on asking, only less often. An empty key comes first,
        as soon as the store listens. Ends when `stop` is set. StoreUnavailable when the connection breaks (call again),
        Unsupported when this store never tells.
        """
        ...


@runtime_checkable
class Sweeping(Protocol):
    """A store in which a writer that died leaves something behind that no listing shows."""

    def sweep(self, older_than_s: float = 86_400.0, *, at: float | None = None) -> int:
        """Remove what was begun longer ago than this and never finished; returns how many things.

        `at` is the present time by the store's clock; by this machine's where it is not given.
        """
        ...


@runtime_checkable
class Browsing(Protocol):
    """A store that can show one level at a time, without everything below it."""

    def folders(self, prefix: str = "") -> Level:
        """What lies right below `prefix`, which is empty or ends in "/": folders, as keys that end in "/", and objects.

        In key order. A folder that could not be part of a key is left out.
        """
        ...


@runtime_checkable
class Settling(Protocol):
    """A store that may not show an object at once."""

    settles_s: float
    """How many seconds after a put others may still be told that there is no such object."""
