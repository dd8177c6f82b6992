"""Every error deltawire raises on purpose.

DeltawireError
├── FormatError
│   ├── TruncatedFile
│   ├── HeaderError
│   ├── UnknownFormat
│   ├── CorruptStream
│   ├── PositionError
│   ├── CountMismatch
│   ├── HashMismatch
│   └── ObjectTooLarge
├── SchemaError
│   ├── SchemaMismatch
│   ├── UnsafeName
│   ├── ModelTooLarge
│   ├── UnsupportedDtype
│   └── UnsupportedTensor
├── ChainError
│   ├── RunNotFound
│   ├── RunReplaced
│   ├── VersionNotFound
│   ├── ManifestError
│   ├── MissingBase
│   ├── ForeignObject
│   ├── DigestMismatch
│   ├── SignatureError
│   ├── RolledBack
│   └── ReferenceUnavailable
├── NotRestored
├── VersionRefused
├── PublishError
│   ├── WriterConflict
│   ├── RunExists
│   ├── DivergedRun
│   ├── NotTheSigner
│   ├── PublishFailed
│   ├── RankLost
│   ├── OutOfStep
│   └── PublisherClosed
├── StoreError
│   ├── ObjectNotFound
│   ├── AlreadyExists
│   ├── PermissionDenied
│   ├── StoreUnavailable
│   ├── StoreFull
│   ├── Unsupported
│   └── BadURL
├── FolderError
├── Misconfigured
└── MissingExtra

This module is public as `deltawire.errors`.
"""

from __future__ import annotations

from collections.abc import Callable

from .extras import install_command as _install_command

__all__ = [
    "DAMAGE",
    "AlreadyExists",
    "BadURL",
    "ChainError",
    "CorruptStream",
    "CountMismatch",
    "DeltawireError",
    "DigestMismatch",
    "DivergedRun",
    "FolderError",
    "ForeignObject",
    "FormatError",
    "HashMismatch",
    "HeaderError",
    "ManifestError",
    "Misconfigured",
    "MissingBase",
    "MissingExtra",
    "ModelTooLarge",
    "NotRestored",
    "NotTheSigner",
    "ObjectNotFound",
    "ObjectTooLarge",
    "OutOfStep",
    "PermissionDenied",
    "PositionError",
    "PublishError",
    "PublishFailed",
    "PublisherClosed",
    "RankLost",
    "ReferenceUnavailable",
    "RolledBack",
    "RunExists",
    "RunNotFound",
    "RunReplaced",
    "SchemaError",
    "SchemaMismatch",
    "SignatureError",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "TruncatedFile",
    "UnknownFormat",
    "UnsafeName",
    "Unsupported",
    "UnsupportedDtype",
    "UnsupportedTensor",
    "VersionNotFound",
    "VersionRefused",
    "WriterConflict",
]


class DeltawireError(Exception):
    """Base of all errors that deltawire raises on purpose.

    try:
        dw.Run.at("s3://runs/chat@best")
    except dw.DeltawireError as error:
        raise SystemExit(str(error))
    """

    exit_code = 1
    """Exit status of the command line for an error of this class."""

    everywhere = False
    """Whether it was raised for each of several buckets of the run."""


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class FormatError(DeltawireError):
    """Bytes are not what they claim to be. No weight was touched."""

    exit_code = 3


class TruncatedFile(FormatError):
    """A file ends before the data that it promises."""


class HeaderError(FormatError):
    """A safetensors header is too large, is not JSON, or its offsets do not tile the data."""


class UnknownFormat(FormatError):
    """This build does not know the format version or encoding."""


class CorruptStream(FormatError):
    """A compressed stream does not have the size it claims, or does not decode."""


class PositionError(FormatError):
    """Changed positions are out of range or not ascending."""


class CountMismatch(FormatError):
    """The data does not hold the stated number of elements."""


class HashMismatch(FormatError):
    """The bytes of an object do not have the hash that its manifest names."""


class ObjectTooLarge(FormatError):
    """An object is larger than anything it could be. It was not read."""


# ── schema ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class SchemaError(DeltawireError):
    """Tensors cannot be published, or are not those of the run."""

    exit_code = 3


class SchemaMismatch(SchemaError):
    """Names, shapes or dtypes differ from the run's schema."""


class UnsafeName(SchemaError):
    """The name of a tensor, file or object leads out of its folder, or no folder can hold it."""


class ModelTooLarge(SchemaError):
    """A run declares a larger model than is allowed or fits into memory."""


class UnsupportedDtype(SchemaError):
    """A dtype has no integer view."""


class UnsupportedTensor(SchemaError):
    """A tensor has no bits to read: sparse, on the meta device, lazily conjugated, a list."""


