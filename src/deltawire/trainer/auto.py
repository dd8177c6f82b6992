"""`auto`: the encoding that gets a version from here to a replica soonest.

    time = bytes / link speed + encode + decode

The link is measured by the publisher's own uploads; what an encoding costs and saves is measured by its own use, starting
from the figures of benchmarks/codec.py. A replica is taken to have a link and a processor like the trainer's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.parallel import default_threads

UNKNOWN_LINK = 125e6
"""Bytes per second before the first upload was timed: 1 Gbit/s."""

_MEMORY = 0.3
"""Weight of a new measurement in a running mean."""

_SMALL = 64 << 10
"""Uploads below this say more about latency than about the link."""


@dataclass(slots=True)
class Estimate:
    """What an encoding is expected to need. Per thread, both ways together where it is time."""

    bits_per_changed: float
    seconds_per_weight: float
    # work in proportion to the model
    seconds_per_change: float
    # work in proportion to the change

    def bytes(self, changed: int) -> float:
        return changed * self.bits_per_changed / 8

    def work(self, weights: int, changed: int) -> float:
        return (weights * self.seconds_per_weight + changed * self.seconds_per_change) / default_threads()


class EncodingChooser:
    def __init__(self) -> None:
        self.link = UNKNOWN_LINK
        self.measured = False
        self.estimates = {
            "packed": Estimate(9.9, 0.0, 20e-9),
            "context": Estimate(7.2, 3e-9, 40e-9),
        }

    def choose(self, weights: int, changed: int) -> tuple[str, str]:
        """(encoding, why) for a delta of this size."""
        times = {name: self._time(estimate, weights, changed) for name, estimate in self.estimates.items()}
        best, other = sorted(times, key=lambda name: times[name])[:2]
        speed = f"{self.link * 8 / 1e6:.0f} Mbit/s {'measured' if self.measured else 'assumed'}"
        return best, f"{best} {times[best]:.3g} s, {other} {times[other]:.3g} s at {speed}"

    def uploaded(self, size: int, seconds: float) -> None:
        """Learn the link from an upload."""
        if size < _SMALL or seconds <= 0:
            return
        speed = size / seconds
        self.link = speed if not self.measured else (1 - _MEMORY) * self.link + _MEMORY * speed
        self.measured = True

    def encoded(self, encoding: str, size: int, weights: int, changed: int, seconds: float) -> None:
        """Learn what an encoding saves and costs from its last use. Decoding is taken to cost what encoding did."""
        estimate = self.estimates.get(encoding)
        if estimate is None or changed < 1000:
            return
        estimate.bits_per_changed += _MEMORY * (8 * size / changed - estimate.bits_per_changed)
        ratio = 2 * seconds / max(estimate.work(weights, changed), 1e-9)
        # one sample may have been held up by something else
        ratio = (1 - _MEMORY) + _MEMORY * min(max(ratio, 0.25), 4.0)
        estimate.seconds_per_weight *= ratio
        estimate.seconds_per_change *= ratio

    def _time(self, estimate: Estimate, weights: int, changed: int) -> float:
        # once up to the bucket, once down from it
        return 2 * estimate.bytes(changed) / self.link + estimate.work(weights, changed)
