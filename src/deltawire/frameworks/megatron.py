"""Weights that Megatron trains, published as its ranks hold them: `MegatronLayout` knows where they belong."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import deltawire as dw
from deltawire.errors import Misconfigured, SchemaMismatch, UnsupportedTensor

TESTED = {"megatron-core": "0.16.1", "megatron-bridge": "0.3.1"}
HOOK = {
    "get_conversion_tasks": {"megatron_model"},
    "export_hf_weights": {"model", "show_progress", "conversion_tasks"},
}
"""What is called of an AutoBridge, and with what."""
NOTED = {"param_name", "global_param_name", "vp_stage", "param_weight", "mapping"}
"""What is read of its conversion tasks."""
VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
"""Parameters with a row for each token. Megatron may pad them."""
RANK_BITS, CHECK_BITS = 14, 13
CHUNK = 1 << 18
"""Numbers that are looked at together."""

Key = tuple[int, str]
"""A parameter of this rank: its virtual pipeline stage, and its name there."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A rectangle of a tensor of the checkpoint, and the elements of a parameter that are in it."""

    name: str
    full_shape: tuple[int, ...]
    where: tuple[slice, ...] | range
    key: Key
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class MegatronLayout:
    """Where this rank's parameters lie in the tensors of the checkpoint.

        layout = MegatronLayout(bridge, models)                        # once, on all ranks together
        publisher.publish(layout.shards(), step=step)          # after each step, on all ranks

    bridge  the AutoBridge of Megatron-Bridge that the model was made with
    models  the model, or a list with one for each virtual pipeline stage

    To learn it, Bridge exports once, with its own communication, numbers instead of weights: where a number arrives,
    there the element lies. Raises UnsupportedTensor on all ranks, with the tensor's name, if Bridge computes a tensor
    instead of rearranging it, and Misconfigured for versions of Megatron that have another export.
    """

    def __init__(self, bridge: Any, models: Any) -> None:
        self._models = models if isinstance(models, list) else [models]
        self._parts: list[_Part] = []
        self._shapes: dict[Key, torch.Size] = {}
        refused: list[str] = []
        self._learn(bridge, refused)
        everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        # all ranks raise, or none: the others would wait for this one when they publish
        dist.all_gather_object(everywhere, refused)
        for messages in filter(None, everywhere):
            raise UnsupportedTensor(f"{messages[0]}. Publish bridge.export_hf_weights(models) instead")

    def shards(self) -> list[dw.Shard]:
        """What this rank holds now: views of its parameters."""
        held = dict(_parameters(self._models))
        for key, shape in self._shapes.items():
            if key not in held or held[key].shape != shape:
                raise SchemaMismatch(
                    f"{key[1]!r} is not what it was when the MegatronLayout was made: make a new MegatronLayout"
                )
        flat = {key: held[key].detach().view(-1) for key in self._shapes}
        found = []
        for part in self._parts:
            parameter = flat[part.key]
            view = parameter.as_strided(part.size, part.stride, parameter.storage_offset() + part.first)
            found.append(dw.Shard(part.name, view, part.full_shape, part.where))
        return found

    def _learn(self, bridge: Any, refused: list[str]) -> None:
        rank, starts = dist.get_rank(), [0]
        tokens = getattr(bridge.hf_pretrained, "config", bridge.hf_pretrained).get_text_config().vocab_size
        task: Any = None

        def numbered(tasks: list[Any]) -> Iterator[Any]:
            nonlocal task
            for task in tasks:
                weight = task.param_weight
                if weight is not None:
                    if type(weight) not in (Tensor, torch.nn.Parameter) or not weight.is_contiguous():
                        refused.append(f"{task.param_name!r} is not a plain tensor, but a {type(weight).__name__}")
                    if ".to_wrap." in task.global_param_name:
                        refused.append(f"{task.param_name!r} has an adapter, which Bridge adds to it")
                    self._shapes[task.vp_stage, task.param_name] = weight.shape
                    starts.append(starts[-1] + weight.numel())
                    numbers = torch.arange(*starts[-2:], device=weight.device).view(weight.shape)
                    weight = _code(numbers, torch.full_like(numbers, rank))
                yield replace(task, param_weight=weight)

        tasks = numbered(_tasks(bridge, self._models))
        # to the end, whatever is refused: the ranks gather together
        for name, codes in bridge.export_hf_weights(self._models, show_progress=False, conversion_tasks=tasks):
            if task.global_param_name.endswith(VOCABULARY):
                codes = codes[:tokens]
            shape, keys = tuple(codes.shape), [*self._shapes]
            try:
                for source, first, *where in _rectangles(codes, rank, starts):
                    for place, offset, size, stride in _places(shape, *where):
                        at = first - starts[source] + offset
                        self._parts.append(_Part(name, shape, place, keys[source], at, size, stride))
            except ValueError:
                how = f"{type(task.mapping).__name__} of {task.global_param_name!r}"
                refused.append(f"Megatron-Bridge computes {name!r}, by {how}")


