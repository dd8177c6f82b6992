"""The kernels on a GPU. Every function here has a twin of the same name and signature in `torch_ops`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from ..core import digest as core_digest
from ..core.codecs.context.classes import CLASSES, COLUMN_NEUTRAL, ROW_NEUTRAL
from . import _adamw, _change, _classes, _digest, _ranks, _rows
from .adamw import ChangeLog, Elements, StepInputs
from .pace import in_turns
from .plan import TILE, Launch, Plan
from .results import CLASS_STEPS, Changed, ClassRanks, ClassRules, Moves, Origins, TooMany

CHUNK = 128
"""Units of a row that are read as one piece; a byte can count them."""

_SAMPLED = 1 << 14
"""Units of a sample that one program counts, about."""

_SCRATCH = 48 << 20
"""Bytes of scratch memory that counting within classes may take, whatever the model's size."""

# How many chunks or changes a program takes at a time, and with how many warps: the fastest of those tried on an H200.
COUNT = {"CHUNKS": 32, "num_warps": 4}
EXTRACT = {"CHUNKS": 64, "num_warps": 4}
APPLY = {"BLOCK": 1024, "num_warps": 8}
DIGEST = {"ROWS": 4, "num_warps": 2}
DIGEST_CHANGE = {"BLOCK": 512, "num_warps": 4}
EXPONENTS = {"BLOCK": 1024, "num_warps": 4}
CLASS_COUNTS = {"CHUNKS": 32, "num_warps": 4}
CLASS_RANKS = {"CHUNKS": 16, "GROUP": 128, "BLOCK": 32, "num_warps": 4}
PLACE = {"CHUNKS": 32, "GROUP": 256, "BLOCK": 32, "num_warps": 4}
ADAMW = {"WORDS": 32, "num_warps": 1}
GATHER = {"BLOCK": 512, "num_warps": 4}
ROWS = {"BLOCK": 512, "num_warps": 4}

Start = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], object]
"""What is done with a kernel, its grid, its arguments and its constants and options."""

starting: ContextVar[Start] = ContextVar(
    "starting", default=lambda kernel, grid, arguments, options: kernel[grid](*arguments, **options)
)
"""Launches a kernel; ahead.py has it compiled instead."""

# Programs per multiprocessor that take tiles in turn. What fits at once: any that must wait work alone at the end.
PROGRAMS = 5


def detect(
    plan: Plan, old: Sequence[Tensor], new: Sequence[Tensor], *, cast: bool = False, most: int | None = None
) -> Changed:
    """The differences between two lists of tensors; with `cast`, new ones of fp32 are rounded to bf16."""
    launches = plan.launches(old, new)
    # zeros: where kernels are only compiled, nothing counts
    counts = torch.zeros(plan.tiles, dtype=torch.int32, device=plan.device)
    for launch in launches:
        _run(_change.count_kernel, plan, launch, counts, CAST=cast, ALIGNED=launch.aligned, CHUNK=CHUNK, **COUNT)
    starts = _starts(counts)
    # the one place that waits for the device: outputs are as large as what changed, not as what could
    total = int(starts[-1])
    if most is not None and total > most:
        raise TooMany(total)
    return extract(plan, launches if total else (), starts, total, cast=cast)


def extract(plan: Plan, launches: Iterable[Launch], starts: Tensor, total: int, *, cast: bool = False) -> Changed:
    """The differences, once it is known how many there are in each tile."""
    values = (torch.empty(total, dtype=plan.value_dtype, device=plan.device) for _ in range(2))
    result = Changed(starts, torch.empty(total, dtype=plan.position_dtype, device=plan.device), *values)
    for launch in launches:
        options = {"CAST": cast, "ALIGNED": launch.aligned, "CHUNK": CHUNK, **EXTRACT}
        _run(_change.extract_kernel, plan, launch, starts, result.positions, result.old, result.new, **options)
    return result


def prepare_apply(plan: Plan, tensors: Sequence[Tensor], changed: Changed) -> Callable[[], None]:
    """Return a call that writes the changes and looks at nothing else."""
    launches = plan.launches(tensors) if changed.count else ()

    def run() -> None:
        for launch in launches:
            _run(_change.apply_kernel, plan, launch, changed.starts, changed.positions, changed.new, **APPLY)

    return run


