"""A view that follows deltas has the bits of one that is computed anew, and looks only at what changed."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.core import full
from deltawire.core.change import Change, compare, whole
from deltawire.core.state import State
from deltawire.derive.followed import FollowedView, ViewDetector
from deltawire.trainer.detectors import Found
from deltawire.views import FP8_BLOCK, VIEWS
from deltawire.views.blocks import Blocks
from deltawire.views.host import BlockView
from support import Bag, moved
from view_models import ATTENTION, SCHEMA, weights


def loaded(bag: Bag) -> State:
    state = State(bag.schema)
    state.load(bag)
    return state


class Scene:
    """A source in memory, its view, and a detector that has the view."""

    def __init__(self, view: str = FP8_BLOCK) -> None:
        self.source, self.blocks = loaded(weights(0)), Blocks(SCHEMA, view)
        self.view = FollowedView(self.source, self.blocks)
        self.detector = ViewDetector()
        self.detector.bind(self.view)
        self.digest = self.detector.load(self.view)
        self.detect()

    def change(self, tensor: str, new: np.ndarray) -> None:
        spec = SCHEMA.by_name()[tensor]
        bits = self.source.bits(tensor)
        change = compare(whole(spec), bits, new)
        change.write(bits)
        self.view.note([change])

    def detect(self) -> Found:
        self.view.advance()
        found = self.detector.detect(self.view, 1 << 40)().result()
        self.digest += found.shift
        anew = BlockView(self.source, self.blocks)
        assert np.array_equal(self.view.maxima, anew.maxima)
        assert self.digest == full.digest_of(anew) == full.digest_of(self.detector.state)
        return found


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("density", [0.0005, 0.02, 0.5])
def test_any_changes_of_any_tensors(density: float, view: str) -> None:
    scene, rng = Scene(view), np.random.default_rng(1)
    for _ in range(4):
        for tensor in SCHEMA.tensors:
            scene.change(tensor.name, moved(rng, scene.source.bits(tensor.name), tensor.dtype, density))
        scene.detect()


def test_the_largest_weight_of_a_block_grows_shrinks_and_becomes_nan() -> None:
    scene = Scene()
    for bits in (0x4080, 0x3F00, 0x3D00, 0x7FC0, 0xC000, 0xFF80, 0x3C00):
        new = scene.source.bits(ATTENTION).copy()
        new[200 * 257 + 200] = bits
        scene.change(ATTENTION, new)
        found = scene.detect()
        assert any(c.region.tensor.name == ATTENTION + "_scale_inv" and c.count == 1 for b in found.blocks for c in b)


def test_two_deltas_before_one_look() -> None:
    scene, rng = Scene(), np.random.default_rng(2)
    for _ in range(2):
        scene.change(ATTENTION, moved(rng, scene.source.bits(ATTENTION), "BF16", 0.01))
    scene.detect()


def test_a_full_load_is_compared_everywhere() -> None:
    scene = Scene()
    scene.source.load(weights(9))
    scene.view.note(None)
    assert scene.detect().count > 1000


def test_only_changed_weights_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no scale moves, the positions that are converted again are those of the delta."""
    scene = Scene()
    new = scene.source.bits(ATTENTION).copy()
    small = np.flatnonzero((new & 0x7FFF) < 0x3C00)[5000:5100]
    new[small] ^= 0x8000
    scene.change(ATTENTION, new)
    scene.view.advance()
    found = scene.view.changes_since(scene.detector.state)
    assert found is not None
    assert {name: list(positions) for name, (positions, _) in found.items()} == {ATTENTION: list(small)}


def test_nothing_noted_is_nothing_changed() -> None:
    scene = Scene()
    assert scene.detect().count == 0
    scene.view.note(
        [Change(whole(SCHEMA.tensors[0]), *(np.empty(0, kind) for kind in (np.uint32, np.uint16, np.uint16)))]
    )
    assert scene.detect().count == 0
