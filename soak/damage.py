"""Damage to objects at rest, and its repair."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from deltawire.core import keys
from deltawire.core.errors import DeltawireError
from deltawire.store import Store

_RESTORED = (keys.ANCHORS, keys.DELTAS, keys.HISTORY)
"""What is written once. Others are overwritten by their owners, and must not be put back to what they were."""

Undo = Callable[[], None]


class Vandal:
    """Works on the bucket directly, past the proxy. Manifests, run.json and pruned.json are left alone: of these there
    is one copy only, so what is lost with them nobody can bring back."""

    def __init__(self, store: Store, disk: Path) -> None:
        self._store, self._disk = store, disk
        self._good: dict[str, bytes] = {}
        """Write-once objects as they were before the first damage: a second damage must not save a bad copy."""

    def victim(self, dice: random.Random, prefixes: tuple[str, ...]) -> tuple[str, bytes] | None:
        found = [item for item in self._store.list() if item.key.startswith(prefixes) and item.size > 8]
        if not found:
            return None
        # the newest are the ones that somebody will want
        item = dice.choice(sorted(found, key=lambda item: item.modified)[-12:])
        data = self._store.get(item.key).data
        return item.key, self._good.setdefault(item.key, data) if item.key.startswith(_RESTORED) else data

    def overwrite(self, dice: random.Random, how: str) -> Undo | None:
        """Other bytes under the same key, or none at all."""
        chosen = self.victim(dice, (keys.ANCHORS, keys.DELTAS, keys.HISTORY, keys.HEAD, keys.REPLICAS))
        if chosen is None:
            return None
        key, data = chosen
        damaged = bytearray(data)
        if how == "flip bits":
            for _ in range(dice.choice([1, 1, 8])):
                damaged[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        if how == "lose object":
            self._store.delete(key)
        else:
            self._store.put(key, bytes(damaged[: dice.randrange(len(data))] if how == "truncate" else damaged))

        return lambda: self._repair(key, data, lost=how == "lose object")

    def _repair(self, key: str, data: bytes, lost: bool = False) -> None:
        """From a copy, unless it was pruned meanwhile: what is put back then prune takes again."""
        if key.startswith(_RESTORED) and (lost or next(self._store.list(key), None) is not None):
            self._store.put(key, data)

    def rot(self, dice: random.Random) -> Undo | None:
        """A flipped bit in the server's own files, under an object: the server notices and answers with an error."""
        chosen = self.victim(dice, (keys.ANCHORS, keys.DELTAS))
        if chosen is None:
            return None
        key, data = chosen
        probe = data[len(data) // 2 :][:64]
        for path in self._disk.rglob("*.dat"):
            at = path.read_bytes().find(probe)
            if at >= 0:
                _flip(path, at)
                # not by flipping it back: the server may have moved what it holds in the meantime
                return lambda: self._repair(key, data)
        return None


def _flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def damage_cache(folder: Path, dice: random.Random) -> bool:
    """By rename or removal: what is written into an open file its reader may see, and only the digest catches that."""
    found = sorted(path for path in folder.glob("*") if path.suffix != ".part")
    if not found:
        return False
    path = dice.choice(found)
    try:
        data = bytearray(path.read_bytes())
        if dice.random() < 0.3 or not data:
            path.unlink()
            return True
        data[dice.randrange(len(data))] ^= 1
        damaged = folder.parent / "damaged"
        damaged.write_bytes(data)
        damaged.rename(path)
    except FileNotFoundError:
        return False
    return True


def try_to(work: Callable[[], Undo | None]) -> Undo | None:
    """The server may be down or full: then there is no such fault now."""
    try:
        return work()
    except DeltawireError:
        return None