# ── chain ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class ChainError(DeltawireError):
    """A version cannot be reached, or is not what its manifest says."""

    exit_code = 3


class RunNotFound(ChainError):
    """There is no run.json at this address."""

    exit_code = 4


class RunReplaced(ChainError):
    """Another run is at this address now."""


class VersionNotFound(ChainError):
    """The run has no such version, or it was pruned."""

    exit_code = 4


class ManifestError(ChainError):
    """A manifest, head or run file does not parse or contradicts itself."""


class MissingBase(ChainError):
    """No path of anchors and deltas leads to the wanted version."""


class ForeignObject(ChainError):
    """A manifest or file belongs to another run or version."""


class DigestMismatch(ChainError):
    """Weights are not, bit for bit, the version that they should be. A `Target` raises it by `update.require(digest)`.

    version   number of that version
    expected  the digest that its manifest names, 32 hex digits
    found     the digest of the weights, the same
    hint      end of the message: what became of the weights, or what to do
    """

    def __init__(self, version: int, expected: str, found: str, hint: str = "") -> None:
        self.version, self.expected, self.found = version, expected, found
        message = f"version {version} should have state digest {expected}, these weights have {found}"
        super().__init__(f"{message}; {hint}" if hint else message)


class SignatureError(ChainError):
    """A version or link is not signed by a key that is trusted here. No weight was touched."""


class RolledBack(ChainError):
    """A signed run ends before a version that was seen here, or has another one of that number.

    An old copy of it was restored. No weight was touched, and a publisher commits nothing.
    """


class ReferenceUnavailable(ChainError):
    """The checkpoint that a run starts from cannot be found here."""

    exit_code = 4


class NotRestored(DeltawireError):
    """Live weights were changed and could not be restored. Nothing may compute with them."""


class VersionRefused(DeltawireError):
    """The engine cannot serve this version. Nothing was changed, and no other object would help.

    has_ended   returns whether the cause is gone, where that can be told
    """

    def __init__(self, message: str, has_ended: Callable[[], bool] = lambda: False) -> None:
        super().__init__(message)
        self.has_ended = has_ended


# ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────────


class PublishError(DeltawireError):
    """A version could not be published."""

    exit_code = 6


class WriterConflict(PublishError):
    """Another publisher writes to the run, has taken it over, or committed this version first."""


class RunExists(PublishError):
    """A run cannot be created because there is one at this address."""


class DivergedRun(PublishError):
    """The newest version of the run is not what this trainer last published."""


class NotTheSigner(PublishError):
    """A publisher does not have the key that signs this run, or the run is unsigned and it has one."""


class PublishFailed(PublishError):
    """A publish in the background failed. Raised by the next call."""


class RankLost(PublishError):
    """Another rank of a sharded trainer does not answer any more."""


class OutOfStep(PublishError):
    """Ranks of a sharded trainer did not publish equally often."""


class PublisherClosed(PublishError):
    """`publish` was called after `close`."""


# ── stores ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class StoreError(DeltawireError):
    """A store could not do what was asked."""

    exit_code = 5


class ObjectNotFound(StoreError):
    """There is no object with this key."""

    exit_code = 4


class AlreadyExists(StoreError):
    """An object with this key exists, and must not be overwritten."""


class PermissionDenied(StoreError):
    """The store refused the credentials or the operation."""


class StoreUnavailable(StoreError):
    """A request timed out, was reset or throttled, or got a 5xx answer. The only error that is worth a retry.

    `retry_after` is the number of seconds to leave the store alone, as it asked, or because it is overloaded; None if a
    retry may come soon.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StoreFull(StoreError):
    """The store has no room left."""


class Unsupported(StoreError):
    """This store does not have the operation."""


class BadURL(StoreError):
    """An address is not one that a store has."""

    exit_code = 2


# ── this machine ─────────────────────────────────────────────────────────────────────────────────────────────────────


class FolderError(DeltawireError):
    """A folder on this machine cannot be written: full, protected, a name too long."""


class Misconfigured(DeltawireError):
    """Settings are wrong, do not fit together, or cannot work here: a port that is in use, a server without a token."""

    exit_code = 2


class MissingExtra(DeltawireError):
    """An optional dependency is not installed. With the name of an extra, the message ends with how to install it."""

    exit_code = 2

    def __init__(self, message: str, extra: str = "") -> None:
        super().__init__(f"{message}: {_install_command(extra)}" if extra else message)


# ── groups ───────────────────────────────────────────────────────────────────────────────────────────────────────────

DAMAGE = (ChainError, FormatError, SchemaError, ObjectNotFound)
"""Errors caused by what is in the bucket, not by the way to it. For `except`."""
