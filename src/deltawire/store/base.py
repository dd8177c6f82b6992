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

from deltawire.core.errors import ObjectTooLarge, UnsafeName

LISTED = 1_000_000
"""Objects that a listing may have: they are held in memory, some 300 bytes each."""

TEMP_PREFIX = ".tmp-"
"""How a half-written local file is named. No key may use it, or an object could be swept away or hidden."""

# A file system allows 255 bytes per part; S3 allows 1024 for the whole key, of which a run's prefix needs some.
_MAX_PART_BYTES = 255
_MAX_KEY_BYTES = 900


def check_size(where: str, size: int, limit: int | None) -> None:
    """Raise ObjectTooLarge before a byte of it is read."""
    if limit is not None and size > limit:
        raise ObjectTooLarge(
            f"{where} has {size:,} bytes; what belongs there has at most {limit:,}: somebody else wrote it"
        )


def check_range(start: int, length: int) -> None:
    if start < 0 or length < 0:
        raise ValueError(f"a range needs start ≥ 0 and length ≥ 0, got {start} and {length}")


def check_listing(where: str, count: int) -> None:
    """Raise ObjectTooLarge beyond LISTED objects: whoever can write to a bucket must not fill a reader's memory."""
    if count > LISTED:
        raise ObjectTooLarge(f"{where} has more than {LISTED:,} objects, all that a listing may have: delete some")


Chunks = Callable[[], Iterable[bytes | memoryview]]
"""What `put` streams: called once per attempt, so that a retry starts from the first byte again.

A chunk is bytes or a contiguous memoryview; its buffer may be filled anew once the next chunk is asked for. What the
producer raises reaches the caller of `put` unchanged, and nothing becomes visible.
"""


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
    """Changes whenever the content does; None where the store has no etags."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """An object's bytes and their etag, which belong together."""

    data: bytes
    etag: str | None


Level = tuple[list[str], list[ObjectInfo]]
"""The folders and the objects right below a prefix."""


@runtime_checkable
class Store(Protocol):
    """Where a run is kept. Methods may be called from several threads at once."""

    url: str
    """The address, as the user wrote it, without credentials."""

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


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
# The rules are the same for every store, so that a run can move between them.


def check_key(key: str) -> str:
    """The key itself, or UnsafeName when some store could read it as another place than it says."""
    problem = _key_problem(key)
    if problem:
        raise UnsafeName(f"object key {key!r}: {problem}")
    return key


def is_key(key: str) -> bool:
    return _key_problem(key) is None


def check_prefix(prefix: str) -> str:
    """The folder a list prefix points into: "" or ending in "/". What follows it is compared as text only."""
    folder = prefix[: prefix.rfind("/") + 1]
    if folder:
        check_key(folder[:-1])
    return folder


def is_addressable(part: str) -> bool:
    """Whether a file found in a folder could have been put there under a key."""
    return _part_problem(part) is None


def _key_problem(key: str) -> str | None:
    if not key:
        return "it is empty"
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if size > _MAX_KEY_BYTES:
        return f"it is longer than {_MAX_KEY_BYTES} bytes"
    if key.startswith("/"):
        return "it starts with '/'; keys are relative to the run"
    for part in key.split("/"):
        problem = _part_problem(part)
        if problem:
            return problem
    return None


def _part_problem(part: str) -> str | None:
    if not part:
        return "it has an empty part"
    if part in (".", ".."):
        return f"it has a {part!r} part"
    if part.startswith(TEMP_PREFIX):
        return f"parts that start with {TEMP_PREFIX!r} are kept for unfinished files"
    for char in part:
        if char < " " or char == "\x7f":
            return f"it contains the control character {char!r}"
        if char == "\\":
            return "it contains a backslash, which some systems read as '/'"
        if "\ud800" <= char <= "\udfff":
            return "it is not valid Unicode"
    if len(part.encode()) > _MAX_PART_BYTES:
        return f"it has a part longer than {_MAX_PART_BYTES} bytes"
    return None
