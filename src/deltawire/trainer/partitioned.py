"""What one rank holds of a model whose parameters DeepSpeed ZeRO 3 or FSDP1 keeps as slices of flat memory.

Both cut without regard to rows: each rank has a flat range of a tensor, or nothing of it. Where these lie is read from
what they note on their parameters, so nothing is gathered. Everything else of the model is held whole by every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import get_rank

from ..core.errors import SchemaMismatch, UnsupportedTensor
from ..models import FLATTENED, fsdp1_root, is_flattened, is_fsdp1, is_module, is_zero3, tensors_of, unwrapped
from .shard import Pieces


def held_by_name(model: Any) -> dict[str, Any]:
    """The tensors of a model that this rank holds, named as in its checkpoint; `Pieces` for those that are cut flat."""
    # a view of a module, such as adapter(model), names other tensors than the module has
    if is_module(model) and hasattr(model, "named_modules"):
        if (root := fsdp1_root(model)) is not None:
            return tensors_of(model, _of_fsdp1(root))
        if is_zero3(model):
            return tensors_of(model, _of_zero3(unwrapped(model)))
    return tensors_of(model)


# ── DeepSpeed ZeRO 3 ─────────────────────────────────────────────────────────────────────────────────────────────────


def _of_zero3(module: Any) -> dict[str, Any]:
    slices: dict[int, Pieces] = {}
    found = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if hasattr(tensor, "ds_tensor") and id(tensor) not in slices:
            slices[id(tensor)] = _slice(name, tensor)
        found[name] = slices.get(id(tensor), tensor.detach())
    return found


def _slice(name: str, parameter: Any) -> Pieces:
    """The slice that this rank has of a parameter: of equal size on all ranks, and the last ones padded."""
    local = parameter.ds_tensor
    if getattr(local.status, "name", "AVAILABLE") != "AVAILABLE":
        raise UnsupportedTensor(
            f"{name[:80]!r} is on NVMe now, where DeepSpeed's offload_param has put it: offload parameters to the "
            "cpu, or publish a gathered state dict"
        )
    if local.dtype != parameter.dtype:
        raise UnsupportedTensor(
            f"{name[:80]!r} is kept as {local.dtype}, quantized by DeepSpeed: publish without "
            "zero_quantized_nontrainable_weights"
        )
    first = min(get_rank(parameter.ds_process_group) * local.ds_numel, parameter.ds_numel)
    end = min(first + local.ds_numel, parameter.ds_numel)
    return Pieces.of(parameter.ds_shape, local, (local.detach().reshape(-1)[: end - first], range(first, end)))


# ── FSDP1 ────────────────────────────────────────────────────────────────────────────────────────────────────────────

FLAT = "_flat_param"
"""Name of a flat parameter in its module."""

NOTED = ("_param_infos", "_shared_param_infos", "_param_extensions", "_shapes", "_contiguities", "_shard_param_infos")
"""What FSDP1 notes on its flat parameters, under private names."""


def _of_fsdp1(root: Any) -> dict[str, Any]:
    """The state dict's names, read from the modules: `state_dict()` itself would gather."""
    flattened: dict[int, dict[str, Pieces]] = {}
    known = set()
    for module in filter(is_fsdp1, root.modules()):
        if (handle := _noted(module, "_handle")) is None:
            continue
        known.add(id(flat := _noted(handle, "flat_param")))
        for owner, name, pieces in _flattened(flat):
            flattened.setdefault(id(owner), {})[name] = pieces
    found: dict[str, Any] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        here = flattened.get(id(module), {})
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        kept = {name: buffers[name] for name in buffers if name not in module._non_persistent_buffers_set}
        for name, tensor in {**own, **here, **kept}.items():
            if is_flattened(tensor) and id(tensor) not in known:
                raise UnsupportedTensor(f"{type(root).__name__} is {FLATTENED}")
            if name != FLAT:
                found[f"{path}.{name}" if path else name] = tensor.detach() if isinstance(tensor, Tensor) else tensor
    return found


def _flattened(flat: Any) -> Iterator[tuple[Any, str, Pieces]]:
    """(module, name in it, what is held here) of each parameter in a flat one."""
    infos, shared, *noted = (_noted(flat, name) for name in NOTED)
    # until the first forward pass the flat parameter itself is the shard; later it may be the whole for a while
    local = getattr(flat, "_local_shard", flat).detach()
    by_place: dict[tuple[int, str], Pieces] = {}
    for info, extension, shape, contiguous, shard in zip(infos, *noted, strict=True):
        name = f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
        if extension is not None:
            raise SchemaMismatch(f"{name[:80]!r} is cut by tensor parallelism and FSDP1: shard it with fully_shard")
        if not contiguous:
            raise SchemaMismatch(f"{name[:80]!r} was not flattened row by row: make it contiguous before FSDP1")
        first, at, size = 0, 0, 0
        if shard.in_shard:
            first, at, size = shard.intra_param_start_idx, shard.offset_in_shard, shard.numel_in_shard
        pieces = Pieces.of(shape, local, (local[at : at + size], range(first, first + size)))
        by_place[id(info.module), info.param_name] = pieces
        yield info.module, info.param_name, pieces
    for info in shared:
        yield info.module, info.param_name, by_place[id(info.prim_module), info.prim_param_name]


def _noted(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise UnsupportedTensor(
            f"torch {torch.__version__} keeps the weights of FSDP1 in another way than this deltawire knows: its "
            f"{type(owner).__name__} has no {name!r}. Shard with "
            "torch.distributed.fsdp.fully_shard, or publish what each rank holds as a list of deltawire.Shard"
        )
    return getattr(owner, name)