def resolve(plan: Plan, tensors: Sequence[Tensor], moves: Moves) -> Changed:
    """Old bits at the positions of moves, and the new ones they lead to."""
    old, new = torch.empty_like(moves.values), torch.empty_like(moves.values)
    for launch in plan.launches(tensors) if moves.values.numel() else ():
        given = moves.starts, moves.positions, moves.values, moves.kinds
        _run(_change.resolve_kernel, plan, launch, *given, old, new, **APPLY)
    return Changed(moves.starts, moves.positions, old, new)


def digest(plan: Plan, tensors: Sequence[Tensor], keys: Tensor) -> Tensor:
    """Both lanes of the state digest. The plan is flat, in units of at most 16 bits; keys are int64 [tiles, 2]."""
    out = torch.zeros(2, dtype=torch.int64, device=plan.device)
    prepare_digest(plan, tensors, keys)(out)
    return out


def prepare_digest(plan: Plan, tensors: Sequence[Tensor], keys: Tensor) -> Callable[[Tensor], None]:
    """A function that adds both lanes to its argument and reads nothing else."""
    table, launches = _digest_table(plan), plan.launches(tensors)

    def run(out: Tensor) -> None:
        for launch in _paced(launches, 12):
            options = {"ALIGNED": launch.aligned, "BLOCK": core_digest.BLOCK, **DIGEST}
            _run(_digest.digest_kernel, plan, launch, keys, table, out, **options)

    return run


def digest_change(plan: Plan, changed: Changed, keys: Tensor, origins: Origins | None = None) -> Tensor:
    """How both lanes of the state digest move when the changes are applied; int64 [groups, 2]."""
    out = torch.zeros((origins.groups if origins else 1, 2), dtype=torch.int64, device=plan.device)
    if changed.count:
        units = plan.remember("units", lambda: torch.from_numpy(plan.unit).to(plan.device))
        _start(
            _digest.digest_change_kernel, plan.tiles,
            plan.geometry, units, keys, _digest_table(plan), changed.starts, changed.positions, changed.old,
            changed.new, keys if origins is None else origins.table, out,
            PLACED=origins is not None, PERIOD=core_digest.BLOCK, **DIGEST_CHANGE,
        )  # fmt: skip
    return out


def digest_rows(bands: Launch, table: Tensor, out: Tensor) -> None:
    """Add both lanes of the state digest of rows of 16-bit units that begin anywhere in its blocks (_rows.py)."""
    for part in in_turns(bands, 4):
        _start(_rows.rows_kernel, part.count, part.tiles, table, out, PERIOD=core_digest.BLOCK, **ROWS)


