"""A model of this process as a target: a torch module, a state dict, a mapping of arrays, a private `State`.

stage    decode, bring it to where the weights are, predict the digest    nothing touched
swap     scatter the new bits, recompute the digest of the live weights   on an error: scatter the old ones back
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..bucket.replay import State
from ..core import full
from ..core.digest import StateDigest
from ..core.errors import DigestMismatch
from ..core.full import Source
from ..core.schema import Schema
from ..core.sparse import DeltaFile, open_delta
from ..models import ModelView, live_tensors, whereabouts
from .host import HostMemory, require_ties
from .target import Delta, Staged, Update

if TYPE_CHECKING:
    from torch import nn

Model: TypeAlias = "nn.Module | Mapping[str, Any] | State"
"""Weights by name: a torch module, a state dict, a mapping of writable numpy arrays or torch tensors, or a `State`."""


class Patch(Protocol):
    """Changes that are ready to be written to live weights."""

    @property
    def moved(self) -> StateDigest:
        """Change of the state digest."""
        ...

    def write(self) -> None: ...

    def undo(self) -> None:
        """Restore the old bits, also after a write that failed half-way."""
        ...


class Memory(Protocol):
    """The weights of a model where they lie: `HostMemory` or `DeviceMemory`."""

    schema: Schema

    def digest(self) -> StateDigest:
        """Recompute the state digest of the live weights."""
        ...

    def decode(self, file: DeltaFile) -> Sequence[Any]:
        """Decode and check a delta, for `prepare`."""
        ...

    def prepare(self, decoded: Sequence[Any]) -> Patch:
        """Bring decoded changes to where the weights are. Writes nothing."""
        ...

    def load(self, source: Source) -> None:
        """Overwrite everything with a verified source, tensor by tensor."""
        ...


@dataclass(slots=True, kw_only=True)
class StagedModel(Staged):
    """An update of a model of this process."""

    write: Callable[[], None]
    undo: Callable[[], None] = lambda: None
    decoded: Sequence[Any] = ()
    """What a delta changes, as the memory decoded it; empty for full weights."""


class ModelTarget:
    """Patches a model in place.

    strict      whether weights that the run does not carry are an error or left alone
    prove       whether `swap` recomputes the digest of all live weights
    """

    takes_deltas = True

    def __init__(self, model: Model, *, strict: bool = True, prove: bool = True) -> None:
        self.model = model
        self._strict, self._prove = strict, prove
        self._memory: Memory = HostMemory({}, Schema.build(()))
        self._where: object = ()

    def bind(self, schema: Schema) -> bool:
        # `model.to(…)` and the like move the weights of the same module
        where = whereabouts(self.model)
        if schema is self._memory.schema and where == self._where:
            return False
        self._memory, self._where = open_memory(self.model, schema, strict=self._strict), where
        return True

    def digest(self) -> StateDigest:
        return self._memory.digest()

    def stage(self, update: Update) -> StagedModel:
        clock, memory, content = time.perf_counter(), self._memory, update.content
        if not isinstance(content, Delta):
            # proven before it is written: a write that fails half-way cannot be undone
            update.require(full.digest_of(content))
            require_ties(self.model, content)
            staged = StagedModel(update=update, undoable=False, write=lambda: memory.load(content))
            staged.timings["decode"] = time.perf_counter() - clock
            return staged
        decoded: list[Any] = []
        for data in content.files:
            decoded += memory.decode(open_delta(data.read, data.size, memory.schema, content.claim))
        ready = time.perf_counter()
        patch = memory.prepare(decoded)
        update.require(update.base + patch.moved)
        staged = StagedModel(update=update, write=patch.write, undo=patch.undo, decoded=decoded)
        staged.timings |= {"decode": ready - clock, "stage": time.perf_counter() - ready}
        return staged

    def swap(self, staged: StagedModel) -> None:
        clock, update = time.perf_counter(), staged.update
        try:
            staged.write()
            written = time.perf_counter()
            staged.timings["apply"] = written - clock
            if self._prove:
                found = self.digest()
                staged.timings["prove"] = time.perf_counter() - written
                if found != update.digest:
                    then = "the previous weights were restored" if staged.undoable else "call sync() again"
                    raise DigestMismatch(update.version, str(update.digest), str(found), then)
        except BaseException:
            staged.undo()
            raise


def open_memory(model: Model, schema: Schema, *, strict: bool = True) -> Memory:
    """Open the memory of a model: `DeviceMemory` if all of it is on one GPU in the run's dtypes, else `HostMemory`."""
    if not isinstance(model, State):
        view = ModelView(live_tensors(model))
        wanted = {tensor.name: tensor.dtype for tensor in schema.tensors}
        if view.device() is not None and not any(wanted.get(t.name, t.dtype) != t.dtype for t in view.schema.tensors):
            from .device import DeviceMemory

            return DeviceMemory(model, schema, strict=strict)
    return HostMemory(model, schema, strict=strict)
