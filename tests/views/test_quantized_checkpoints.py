"""Checkpoints that are quantized already are published bit by bit, whatever their layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.core import full
from deltawire.core.schema import Schema, TensorSpec
from deltawire.trainer import Publisher
from support import Bag, random_bag, same

LAYOUTS = {
    # compressed-tensors, pack-quantized: eight 4-bit weights in an int32
    "w4a16": [
        ("q_proj.weight_packed", "I32", (64, 16)), ("q_proj.weight_scale", "BF16", (64, 1)),
        ("q_proj.weight_zero_point", "I32", (8, 1)), ("q_proj.weight_shape", "I64", (2,)),
    ],
    # compressed-tensors, int-quantized
    "w8a8": [("q_proj.weight", "I8", (64, 128)), ("q_proj.weight_scale", "F32", (64, 1))],
    # two 4-bit floats in a byte, scales in e4m3 or as powers of two
    "nvfp4": [
        ("q_proj.weight_packed", "U8", (64, 64)), ("q_proj.weight_scale", "F8_E4M3", (64, 8)),
        ("q_proj.weight_global_scale", "F32", (1,)),
    ],
    "mxfp4": [
        ("experts.gate_up_proj_blocks", "U8", (2, 32, 4, 16)), ("experts.gate_up_proj_scales", "F8_E8M0", (2, 32, 4)),
    ],
    "fp8": [("q_proj.weight", "F8_E4M3", (130, 200)), ("q_proj.weight_scale_inv", "F32", (2, 2))],
    "e5m2": [("q_proj.weight", "F8_E5M2", (64, 128)), ("q_proj.weight_scale", "BF16", (64, 1))],
}  # fmt: skip


def stepped(bag: Bag, seed: int) -> Bag:
    """Some units of each tensor get other bits."""
    rng, result = np.random.default_rng(seed), bag.copy()
    for bits in result.tensors.values():
        where = rng.choice(bits.size, max(1, bits.size // 50), replace=False)
        bits[where] ^= rng.integers(1, np.iinfo(bits.dtype).max, where.size, bits.dtype)
    return result


@pytest.mark.parametrize("encoding", ["packed", "context"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_bit_arrives(layout: str, encoding: str, tmp_path: Path) -> None:
    schema = Schema.build([TensorSpec(*spec) for spec in LAYOUTS[layout]])
    versions = [random_bag(schema, 0)]
    for seed in (1, 2):
        versions.append(stepped(versions[-1], seed))
    with Publisher(str(tmp_path / "run"), encoding=encoding) as publisher:
        for number, version in enumerate(versions):
            folder = tmp_path / f"step-{number}"
            folder.mkdir()
            full.write_checkpoint(folder, version)
            publisher.publish(full.Checkpoint(folder), wait=True)
    run, state = Run.open(str(tmp_path / "run")), None
    for number, version in enumerate(versions):
        state = checkout(run, number, state)
        assert same(state.tensors, version.tensors)
        assert run.manifest(number).links[0].kind == ("delta" if number else "anchor")
