"""Views in torch have the bits that they have in host memory."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from deltawire.core.change import Region, whole
from deltawire.core.schema import TensorSpec
from deltawire.models import ModelView
from deltawire.views import FP8_BLOCK, VIEWS, device
from deltawire.views.blocks import Blocks
from deltawire.views.device import BlockModel
from deltawire.views.host import BlockView, Place
from support import Bag, random_bits
from view_models import ATTENTION, EXPERTS, SCHEMA, weights

_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def tensors(bag: Bag) -> dict[str, torch.Tensor]:
    signed = {2: np.int16, 4: np.int32}
    return {
        t.name: torch.from_numpy(bag.tensors[t.name].view(signed[t.unit_size]).copy())
        .view(_TORCH[t.dtype])
        .view(t.shape)
        for t in bag.schema.tensors
    }


def assert_same(bag: Bag) -> None:
    for view in VIEWS:
        blocks = Blocks(bag.schema, view)
        expected, found = BlockView(bag, blocks), BlockModel(ModelView(tensors(bag)), blocks)
        assert found.schema == expected.schema
        for tensor in found.schema.tensors:
            assert np.array_equal(found.region(whole(tensor)), expected.region(whole(tensor))), (view, tensor.name)


@pytest.mark.parametrize("at_once", [1 << 26, 1 << 14])
def test_the_same_bits_as_in_host_memory(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_AT_ONCE", at_once)
    untied = weights(5, SCHEMA.build(SCHEMA.tensors))
    assert_same(untied)


def test_the_same_of_any_bits() -> None:
    rng = np.random.default_rng(4)
    schema = SCHEMA.build([TensorSpec("a.weight", "BF16", (300, 200)), TensorSpec("b.weight", "F32", (130, 129))])
    assert_same(Bag(schema, {t.name: random_bits(rng, t) for t in schema.tensors}))


def test_parts_of_several_processes() -> None:
    bag = weights(6, SCHEMA.build(SCHEMA.tensors))
    blocks, live = Blocks(bag.schema, FP8_BLOCK), tensors(bag)
    expected = BlockView(bag, blocks)
    for name in (ATTENTION, EXPERTS):
        spec = bag.schema.by_name()[name]
        rows = live[name].reshape(-1, spec.columns)
        held = [(0, 77, 0, 90), (77, spec.rows, 0, 90), (0, 130, 90, spec.columns), (130, spec.rows, 90, spec.columns)]
        for a, b, left, right in held:
            part = ModelView({"part": rows[a:b, left:right].contiguous()})
            place = {"part": Place(blocks.grids[name], a, left)}
            view = BlockModel(part, blocks, place, {}, lambda own: expected.maxima)
            region = Region(blocks.grids[name].weights, a, b - a, left, right - left)
            assert np.array_equal(view.region(whole(view.schema.tensors[0])), expected.region(region))
            own = BlockModel(part, blocks, place, {}, lambda own: np.minimum(own, expected.maxima))
            assert own.schema == view.schema