def _tasks(bridge: Any, models: list[Any]) -> list[Any]:
    """What Bridge converts, on all ranks. Raises Misconfigured if this Bridge converts in another way."""
    calls = {name: inspect.signature(getattr(bridge, name, lambda: None)).parameters.keys() for name in HOOK}
    if all(needs <= calls[name] for name, needs in HOOK.items()):
        # without those that Bridge has no mapping for
        tasks = [task for task in bridge.get_conversion_tasks(models) if task is not None]
        if tasks and all(is_dataclass(task) and {field.name for field in fields(task)} >= NOTED for task in tasks):
            return tasks
    here, tested = (" and ".join(f"{name} {of(name)}" for name in TESTED) for of in (_version, TESTED.get))
    raise Misconfigured(
        f"{here} export weights in another way than {tested}, with which deltawire {dw.__version__} was tested: "
        "install those, or publish bridge.export_hf_weights(models)"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not a package)"


def _parameters(models: list[Any]) -> Iterator[tuple[Key, Tensor]]:
    """Parameters and buffers of this rank, by the names that Bridge uses."""
    for stage, model in enumerate(models):
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            while name.startswith("module."):
                name = name.removeprefix("module.")
            yield (stage, name), tensor


# ── numbers of elements ──────────────────────────────────────────────────────────────────────────────────────────────


def _code(number: Tensor, rank: Tensor) -> Tensor:
    """Number and rank of elements, with a check: what is computed from codes is none."""
    code = number << RANK_BITS | rank
    mixed = (code ^ code >> 15 ^ 0x5BD1E995) * 0x2545F4914F6CDD1D
    return code << CHECK_BITS | (mixed ^ mixed >> 29) * 0x9E3779B1 >> 32 & (1 << CHECK_BITS) - 1


def _decoded(code: Tensor) -> tuple[Tensor, Tensor]:
    return code >> RANK_BITS + CHECK_BITS, code >> CHECK_BITS & (1 << RANK_BITS) - 1


def _rectangles(codes: Tensor, rank: int, starts: list[int]) -> Iterator[tuple[int, ...]]:
    """The rectangles of a tensor's matrix that are elements of one parameter of this rank, evenly spaced in it.

    Yields (parameter, number of the first element, row, rows, column, columns, step to the next row, step to the next
    column). Raises ValueError if some are no codes.
    """
    if codes.dtype != torch.int64:
        raise ValueError(codes.dtype)
    codes = codes.reshape(-1, codes.shape[-1] if codes.dim() > 1 else 1)
    edges = torch.tensor(starts[1:], device=codes.device)
    runs = []
    height = max(1, CHUNK // max(1, codes.shape[1]))
    for top in range(0, len(codes), height):
        part = codes[top : top + height]
        number, owner = _decoded(part)
        if not torch.equal(_code(number, owner), part):
            raise ValueError(part)
        mine = owner == rank
        if not mine.any():
            continue
        source = torch.bucketize(number.contiguous(), edges, right=True)
        beside = mine[:, 1:] & mine[:, :-1] & (source[:, 1:] == source[:, :-1])
        steps = number[:, 1:] - number[:, :-1]
        across = max(1, int(steps[beside].mode().values)) if beside.any() else 1
        beside &= steps == across
        edge = torch.zeros_like(mine[:, :1])
        at, column = (mine & ~torch.cat([edge, beside], 1)).nonzero(as_tuple=True)
        last = (mine & ~torch.cat([beside, edge], 1)).nonzero(as_tuple=True)[1]
        found = [source[at, column], torch.full_like(at, across), column, last + 1 - column, at + top]
        runs.append(torch.stack([*found, number[at, column]]).cpu().numpy())
    if not runs:
        return
    table: Any = np.concatenate(runs, axis=1)
    table = table[:, np.lexsort(table[4::-1])]
    down: Any = np.diff(table[5])
    below = (np.diff(table[:4]) == 0).all(0) & (np.diff(table[4]) == 1)
    jumps, often = np.unique(down[below], return_counts=True)
    step = int(jumps[often.argmax()]) if len(jumps) else 0
    cuts = np.flatnonzero(~(below & (down == step))) + 1 if step >= 0 else np.arange(1, table.shape[1])
    for begin, end in pairwise([0, *cuts.tolist(), table.shape[1]]):
        parameter, beside_by, first_column, columns, row, first = map(int, table[:, begin])
        yield parameter, first, row, end - begin, first_column, columns, max(step, 0), beside_by


def _places(
    shape: tuple[int, ...], row: int, rows: int, column: int, columns: int, down: int, across: int
) -> Iterator[tuple[tuple[slice, ...] | range, int, tuple[int, ...], tuple[int, ...]]]:
    """A rectangle of a tensor's matrix as places in the tensor: where, first element, size and strides of the view."""
    if len(shape) < 2:
        yield (slice(row, row + rows),)[: len(shape)], 0, (rows,)[: len(shape)], (down,)[: len(shape)]
    elif len(shape) > 2 and columns == shape[-1] == down and across == 1:
        yield range(row * columns, (row + rows) * columns), 0, (rows * columns,), (1,)
    else:
        height = shape[-2] if len(shape) > 2 else rows + row
        for top in range(row - row % height, row + rows, height):
            begin, end = max(row, top), min(row + rows, top + height)
            outer = np.unravel_index(top // height, shape[:-2]) if len(shape) > 2 else ()
            where = (*(slice(int(o), int(o) + 1) for o in outer), slice(begin - top, end - top))
            ones = (1,) * len(outer)
            size, stride = (*ones, end - begin, columns), (*ones, down, across)
            yield (*where, slice(column, column + columns)), (begin - row) * down, size, stride
