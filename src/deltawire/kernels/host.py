"""From the device to the core: changes come to the host as the core's `Change`.

Only the sparse payload travels. A plan made here has one segment per region of the core, cut so that positions ascend:
along memory where the region is in one piece, in bands of whole rows where it is a block of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise, starmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.change import Change, Region
from ..core.compiled import njit
from ..core.dtypes import Bits, lookup
from ..core.parallel import for_each
from .plan import TILE, Plan, Segment
from .results import Changed

_WORTH_THREADS = 1 << 18
"""Changes that are worth starting threads for."""


def region_plan(names: Sequence[str], tensors: Sequence[Tensor], regions: Sequence[Region]) -> Plan:
    """A plan that covers regions of named tensors, one segment each, in their order."""
    numbers = {name: number for number, name in enumerate(names)}
    return Plan(tensors, [_segment(numbers[region.tensor.name], region) for region in regions])


def _segment(number: int, region: Region) -> Segment:
    if region.contiguous:
        cuts = np.append(np.arange(0, region.units, TILE), region.units)
        return Segment(number, region.start, region.units, np.array([0, 1]), cuts)
    band = max(1, TILE // region.columns)
    cuts = np.append(np.arange(0, region.rows, band), region.rows)
    return Segment(number, region.start, region.tensor.columns, cuts, np.array([0, region.columns]))


def to_changes(plan: Plan, changed: Changed, regions: Sequence[Region]) -> list[Change]:
    """What `detect` found by a `region_plan`, on the host and in the core's terms. Waits for the device."""
    starts, positions, old, new = (fetched(t) for t in (changed.starts, changed.positions, changed.old, changed.new))
    wait(plan.device)
    edges, first_tile = starts.numpy(), plan.first_tile
    bases = plan.remember("bases", lambda: np.concatenate([_bases(s)[: s.tiles] for s in plan.segments]))
    flat = np.empty(changed.count, np.uint32)

    def place(tiles: slice) -> None:
        _add_bases(positions.numpy(), edges[tiles.start : tiles.stop + 1], bases[tiles], flat)

    # few calls, and views of what was fetched: each call releases the interpreter's lock, for which others are waiting
    pieces = min(8, -(-changed.count // _WORTH_THREADS))
    cuts = [number * plan.tiles // max(pieces, 1) for number in range(pieces + 1)]
    for_each(place, [slice(*cut) for cut in pairwise(cuts)], pieces)
    result = []
    for region, here in zip(regions, starmap(slice, pairwise(edges[first_tile].tolist())), strict=True):
        unit = lookup(region.tensor.dtype).unit
        result.append(Change(region, flat[here], *(bits.numpy()[here].astype(unit, copy=False) for bits in (old, new))))
    return result


def fetched(tensor: Tensor) -> Tensor:
    """A copy on its way to the host; pinned, so that the device can write it while the host does something else."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def read_region(flat: Tensor, region: Region) -> Bits:
    """A region in one piece of a tensor, whose flat units are given, as a copy on the host. Waits for the device."""
    part = flat[region.start : region.start + region.units]
    copy = part.clone() if part.device.type == "cpu" else fetched(part)
    wait(part.device)
    return copy.numpy().view(lookup(region.tensor.dtype).unit)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one: Triton launches there, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def wait(device: torch.device) -> None:
    """Wait for what was queued on the current stream of a device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _bases(segment: Segment) -> npt.NDArray[np.int64]:
    """Where each tile begins, counted row by row over the region."""
    return segment.column_cuts[:-1] if segment.rows == 1 else segment.row_cuts[:-1] * segment.columns


@njit(cache=True, nogil=True)
def _add_bases(positions: Any, edges: Any, bases: Any, out: Any) -> None:
    """Turn positions in tiles into positions in the region; `edges` are the tiles' first changes."""
    for tile in range(bases.size):
        for i in range(edges[tile], edges[tile + 1]):
            out[i] = bases[tile] + positions[i]
