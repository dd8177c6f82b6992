"""Learn where a layer's post-load hook puts its weights.

After loading, a layer may rearrange its weights for a kernel: swap halves, pad, cut into tiles. No table of kernels is
kept here. The layer's own hook is run on copies of the layer whose weights say where they come from, and what comes
out is read:

    1. Every traced rectangle (placement.py) has a number on each unit of its first row and first column, and zeros
       elsewhere. A weight of 8 or 16 bits cannot hold the number, so it is passed digit by digit, one run per digit.
    2. Where the numbers come out gives two small tables: unit [r, c] lies at rows[r] + columns[c].
    3. Two runs with random bits, one of them of finite numbers alone, confirm it for every unit, and show that nothing
       else depends on the weights.

A hook that computes instead of moving fails in one of these steps, and the tensor is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.compiled import njit
from ...replica.shard import Piece, Places
from .placement import Standing, storage

_Table = tuple[str, tuple[Any, ...], Any, Any]
"""Name and form of a tensor of the layer; rows and columns of a rectangle, as in `Places`."""


class Computes(Exception):
    """A hook does more than move weights."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with a post-load hook, of which it is learned where the hook puts the weights.

    found = {name: without_data(tensor) for name, tensor in layer.named_parameters()}    # before its hook runs
    Layer("model.layers.0.mlp", layer, found, hook=lambda made: made.process_weights_after_loading())
    """

    name: str
    module: nn.Module
    loaded: Mapping[str, Tensor]
    """Its parameters as the loader fills them, without data."""
    hook: Callable[[nn.Module], object]
    """Runs the hook on a copy of the module that `copy_of` made."""
    key: tuple[Any, ...] = ()
    """Layers with equal keys rearrange their weights in the same way."""


@dataclass(slots=True)
class Learned:
    """The learned hooks of a model's layers."""

    layers: Sequence[Layer]
    _touches: dict[Any, bool] = field(default_factory=dict)
    _tables: dict[Any, dict[tuple[Any, ...], _Table]] = field(default_factory=dict)

    def standing(self) -> list[Standing]:
        """Parameters that the loader should be traced with, in the place of those that hooks rearranged."""
        found = []
        for layer in self.layers:
            key = _key(layer)
            if key not in self._touches:
                self._touches[key] = _touches(layer)
            if self._touches[key]:
                found += [Standing(layer.module, name, tensor) for name, tensor in layer.loaded.items()]
        return found

    def compose(self, pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], list[str]]:
        """Where the hooks put the pieces that were traced without data. Returns all pieces, and why one was not found:
        nothing more is learned after the first such layer, and pieces that are not known stay as they are."""
        by_storage = {storage(t): (layer, name) for layer in self.layers for name, t in layer.loaded.items()}
        wanted: dict[int, list[tuple[int, str]]] = {}
        layers: dict[int, Layer] = {}
        for number, piece in enumerate(pieces):
            if piece.view.is_meta:
                layer, name = by_storage[storage(piece.view)]
                layers[id(layer)] = layer
                wanted.setdefault(id(layer), []).append((number, name))
        result = [*pieces]
        for key, numbers in wanted.items():
            layer = layers[key]
            mine = [(name, pieces[number]) for number, name in numbers]
            try:
                for (number, _), placed in zip(numbers, self._placed(layer, mine), strict=True):
                    result[number] = placed
            except Computes as error:
                return tuple(result), [f"{layer.name!r}: {error}"]
            except Exception as error:
                first, reason = mine[0][1].region.tensor.name, f"{type(error).__name__}: {error}"
                return tuple(result), [
                    f"{layer.name!r}: its hook cannot be run on a copy ({first!r} and others): {reason}"
                ]
        return tuple(result), []

    def _placed(self, layer: Layer, pieces: Sequence[tuple[str, Piece]]) -> list[Piece]:
        tables = self._tables.get(_key(layer), {})
        shapes = [_shape(name, piece) for name, piece in pieces]
        if not all(shape in tables for shape in shapes):
            tables = dict(zip(shapes, learn(layer, pieces), strict=True))
            self._tables[_key(layer)] = tables
        return [_at(layer, piece, tables[shape]) for (_, piece), shape in zip(pieces, shapes, strict=True)]


