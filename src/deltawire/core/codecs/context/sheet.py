"""Tiles whose old weights are on a device: what it needs to count their classes, and ranks from what it counted.

    sheet     geometry, rules and levels of tiles ──▶ the device counts classes (`kernels.read_sheet`, `class_counts`)
    ranks     its counts, and the streams         ──▶ the device finds the places (`kernels.place`)

Both are plain arrays, so that the process that decodes needs no torch and may be another than the one with the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...parallel import ordered_map
from .decoder import Ranked, TiledBlock, TileSpan

SMALL_TILE = 1 << 16
"""Units of a tile whose ranks fit two bytes."""

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of a block that lie in one tensor of those that are counted."""

    tensor: int
    """Number of the tensor."""
    offset: int
    """Units of the tensor before the first tile."""
    stride: int
    """Units from one row of the tiles to the next."""
    block: TiledBlock
    span: TileSpan


def make_sheet(tiles: Sequence[Tiles]) -> Arrays:
    spans = [item.span for item in tiles]
    return {
        "segments": np.array([[t.tensor, t.offset, t.stride, t.span.leveled] for t in tiles], np.int64),
        "lengths": np.array([[s.row_cuts.size, s.column_cuts.size] for s in spans], np.int64),
        "row_cuts": np.concatenate([s.row_cuts for s in spans]),
        "column_cuts": np.concatenate([s.column_cuts for s in spans]),
        "rules": np.stack([s.rule for s in spans]),
        "row_levels": np.concatenate([s.row_levels for s in spans]),
        "column_levels": np.concatenate([s.column_levels for s in spans]),
    }


def decode_ranks(tiles: Sequence[Tiles], sizes: npt.NDArray[np.int32], threads: int | None = None) -> list[Ranked]:
    """Entropy-decode tiles. `sizes` is what the device counted: [tiles, CLASSES], one of `tiles` after the other."""
    ends = np.cumsum([0, *(item.span.tiles for item in tiles)]).tolist()

    def one(number: int) -> Ranked:
        item = tiles[number]
        return item.block.ranks(item.span, sizes[ends[number] : ends[number + 1]])

    return list(ordered_map(one, range(len(tiles)), threads))


def join_ranks(tiles: Sequence[Tiles], found: Sequence[Ranked]) -> Arrays:
    """Counts, ranks and steps of all tiles, in the order and as wide as `kernels.place` takes them."""
    small = all(_largest(item.span) <= SMALL_TILE for item in tiles)
    width = max(item.block.regions[item.span.region][0].tensor.unit_size for item in tiles)
    return {
        "counts": np.concatenate([counts for counts, _, _ in found]).astype(np.int32),
        "ranks": np.concatenate([ranks for _, ranks, _ in found]).astype(np.uint16 if small else np.uint32),
        "steps": np.concatenate([steps for _, _, steps in found]).astype(f"<u{width}"),
    }


def _largest(span: TileSpan) -> int:
    return int(np.diff(span.row_cuts).max(initial=1) * np.diff(span.column_cuts).max(initial=1))
