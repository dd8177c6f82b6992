"""The kernels in plain torch, for any device: what `triton_ops` must equal, and what runs where there is no Triton.

Segments are taken one after the other, so scratch memory follows the largest segment, not the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..core import digest as core_digest
from ..core.change import FLIPS, NEW_BITS, NUMBER_STEPS
from ..core.codecs.context.classes import CLASSES, COLUMN_NEUTRAL, ROW_NEUTRAL
from .adamw import ChangeLog, Elements
from .plan import TILE, Plan, Segment, narrow, units, widen
from .results import Changed, ClassRanks, ClassRules, Moves, Origins, TooMany

_DIGEST_BLOCKS = 1 << 12


def detect(
    plan: Plan, old: Sequence[Tensor], new: Sequence[Tensor], *, cast: bool = False, most: int | None = None
) -> Changed:
    """The differences between two lists of tensors; with `cast`, new ones of fp32 are rounded to bf16."""
    if cast:
        new = [tensor.detach().to(torch.bfloat16) for tensor in new]
    plan.launches(old, new)
    counts = torch.zeros(plan.tiles, dtype=torch.int64, device=plan.device)
    positions: list[Tensor] = []
    was: list[Tensor] = []
    now: list[Tensor] = []
    for first, segment in _segments(plan):
        a, b = (_rectangle(segment, units(t[segment.tensor])) for t in (old, new))
        row, column = torch.nonzero(a != b, as_tuple=True)
        tile, position = _locate(segment, row, column)
        # row by row over the segment is row by row in each tile: a stable sort keeps that
        tile, order = torch.sort(tile, stable=True)
        counts[first : first + segment.tiles] = torch.bincount(tile, minlength=segment.tiles)
        positions.append(narrow(position[order], plan.position_dtype))
        for values, out in ((a, was), (b, now)):
            out.append(narrow(widen(values[row, column][order]), plan.value_dtype))
    total = int(counts.sum())
    if most is not None and total > most:
        raise TooMany(total)
    return Changed(
        _starts(counts),
        _joined(positions, plan.position_dtype, plan.device),
        _joined(was, plan.value_dtype, plan.device),
        _joined(now, plan.value_dtype, plan.device),
    )


def prepare_apply(plan: Plan, tensors: Sequence[Tensor], changed: Changed) -> Callable[[], None]:
    """Return a call that writes the changes."""
    plan.launches(tensors)

    def run() -> None:
        starts = changed.starts.tolist()
        for first, segment in _segments(plan):
            bits = units(tensors[segment.tensor])
            new = widen(changed.new[starts[first] : starts[first + segment.tiles]])
            bits[_addresses(plan, changed, first, segment)] = new.to(bits.dtype)

    return run


def resolve(plan: Plan, tensors: Sequence[Tensor], moves: Moves) -> Changed:
    """Old bits at the positions of moves, and the new ones they lead to."""
    plan.launches(tensors)
    found = Changed(moves.starts, moves.positions, torch.empty_like(moves.values), torch.empty_like(moves.values))
    starts = moves.starts.tolist()
    for first, segment in _segments(plan):
        here = slice(starts[first], starts[first + segment.tiles])
        bits = units(tensors[segment.tensor])
        old = widen(bits[_addresses(plan, found, first, segment)])
        new, kind = widen(moves.values[here]), int(moves.kinds[first])
        if kind == FLIPS:
            new ^= old
        elif kind != NEW_BITS:
            new = _stepped(old, new, kind == NUMBER_STEPS, 8 * bits.dtype.itemsize)
        found.old[here], found.new[here] = narrow(old, found.old.dtype), narrow(new, found.new.dtype)
    return found


def digest(plan: Plan, tensors: Sequence[Tensor], keys: Tensor) -> Tensor:
    """Both lanes of the state digest. The plan is flat, in units of at most 16 bits; keys are int64 [tiles, 2]."""
    plan.launches(tensors)
    out = torch.zeros(2, dtype=torch.int64, device=plan.device)
    table = torch.from_numpy(core_digest.TABLE.view("i8").copy()).to(plan.device)
    period = core_digest.BLOCK
    for first, segment in _segments(plan):
        bits = units(tensors[segment.tensor], int(plan.unit[first]))
        for start in range(0, bits.numel(), _DIGEST_BLOCKS * period):
            part = widen(bits[start : start + _DIGEST_BLOCKS * period])
            rows = torch.nn.functional.pad(part, (0, -part.numel() % period)).reshape(-1, period)
            block = start // period + torch.arange(rows.shape[0], device=plan.device)
            for lane in range(2):
                out[lane] += (_mix(keys[first, lane] + block) * (rows * table[lane]).sum(1)).sum()
    return out


def prepare_digest(plan: Plan, tensors: Sequence[Tensor], keys: Tensor) -> Callable[[Tensor], None]:
    """A function that adds both lanes to its argument."""

    def run(out: Tensor) -> None:
        out += digest(plan, tensors, keys)

    return run


def digest_change(plan: Plan, changed: Changed, keys: Tensor, origins: Origins | None = None) -> Tensor:
    """How both lanes of the state digest move when the changes are applied; int64 [groups, 2]."""
    out = torch.zeros((origins.groups if origins else 1, 2), dtype=torch.int64, device=plan.device)
    table = torch.from_numpy(core_digest.TABLE.view("i8").copy()).to(plan.device)
    period = core_digest.BLOCK
    starts = changed.starts.tolist()
    for first, segment in _segments(plan):
        here = slice(starts[first], starts[first + segment.tiles])
        at = _addresses(plan, changed, first, segment)
        old, new = widen(changed.old[here]), widen(changed.new[here])
        halves = 2 if plan.unit[first] == 4 else 1
        group = 0
        if origins is not None:
            base, columns, across, group = origins.table[first].tolist()
            at = base + at // columns * across + at % columns
        for half in range(halves):
            moved = ((new >> 16 * half) & 0xFFFF) - ((old >> 16 * half) & 0xFFFF)
            p = at * halves + half
            for lane in range(2):
                out[group, lane] += (_mix(keys[first, lane] + p // period) * table[lane][p % period] * moved).sum()
    return out


def exponents(units: Tensor, samples: Sequence[tuple[int, int, int, int]], shift: int, mask: int) -> Tensor:
    """How many units of each sample have each exponent, int32 [samples, 256]."""
    counts = []
    for start, rows, columns, every in samples:
        rows_of = units[start : start + rows * columns].view(rows, columns)[::every].reshape(-1)
        found = (rows_of >> shift).bitwise_and_(mask).to(torch.int32)
        counts.append(torch.bincount(found, minlength=256).to(torch.int32))
    return torch.stack(counts)


def class_counts(plan: Plan, old: Sequence[Tensor], rules: ClassRules) -> Tensor:
    """Units of each class in each tile, int32 [tiles, CLASSES]: what a host needs to decode ranks."""
    plan.launches(old)
    sizes = torch.zeros((plan.tiles, CLASSES), dtype=torch.int32, device=plan.device)
    for first, segment in _segments(plan):
        key, _ = _keys(plan, rules, first, segment, units(old[segment.tensor]))
        count = torch.bincount(key, minlength=segment.tiles * CLASSES)
        sizes[first : first + segment.tiles] = count.reshape(-1, CLASSES).to(torch.int32)
    # nothing of class 0 is ever coded
    sizes[:, 0] = 0
    return sizes


def class_ranks(plan: Plan, old: Sequence[Tensor], rules: ClassRules, changed: Changed) -> ClassRanks:
    """Ranks of changes within the classes of the old bits, which `old` must still hold."""
    sizes = class_counts(plan, old, rules)
    counts = torch.zeros_like(sizes)
    ranks, steps = torch.empty_like(changed.positions), torch.empty_like(changed.new)
    starts = changed.starts.tolist()
    for first, segment in _segments(plan):
        here = slice(starts[first], starts[first + segment.tiles])
        key, order = _keys(plan, rules, first, segment, units(old[segment.tensor]))
        rank = torch.empty_like(order)
        rank[order] = torch.arange(order.numel(), device=plan.device) - _group_starts(key, segment)[key[order]]
        at = _places(plan, changed, first, segment)
        # tiles come in order already: only classes within them are sorted, and ranks in a class ascend
        mine, into = torch.sort(key[at], stable=True)
        count = torch.bincount(mine, minlength=segment.tiles * CLASSES).reshape(-1, CLASSES)
        counts[first : first + segment.tiles] = count.to(torch.int32)
        ranks[here] = narrow(rank[at][into], ranks.dtype)
        step = _steps(plan, rules, first, widen(changed.old[here]), widen(changed.new[here]))
        steps[here] = narrow(step[into], steps.dtype)
    return ClassRanks(sizes, counts, ranks, steps)


def place(
    plan: Plan, old: Sequence[Tensor], rules: ClassRules, counts: Tensor, ranks: Tensor, steps: Tensor
) -> Changed:
    """Positions, old and new bits from ranks and steps. A rank past its class is a ValueError."""
    starts = _starts(counts.sum(1))
    total = int(starts[-1])
    if total != ranks.numel() or total != steps.numel():
        raise ValueError(f"counts say {total} changes; there are {ranks.numel()} ranks and {steps.numel()} steps")
    sizes = class_counts(plan, old, rules)
    positions = torch.empty(total, dtype=plan.position_dtype, device=plan.device)
    was, now = (torch.empty(total, dtype=plan.value_dtype, device=plan.device) for _ in range(2))
    edges = starts.tolist()
    for first, segment in _segments(plan):
        here = slice(edges[first], edges[first + segment.tiles])
        bits = units(old[segment.tensor])
        key, order = _keys(plan, rules, first, segment, bits)
        mine = torch.arange(segment.tiles * CLASSES, device=plan.device).repeat_interleave(
            counts[first : first + segment.tiles].reshape(-1)
        )
        rank = widen(ranks[here])
        bad = int((rank >= sizes[first : first + segment.tiles].reshape(-1)[mine]).sum())
        if bad:
            raise ValueError(f"{bad} ranks lead past their class")
        at = order[_group_starts(key, segment)[mine] + rank]
        row, column = at // segment.columns, at % segment.columns
        positions[here] = narrow(_locate(segment, row, column)[1], positions.dtype)
        before = widen(_rectangle(segment, bits)[row, column])
        was[here] = narrow(before, was.dtype)
        after = _stepped(before, widen(steps[here]), bool(rules.table[first, 1]), 8 * bits.dtype.itemsize)
        now[here] = narrow(after, now.dtype)
    return Changed(starts, positions, was, now)


def nothing_seen(elements: Elements) -> Tensor:
    """A byte per element."""
    return torch.zeros(elements.tiles * TILE, dtype=torch.bool, device=elements.device)


def note(elements: Elements, log: ChangeLog, number: int, old: Tensor, new: Tensor) -> None:
    """Put what changed between two sets of bf16 bits of a tensor into the log, the first change of each element."""
    first = int(elements.first_tile[number])
    seen = log.seen[first * TILE : first * TILE + old.numel()]
    at = torch.nonzero((old != new) & ~seen).view(-1)
    seen[at] = True
    end = log.count + at.numel()
    if end > log.entries.numel():
        log.grow(2 * end)
    log.entries[log.count : end] = (first + at // TILE << 32) | (at % TILE << 16) | widen(old[at])
    log.set_count(end)


def gather_bf16(elements: Elements, params: Sequence[Tensor], entries: Tensor) -> Tensor:
    """The bf16 bits (int16) that the elements of log entries have now."""
    ordered, order = torch.sort(entries)
    out = torch.empty(entries.numel(), dtype=torch.int16, device=elements.device)
    cuts = torch.from_numpy(elements.first_tile).to(elements.device) << 32
    edges = torch.searchsorted(ordered, cuts).tolist()
    for number, p in enumerate(params):
        here = slice(edges[number], edges[number + 1])
        at = ((ordered[here] >> 32) - int(elements.first_tile[number])) * TILE + (ordered[here] >> 16 & 0xFFFF)
        out[order[here]] = units(p.detach().reshape(-1)[at].to(torch.bfloat16))
    return out


def _segments(plan: Plan) -> Iterator[tuple[int, Segment]]:
    """Segments that have tiles, and the number of their first."""
    return ((int(first), s) for first, s in zip(plan.first_tile[:-1], plan.segments, strict=True) if s.tiles)


def _rectangle(segment: Segment, bits: Tensor) -> Tensor:
    return bits.as_strided((segment.rows, segment.columns), (segment.stride, 1), bits.storage_offset() + segment.offset)


def _locate(segment: Segment, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Tile of the segment, and position in it."""
    rows, columns = (torch.from_numpy(cuts).to(row.device) for cuts in (segment.row_cuts, segment.column_cuts))
    i, j = _between(rows)[row], _between(columns)[column]
    tile = i * (len(columns) - 1) + j
    return tile, (row - rows[i]) * (columns[j + 1] - columns[j]) + column - columns[j]


