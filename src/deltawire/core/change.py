"""Where weights changed and what they became: regions, changes, and the blocks a model is cut into."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import digest
from .compiled import njit
from .dtypes import Bits, lookup, read_only
from .errors import SchemaMismatch
from .scatter import gather, scatter
from .schema import Schema, TensorSpec
from .simd import LANES, difference_mask, trailing_zeros
from .ulps import step_in_place, take_steps

BLOCK_UNITS = 1 << 24
"""About how many units a block covers: enough for stable statistics, few enough to hold several in memory."""

_DIGITS = re.compile("[0-9]+")

_CHUNK = 1 << 20
"""Units compared at a time, so that scratch arrays stay in the cache's reach whatever the density."""


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of one tensor, in the tensor's matrix of units. Positions inside count row by row.

    A unit is an unsigned integer of `tensor.unit_size` bytes: the bits of an element, or half of them if it has eight
    bytes. With the flat units of the whole tensor:

        part = region.cut(units)         # the region's own, flat
        rows = region.matrix(units)      # the same as a view, [rows, columns]
    """

    tensor: TensorSpec
    row: int
    """First row."""
    rows: int
    column: int
    """First column."""
    columns: int

    @property
    def units(self) -> int:
        """Number of units."""
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of its units."""
        return self.units * self.tensor.unit_size

    @property
    def start(self) -> int:
        """Flat position of the region's first unit."""
        return self.row * self.tensor.columns + self.column

    @property
    def contiguous(self) -> bool:
        """Whether its units follow each other without a gap in the flat tensor."""
        return self.columns == self.tensor.columns or self.rows <= 1

    @property
    def geometry(self) -> tuple[int, int, int]:
        """(start, width, stride): position p is unit start + p // width · stride + p % width of the tensor."""
        stride = max(self.tensor.columns, 1)
        return self.start, stride if self.contiguous else self.columns, stride

    def meet(self, other: Region) -> Region | None:
        """The part that two regions have in common; None if they have none."""
        if self.tensor.name != other.tensor.name:
            return None
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Region(self.tensor, row, rows, column, columns) if rows > 0 and columns > 0 else None

    def within(self, other: Region) -> tuple[slice, slice]:
        """Rows and columns of another region, which contains this one."""
        row, column = self.row - other.row, self.column - other.column
        return slice(row, row + self.rows), slice(column, column + self.columns)

    def part(self, rows: slice, columns: slice) -> Region:
        """Rows and columns of the region as a region: the inverse of `within`."""
        row, column = self.row + rows.start, self.column + columns.start
        return Region(self.tensor, row, rows.stop - rows.start, column, columns.stop - columns.start)

    def matrix(self, bits: Bits) -> Bits:
        """The region as a 2-D view of the whole tensor's flat bits."""
        whole = bits.reshape(self.tensor.rows, self.tensor.columns)
        return whole[self.row : self.row + self.rows, self.column : self.column + self.columns]

    def cut(self, bits: Bits) -> Bits:
        """The region's own flat bits: a view where it is contiguous in the tensor, else a copy."""
        if self.contiguous:
            return bits[self.start : self.start + self.units]
        # a copy in any case: one column of a matrix would reshape to a strided view, and kernels count on neighbours
        return np.ascontiguousarray(self.matrix(bits)).reshape(-1)


