"""The folders of a source: which of them are versions, in which order, and whether they are complete.

<root>/weight_v000001/ …                slime, miles, vime
<root>/updates/weight_v000001/ …        stitch, with <root>/latest: how far versions are out
<root>/<run>/weight_v000001/ …          the same of one of several runs, which `latest` names
<root>/delta-00000001/ …                SkyRL
<root>/<any name>/ …                    ModelExpress: versions are in the order in which they build on each other
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from deltawire.errors import CountMismatch, ManifestError, ObjectNotFound, UnsafeName, Unsupported
from deltawire.store import Browsing, ObjectInfo, Store

from . import indexed, skyrl
from .version import ForeignVersion

NUMBERED = re.compile(r"(?:weight_v|delta-)([0-9]{1,15})\Z")
POINTER = re.compile(r"(?:([^/\s\x00-\x1f\x7f\ufffd]{1,200})/)?(?:weight_v)?([0-9]{1,15})\s*\Z")
LATEST, UPDATES = "latest", "updates/"
COMPANIONS, MAX_COMPANION = (".json", ".jinja", ".model", ".tiktoken", ".txt"), 64 << 20

Stamp = tuple[tuple[str, int, float, str | None], ...]


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that may hold a version, as a listing shows it."""

    store: Store
    prefix: str
    """Ends in "/"."""
    objects: tuple[ObjectInfo, ...]

    @property
    def name(self) -> str:
        return self.prefix[:-1].rpartition("/")[2]

    @property
    def number(self) -> int | None:
        """The number of the version, where the name has one."""
        return number_of(self.prefix)

    @property
    def stamp(self) -> Stamp:
        """Changes when something in the folder does."""
        return self.stamp_of({item.key[len(self.prefix) :] for item in self.objects})

    def stamp_of(self, names: set[str]) -> Stamp:
        """Changes when one of these files does."""
        wanted = [item for item in self.objects if item.key[len(self.prefix) :] in names]
        return tuple((item.key, item.size, item.modified, item.etag) for item in wanted)

    @property
    def modified(self) -> float:
        """When its last file was written."""
        return max((item.modified for item in self.objects), default=0.0)

    @property
    def where(self) -> str:
        return f"{self.store.url}: {self.prefix}"

    def size(self, name: str) -> int:
        """Bytes of a file in it. ObjectNotFound if it is missing, UnsafeName if it is elsewhere."""
        if "/" in name or "\\" in name:
            raise UnsafeName(f"{self.where} names the file {name[:80]!r}, which leads out of the folder")
        for item in self.objects:
            if item.key == self.prefix + name:
                return item.size
        raise ObjectNotFound(f"{self.where}{name[:80]} is missing")

    def check_named(self, files: set[str]) -> None:
        """CountMismatch for a safetensors file that a delta does not name: changes would be left out."""
        for item in self.objects:
            name = item.key[len(self.prefix) :]
            if name.endswith(".safetensors") and name not in files:
                raise CountMismatch(f"{self.where}{name[:80]} is not named by the version")

    def has(self, name: str) -> bool:
        return any(item.key == self.prefix + name for item in self.objects)

    def read(self, most: int) -> ForeignVersion | None:
        """The version in it, of at most so many tensors; None while the file that is written last is not there."""
        return skyrl.read(self, most) if self.name.startswith("delta-") else indexed.read(self, most)

    def base(self) -> str | None:
        """The version that it builds on, without a look at its tensors."""
        return indexed.base_of(self)

    def companions(self) -> dict[str, bytes]:
        """Config and tokenizer files beside its weights."""
        names = {item.key[len(self.prefix) :]: item for item in self.objects if item.size <= MAX_COMPANION}
        return {
            name: self.store.get(item.key, limit=MAX_COMPANION).data
            for name, item in names.items()
            if name.endswith(COMPANIONS) and not name.endswith(".index.json") and not name.startswith(".")
        }


def open_folder(store: Store, prefix: str) -> Folder:
    return Folder(store, prefix, tuple(_browse(store, prefix)[1]))


def chain(store: Store) -> list[str]:
    """Prefixes of the folders that may hold versions that are out, in the order of their numbers, or of their names.

    ManifestError if two of them have one number.
    """
    names, objects = _browse(store, "")
    root, most = "", None
    if any(item.key == LATEST for item in objects):
        run, most = _pointer(store)
        tries = [f"{run}/", f"{UPDATES}{run}/"] if run else []
        for root in (*tries, UPDATES, ""):
            names = _browse(store, root)[0]
            if most == 0 or any(number_of(name) == most for name in names):
                break
    elif UPDATES in names:
        root = UPDATES
        names = _browse(store, root)[0]
    numbers = {name: number_of(name) for name in names}
    if any(number is not None for number in numbers.values()):
        kept = {name: n for name, n in numbers.items() if n is not None and (most is None or n <= most)}
        ordered = sorted(kept, key=lambda name: kept[name])
        for one, other in pairwise(ordered):
            if kept[one] == kept[other]:
                raise ManifestError(f"{store.url}: {one} and {other} have the same number: remove one of them")
        return ordered
    return [] if most is not None else names


def number_of(prefix: str) -> int | None:
    """The number in the name of a folder."""
    found = NUMBERED.match(prefix[:-1].rpartition("/")[2])
    return int(found[1]) if found else None


def _pointer(store: Store) -> tuple[str, int]:
    """The run and the newest version that `latest` names."""
    text = store.get(LATEST, limit=4096).data.decode("utf-8", "replace")
    found = POINTER.match(text)
    if found is None:
        raise ManifestError(f"{store.url}: {LATEST} names no version: {text[:80]!r}")
    return found[1] or "", int(found[2])


def _browse(store: Store, prefix: str) -> tuple[list[str], list[ObjectInfo]]:
    if not isinstance(store, Browsing):
        raise Unsupported(f"{store.url} cannot list one level at a time")
    return store.folders(prefix)
