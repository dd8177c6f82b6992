"""Weights in host memory, and whatever torch can copy: read as the run's bits and written as them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..core.change import Change, Region, no_change, pieces
from ..core.compiled import njit
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.errors import SchemaMismatch
from ..core.full import Source, digests_of
from ..core.parallel import for_each
from ..core.scatter import scatter, scatter_and_look
from ..models import dtype_of, is_torch, like, torch_bits, torch_dtype
from .shard import WHOLE, Part, Piece, PieceChange, Places, Sums, cut

WORTH_THREADS = 1 << 20
"""Number of changes that are worth starting threads for: some milliseconds of work."""


class HostShard:
    """Pieces in host memory; `memory` has that of each piece."""

    def __init__(
        self, pieces: Sequence[Piece], memory: Sequence[Rows | Placed | Copied], *, audited: bool = True
    ) -> None:
        self.pieces, self._memory, self.audited = pieces, memory, audited
        self.in_place = not any(isinstance(each, Copied) for each in memory)
        """Whether writes go straight to the weights, so that several may go on at once."""

    def compile(self) -> None:
        """Compile the kernels that write, which would take too long in the first pause."""
        for piece, memory in zip(self.pieces, self._memory, strict=True):
            if not isinstance(memory, Copied):
                memory.write(no_change(piece.region), self.audited)

    def read(self, piece: int, part: Part = WHOLE) -> Bits:
        """A live view where memory is in the run's dtype, else a copy."""
        return self._memory[piece].read(part)

    def prepare(self, changes: Sequence[PieceChange]) -> list[PieceChange]:
        return list(changes)

    def write(self, patch: Sequence[PieceChange]) -> None:
        self._each(self.put, patch)

    def undo(self, patch: Sequence[PieceChange]) -> None:
        failed: list[Exception] = []

        def put_back(item: PieceChange) -> None:
            try:
                # of a change that was never written it has no effect
                self.put(PieceChange(item.piece, item.change.swapped()))
            except Exception as error:
                # all others are taken back all the same
                failed.append(error)

        self._each(put_back, patch)
        if failed:
            raise failed[0]

    def _each(self, put: Callable[[PieceChange], None], patch: Sequence[PieceChange]) -> None:
        many = self.in_place and sum(item.change.count for item in patch) >= WORTH_THREADS
        for_each(put, patch, None if many else 1)

    def put(self, item: PieceChange) -> None:
        if not self._memory[item.piece].write(item.change, self.audited):
            name = item.change.region.tensor.name
            raise RuntimeError(f"memory of {name!r} does not hold what was written to it")

    def load(self, source: Source) -> None:
        for piece, memory in zip(self.pieces, self._memory, strict=True):
            whole = piece.region
            memory.fill(
                (part.within(whole), source.region(part).reshape(part.rows, part.columns)) for part in pieces(whole)
            )

    def digests(self, groups: Sequence[int]) -> Sums:
        def read(number: int, part: Region) -> Bits:
            return self.read(number, part.within(self.pieces[number].region))

        for memory in self._memory:
            memory.exact = True
        # a read makes a copy of all of them
        copied = {number for number, memory in enumerate(self._memory) if isinstance(memory, Copied)}
        sums = digests_of(read, [piece.region for piece in self.pieces], groups, at_once=copied)
        for group, memory in zip(groups, self._memory, strict=True):
            if not memory.exact:
                # weights that no version can hold must not pass for the nearest one
                sums[group] += StateDigest(1, 1)
        return sums

    digests_beside = digests

    def shifts(self, patch: Sequence[PieceChange], groups: Sequence[int]) -> Sums:
        totals = {group: StateDigest() for group in groups}
        for item in patch:
            totals[groups[item.piece]] += item.change.digest()
        return totals


class Rows:
    """Memory in the run's own dtype, whose rows are those of the piece."""

    def __init__(self, region: Region, bits: Bits) -> None:
        """`bits` are [rows, columns]; columns are neighbours in memory."""
        self.exact = True
        """Whether all that was read is exactly representable in the run's dtype; whichever thread reads says so."""
        self._region, self._bits = region, bits
        self._stride = bits.strides[0] // bits.itemsize if region.rows > 1 else max(region.columns, 1)
        span = (region.rows - 1) * self._stride + region.columns if bits.size else 0
        self._flat = np.lib.stride_tricks.as_strided(bits, (span,), (bits.itemsize,))

    def read(self, part: Part) -> Bits:
        return self._bits[part]

    def write(self, change: Change, look: bool) -> bool:
        """Write the new bits. Returns whether memory holds them afterwards; without `look`, that is not looked at."""
        region, stride = change.region, self._stride
        first = (region.row - self._region.row) * stride + region.column - self._region.column
        width = stride if region.rows <= 1 else region.columns
        given = self._flat, change.positions, self.widen(change.new), first, width, stride
        if look:
            return bool(scatter_and_look(*given))
        scatter(*given)
        return True

    def fill(self, parts: Iterable[tuple[Part, Bits]]) -> None:
        for part, bits in parts:
            self._bits[part] = self.widen(bits)

    def widen(self, bits: Bits) -> Bits:
        return bits