@dataclass(frozen=True, slots=True)
class Change:
    """The units of a region that differ between one version and another. `Region` says what a unit is.

    With the flat units of the whole tensor:

        change.write(units)              # in place
        change.undo(units)               # the old ones again

    region     the part of a tensor that was compared
    positions  of the units that differ: ascending, counted row by row within the region, not within the tensor;
               `region.geometry` says where they are in the tensor
    old        the units at these positions before
    new        the units at these positions after
    """

    region: Region
    positions: npt.NDArray[np.uint32]
    old: Bits
    new: Bits

    @property
    def count(self) -> int:
        """How many units differ."""
        return int(self.positions.size)

    @property
    def elements(self) -> int:
        """How many elements changed: an 8-byte one is two units, which may both have changed."""
        per = lookup(self.region.tensor.dtype).units_per_element
        if per == 1 or not self.count:
            return self.count
        return 1 + int(np.count_nonzero(np.diff(self.positions // per)))

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.old.nbytes + self.new.nbytes

    def digest(self, words: digest.Words = digest.PUBLIC) -> digest.StateDigest:
        """How the state digest moves when this change is applied."""
        name, geometry = self.region.tensor.name, self.region.geometry
        return digest.of_change(name, self.positions, self.old, self.new, *geometry, words)

    def write(self, bits: Bits) -> None:
        """Put the new values into the tensor's flat bits, in place."""
        scatter(bits, self.positions, self.new, *self.region.geometry)

    def undo(self, bits: Bits) -> None:
        """Put the old values into the tensor's flat bits, in place; also after a write that ended half-way."""
        self.swapped().write(bits)

    def swapped(self) -> Change:
        """The change that takes this one back."""
        return Change(self.region, self.positions, self.new, self.old)


Units = tuple[npt.NDArray[np.uint32], Bits, Bits]
"""Positions, old and new bits of several changes, one after the other."""


def joined(changes: Sequence[Change]) -> Units:
    """All units of changes; without a copy where they follow each other in one array, as those of a device do."""
    positions, old, new = ([getattr(change, part) for change in changes] for part in ("positions", "old", "new"))
    return join(positions), join(old), join(new)


def join(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One array of several; without a copy if they follow each other in one array already."""
    # numpy says of an empty part that it is at the beginning
    parts = [part for part in parts if part.size] or parts[:1]
    whole, dense = parts[0].base, parts[0].dtype.itemsize
    if isinstance(whole, np.ndarray) and whole.dtype == parts[0].dtype and whole.strides == (dense,):
        first = at = parts[0].__array_interface__["data"][0]
        for part in parts:
            if part.base is not whole or part.strides != (dense,) or part.__array_interface__["data"][0] != at:
                break
            at += part.nbytes
        else:
            start = whole.__array_interface__["data"][0]
            return whole[(first - start) // dense : (at - start) // dense]
    return np.concatenate(parts)


def digest_shift(changes: Iterable[Change], words: digest.Words = digest.PUBLIC) -> digest.StateDigest:
    """How the state digest moves when all of these are applied."""
    return sum((change.digest(words) for change in changes), digest.StateDigest())


NEW_BITS, NUMBER_STEPS, BIT_STEPS, FLIPS = range(4)
"""What the values of `RegionMoves` are: new bits; zigzagged steps along the numbers that bits stand for; the same along
the bits themselves; old XOR new."""


@dataclass(frozen=True, slots=True)
class RegionMoves:
    """Changed units of a region as a delta has them, without the old bits."""

    region: Region
    positions: npt.NDArray[np.uint32]
    """Ascending, counted within the region, and checked."""
    values: Bits
    """One per position, as wide as the region's units."""
    kind: int
    """What the values are: NEW_BITS, NUMBER_STEPS, BIT_STEPS or FLIPS."""

    def resolve(self, bits: Bits) -> Change:
        """The change that they are to a tensor with these flat bits."""
        old = np.empty(self.positions.size, bits.dtype)
        gather(bits, self.positions, old, *self.region.geometry)
        return self.from_old(old)

    def from_old(self, old: Bits) -> Change:
        """Return the change, given the old bits at the positions."""
        if self.kind == NEW_BITS:
            new = self.values
        elif self.kind == FLIPS:
            new = old ^ self.values
        else:
            new = np.empty_like(old)
            take_steps(self.values, old, self.kind == NUMBER_STEPS, new)
        return Change(self.region, self.positions, old, new)

    def apply(self, bits: Bits) -> Change:
        """Resolve the moves against these bits and write the new ones."""
        if self.kind in (NEW_BITS, FLIPS):
            change = self.resolve(bits)
            change.write(bits)
            return change
        old, new = np.empty_like(self.values), np.empty_like(self.values)
        signed = self.kind == NUMBER_STEPS
        step_in_place(bits, self.positions, self.values, signed, old, new, *self.region.geometry)
        return Change(self.region, self.positions, old, new)


Block = tuple[Region, ...]
"""Regions of one dtype that are coded together and can be fetched alone."""


def blocks(schema: Schema, block_units: int = BLOCK_UNITS) -> list[Block]:
    """Cut a model into blocks, the same way on every machine: by dtype, then by kind, large tensors by rows.

    Tensors whose names differ in numbers alone are of one kind. A node that holds some layers or experts needs few
    blocks, and one that holds some rows or columns needs the same of all tensors of a block.
    """
    result: list[list[Region]] = []
    last, room = "", 0
    for tensor in sorted(schema.tensors, key=_by_kind):
        for region in pieces(whole(tensor), block_units):
            if tensor.dtype != last or region.units > room:
                result.append([])
                last, room = tensor.dtype, block_units
            result[-1].append(region)
            room -= region.units
    return [tuple(block) for block in result]


def kind_of(tensor: TensorSpec) -> tuple[str, str]:
    """What tensors have in common whose names differ in numbers alone."""
    return tensor.dtype, _DIGITS.sub("0", tensor.name)


def _by_kind(tensor: TensorSpec) -> tuple[str, str, tuple[tuple[int, str], ...]]:
    numbers = _DIGITS.findall(tensor.name)
    return *kind_of(tensor), tuple((len(digits), digits) for digits in numbers)


def whole(tensor: TensorSpec) -> Region:
    return Region(tensor, 0, tensor.rows, 0, tensor.columns)


def regions(tensor: TensorSpec, block_units: int = BLOCK_UNITS) -> Iterator[Region]:
    """A tensor in pieces of at most a block, in the order of its bytes."""
    return pieces(whole(tensor), block_units)


def pieces(region: Region, block_units: int = BLOCK_UNITS) -> Iterator[Region]:
    """A rectangle in pieces of at most a block, in the order of its own units."""
    if region.units == 0:
        return
    columns, width = region.columns, min(region.columns, block_units)
    for first, last in _bands(region.rows, max(1, block_units // width)):
        for column in range(0, columns, width):
            yield Region(
                region.tensor, region.row + first, last - first, region.column + column, min(width, columns - column)
            )


def tile(rectangles: Iterable[Region], schema: Schema, what: str) -> None:
    """Refuse rectangles that leave out a unit of the schema's tensors or hold one twice.

    They must come in bands: rectangles that share a row have the same rows. Shards of a tensor do.
    """
    by_tensor: dict[TensorSpec, list[Region]] = {tensor: [] for tensor in schema.tensors}
    for rectangle in rectangles:
        if rectangle.tensor not in by_tensor:
            raise SchemaMismatch(f"{what} holds a part of {rectangle.tensor.name[:80]!r}, which is not in the schema")
        by_tensor[rectangle.tensor].append(rectangle)
    for tensor, parts in by_tensor.items():
        if not tensor.units:
            continue
        # where the next rectangle must start
        row = column = rows = 0
        for part in sorted(parts, key=lambda part: (part.row, part.column)):
            in_band = column == 0 or part.rows == rows
            fits = 0 < part.rows <= tensor.rows - row and 0 < part.columns <= tensor.columns - column
            if (part.row, part.column) != (row, column) or not in_band or not fits:
                raise SchemaMismatch(f"{what} does not hold every part of {tensor.name!r} exactly once, in bands")
            rows, column = part.rows, column + part.columns
            if column == tensor.columns:
                row, column = row + rows, 0
        if row != tensor.rows:
            raise SchemaMismatch(f"{what} does not hold all of {tensor.name!r}")


def _bands(rows: int, height: int) -> Iterator[tuple[int, int]]:
    """Rows in bands of at most `height`, cut at every half, quarter, eighth or sixteenth where that divides the rows.

    A tensor-parallel rank holds such a part. A band that reaches into two of them would have to be decoded by both.
    """
    if rows <= height:
        yield 0, rows
        return
    parts = next((parts for parts in (16, 8, 4, 2) if rows % parts == 0), 1)
    # as few parts as there are that fit a band each
    while parts > 2 and rows // (parts // 2) <= height:
        parts //= 2
    each = rows // parts
    count = -(-each // height)
    for part in range(parts):
        for i in range(count):
            yield part * each + i * each // count, part * each + (i + 1) * each // count


@njit(cache=True, nogil=True)
def _compare(old: Any, new: Any, start: int, positions: Any, was: Any, now: Any) -> int:
    """Where another thread writes to `new`, a weight may be back at its old bits when it is read a second time. A
    change of nothing has no code, and a delta with one could not be read: such a weight is no change."""
    found = 0
    whole = old.size // LANES * LANES
    for i in range(0, whole, LANES):
        mask: Any = difference_mask(old, new, i)
        while mask != 0:
            j = i + trailing_zeros(mask)
            positions[found] = start + j
            was[found] = old[j]
            now[found] = new[j]
            found += was[found] != now[found]
            mask &= mask - np.uint64(1)
    for i in range(whole, old.size):
        if old[i] != new[i]:
            positions[found] = start + i
            was[found] = old[i]
            now[found] = new[i]
            found += was[found] != now[found]
    return found


def compare(region: Region, old: Bits, new: Bits) -> Change:
    """Every position where the bits of a region differ. Both are the region's own flat bits (see `Region.cut`)."""
    size = min(_CHUNK, region.units)
    scratch = np.empty(size, np.uint32), np.empty(size, old.dtype), np.empty(size, old.dtype)
    kept = no_change(region)
    parts: tuple[npt.NDArray[Any], ...] = (kept.positions, kept.old, kept.new)
    count = 0
    for start in range(0, region.units, size):
        end = min(start + size, region.units)
        n = _compare(read_only(old[start:end]), read_only(new[start:end]), start, *scratch)
        if count + n > parts[0].size:
            # as if the rest were as dense, and a little denser: touching fresh memory costs more than comparing
            room = count + n if end == region.units else (count + n) * region.units // end * 17 // 16
            larger = tuple(np.empty(room, part.dtype) for part in parts)
            for old_part, new_part in zip(parts, larger, strict=True):
                new_part[:count] = old_part[:count]
            parts = larger
        for part, fresh in zip(parts, scratch, strict=True):
            part[count : count + n] = fresh[:n]
        count += n
    for part in parts:
        part.resize(count, refcheck=False)
    return Change(region, *parts)


def no_change(region: Region) -> Change:
    unit = lookup(region.tensor.dtype).unit
    return Change(region, np.empty(0, np.uint32), np.empty(0, unit), np.empty(0, unit))


@njit(cache=True, nogil=True)
def _compose(pa: Any, oa: Any, na: Any, pb: Any, nb: Any, ob: Any, positions: Any, old: Any, new: Any) -> int:
    i = 0
    j = 0
    n = 0
    while i < pa.size or j < pb.size:
        if j == pb.size or (i < pa.size and pa[i] < pb[j]):
            positions[n], old[n], new[n] = pa[i], oa[i], na[i]
            i += 1
        elif i == pa.size or pb[j] < pa[i]:
            positions[n], old[n], new[n] = pb[j], ob[j], nb[j]
            j += 1
        else:
            positions[n], old[n], new[n] = pa[i], oa[i], nb[j]
            i += 1
            j += 1
        # a weight that came back to where it was did not change
        n += old[n] != new[n]
    return n


def undo_within(region: Region, bits: Bits, change: Change) -> None:
    """Put the old bits of a change back where it falls into a region, both in one piece."""
    if change.count and change.region.tensor == region.tensor:
        at = change.positions.astype(np.int64) + (change.region.start - region.start)
        here = slice(*np.searchsorted(at, (0, region.units)).tolist())
        bits[at[here]] = change.old[here]


def compose(first: Change, second: Change) -> Change:
    """One change with the effect of both, `first` before `second`, over the same region."""
    size = first.count + second.count + 1
    positions = np.empty(size, np.uint32)
    old, new = np.empty(size, first.old.dtype), np.empty(size, first.old.dtype)
    n = _compose(first.positions, first.old, first.new, second.positions, second.new, second.old, positions, old, new)
    return Change(first.region, positions[:n].copy(), old[:n].copy(), new[:n].copy())
