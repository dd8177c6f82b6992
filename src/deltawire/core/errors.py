"""Every error deltawire raises on purpose.

DeltawireError
├── FormatError              bytes that are not what they claim to be; no weight was touched
│   ├── TruncatedFile        the file ends before the data it promises
│   ├── HeaderError          a safetensors header that is too large, not JSON, or whose offsets do not tile the data
│   ├── UnknownFormat        a format version or encoding this build does not know
│   ├── CorruptStream        a compressed stream that lies about its size or does not decode
│   ├── PositionError        changed positions out of range or not ascending
│   ├── CountMismatch        a stated number of elements that the data does not hold
│   ├── HashMismatch         an object whose bytes do not have the hash its manifest names
│   └── ObjectTooLarge       an object larger than anything it could honestly be; not read
├── SchemaError
│   ├── SchemaMismatch       names, shapes or dtypes differ from the run's schema
│   ├── UnsafeName           a tensor, file or object name that could escape its folder, or that no folder can hold
│   ├── ModelTooLarge        a run that declares a larger model than is allowed or fits into memory
│   ├── UnsupportedDtype     a dtype with no integer view
│   └── UnsupportedTensor    something without bits to read: sparse, on the meta device, lazily conjugated, a list
├── ChainError
│   ├── RunNotFound          no run.json at this address
│   ├── RunReplaced          another run lies at this address now
│   ├── VersionNotFound      the run has no such version (or it was pruned)
│   ├── ManifestError        a manifest, head or run file that does not parse or contradicts itself
│   ├── MissingBase          no path of anchors and deltas leads to the wanted version
│   ├── ForeignObject        a manifest or file that belongs to another run or version
│   ├── DigestMismatch       weights that are not, bit for bit, the version they should be
│   └── ReferenceUnavailable the checkpoint a run starts from cannot be found here
├── NotRestored              live weights were changed and could not be put back; nobody may compute with them
├── PublishError
│   ├── WriterConflict       another writer committed this version first
│   ├── RunExists            a run is to be made where there is one
│   ├── DivergedRun          the run's newest version is not what this trainer last published
│   ├── PublishFailed        a background publish failed; raised on the next call
│   ├── RankLost             another rank of a sharded trainer does not answer any more
│   ├── OutOfStep            ranks of a sharded trainer that did not publish equally often
│   └── PublisherClosed      publish() after close()
├── StoreError
│   ├── ObjectNotFound
│   ├── AlreadyExists        put_if_absent found the key taken
│   ├── PermissionDenied
│   ├── StoreUnavailable     the only error worth a retry: time-outs, resets, 5xx, throttling
│   ├── StoreFull
│   ├── Unsupported          the store cannot do what was asked of it
│   └── BadURL
├── FolderError              a folder on this machine that cannot be written: full, protected, a name too long
├── Unguarded                a server that others could reach and stop, without a token
├── CannotListen             a port that is in use, or an address that is not this machine's
├── UntrustedCode            a checkpoint that asks for code of its own to be run; never done
├── Misconfigured            settings that are wrong or do not fit together
└── MissingExtra             an optional dependency is not installed

`exit_code` is what the command line returns for an error of that class.
"""

from __future__ import annotations


class DeltawireError(Exception):
    exit_code = 1


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class FormatError(DeltawireError):
    exit_code = 3


class TruncatedFile(FormatError):
    pass


class HeaderError(FormatError):
    pass


class UnknownFormat(FormatError):
    pass


class CorruptStream(FormatError):
    pass


class PositionError(FormatError):
    pass


class CountMismatch(FormatError):
    pass


class HashMismatch(FormatError):
    pass


class ObjectTooLarge(FormatError):
    pass


# ── schema ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class SchemaError(DeltawireError):
    exit_code = 3


class SchemaMismatch(SchemaError):
    pass


class UnsafeName(SchemaError):
    pass


class ModelTooLarge(SchemaError):
    pass


class UnsupportedDtype(SchemaError):
    pass


class UnsupportedTensor(SchemaError):
    pass


# ── chain ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class ChainError(DeltawireError):
    exit_code = 3


class RunNotFound(ChainError):
    exit_code = 4


class RunReplaced(ChainError):
    pass


class VersionNotFound(ChainError):
    exit_code = 4


class ManifestError(ChainError):
    pass


class MissingBase(ChainError):
    pass


class ForeignObject(ChainError):
    pass


class DigestMismatch(ChainError):
    """`expected` is what the manifest names, `found` is what the weights have."""

    def __init__(self, version: int, expected: str, found: str, hint: str = "") -> None:
        self.version, self.expected, self.found = version, expected, found
        message = f"version {version} should have state digest {expected}, these weights have {found}"
        super().__init__(f"{message}; {hint}" if hint else message)


class ReferenceUnavailable(ChainError):
    exit_code = 4


class NotRestored(DeltawireError):
    pass


# ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────────────


class PublishError(DeltawireError):
    exit_code = 6


class WriterConflict(PublishError):
    pass


class RunExists(PublishError):
    pass


class DivergedRun(PublishError):
    pass


class PublishFailed(PublishError):
    pass


class RankLost(PublishError):
    pass


class OutOfStep(PublishError):
    pass


class PublisherClosed(PublishError):
    pass


# ── stores ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class StoreError(DeltawireError):
    exit_code = 5


class ObjectNotFound(StoreError):
    exit_code = 4


class AlreadyExists(StoreError):
    pass


class PermissionDenied(StoreError):
    pass


class StoreUnavailable(StoreError):
    """`retry_after` is how many seconds the store asked to be left alone; None where it did not say."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StoreFull(StoreError):
    pass


class Unsupported(StoreError):
    pass


class BadURL(StoreError):
    exit_code = 2


# ── this machine ─────────────────────────────────────────────────────────────────────────────────────────────────────


class FolderError(DeltawireError):
    pass


class Unguarded(DeltawireError):
    exit_code = 2


class CannotListen(DeltawireError):
    exit_code = 2


class UntrustedCode(DeltawireError):
    exit_code = 3


class Misconfigured(DeltawireError):
    exit_code = 2


class MissingExtra(DeltawireError):
    exit_code = 2