class Bfloat16(Rows):
    """float32 that is bfloat16: its upper half is the run's bits, its lower half is zero."""

    def read(self, part: Part) -> Bits:
        wide = np.ascontiguousarray(self._bits[part])
        narrow = np.empty(wide.shape, np.uint16)
        if _upper_halves(wide.reshape(-1), narrow.reshape(-1)):
            self.exact = False
        return narrow

    def widen(self, bits: Bits) -> Bits:
        wide: Bits = bits.astype(np.uint32) << np.uint32(16)
        return wide


class Float16(Rows):
    """float32 that is float16."""

    def read(self, part: Part) -> Bits:
        wide = np.ascontiguousarray(self._bits[part])
        with np.errstate(over="ignore"):
            narrow = wide.view(np.float32).astype(np.float16).view(np.uint16)
        if not np.array_equal(self.widen(narrow), wide):
            self.exact = False
        return narrow

    def widen(self, bits: Bits) -> Bits:
        return bits.view(np.float16).astype(np.float32).view(np.uint32)


class Copied:
    """Torch weights on a device, not contiguous, or wider in another way: read as a copy, written back whole."""

    def __init__(self, region: Region, tensor: Any, dtype: Any) -> None:
        self.exact = True
        self._region, self._tensor, self._dtype = region, tensor, dtype

    def read(self, part: Part) -> Bits:
        narrow = self._tensor.to(self._dtype)
        if narrow.dtype != self._tensor.dtype:
            again = narrow.to(self._tensor.dtype)
            if not np.array_equal(torch_bits(again), torch_bits(self._tensor)):
                self.exact = False
        # a copy in any case: torch has live bits only of what is contiguous and in host memory
        return torch_bits(narrow).reshape(self._region.rows, self._region.columns)[part]

    def write(self, change: Change, look: bool) -> bool:
        bits = self.read(WHOLE)
        held = Rows(self._region, bits).write(change, look)
        self._put(bits)
        return held

    def fill(self, parts: Iterable[tuple[Part, Bits]]) -> None:
        bits = self.read(WHOLE)
        for part, new in parts:
            bits[part] = new
        self._put(bits)

    def _put(self, bits: Bits) -> None:
        # of the run's dtype, without memory of its own
        template = self._tensor.new_empty((), dtype=self._dtype).expand(self._tensor.shape)
        self._tensor.copy_(like(template, bits.reshape(-1)))


class Placed:
    """Memory in a kernel's layout, which was learned: units lie where two tables say."""

    def __init__(self, region: Region, bits: Bits, places: Places) -> None:
        self.exact = True
        self._region, self._bits, self._places = region, bits, places

    def read(self, part: Part) -> Bits:
        rows, columns = self._places.rows[part[0]], self._places.columns[part[1]]
        out = np.empty((rows.size, columns.size), self._bits.dtype)
        _gather(self._bits, rows, columns, out)
        return out

    def write(self, change: Change, look: bool) -> bool:
        positions, new = cut(change.region, self._region, change.positions, change.new)
        row, column = np.divmod(positions, np.uint32(self._region.columns))
        where = self._places.rows[row] + self._places.columns[column]
        return bool(scatter_and_look(self._bits, where, new, 0, 1, 1))

    def fill(self, parts: Iterable[tuple[Part, Bits]]) -> None:
        for part, bits in parts:
            self._bits[self._places.rows[part[0], None] + self._places.columns[part[1]]] = bits


@njit(cache=True, nogil=True)
def _upper_halves(wide: Any, narrow: Any) -> Any:
    rest = np.uint32(0)
    for i in range(wide.size):
        rest |= wide[i]
        narrow[i] = np.uint16(wide[i] >> np.uint32(16))
    return rest & np.uint32(0xFFFF)


@njit(cache=True, nogil=True)
def _gather(bits: Any, rows: Any, columns: Any, out: Any) -> None:
    for r in range(rows.size):
        for c in range(columns.size):
            out[r, c] = bits[rows[r] + columns[c]]


_WIDE = {("BF16", "F32"): Bfloat16, ("F16", "F32"): Float16}


def memory_of(region: Region, tensor: Any, name: str) -> Rows | Copied:
    """The memory of a whole tensor of a model, whose dtype may be wider than the run's."""
    wanted, found = region.tensor.dtype, dtype_of(tensor)
    kind = Rows if found == wanted else _WIDE.get((wanted, found))
    if is_torch(tensor):
        tensor = tensor.detach()
        # an empty tensor may have strides of 0: it has no elements to share memory
        if tensor.numel() and any(
            step == 0 and side > 1 for step, side in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise SchemaMismatch(f"{name!r} is expanded, so its elements share memory and cannot differ: clone() it")
        if kind is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return Copied(region, tensor, torch_dtype(wanted))
        bits = torch_bits(tensor)
    else:
        patchable = isinstance(tensor, np.ndarray) and tensor.flags.c_contiguous and tensor.flags.writeable
        if kind is None or not patchable:
            raise SchemaMismatch(
                f"{name!r} must be a writable, contiguous array of {wanted} or float32 to be patched in place"
            )
        # without the shape that a subclass (matrix, masked array) insists on
        bits = np.asarray(tensor).reshape(-1).view(f"u{min(tensor.itemsize, 4)}")
    return kind(region, bits.reshape(region.rows, region.columns))
