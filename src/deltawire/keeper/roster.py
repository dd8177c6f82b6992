"""Write the heartbeats of a large fleet as one object, `roster.json`: `fleet`, `log` and `dash` read that.

Replicas that were found before keep their places while they renew their heartbeats, so a flood of others hides none.
"""

from __future__ import annotations

import msgspec

from ..bucket.addresses import host_and_port
from ..bucket.roster import latest_heartbeats
from ..bucket.run import Run
from ..core import keys
from ..core.errors import DeltawireError
from ..core.manifest import Heartbeat, Roster, dump
from ..store import ObjectInfo

EVERY_S = 10.0
"""Seconds between two rosters, at least: as often as a replica writes its heartbeat."""

LEAST = 200
"""Heartbeats from which a roster is written; fewer are read one by one."""

MOST = 20_000
"""Heartbeats that are read; of these one half at least are known ones, while they are renewed."""

_SYNC = 1000
"""Bytes of the record of the latest sync, beyond which it is left out."""

_TEXT = 200
"""Letters of an error."""


class RosterWriter:
    """Keeps the roster of a run. Use it from one thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known: dict[str, tuple[ObjectInfo, Heartbeat | None]] = {}
        """By key, those that have been there for longest first; None for what is no heartbeat."""
        self._begun = False

    def update(self) -> int:
        """Read the heartbeats that were written since the last time, and write the roster. Returns how many it has."""
        if not self._begun:
            self._go_on()
        listed = [item for item in self._run.heartbeat_objects() if keys.is_replica(item.key)]
        if len(listed) < LEAST:
            self._known.clear()
            return 0
        chosen = latest_heartbeats(listed, MOST, [key for key, (_, beat) in self._known.items() if beat])
        there = {item.key: item for item in chosen}
        self._known = {key: one for key, one in self._known.items() if key in there}
        new = [item for item in chosen if item.key not in self._known or self._known[item.key][0] != item]
        for item, beat in self._run.heartbeats(new):
            self._known[item.key] = item, None if beat is None or isinstance(beat, DeltawireError) else _short(beat)
        found = [(item.modified, beat) for item, beat in self._known.values() if beat is not None]
        count = _fitting(found)
        left_out = len(listed) - count
        roster = Roster(
            self._run.info.run, tuple(b for _, b in found[:count]), tuple(at for at, _ in found[:count]), left_out
        )
        self._run.store.put(keys.ROSTER, dump(roster))
        return count

    def _go_on(self) -> None:
        """Take those that the keeper before this one knew for known, while they are renewed."""
        found = self._run.roster()
        for beat, modified in zip(found.replicas, found.modified, strict=True) if found else ():
            key = keys.replica(beat.replica)
            self._known[key] = ObjectInfo(key, 0, modified, None), beat
        self._begun = True


def _short(beat: Heartbeat) -> Heartbeat:
    """What a table of replicas shows of a heartbeat, within limits: a forged one takes no more room than others."""
    syncs = tuple(sync for sync in beat.syncs[-1:] if len(dump(sync)) <= _SYNC)
    address = beat.address if len(beat.address) <= _TEXT and host_and_port(beat.address) else ""
    return msgspec.structs.replace(
        beat,
        run="",
        error=beat.error[:_TEXT],
        timings={},
        reading=(),
        syncs=syncs,
        address=address,
        role=beat.role[:40],
    )


def _fitting(found: list[tuple[float, Heartbeat]]) -> int:
    """How many of them, from the first on, fit into the object."""
    size = 4096
    for count, (_, beat) in enumerate(found):
        size += len(dump(beat)) + 24
        if size > keys.limit(keys.ROSTER):
            return count
    return len(found)
