"""Where a checkpoint's weights lie in a running model.

An engine fuses, pads and shards what it loads: `q_proj`, `k_proj` and `v_proj` become rows of one `qkv_proj`, a rank
keeps half of them. No table of such rules is kept here. The model's own loader is run once, with tensors that have
shapes but no data, and every copy it would make into the model's storage is written down instead of made:

    checkpoint  rectangle of a tensor (a core `Region`)   →   runtime  rectangle of a storage (a view)

Whatever the loader does that is not such a copy (a cast, a transposition, arithmetic, a tensor it ignores) is a
*problem*: weights it concerns cannot be patched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.change import Region
from ...core.dtypes import lookup
from ...core.full import OF_DRAFT
from ...core.schema import Schema, TensorSpec
from ...models import torch_dtype
from ...replica.host import HostShard, Placed, Rows
from ...replica.shard import LiveShard, Piece

_aten = torch.ops.aten
_FILLS = {
    _aten.fill_.Scalar,
    _aten.fill_.Tensor,
    _aten.zero_.default,
}
"""How loaders clear padding: the padding is clear already, so nothing needs to be kept of it."""

Loader = Callable[[Iterable[tuple[str, Tensor]]], object]
"""A model's own `load_weights`."""


class Standing(NamedTuple):
    """A parameter of a module that is taken in the place of the live one while a loader is traced."""

    module: nn.Module
    name: str
    tensor: Tensor
    """Without data, of the form that the loader fills."""


@dataclass(frozen=True, slots=True)
class Placement:
    """All that one rank's loader would copy, and what it would do beside that."""

    pieces: tuple[Piece, ...]
    problems: tuple[str, ...]
    untouched: tuple[str, ...] = ()
    """Parameters of the model that the loader writes nothing to, by their names without adapters around them."""
    failure: str = ""
    """The error that the loader raised; then nothing else is known."""
    spare: tuple[Piece, ...] = ()
    """Those of the pieces that are in memory made for them, which is to be filled."""


def open_shard(pieces: Sequence[Piece], staging_gb: float | None = None) -> LiveShard:
    """Weights in host memory are patched by the core's kernels, others by torch's or Triton's. Raises ValueError where
    that cannot be done. `staging_gb`: see `ServerOptions.staging_memory`."""
    for piece in pieces:
        if piece.view.is_meta:
            raise ValueError(f"it is not known where {piece.region.tensor.name!r} lies in memory")
    if any(piece.view.device.type != "cpu" for piece in pieces):
        from ...replica.device import DeviceShard
        from ...replica.portions import room_beside

        weights = sum(piece.view.nbytes for piece in pieces)
        return DeviceShard(pieces, room=room_beside(weights, staging_gb))
    memory: list[Rows | Placed] = []
    for piece in pieces:
        size = piece.view.dtype.itemsize
        signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
        bits = piece.view.view(signed).numpy().view(f"u{size}")
        memory.append(Placed(piece.region, bits, piece.places) if piece.places else Rows(piece.region, bits))
    return HostShard(pieces, memory)


@torch.no_grad()
def trace(
    model: nn.Module, load: Loader, schema: Schema, standing: Sequence[Standing] = (), of_draft: bool = False
) -> Placement:
    """Run the loader without data. Nothing in the model is written. With `of_draft` it is given the tensors that the
    run has for a draft model with a checkpoint of its own, else all others.

    Pieces of a parameter that another one stands in for are pieces of that one.
    """
    with _in_place(standing):
        tracer = _Tracer(model)
        try:
            with tracer:
                load(tracer.tensors(schema, of_draft))
        except Exception as error:
            # names it does not know; or it computes with what it loads, and cannot be run without data
            failure = f"{type(error).__name__}: {error}"
            return Placement((), (f"the model's loader cannot be traced: {failure}",), failure=failure)
        named = model.named_parameters()
        untouched = [name.replace(".base_layer.", ".") for name, each in named if storage(each) not in tracer.written]
        return Placement(tuple(tracer.pieces), tuple(tracer.problems), tuple(untouched))


@torch.no_grad()
def trace_draft(
    draft: nn.Module,
    model: nn.Module,
    schema: Schema,
    found: Placement,
    standing: Sequence[Standing] = (),
    has_own: bool = False,
) -> Placement | None:
    """Add what the loader of a draft model copies beside its model's: `found`, traced with the same `standing`. None if
    some of the draft's own weights are not in the run. With `has_own` the draft has a checkpoint of its own.

    Weights that both models hold in one place are found once. A checkpoint may have them a second time, for the draft:
    no model computes with these, so they get memory of their own, in which they can be proven.
    """
    load: Any = draft.load_weights
    beside = trace(draft, load, schema, standing, has_own)
    modules = {*model.modules()}
    shared = {storage(t) for t in (*model.parameters(), *model.buffers())}
    shared |= {storage(tensor) for module, _, tensor in standing if module in modules}
    own = {name for name, each in draft.named_parameters() if storage(each) not in shared}
    if beside.failure or own.intersection(beside.untouched):
        return None
    device = next((each.device for each in model.parameters()), None)
    known = {_place(piece) for piece in found.pieces}
    pieces, spare = [], []
    for piece in beside.pieces:
        if storage(piece.view) not in shared:
            pieces.append(piece)
        elif _place(piece) not in known:
            spare.append(replace(piece, view=torch.zeros(piece.view.shape, dtype=piece.view.dtype, device=device)))
    problems = dict.fromkeys((*found.problems, *beside.problems))
    return replace(
        found, pieces=(*found.pieces, *pieces, *spare), problems=tuple(problems), spare=(*found.spare, *spare)
    )