def copy_of(module: Any) -> Any:
    """A copy of a module that a hook may change: dictionaries and buffers of its own, everything else shared. A shallow
    copy of what is no module."""
    if not isinstance(module, nn.Module):
        return copy(module)
    made: Any = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    for kind in ("_parameters", "_modules"):
        made.__dict__[kind] = dict(module.__dict__[kind])
    made.__dict__["_buffers"] = {n: None if b is None else b.clone() for n, b in module._buffers.items()}
    made.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    return made


def without_data(tensor: Tensor) -> Any:
    """A tensor of the same form, class and attributes, such as its loader."""
    made: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    made.__class__ = tensor.__class__
    made.__dict__ = dict(tensor.__dict__)
    return made


@torch.no_grad()
def learn(layer: Layer, pieces: Sequence[tuple[str, Piece]]) -> list[_Table]:
    """Where each piece lies once the hook has run. Raises Computes."""
    tables = _tables(layer, pieces)
    # of numbers that are not finite, one result of a computation looks like another
    rest = [_confirm(layer, pieces, tables, finite) for finite in (True, False)]
    for name in rest[0].keys() | rest[1].keys():
        a, b = (found.get(name) for found in rest)
        if a is None or b is None or not all(np.array_equal(x, y) for x, y in zip(a, b, strict=True)):
            first = pieces[0][1].region.tensor.name
            raise Computes(f"its hook computes {name!r} from {first!r} and others, or keeps a second copy there")
    return tables


def _tables(layer: Layer, pieces: Sequence[tuple[str, Piece]]) -> list[_Table]:
    """Follow the first row and the first column of every piece."""
    lines = [_lines(piece) for _, piece in pieces]
    starts = np.cumsum([0, *(line.size for line in lines)])
    digit = min(_digit(piece) for _, piece in pieces)
    codes: dict[str, Any] = {}
    forms: dict[str, tuple[Any, ...]] = {}
    # what is there without weights: padding, and tensors of other kinds
    still = _nonzero(_run(layer, _inputs(layer))[0])
    done = 1
    while done <= starts[-1]:
        inputs = _inputs(layer)
        for (name, _), line, start in zip(pieces, lines, starts, strict=False):
            values = (start + np.arange(line.size)) // done % digit + 1
            flat = _units(inputs[name])
            flat[torch.from_numpy(line).to(flat.device)] = torch.from_numpy(values).to(flat)
        outputs, _ = _run(layer, inputs)
        forms = {name: _form(tensor) for name, tensor in outputs.items()}
        for name, (places, found) in _nonzero(outputs).items():
            new = ~np.isin(places, still[name][0]) if name in still else np.ones(places.size, bool)
            places, code = places[new], (found[new].astype(np.int64) - 1) * done
            known = codes.setdefault(name, [places, np.zeros(code.size, np.int64)])
            if not np.array_equal(known[0], places):
                raise Computes(f"its hook puts weights of {pieces[0][1].region.tensor.name!r} in places that vary")
            known[1] += code
        done *= digit
    return [(name, forms[name], rows, columns) for name, rows, columns in _read(pieces, lines, starts, codes)]


