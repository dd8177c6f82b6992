"""A `context` block whose old weights are counted on a device has the bytes that the host's own encoder makes."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from deltawire.core.change import Change, Region, compare, no_change, whole
from deltawire.core.codecs.context.old_weights import HostBlock
from deltawire.core.dtypes import lookup
from deltawire.core.schema import TensorSpec
from deltawire.core.sparse import _batches, encode_block, encode_counted
from deltawire.kernels.block import DeviceBlock
from tiled import encode_tiles, tiles_of

_TURN = threading.Lock()


class Model:
    """Tensors before and after a step in which rows and columns move more or less often than others."""

    def __init__(self, dtype: str, shapes: dict[str, tuple[int, ...]], density: float = 0.05, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.old: dict[Region, Any] = {}
        self.new: dict[Region, Any] = {}
        for name, shape in shapes.items():
            region = whole(TensorSpec(name, dtype, shape))
            bits = _bits(rng, dtype, region.units)
            likely = np.outer(
                rng.choice([0.0, 0.3, 1.0, 3.0], region.rows), rng.choice([0.2, 1.0, 2.0], region.columns)
            )
            moved = rng.random(region.units) < density * likely.reshape(-1)
            self.old[region] = bits
            self.new[region] = np.where(moved, bits + rng.integers(1, 3, bits.size).astype(bits.dtype), bits)

    @property
    def changes(self) -> list[Change]:
        found = [compare(region, old, self.new[region]) for region, old in self.old.items()]
        return [change for change in found if change.count]

    def before(self, region: Region) -> Any:
        return self.old[region]


class OnDevice:
    """A `Before` of weights on a device, which hold the new bits: what changed is taken back there."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self._model, self._device = model, device

    def __call__(self, region: Region) -> Any:
        raise AssertionError("old weights must not come to the host")

    def block(self, regions: list[Region]) -> DeviceBlock:
        by_region = {change.region: change for change in self._model.changes}
        # the interpreter of kernels is not for several threads
        found = DeviceBlock(regions, self._read, counting=lambda: _TURN)
        found.undo([by_region[region] for region in regions])
        return found

    def _read(self, region: Region) -> torch.Tensor:
        bits = self._model.new[region]
        return torch.from_numpy(bits.view(f"i{bits.itemsize}") if bits.itemsize > 1 else bits).to(self._device)


def _bits(rng: np.random.Generator, dtype: str, count: int) -> Any:
    if dtype == "BF16":
        return (rng.normal(0, 0.02, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "F32":
        return rng.normal(0, 0.02, count).astype(np.float32).view(np.uint32)
    return rng.integers(0, 200, count).astype(lookup(dtype).unit)


@pytest.fixture(autouse=True)
def chosen(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.kernels.operations", lambda device: ops)


@pytest.mark.parametrize(
    "dtype", ["BF16", "F8_E4M3", *(pytest.param(x, marks=pytest.mark.slow) for x in ("F32", "I32"))]
)
def test_a_device_encodes_the_same_bytes_as_the_host(dtype: str, device: torch.device) -> None:
    # narrow ones are walked as a row, odd ones end in a part of a chunk
    model = Model(dtype, {"a": (96, 260), "b": (700,), "c": (40, 9), "d": (64, 128)})
    with tiles_of(4096):
        expected = encode_tiles(model.changes, model.before)
        assert encode_tiles(model.changes, OnDevice(model, device)) == expected
    if dtype == "BF16":
        assert any(coded.streams["levels"] for _, coded in expected)


def test_blocks_that_are_counted_together_have_the_bytes_they_have_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on threads, where a batch has one dtype, and where one of the blocks is too small for tiles or unchanged."""
    monkeypatch.setattr("deltawire.core.sparse.BATCH_UNITS", 30_000)
    models = [
        Model("BF16", {"a": (96, 260), "b": (700,)}, seed=1),
        Model("BF16", {"c": (40, 9)}, seed=2),
        Model("BF16", {"d": (64, 128)}, seed=3),
        Model("F8_E4M3", {"e": (64, 128), "f": (90,)}, seed=4),
        Model("BF16", {"g": (300, 130)}, seed=5, density=0.02),
    ]
    blocks = [[compare(region, old, model.new[region]) for region, old in model.old.items()] for model in models]
    blocks.append([no_change(region) for region in models[0].old])
    every = Model("BF16", {})
    for model in models:
        every.old |= model.old
        every.new |= model.new
    expected = [encode_block(block, "context", every.before) for block in blocks]
    assert [len(batch) for batch in _batches(blocks)] == [2, 1, 1, 1, 1]
    assert [*encode_counted(blocks, OnDevice(every, device), 4)] == expected
    assert {record.encoding for block in expected for record in block.records} == {"context", "packed"}


def test_levels_are_counted_as_on_the_host(device: torch.device) -> None:
    model = Model("BF16", {"a": (1100, 130), "b": (64, 256)}, seed=3)
    host, there = HostBlock(model.changes, model.before), OnDevice(model, device).block(list(model.old))
    assert np.array_equal(host.exponents(7, 255, [3, 1]), there.exponents(7, 255, [3, 1]))
    rule, rng = np.array([7, 255, 112, 121, 121, 32], np.int64), np.random.default_rng(4)
    for number, region in enumerate(model.old):
        plus = rng.integers(2, 7, region.columns).astype(np.uint8)
        assert np.array_equal(host.by_row(number, rule, plus, 18), there.by_row(number, rule, plus, 18))
        lines = rng.integers(-1, 9, region.rows)
        assert np.array_equal(host.by_column(number, rule, lines, 18), there.by_column(number, rule, lines, 18))


def test_weights_of_another_version_are_refused(device: torch.device) -> None:
    model = Model("BF16", {"a": (64, 128)})
    before = OnDevice(model, device)
    before.block = lambda regions: DeviceBlock(regions, before._read)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="not the weights"):
        encode_tiles(model.changes, before)