def _place(piece: Piece) -> tuple[Any, ...]:
    return piece.region, storage(piece.view), piece.view.storage_offset(), piece.view.stride()


@contextmanager
def _in_place(standing: Sequence[Standing]) -> Iterator[None]:
    live = [(module, dict(module._parameters)) for module in dict.fromkeys(one.module for one in standing)]
    try:
        for module, name, tensor in standing:
            module._parameters[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for module, parameters in live:
            module._parameters = parameters


class _Tracer(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self.problems: list[str] = []
        self.written: set[int] = set()
        """Storages that the model wrote to."""
        self._live = {storage(t) for t in (*model.parameters(), *model.buffers())}
        self._sources: dict[int, TensorSpec] = {}
        # a storage's address means something only while the tensor lives
        self._held: list[Tensor] = []

    def tensors(self, schema: Schema, of_draft: bool) -> Iterator[tuple[str, Tensor]]:
        for spec in schema.tensors:
            if spec.name.startswith(OF_DRAFT) != of_draft:
                continue
            tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
            self._held.append(tensor)
            self._sources[storage(tensor)] = spec
            yield spec.name.removeprefix(OF_DRAFT), tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = args[0] if args and isinstance(args[0], Tensor) else None
        if written is None or not _writes(func) or storage(written) not in self._live:
            return func(*args, **(kwargs or {}))
        self.written.add(storage(written))
        if func is _aten.copy_.default:
            self._copy(written, args[1])
        elif func not in _FILLS:
            self.problems.append(f"the loader changes {tuple(written.shape)} weights by {func}, not by a plain copy")
        return written

    def _copy(self, to: Tensor, source: Tensor) -> None:
        # raises where the copy itself would
        source.expand_as(to)
        spec = self._sources.get(storage(source)) if source.is_meta else None
        if spec is None:
            self.problems.append(
                f"the loader writes {tuple(to.shape)} values that it computed, not those of a checkpoint tensor"
            )
        elif to.dtype != source.dtype:
            self.problems.append(
                f"{spec.name!r} is {spec.dtype} in the run and {to.dtype} in the server: publish in the server's dtype "
                "(wire_dtype=…), or start the server with the run's --dtype"
            )
        elif (found := _piece(spec, source, to)) is None:
            self.problems.append(
                f"{spec.name!r} is not laid out in rows here: shape {tuple(to.shape)}, strides {to.stride()} from "
                f"{source.stride()}"
            )
        else:
            self.pieces.append(found)


def _piece(spec: TensorSpec, source: Tensor, to: Tensor) -> Piece | None:
    """The copy as a rectangle on both sides, or None where one of them is not one."""
    if source.shape != to.shape or lookup(spec.dtype).units_per_element != 1:
        return None
    sides = [(n, a, b) for n, a, b in zip(source.shape, source.stride(), to.stride(), strict=True) if n != 1]
    merged: list[tuple[int, int, int]] = []
    for n, a, b in sides:
        # two dimensions that follow each other in both memories are one
        if merged and merged[-1][1] == n * a and merged[-1][2] == n * b:
            merged[-1] = (merged[-1][0] * n, a, b)
        else:
            merged.append((n, a, b))
    across = max(spec.columns, 1)
    first, offset = divmod(int(source.storage_offset()), across)
    if not merged:
        merged = [(1, 1, 1)]
    if len(merged) == 1:
        n, a, b = merged[0]
        if a == 1 and b == 1 and (offset + n <= across or (offset == 0 and n % across == 0)):
            # some of one row, or whole rows
            merged = [(n // across, across, across), (across, 1, 1)] if n > across else [(1, across, n), (n, 1, 1)]
        else:
            # one column of a matrix
            merged.append((1, 1, 1))
    if len(merged) != 2:
        return None
    (rows, down, stride), (columns, right, step) = merged
    if right != 1 or step != 1 or offset + columns > across or (rows > 1 and (down != across or stride < columns)):
        return None
    view = torch.as_strided(to.detach(), (rows, columns), (stride, 1), to.storage_offset())
    return Piece(Region(spec, first, rows, offset, columns), view)


def _writes(func: Any) -> bool:
    """Whether an operator changes its first argument."""
    arguments = func._schema.arguments
    return bool(arguments and arguments[0].alias_info is not None and arguments[0].alias_info.is_write)


def storage(tensor: Tensor) -> int:
    """Identifies a tensor's storage while that exists."""
    return int(tensor.untyped_storage()._cdata)
