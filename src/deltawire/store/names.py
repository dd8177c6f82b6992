"""Which keys a store accepts. The rules are the same for every store, so that a run can move between them."""

from __future__ import annotations

from deltawire.core.errors import UnsafeName

TEMP_PREFIX = ".tmp-"
"""How a half-written local file is named. No key may use it, or an object could be swept away or hidden."""

# A file system allows 255 bytes per part; S3 allows 1024 for the whole key, of which a run's prefix needs some.
_MAX_PART_BYTES = 255
_MAX_KEY_BYTES = 900


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