def _read(
    pieces: Sequence[tuple[str, Piece]], lines: Any, starts: Any, codes: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    where = np.full(starts[-1], -1, np.int64)
    owner = np.full(starts[-1], -1, np.int32)
    for number, (places, code) in enumerate(codes.values()):
        known = (code >= 0) & (code < starts[-1])
        where[code[known]], owner[code[known]] = places[known], number
    names, result = [*codes], []
    for (_, piece), line, start in zip(pieces, lines, starts, strict=False):
        mine = slice(start, start + line.size)
        if (where[mine] < 0).any() or (owner[mine] != owner[start]).any():
            raise Computes(f"its hook does not keep the weights of {piece.region.tensor.name!r} as they are")
        rows = where[mine][: piece.region.rows]
        columns = np.concatenate([rows[:1], where[mine][piece.region.rows :]]) - rows[0]
        result.append((names[owner[start]], rows, columns))
    return result


def _confirm(layer: Layer, pieces: Sequence[tuple[str, Piece]], tables: Sequence[_Table], finite: bool) -> Any:
    """Run the hook on random bits and compare every unit. Returns what is not zero outside of the pieces."""
    inputs = _inputs(layer)
    random = np.random.default_rng(int(finite))
    sent = []
    for name, piece in pieces:
        flat = _units(inputs[name])
        size = flat.dtype.itemsize
        drawn = np.frombuffer(bytearray(random.bytes(piece.region.units * size)), f"u{size}")
        if finite:
            drawn &= np.array(~(1 << (8 * size - 2)) & ((1 << 8 * size) - 1), drawn.dtype)
        sent.append(torch.from_numpy(drawn.view(np.uint8)).view(flat.dtype).reshape(piece.view.shape))
        _matrix(flat, piece).copy_(sent[-1])
    outputs, others = _run(layer, inputs)
    for (name, _, rows, columns), (_, piece), bits in zip(tables, pieces, sent, strict=True):
        flat = _units(outputs[name])
        if flat.dtype != bits.dtype or not torch.equal(_taken(flat, rows, columns), bits):
            raise Computes(f"its hook changes the weights of {piece.region.tensor.name!r}, it does not only move them")
    return _nonzero(outputs | others)


def _taken(flat: Tensor, rows: Any, columns: Any) -> Tensor:
    """The units of a rectangle, in host memory; zeros are left in their places."""
    if flat.device.type == "cpu":
        out = torch.empty((rows.size, columns.size), dtype=flat.dtype)
        _take(flat.numpy(), rows, columns, out.numpy())
        return out
    at = torch.from_numpy(rows[:, None] + columns).to(flat.device)
    out = flat[at].cpu()
    flat[at] = 0
    return out


@njit(cache=True, nogil=True)
def _take(flat: Any, rows: Any, columns: Any, out: Any) -> None:
    for r in range(rows.size):
        for c in range(columns.size):
            out[r, c] = flat[rows[r] + columns[c]]
            flat[rows[r] + columns[c]] = 0


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launch kernels on this device, as an engine does when it loads: hooks do not always name one."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def _device(layer: Layer) -> torch.device:
    """Where a layer's weights are; its hook may have put buffers in the place of all parameters."""
    tensors = (*layer.module.parameters(recurse=False), *layer.module.buffers(recurse=False))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _inputs(layer: Layer) -> dict[str, Tensor]:
    """Parameters of a copy: zeros where weights are loaded to."""
    device, made = _device(layer), {}
    for name, meta in layer.loaded.items():
        made[name] = tensor = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
        tensor.zero_()
        tensor.__class__ = meta.__class__
        tensor.__dict__ = dict(meta.__dict__)
    return made


def _run(layer: Layer, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters and buffers of a copy after its hook, and other tensors that the hook left there."""
    made = copy_of(layer.module)
    for name, live in layer.module._parameters.items():
        if live is not None and name not in parameters:
            # not the loader's: as it is
            made._parameters[name] = nn.Parameter(live.detach().clone(), requires_grad=False)
    made._parameters.update(parameters)
    before = {storage(t) for t in _attributes(layer.module).values()}
    with on_device(_device(layer)):
        layer.hook(made)
    found = {name: t.detach() for name, t in (*made._parameters.items(), *made._buffers.items()) if t is not None}
    return found, {name: t for name, t in _attributes(made).items() if storage(t) not in before}


def _attributes(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that a module and the object that runs its kernel keep outside of its parameters."""
    owners = (module, getattr(module, "quant_method", None))
    return {n: t for o in owners if o is not None for n, t in vars(o).items() if isinstance(t, Tensor) and t.numel()}


class _Touched(Exception):
    pass


class _TouchWatch(TorchDispatchMode):
    """Raises as soon as an operator is called with one of some tensors."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(storage(t) in self._storages for t in _tensors((args, kwargs))):
            raise _Touched
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])


def _touches(layer: Layer) -> bool:
    """Whether the hook does anything with the weights; it is run without data, up to the first operation on them.

    So does one that puts parameters of another class or with fewer attributes there: loaders may need what is gone."""
    made = copy_of(layer.module)
    made._parameters.update(layer.loaded)
    try:
        with on_device(_device(layer)), _TouchWatch({storage(t) for t in layer.loaded.values()}):
            layer.hook(made)
    except Exception:
        return True
    return any(
        (t := made._parameters.get(name)) is None
        or type(t) is not type(meta)
        or not vars(meta).keys() <= vars(t).keys()
        or storage(t) != storage(meta)
        or _form(t) != _form(meta)
        for name, meta in layer.loaded.items()
    )


def _key(layer: Layer) -> tuple[Any, ...]:
    forms = tuple((name, _form(tensor)) for name, tensor in layer.loaded.items())
    return (type(layer.module), *layer.key, forms) if layer.key else (id(layer),)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def _shape(name: str, piece: Piece) -> tuple[Any, ...]:
    """A rectangle of a parameter."""
    return name, piece.view.storage_offset(), tuple(piece.view.shape), piece.view.stride()


def _at(layer: Layer, piece: Piece, table: _Table) -> Piece:
    """The piece in the live memory of a layer: as a plain view where its rows are rows there too."""
    name, form, rows, columns = table
    live: Any = layer.module._parameters.get(name)
    if live is None:
        live = layer.module._buffers.get(name)
    if live is None or _form(live) != form or live.dtype != piece.view.dtype:
        raise Computes(f"its hook does not keep {piece.region.tensor.name!r} in a parameter of the same type")
    live = live.detach()
    step = int(rows[1] - rows[0]) if rows.size > 1 else columns.size
    if np.array_equal(columns, np.arange(columns.size)) and step >= columns.size and (np.diff(rows) == step).all():
        return replace(piece, view=torch.as_strided(live, piece.view.shape, (step, 1), int(rows[0])))
    return replace(piece, view=_storage_of(live), places=Places(rows, columns))


def _lines(piece: Piece) -> Any:
    """Where the first column and the rest of the first row of a piece lie in the parameter's storage."""
    first, (down, _) = piece.view.storage_offset(), piece.view.stride()
    rows, columns = piece.view.shape
    return first + np.concatenate([np.arange(rows) * down, np.arange(1, columns)]).astype(np.int64)


def _digit(piece: Piece) -> int:
    """How many digits a unit can hold, as finite numbers above zero of any float type."""
    return (1 << (6 if piece.view.dtype.itemsize == 1 else 14)) - 1


def _storage_of(tensor: Tensor) -> Tensor:
    """Return all of a tensor's storage, flat."""
    count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return torch.as_strided(tensor, (count,), (1,), 0)


def _units(tensor: Tensor) -> Tensor:
    """A tensor's storage as integers."""
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return _storage_of(torch.Tensor.detach(tensor)).view(signed[tensor.dtype.itemsize])


def _matrix(flat: Tensor, piece: Piece) -> Tensor:
    return torch.as_strided(flat, piece.view.shape, piece.view.stride(), piece.view.storage_offset())


def _nonzero(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, Any]]:
    """Places and values of units that are not zero."""
    found = {}
    for name, tensor in tensors.items():
        flat = _units(tensor)
        places = flat.nonzero().reshape(-1)
        found[name] = places.cpu().numpy(), flat[places].cpu().numpy()
    return found