def _between(cuts: Tensor) -> Tensor:
    """Number of the last cut before each place along an axis."""
    return torch.arange(len(cuts) - 1, device=cuts.device).repeat_interleave(cuts.diff())


def _places(plan: Plan, changed: Changed, first: int, segment: Segment) -> Tensor:
    """Changes as positions in the segment, row by row."""
    starts = changed.starts[first : first + segment.tiles + 1]
    tile = torch.arange(segment.tiles, device=plan.device).repeat_interleave(starts.diff())
    rows, columns = (torch.from_numpy(cuts).to(plan.device) for cuts in (segment.row_cuts, segment.column_cuts))
    i, j = tile // (len(columns) - 1), tile % (len(columns) - 1)
    width = columns[j + 1] - columns[j]
    position = widen(changed.positions[int(starts[0]) : int(starts[-1])])
    return (rows[i] + position // width) * segment.columns + columns[j] + position % width


def _addresses(plan: Plan, changed: Changed, first: int, segment: Segment) -> Tensor:
    """Changes as positions in the tensor."""
    at = _places(plan, changed, first, segment)
    return segment.offset + at // segment.columns * segment.stride + at % segment.columns


def _keys(plan: Plan, rules: ClassRules, first: int, segment: Segment, bits: Tensor) -> tuple[Tensor, Tensor]:
    """tile · CLASSES + class of every unit of a segment, row by row; and the order that sorts by it."""
    shift, mask, low, top, offset, classes = rules.table[first].tolist()
    exponent = widen(_rectangle(segment, bits)) >> shift & mask
    result = offset - exponent.clamp(low, top)
    row_cuts, column_cuts = (torch.from_numpy(cuts).to(bits.device) for cuts in (segment.row_cuts, segment.column_cuts))
    rows, columns = _between(row_cuts), _between(column_cuts)
    across = len(column_cuts) - 1
    if rules.levels.numel():
        row_at = int(rules.level_at[first, 0])
        row = rules.levels[row_at : row_at + segment.rows].to(torch.int64)[:, None]
        # those of each tile begin elsewhere
        moved = rules.level_at[first : first + across, 1] - column_cuts[:-1]
        column_at = moved[columns] + torch.arange(segment.columns, device=bits.device)
        column = rules.levels[column_at].to(torch.int64)[None, :]
        result = ((result + row + column) & 255).clamp(max=classes - 1)
        result = torch.where(row == 0, 0, result)
    else:
        result = ((result + ROW_NEUTRAL + COLUMN_NEUTRAL) & 255).clamp(max=classes - 1)
    tile = rows[:, None] * across + columns[None, :]
    key = (tile * CLASSES + result).reshape(-1)
    return key, torch.sort(key, stable=True)[1]


def _group_starts(key: Tensor, segment: Segment) -> Tensor:
    """Where each (tile, class) begins in the order of `_keys`."""
    count = torch.bincount(key, minlength=segment.tiles * CLASSES)
    return count.cumsum(0) - count


def _steps(plan: Plan, rules: ClassRules, first: int, old: Tensor, new: Tensor) -> Tensor:
    bits = 8 * int(plan.unit[first])
    is_float = bool(rules.table[first, 1])
    # the usual zigzag, less one, of the way back: +1 → 0, −1 → 1, +2 → 2 …, as core/ulps.py has it
    step = (_to_key(old, is_float, bits) - _to_key(new, is_float, bits)) & ((1 << bits) - 1)
    step = torch.where(step >> (bits - 1) != 0, step - (1 << bits), step)
    return ((step << 1) ^ (step >> 63)) - 1


def _stepped(old: Tensor, steps: Tensor, is_float: bool, width: int) -> Tensor:
    step, sign, every = ((steps + 1) >> 1) ^ -((steps + 1) & 1), 1 << (width - 1), (1 << width) - 1
    key = (_to_key(old, is_float, width) - step) & every
    return torch.where(key & sign != 0, key ^ sign, key ^ every) if is_float else key


def _to_key(bits: Tensor, is_float: bool, width: int) -> Tensor:
    sign, every = 1 << (width - 1), (1 << width) - 1
    return torch.where(bits & sign != 0, bits ^ every, bits | sign) if is_float else bits


def _mix(x: Tensor) -> Tensor:
    # torch shifts int64 arithmetically: the copies of the sign are masked off
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ (x >> 31 & (1 << 33) - 1)


def _starts(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.to(torch.int64).cumsum(0), (1, 0))


def _joined(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
