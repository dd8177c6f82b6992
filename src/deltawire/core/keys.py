"""Where things are in a bucket. All keys are relative to the run's prefix."""

from __future__ import annotations

import re

from .errors import ForeignObject

RUN = "run.json"
HEAD = "head.json"
PRUNED = "pruned.json"
CLOCK = "clock.json"
WRITER = "writer.json"
DELEGATED = "delegated.json"
ADDED = "added.json"
KEEPER = "keeper.json"
ROSTER = "roster.json"
ADDED_PAGES = "added/"
ANCHORS = "anchors/"
DELTAS = "deltas/"
FILES = "files/"
HISTORY = "history/"
REPLICAS = "replicas/"
TAGS = "tags/"
VERSIONS = "versions/"
FOLDERS = (ADDED_PAGES, ANCHORS, DELTAS, FILES, HISTORY, REPLICAS, TAGS, VERSIONS)
"""All that a run has. Another run may lie in a folder beside these."""

_DATA = re.compile(
    r"(?:anchors|deltas)/step_(?:[0-9]{6,18}-)?([0-9]{6,18})\.[0-9a-f]{8}(?:-[0-9]{5}-of-[0-9]{5})?\.safetensors"
)
_FILE = re.compile(r"files/[0-9a-f]{32}")
_MANIFEST = re.compile(r"versions/([0-9]{6,18})\.json")
_ADDED_PAGE = re.compile(r"added/([0-9]{6,18})-([0-9]{6,18})\.[0-9a-f]{8}\.json")
_HISTORY = re.compile(r"history/([0-9]{6,18})\.json")
_REPLICA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TAG = re.compile(r"(?!(?:v[0-9]+|latest|newest)$)[A-Za-z][A-Za-z0-9._-]{0,63}")


LIMITS = {
    HEAD: 16 << 10,
    WRITER: 16 << 10,
    KEEPER: 16 << 10,
    DELEGATED: 16 << 10,  # some fifty keepers
    ADDED: 256 << 10,
    PRUNED: 4 << 20,  # 200,000 ranges of versions
    RUN: 32 << 20,  # the schema of a model of 100,000 tensors takes a third of it
    REPLICAS: 16 << 10,
    ROSTER: 16 << 20,  # 20,000 replicas take half of it
    TAGS: 16 << 10,
    VERSIONS: 4 << 20,  # a manifest that names 10,000 objects of a sharded trainer takes two thirds of it
    ADDED_PAGES: 4 << 20,
    HISTORY: 32 << 20,  # all pages that one answer is made from: 100,000 versions and more
}
"""Bytes that a JSON object may have, by its key or folder.

Decoded it takes up to 14 times as much, and a writer to the bucket must not be able to fill a reader's memory.
"""

MAX_VERSION = 10**18 - 1
"""Versions have at most 18 digits in a key."""

Shard = tuple[int, int]
"""(which, of how many): one writer of several, counted from 0 here and from 1 in a key."""

ALONE: Shard = (0, 1)


def anchor(version: int, writer: str, shard: Shard = ALONE) -> str:
    return f"{ANCHORS}step_{version:06d}.{writer}{_shard(shard)}.safetensors"


def delta(base: int, version: int, writer: str, shard: Shard = ALONE) -> str:
    """The writer's mark keeps two trainers that race for one version from overwriting each other's data."""
    span = f"{base:06d}-{version:06d}" if version - base > 1 else f"{version:06d}"
    return f"{DELTAS}step_{span}.{writer}{_shard(shard)}.safetensors"


def _shard(shard: Shard) -> str:
    which, of = shard
    return f"-{which + 1:05d}-of-{of:05d}" if of > 1 else ""


def limit(key: str) -> int:
    """Return how many bytes the JSON object with this key may have."""
    folder, slash, _ = key.partition("/")
    return LIMITS[folder + slash]


def file(hash: str) -> str:
    return f"{FILES}{hash}"


def manifest(version: int) -> str:
    return f"{VERSIONS}{version:06d}.json"


def version_of(manifest_key: str) -> int | None:
    match = _MANIFEST.fullmatch(manifest_key)
    return int(match[1]) if match else None


def data_version(data_key: str) -> int | None:
    """The version that an anchor or delta leads to; None if it is not the key of either."""
    match = _DATA.fullmatch(data_key)
    return int(match[1]) if match else None


def history(end: int) -> str:
    """Summaries of the versions before `end` (see history.py)."""
    return f"{HISTORY}{end:06d}.json"


def history_end(key: str) -> int | None:
    """The version before which a page of history ends; None if it is not the key of one."""
    match = _HISTORY.fullmatch(key)
    return int(match[1]) or None if match else None


def added_page(first: int, last: int, mark: str) -> str:
    """Links that were added to the versions from `first` to `last` (see added.py)."""
    return f"{ADDED_PAGES}{first:06d}-{last:06d}.{mark}.json"


def added_range(key: str) -> tuple[int, int] | None:
    """The first and last version that a page of added links tells of; None if it is not the key of one."""
    match = _ADDED_PAGE.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def replica(id: str) -> str:
    if not _REPLICA.fullmatch(id):
        raise ValueError(f"a replica id is letters, digits, '.', '_' and '-', at most 128; not {id[:40]!r}")
    return f"{REPLICAS}{id}.json"


def is_replica(key: str) -> bool:
    """Whether this is the key of a heartbeat."""
    name = key.removeprefix(REPLICAS).removesuffix(".json")
    return key == f"{REPLICAS}{name}.json" and _REPLICA.fullmatch(name) is not None


def is_tag_name(name: str) -> bool:
    """Letters, digits, '.', '_' and '-', from a letter on, and nothing that already means a version."""
    return _TAG.fullmatch(name) is not None


def tag(name: str) -> str:
    if not is_tag_name(name):
        raise ValueError(
            "a tag is letters, digits, '.', '_' and '-', at most 64, from a letter on, and not latest, newest or v41; "
            f"not {name[:40]!r}"
        )
    return f"{TAGS}{name}.json"


def tag_name(key: str) -> str | None:
    """The name of the tag with this key; None if it is not the key of a tag."""
    name = key.removeprefix(TAGS).removesuffix(".json")
    return name if key == f"{TAGS}{name}.json" and is_tag_name(name) else None


def check_data(key: str) -> None:
    """A manifest may name data objects of its own run only: no other prefix, no way up."""
    if not _DATA.fullmatch(key):
        raise ForeignObject(f"a manifest names {key[:120]!r}, which is not a data object of this run")


def is_object(key: str) -> bool:
    """Whether a manifest may name this key: an anchor, a delta or a companion file."""
    return _DATA.fullmatch(key) is not None or is_file(key)


def is_file(key: str) -> bool:
    return _FILE.fullmatch(key) is not None
