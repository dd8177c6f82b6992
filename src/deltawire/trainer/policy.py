"""What is written for a version: an anchor, a delta or both, and in which encoding."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.added import AddedIndex, in_summaries
from ..core.codecs import ENCODINGS
from ..core.errors import Misconfigured, UnknownFormat
from ..core.manifest import Summary
from ..core.parallel import default_threads
from ..core.sparse import DataFile
from ..costs import AUTO, CODING, bits_at

UNKNOWN_LINK = 125e6
"""Bytes per second before the first upload was timed: 1 Gbit/s."""

USUAL_DENSITY = 0.01
"""Share of weights that change, before the first version said more."""

KEEPER_BEHIND = 32
"""Versions by which a keeper may be behind before a trainer makes anchors again."""

_MEMORY = 0.3
"""Weight of a new measurement in a running mean."""

_SMALL = 64 << 10
"""Bytes of an upload below which its time is mostly latency, so that it does not measure the link."""

FULL = "full weights"
"""Name of what is published in place of a delta, in the reason for a choice."""

_FEW = 1000
"""Changed weights below which a delta does not measure its encoding."""


@dataclass(frozen=True, slots=True)
class AnchorPolicy:
    """Decides which versions get an anchor, and which a delta."""

    every: int | None = None
    """A fixed cadence: an anchor at the latest every so many versions."""
    ratio: float = 1.0
    """An anchor once catching up from the last one would cost more than this many times its bytes."""

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise Misconfigured(f"anchor_every={self.every}: say after how many versions an anchor is due, at least 1")

    def wants_delta(self, delta_bytes: int, full_bytes: int, anchor: bool) -> bool:
        """Whether a version gets a delta; `anchor`: it gets an anchor anyway.

        A delta must be smaller than the full weights. Beside an anchor it may have at most half of the anchor's bytes:
        a larger one saves readers little, and makes a dense run cost more than full weights.
        """
        return 2 * delta_bytes <= full_bytes if anchor else delta_bytes < full_bytes

    def wants_anchor(self, version: int, delta_bytes: int, full_bytes: int, versions: dict[int, Summary]) -> bool:
        """Whether a version gets an anchor, from what was published before and the size of its delta. Pure."""
        # what a newcomer must fetch on top of full weights
        replay_bytes, at = delta_bytes, next(reversed(versions), None)
        # from the end, and no farther than it matters: deciding costs the same at version 100,000 as at version 10
        while at is not None and at in versions:
            summary = versions[at]
            due = replay_bytes > self.ratio * full_bytes or (self.every is not None and version - at >= self.every)
            if due or any(link.kind != "delta" for link in summary.links):
                return due
            replay_bytes += summary.main.bytes
            at = summary.main.base
        return True

    def leaves_to_keeper(
        self, version: int, delta_bytes: int, full_bytes: int, versions: dict[int, Summary], index: AddedIndex | None
    ) -> bool:
        """Whether a keeper makes the anchor that is wanted, or has made one: `index` is what the keeper wrote. Pure.

        A keeper that is not far behind gets twice the time; then an anchor is made whatever it says.
        """
        if index is None:
            return False
        if index.anchor is not None and index.anchor.version in versions:
            first = index.anchor.version
            since = {v: versions[v] for v in range(first, version) if v in versions}
            versions = in_summaries(since, [index.anchor])
        if not self.wants_anchor(version, delta_bytes, full_bytes, versions):
            return True
        patient = AnchorPolicy(None if self.every is None else 2 * self.every, 2 * self.ratio)
        alive = 0 <= version - index.done <= KEEPER_BEHIND  # none is ahead of the trainer
        return alive and not patient.wants_anchor(version, delta_bytes, full_bytes, versions)


@dataclass(slots=True)
class Estimate:
    """Expected bytes and time of an encoding. Times are of one thread, for encoding and decoding together."""

    bits_per_changed: float
    seconds_per_weight: float
    """Work in proportion to the model."""
    seconds_per_change: float
    """Work in proportion to the change."""

    @classmethod
    def of(cls, encoding: str) -> Estimate:
        """The estimate from measured coefficients (costs.py)."""
        coding = CODING[encoding]
        per_weight = coding.encode_weight + coding.decode_weight
        return cls(bits_at(USUAL_DENSITY, encoding), per_weight, coding.encode_change + coding.decode_change)

    def work(self, weights: int, changed: int) -> float:
        """Seconds to encode and decode."""
        return (weights * self.seconds_per_weight + changed * self.seconds_per_change) / default_threads()

    def time(self, weights: int, changed: int, link: float) -> float:
        """Seconds until a delta has arrived: work, and its bytes once up to the bucket and once down from it."""
        return 2 * changed * self.bits_per_changed / 8 / link + self.work(weights, changed)


@dataclass(frozen=True, slots=True)
class Choice:
    """How a delta is encoded."""

    encoding: str
    why: str = ""
    """Empty where the user chose."""
    full: bool = False
    """Whether full weights go out in place of the delta."""


class EncodingChooser:
    """Decides how the next delta is encoded: always the same way, or with `auto` the way that arrives soonest.

        time = bytes / link speed + encode + decode

    The link is measured by the publisher's own uploads; what an encoding costs and saves is measured by its own use,
    starting from what `deltawire plan` goes by (costs.py). A replica is taken to have a link and a processor like
    the trainer's.

    An adapter is small and changes almost everywhere, and servers replace it as a whole. So where it is one, its full
    weights may be what arrives soonest.
    """

    def __init__(self, encoding: str) -> None:
        if encoding not in (AUTO, *ENCODINGS):
            raise UnknownFormat(f"encoding {encoding!r} is unknown; choose packed, context, auto or raw")
        self._fixed = None if encoding == AUTO else Choice(encoding)
        self.link = UNKNOWN_LINK
        self.measured = False
        self.estimates = {name: Estimate.of(name) for name in ("packed", "context")} if encoding == AUTO else {}
        self._density = USUAL_DENSITY

    def choose(self, weights: int, changed: int | None = None, full_bytes: int | None = None) -> Choice:
        """For a delta of this size, or one as dense as the last where the size is not known yet.

        `full_bytes` are those of the full weights, where they may go out in its place.
        """
        if self._fixed is not None:
            return self._fixed
        count = round(weights * self._density) if changed is None else changed
        times = {name: estimate.time(weights, count, self.link) for name, estimate in self.estimates.items()}
        encoding = min(times, key=lambda name: times[name])
        # how dense a change is must be known: what is compared while it is encoded has to be encoded
        if full_bytes is not None and changed is not None:
            # both sides read all weights, as for a delta in which nothing changed
            times[FULL] = 2 * full_bytes / self.link + self.estimates["packed"].work(weights, 0)
        best, *others = sorted(times, key=lambda name: times[name])
        speed = f"{self.link * 8 / 1e6:.3g} Mbit/s {'measured' if self.measured else 'assumed'}"
        rest = ", ".join(f"{name} {times[name]:.2g} s" for name in others)
        return Choice(encoding, f"{times[best]:.2g} s, {rest}, at {speed}", full=best == FULL)

    def learn(self, choice: Choice, file: DataFile, weights: int, encode: float, put: float) -> None:
        """Learn from a delta that was encoded in `encode` seconds and uploaded in `put`. Decoding counts the same."""
        if self._fixed is not None:
            return
        self._density = file.changed / max(weights, 1)
        self.learn_link(file.size, put)
        estimate = self.estimates.get(choice.encoding)
        if estimate is None or file.changed < _FEW:
            return
        estimate.bits_per_changed += _MEMORY * (8 * file.size / file.changed - estimate.bits_per_changed)
        ratio = 2 * encode / max(estimate.work(weights, file.changed), 1e-9)
        # one sample may have been held up by something else
        ratio = (1 - _MEMORY) + _MEMORY * min(max(ratio, 0.25), 4.0)
        estimate.seconds_per_weight *= ratio
        estimate.seconds_per_change *= ratio

    def learn_link(self, size: int, seconds: float) -> None:
        """Learn from an upload how fast the link is."""
        if size >= _SMALL and seconds > 0:
            speed = size / seconds
            self.link = (1 - _MEMORY) * self.link + _MEMORY * speed if self.measured else speed
            self.measured = True
