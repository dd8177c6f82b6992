"""fp8-block and fp8-block-ue8m0 in torch, on the device of the model. The same bits as host.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models import ModelView
from .blocks import A_NAN, INFINITE, LEAST, ROUNDS_UP, SHARE, SIDE, Blocks, Grid
from .host import Maxima, Place, view_schema

_AT_ONCE = 1 << 26
"""Weights that are converted at a time: they take four bytes each meanwhile."""


class BlockModel(ModelView):
    """The view of a model's tensors, as tensors on the same device, made anew for each publish."""

    is_view = True

    def __init__(
        self,
        source: ModelView,
        blocks: Blocks,
        places: Mapping[str, Place] | None = None,
        scales: Mapping[str, Grid] | None = None,
        reduce: Callable[[Maxima], Maxima] | None = None,
    ) -> None:
        """Take the same arguments as host.BlockView."""
        places = {name: Place(grid) for name, grid in blocks.grids.items()} if places is None else places
        scales = {g.scales.name: g for g in blocks.grids.values()} if scales is None else scales
        self.schema, self.known = view_schema(source.schema, places, scales), None
        self._wire, self._widest, self._kept = None, 0, None

        def cast(name: str) -> Tensor:
            # one at a time and again where it is needed again: all of them would take twice the memory of the view
            return source.tensors[name].detach().to(source.wire_dtype(name))  # type: ignore[no-any-return]

        with torch.no_grad():
            self.tensors = {name: cast(name) for name in source.tensors if name not in places}
            device = next(iter(source.tensors.values())).device
            maxima = torch.zeros(blocks.count, dtype=torch.int32, device=device)
            for name, place in places.items():
                _raise_maxima(cast(name), place, maxima)
            if reduce is not None:
                merged = reduce(maxima.cpu().numpy().view("u4"))
                maxima = torch.from_numpy(merged.view("i4")).to(device)
            found = _scales(maxima, blocks.powers_of_two)
            inverse = found.reciprocal()
            for name, place in places.items():
                self.tensors[name] = _quantize(cast(name), place, inverse)
            for name, grid in scales.items():
                self.tensors[name] = found[grid.span].reshape(grid.scales.shape)


def _scales(maxima: Tensor, powers_of_two: bool) -> Tensor:
    """Return what `Blocks.scales_of` gives."""
    least = maxima.clamp(min=int(LEAST.view("i4")))
    if powers_of_two:
        bits = torch.where(maxima < INFINITE, ((least + ROUNDS_UP >> 23) - 8) << 23, maxima)
    else:
        bits = (least.view(torch.float32) * float(SHARE)).view(torch.int32)
    return torch.where(maxima > INFINITE, A_NAN, bits).view(torch.float32)


def _bands(tensor: Tensor, place: Place) -> Iterator[tuple[Tensor, slice, int, int]]:
    """Cut a tensor into bands: rows of one matrix.

    Yields the band, where it is in the tensor, how many rows of its first block come before it, and the row of that
    block among the tensor's.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    height, down = place.grid.height, place.grid.down
    if height % SIDE == 0:
        # blocks end where matrices do: as if they were one
        height = place.row + rows.shape[0]
    at = 0
    step = max(1, _AT_ONCE // (SIDE * max(1, tensor.shape[-1]))) * SIDE
    while at < rows.shape[0]:
        matrix, row = divmod(place.row + at, height)
        end = min(rows.shape[0], at + height - row, at + step - row % SIDE)
        yield rows[at:end], slice(at, end), row % SIDE, matrix * down + row // SIDE
        at = end


def _cut(band: Tensor, top: int, left: int) -> Tensor:
    """A band as [block row, 128, block column, 128], with zeros around it."""
    rows, columns = band.shape
    padded = F.pad(band, (left, -(left + columns) % SIDE, top, -(top + rows) % SIDE))
    return padded.reshape(padded.shape[0] // SIDE, SIDE, padded.shape[1] // SIDE, SIDE)


def _raise_maxima(tensor: Tensor, place: Place, maxima: Tensor) -> None:
    grid = place.grid
    ours = maxima[grid.span].view(-1, grid.across)
    first = place.column // SIDE
    for band, _, top, block in _bands(tensor, place):
        largest = _cut(band, top, place.column % SIDE).abs().float().amax(dim=(1, 3)).view(torch.int32) & 0x7FFFFFFF
        part = ours[block : block + largest.shape[0], first : first + largest.shape[1]]
        torch.maximum(part, largest, out=part)


def _quantize(tensor: Tensor, place: Place, inverse: Tensor) -> Tensor:
    grid, columns, left = place.grid, tensor.shape[-1], place.column % SIDE
    factors = inverse[grid.span].view(-1, grid.across)[:, place.column // SIDE :]
    result = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn, device=tensor.device)
    flat = result.view(torch.uint8).view(-1, columns)
    for band, rows, top, block in _bands(tensor, place):
        cut = _cut(band, top, left)
        factor = factors[block : block + cut.shape[0], : cut.shape[2]]
        codes = (cut.float() * factor[:, None, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        codes = codes.view(-1, cut.shape[2] * SIDE)[top : top + band.shape[0], left : left + columns]
        # one NaN for all, as in host.py
        flat[rows] = torch.where(codes == 0xFF, 0x7F, codes)
    return result
