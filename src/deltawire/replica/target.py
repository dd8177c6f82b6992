"""Live weights as something to read bits from and write bits to: numpy mappings, torch modules, a private `State`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..bucket.replay import State
from ..core import full
from ..core.change import Change, Region, regions
from ..core.digest import StateDigest
from ..core.dtypes import Bits
from ..core.errors import SchemaMismatch
from ..core.full import Source
from ..core.parallel import ordered_map
from ..core.schema import Schema
from ..core.sparse import DeltaFile
from ..models import ModelView, is_torch, like, tensors_of, torch_bits

WORTH_THREADS = 1 << 20
"""Changes that are worth starting threads for: some milliseconds of work."""


class Patch(Protocol):
    """Staged changes, ready to be written to live weights."""

    moved: StateDigest
    # how the state digest will move

    def write(self) -> None: ...

    def undo(self) -> None:
        """Put the old bits back: all of them, also after a write that died half-way."""
        ...


class Target:
    """The weights of a model, by the names of the run's schema. Reads and writes go straight to the live memory."""

    def __init__(self, model: Any, schema: Schema, *, strict: bool = True) -> None:
        self.model = model
        self.schema = schema
        if isinstance(model, State):
            # bits already, of dtypes that numpy may have no name for
            model.schema.require_equal(schema, ours="this state", theirs="the run")
            self._cells: dict[str, list[_Live | _Copied]] = {n: [_Live(bits)] for n, bits in model.tensors.items()}
            return
        tensors = tensors_of(model, to_write=True)
        require(model, tensors, schema, strict)
        # an alias that does not share storage with its tensor here is written beside it
        names: dict[str, list[str]] = {t.name: [t.name] for t in schema.tensors}
        for alias, name in schema.ties.items():
            if alias in tensors:
                names[name].append(alias)
        self._cells = {name: [_cell(tensors[n], n) for n in aliases if n in tensors] for name, aliases in names.items()}

    @property
    def in_place(self) -> bool:
        """Whether writes go straight to the weights, so that several may go on at once."""
        return all(isinstance(cell, _Live) for cells in self._cells.values() for cell in cells)

    def bits(self, name: str) -> Bits:
        """The tensor's present bits: a live view for weights on the CPU, a copy for others. Not to be written to."""
        return self._cells[name][0].bits()

    def region(self, region: Region) -> Bits:
        return region.cut(self.bits(region.tensor.name))

    def decode(self, file: DeltaFile) -> Sequence[Any]:
        """What a delta changes, checked: as `stage` takes it."""
        return [change for changes in file.changes(self.bits) for change in changes]

    def stage(self, decoded: Sequence[Any]) -> Patch:
        """Bring what was decoded to where the weights are. Writes nothing."""
        return _HostPatch(self, decoded)

    def write(self, change: Change) -> None:
        for cell in self._cells[change.region.tensor.name]:
            bits = cell.bits()
            change.write(bits)
            cell.put(bits)

    def undo(self, change: Change) -> None:
        for cell in self._cells[change.region.tensor.name]:
            bits = cell.bits()
            change.undo(bits)
            cell.put(bits)

    def load(self, source: Source) -> None:
        """Overwrite everything with a verified source, tensor by tensor."""
        for tensor in self.schema.tensors:
            cells = [(cell, cell.bits()) for cell in self._cells[tensor.name]]
            for region in regions(tensor):
                new = source.region(region).reshape(region.rows, region.columns)
                for _, bits in cells:
                    region.matrix(bits)[:] = new
            for cell, bits in cells:
                cell.put(bits)

    def digest(self) -> StateDigest:
        """The state digest, recomputed. Names that the run ties and this model does not must agree as well: weights of
        which one was changed alone are no version, and get a digest that no version has."""
        total = full.digest_of(self)
        for cells in self._cells.values():
            first = cells[0].bits()
            for other in (cell.bits() for cell in cells[1:]):
                if not np.may_share_memory(first, other) and not np.array_equal(first, other):
                    total += StateDigest(1, 1)
        return total


def open_target(model: Any, schema: Schema, *, strict: bool = True) -> Target:
    """The target that suits a model: on its GPU where it lies there in one piece."""
    if not isinstance(model, State) and ModelView(model).device() is not None:
        from .device import DeviceTarget

        return DeviceTarget(model, schema, strict=strict)
    return Target(model, schema, strict=strict)


class _HostPatch:
    def __init__(self, target: Target, changes: Sequence[Change]) -> None:
        self._target, self._changes = target, changes
        self.moved = sum((change.digest() for change in changes), StateDigest())

    def write(self) -> None:
        many = sum(change.count for change in self._changes) >= WORTH_THREADS
        threads = None if many and self._target.in_place else 1
        for _ in ordered_map(self._target.write, self._changes, threads):
            pass

    def undo(self) -> None:
        # to undo what was never written changes nothing
        for change in self._changes:
            self._target.undo(change)


class _Live:
    """Weights in host memory: the view is the weight."""

    def __init__(self, bits: Bits) -> None:
        self._bits = bits

    def bits(self) -> Bits:
        return self._bits

    def put(self, bits: Bits) -> None:
        pass


class _Copied:
    """Weights on a device, or not contiguous: read as a copy, written back whole."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def bits(self) -> Bits:
        bits = torch_bits(self._tensor)
        return bits.copy() if self._tensor.device.type == "cpu" else bits

    def put(self, bits: Bits) -> None:
        self._tensor.copy_(like(self._tensor, bits))


def _cell(tensor: Any, name: str) -> _Live | _Copied:
    if is_torch(tensor):
        tensor = tensor.detach()
        live = tensor.device.type == "cpu" and tensor.is_contiguous()
        return _Live(torch_bits(tensor)) if live else _Copied(tensor)
    if not isinstance(tensor, np.ndarray) or not tensor.flags.c_contiguous or not tensor.flags.writeable:
        raise SchemaMismatch(f"{name!r} must be a writable, contiguous array to be patched in place")
    return _Live(tensor.reshape(-1).view(f"u{min(tensor.itemsize, 4)}"))


def require(model: Any, tensors: dict[str, Any], schema: Schema, strict: bool) -> None:
    """Every tensor of the run must be there as the run has it; with `strict`, nothing else may be."""
    found = ModelView(model).schema
    specs = found.by_name()
    specs.update((alias, specs[name]) for alias, name in found.ties.items())
    for tensor in schema.tensors:
        names = [tensor.name, *(alias for alias, name in schema.ties.items() if name == tensor.name)]
        present = [specs[n] for n in names if n in specs]
        if not present:
            raise SchemaMismatch(f"the run has {tensor.name!r}, this model does not")
        for spec in present:
            if (spec.dtype, spec.shape) != (tensor.dtype, tensor.shape):
                raise SchemaMismatch(
                    f"{tensor.name!r} is {tensor.dtype} {list(tensor.shape)} in the run but {spec.dtype} "
                    f"{list(spec.shape)} in this model; load the model in the run's dtype"
                )
    if strict:
        extra = tensors.keys() - {t.name for t in schema.tensors} - schema.ties.keys()
        if extra:
            raise SchemaMismatch(
                f"this model has {sorted(extra)[0]!r}, which the run does not carry; "
                "pass strict=False to leave it alone"
            )
