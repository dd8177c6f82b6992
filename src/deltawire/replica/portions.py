"""What a version changes on a device, in portions: made ready one after the other, and written in one swap.

A device keeps as many of them as it has room for. The others wait in pinned host memory with their old bits, and visit
the device in the swap: one is copied while the one before it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import kernels

SHARE = 0.015
"""Share of the weights on a device that a version may take there beside them."""

LEAST_BYTES = 512 << 20
"""What it may take in any case."""

_IN_WORK = 16
"""Portions are so large that one in work, with all that it takes, needs no more than this part of the room."""

_LEAST_CHANGES = 1 << 20
"""Changes of a portion in any case: there must not be too many of them."""

_ALIGNED = 64


class Room:
    """How much of its device a version may take.

    total   bytes; None: all that it needs
    unit    bytes of the widest weights
    """

    def __init__(self, total: int | None, unit: int) -> None:
        # a change in work: its position, what it was sent as, its old and its new bits
        change = 2 + 3 * unit
        self.at_once = sys.maxsize if total is None else max(total // _IN_WORK // change, _LEAST_CHANGES)
        """Changes of a portion, at most."""
        # two portions on a visit take as much as one in work; the third is for tables
        self.kept = sys.maxsize if total is None else total // _IN_WORK * (_IN_WORK - 3)
        """Bytes of the portions that stay on the device."""

    def cut(self, ends: npt.NDArray[np.integer[Any]]) -> list[tuple[int, int]]:
        """Cut tiles of which so many changes are in the first [n] into stretches that are small enough.

        All of them, then halves of what is too large: few where few weights change, and versions that are about
        equally dense have nearly the same ones.
        """
        found, left = [], [(0, ends.size - 1)]
        while left:
            first, last = left.pop()
            if ends[last] - ends[first] <= self.at_once or last - first == 1:
                found += [(first, last)] if ends[first] < ends[last] else []
            else:
                middle = (first + last) // 2
                left += [(middle, last), (first, middle)]
        return found


def room_beside(weights: int, given: float | None) -> int:
    """Bytes that a version may take beside so many of weights: `given` GB, or by default a share of them."""
    return max(LEAST_BYTES, int(SHARE * weights)) if given is None else int(given * 1e9)


class Portion(NamedTuple):
    """Changes of some tiles."""

    plan: kernels.Plan
    pieces: slice
    """The pieces that the plan is of."""
    changed: kernels.Changed


class Patch:
    """What a version changes, ready to be written and to be taken back.

    views    memory of all pieces
    stream   for copies in the swap; None where they need none of their own
    """

    def __init__(self, views: Sequence[Tensor], room: Room, stream: torch.cuda.Stream | None) -> None:
        self._views, self._stream = views, stream
        self._left = room.kept
        self._here: list[Portion] = []
        self._away: list[Portion] = []
        self._writes: list[Callable[[], None]] = []
        self._visits: list[_Stopover] = []

    @property
    def count(self) -> int:
        return sum(portion.changed.count for portion in (*self._here, *self._away))

    def add(self, portion: Portion) -> None:
        """Keep a portion: on the device while there is room for it, else in host memory."""
        self._left -= portion.changed.nbytes
        if self._left >= 0:
            self._here.append(portion)
        else:
            self._away.append(portion._replace(changed=_on_host(portion.changed)))

    def ready(self) -> None:
        """Do all that a swap has no time for: it does not look where every tensor lies."""
        self._writes = [self._prepared(portion, portion.changed) for portion in self._here]
        if not self._away:
            return
        device = self._away[0].plan.device
        size = max(_size(_written(portion.changed)) for portion in self._away)
        rooms = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        free = [torch.cuda.Event() for _ in rooms] if self._stream is not None else [None, None]
        for number, portion in enumerate(self._away):
            starts, positions, bits = _laid_out(rooms[number % 2], _written(portion.changed))
            there = kernels.Changed(starts, positions, bits, bits)
            self._visits.append(_Stopover(portion.changed, there, self._prepared(portion, there), free[number % 2]))

    def _prepared(self, portion: Portion, changed: kernels.Changed) -> Callable[[], None]:
        return kernels.prepare_apply(self._views[portion.pieces], changed, plan=portion.plan)

    def portions(self) -> Iterator[Portion]:
        """All portions, one after the other on the device."""
        yield from self._here
        for portion in self._away:
            changed = portion.changed
            yield portion._replace(changed=changed.each(lambda t, to=portion.plan.device: t.to(to, non_blocking=True)))  # type: ignore[misc]

    def write(self) -> None:
        for write in self._writes:
            write()
        for visit in self._visits:
            visit.write(visit.waiting.new, self._stream)

    def undo(self) -> None:
        """The old bits, wherever new ones were written."""
        for portion in self._here:
            kernels.apply(self._views[portion.pieces], portion.changed.swapped(), plan=portion.plan)
        for visit in self._visits:
            visit.write(visit.waiting.old, self._stream)


@dataclass(frozen=True, slots=True)
class _Stopover:
    """A portion that waits in host memory, and its place on the device, which others use before and after it."""

    waiting: kernels.Changed
    there: kernels.Changed
    apply: Callable[[], None]
    free: torch.cuda.Event | None
    """When what was there before is written."""

    def write(self, bits: Tensor, stream: torch.cuda.Stream | None) -> None:
        copying: AbstractContextManager[object] = nullcontext()
        if stream is not None and self.free is not None:
            copying = torch.cuda.stream(stream)
            stream.wait_event(self.free)
        with copying:
            for to, data in zip(_written(self.there), (self.waiting.starts, self.waiting.positions, bits), strict=True):
                to.copy_(data, non_blocking=True)
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self.apply()
        if self.free is not None:
            self.free.record()


def _written(changed: kernels.Changed) -> list[Tensor]:
    """What it takes to write a change."""
    return [changed.starts, changed.positions, changed.new]


def _on_host(changed: kernels.Changed) -> kernels.Changed:
    """A copy on its way to host memory, which is pinned in one piece: that is rounded up to a power of two."""
    tensors = [*_written(changed), changed.old]
    pin = changed.positions.device.type == "cuda"
    starts, positions, new, old = _laid_out(torch.empty(_size(tensors), dtype=torch.uint8, pin_memory=pin), tensors)
    for to, data in zip((starts, positions, new, old), tensors, strict=True):
        to.copy_(data, non_blocking=True)
    return kernels.Changed(starts, positions, old, new)


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors)


def _laid_out(memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these, one after the other in memory."""
    found, at = [], 0
    for tensor in like:
        found.append(memory[at : at + tensor.nbytes].view(tensor.dtype))
        at += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    return found