def exponents(units: Tensor, samples: Sequence[tuple[int, int, int, int]], shift: int, mask: int) -> Tensor:
    """How many units of each sample have each exponent, int32 [samples, 256]."""
    out = torch.zeros((len(samples), 256), dtype=torch.int32, device=units.device)
    table = np.array(samples, np.int64)
    # of every sample so many units in one program
    rows = -(-table[:, 1] // table[:, 3])
    parts = np.maximum(1, rows * table[:, 2] // _SAMPLED)
    numbers = np.repeat(np.arange(len(samples)), parts)
    turn = np.arange(numbers.size) - np.repeat(np.cumsum(parts) - parts, parts)
    band = -(-rows // parts)
    programs = np.column_stack([numbers, turn * band[numbers], np.minimum((turn + 1) * band[numbers], rows[numbers])])
    work = np.concatenate([programs, table[numbers]], 1)
    sent = torch.from_numpy(work).to(units.device)
    given = units, sent, out, shift, mask
    _start(_classes.exponents_kernel, len(work), *given, UNIT=units.dtype.itemsize, **EXPONENTS)
    return out


def class_counts(plan: Plan, old: Sequence[Tensor], rules: ClassRules) -> Tensor:
    """Units of each class in each tile, int32 [tiles, CLASSES]: what a host needs to decode ranks."""
    sizes = torch.zeros((plan.tiles, CLASSES), dtype=torch.int32, device=plan.device)
    for launch in _paced(plan.launches(old), 4):
        leveled, words, levels, level_at = _variant(plan, launch, rules)
        _run(
            _classes.class_counts_kernel, plan, launch, rules.table, levels, level_at, sizes,
            LEVELED=leveled, ALIGNED=launch.aligned, CHUNK=CHUNK, CLASSES=CLASSES, WIDE=_wide(words), **CLASS_COUNTS,
        )  # fmt: skip
    return sizes


def class_ranks(plan: Plan, old: Sequence[Tensor], rules: ClassRules, changed: Changed) -> ClassRanks:
    """Ranks of changes within the classes of the old bits, which `old` must still hold."""
    device = plan.device
    sizes, counts = (torch.zeros((plan.tiles, CLASSES), dtype=torch.int32, device=device) for _ in range(2))
    ranks, steps = torch.empty_like(changed.positions), torch.empty_like(changed.new)
    for launch in plan.launches(old):
        change = changed.starts, changed.positions, changed.old, changed.new
        _rank(_ranks.class_ranks_kernel, plan, launch, rules, *change, sizes, counts, ranks, steps, **CLASS_RANKS)
    return ClassRanks(sizes, counts, ranks, steps)


def place(
    plan: Plan, old: Sequence[Tensor], rules: ClassRules, counts: Tensor, ranks: Tensor, steps: Tensor
) -> Changed:
    """Positions, old and new bits from ranks and steps. A rank past its class is a ValueError.

    The memory of ranks becomes that of positions, and that of steps, where it is wide enough, that of new bits.
    """
    starts = _starts(counts.sum(1, dtype=torch.int32))
    total = int(starts[-1])
    if total != ranks.numel() or total != steps.numel():
        raise ValueError(f"counts say {total} changes; there are {ranks.numel()} ranks and {steps.numel()} steps")
    given, needed = (ranks.dtype, steps.dtype), (plan.position_dtype, plan.value_dtype)
    if given != needed:
        raise ValueError(f"ranks and steps are {given}, the plan needs {needed}")
    # the kernel needs the new bits of bytes for itself before it has read the steps
    apart = steps.dtype.itemsize == 1
    result = Changed(starts, ranks, torch.empty_like(steps), torch.empty_like(steps) if apart else steps)
    bad = torch.zeros(1, dtype=torch.int32, device=plan.device)
    for launch in _paced(plan.launches(old) if total else (), 1):
        found = starts, counts, ranks, steps, result.positions, result.old, result.new, bad
        _rank(_ranks.place_kernel, plan, launch, rules, *found, **PLACE)
    if int(bad):
        raise ValueError(f"{int(bad)} ranks lead past their class")
    return result


def nothing_seen(elements: Elements) -> Tensor:
    """A bit per element."""
    return torch.zeros(elements.tiles * (TILE // 32), dtype=torch.int32, device=elements.device)


def adamw(elements: Elements, work: StepInputs, log: ChangeLog | None, *, again: bool = False) -> None:
    """One step; with `again`, only where the log had no room the last time."""
    blank = work.scalars
    per_tile = TILE // (32 * ADAMW["WORDS"])
    scale = blank if work.grad_scale is None else work.grad_scale
    inf = blank if work.found_inf is None else work.found_inf
    seen, entries, used, late, room = blank, blank, blank, blank, 0
    if log is not None:
        blocks = elements.tiles * per_tile
        if log.late is None or log.late.numel() != blocks:
            # a byte per block that waits for room
            log.late = torch.zeros(blocks, dtype=torch.uint8, device=log.seen.device)
        seen, entries, used, late, room = log.seen, log.entries, log.used, log.late, log.entries.numel()
    for aligned, tiles in work.pointers.tiles.items():
        _start(
            _adamw.adamw_kernel, tiles.numel() * per_tile,
            tiles, elements.places, work.pointers.table, work.scalars, scale, inf, seen, entries, used, late, room,
            BF16=elements.bf16, LOG=log is not None, SCALED=work.grad_scale is not None,
            SKIPS=work.found_inf is not None, AGAIN=again, ALIGNED=aligned, TILE=TILE, **ADAMW,
        )  # fmt: skip


def gather_bf16(elements: Elements, params: Sequence[Tensor], entries: Tensor) -> Tensor:
    """The bf16 bits (int16) that the elements of log entries have now."""
    count = entries.numel()
    out = torch.empty(count, dtype=torch.uint16, device=elements.device)
    if count:
        given = elements.places, elements.table(params), entries, count, out
        _start(_adamw.gather_kernel, triton.cdiv(count, GATHER["BLOCK"]), *given, BF16=elements.bf16, **GATHER)
    return out.view(torch.int16)


def _run(kernel: Any, plan: Plan, launch: Launch, *arguments: Any, **options: Any) -> None:
    """A program for each tile of a launch."""
    given = launch.tiles, *launch.addresses, plan.geometry
    _start(kernel, launch.count, *given, *arguments, UNIT=launch.unit, **options)


def _start(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    starting.get()(kernel, (programs,), arguments, options)


def _rank(kernel: Any, plan: Plan, launch: Launch, rules: ClassRules, *arguments: Any, **options: Any) -> None:
    """Programs that take the tiles of a launch in turn, and count within classes."""
    leveled, words, levels, level_at = _variant(plan, launch, rules)
    programs, *scratch = _persistent(plan, launch, words)
    given = launch.tiles, launch.count, *launch.addresses, plan.geometry, rules.table, levels, level_at
    _start(
        kernel, programs, *given, *arguments, *scratch,
        LEVELED=leveled, UNIT=launch.unit, ALIGNED=launch.aligned, CHUNK=CHUNK, CLASSES=CLASSES, WORDS=words,
        WIDE=_wide(words), **options,
    )  # fmt: skip


def _paced(launches: Iterable[Launch], speed: int) -> Iterator[Launch]:
    return (part for launch in launches for part in in_turns(launch, speed))


def _starts(counts: Tensor) -> Tensor:
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=starts[1:])
    return starts


def _digest_table(plan: Plan) -> Tensor:
    return plan.remember("digest table", lambda: torch.from_numpy(core_digest.TABLE.view("i8").copy()).to(plan.device))


def _variant(plan: Plan, launch: Launch, rules: ClassRules) -> tuple[int, int, Tensor, Tensor]:
    """How a kernel that counts classes reads their levels (_classes.NO_LEVELS, LEVELS, ALIGNED_LEVELS), how many words
    of four classes it counts, the levels and where they are.

    A kernel has to be compiled before the first launch that needs it, which may come with any delta. So what few deltas
    have (tiles that are not aligned or are large, units of four bytes) has one kernel, for levels and all classes.
    """
    usual = launch.aligned and plan.position_dtype == torch.uint16 and launch.unit < 4
    classes = next(step for step in CLASS_STEPS if step >= rules.classes) if usual else CLASSES
    if rules.levels.numel():
        return 1 + launch.aligned, classes // 4, rules.levels, rules.level_at
    if usual:
        return 0, classes // 4, rules.levels, rules.level_at
    return 1 + launch.aligned, classes // 4, *plan.remember("neutral levels", lambda: _neutral(plan))


def _neutral(plan: Plan) -> tuple[Tensor, Tensor]:
    """Neutral levels that all tiles share, and where they are."""
    rows, columns = int(plan.rows.max(initial=0)), int(plan.width.max(initial=0))
    levels = np.repeat(np.array([COLUMN_NEUTRAL, ROW_NEUTRAL], np.uint8), [columns, rows])
    level_at = torch.tensor([[columns, 0]], device=plan.device).repeat(plan.tiles, 1)
    return torch.from_numpy(levels).to(plan.device), level_at


def _wide(words: int) -> int:
    """Classes that kernels count, a power of two."""
    return int(triton.next_power_of_2(4 * words))


def _persistent(plan: Plan, launch: Launch, words: int) -> tuple[int, Tensor, Tensor, int]:
    """How many programs take tiles in turn; scratch memory for all of them, and for how many chunks each has some."""
    wide = _wide(words)
    # a power of two, which the search for a chunk halves; at least 16, because Triton compiles a kernel of its own for
    # numbers that are not multiples of 16
    chunks = max(16, triton.next_power_of_2(plan.chunks(CHUNK)))
    kind = torch.int32 if plan.position_dtype == torch.uint32 else torch.uint16
    slot = chunks * (4 * words + kind.itemsize * wide)
    programs = max(1, min(launch.count, _processors(plan.device) * PROGRAMS, _SCRATCH // slot))
    packed = torch.empty(programs * chunks * words, dtype=torch.uint32, device=plan.device)
    return programs, packed, torch.empty(programs * chunks * wide, dtype=kind, device=plan.device), chunks


def _processors(device: torch.device) -> int:
    # the interpreter runs programs one after the other: one that takes several tiles is the case to try
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
