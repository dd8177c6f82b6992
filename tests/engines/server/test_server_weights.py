"""float32 weights that are a version: written wide, read narrow, proven bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from serving import nudge, tiny_model

from deltawire.core.change import compare, regions
from deltawire.core.errors import SchemaMismatch
from deltawire.engines.server.weights import WideTarget
from deltawire.models import ModelView
from deltawire.replica.target import Target
from support import specials

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16}


def narrow_copy(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_the_digest_is_that_of_the_narrow_weights(dtype: str) -> None:
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(TORCH[dtype]).float())
    narrow = narrow_copy(model, TORCH[dtype])
    schema = ModelView(narrow).schema
    assert WideTarget(model, schema).digest() == Target(narrow, schema).digest()


def test_every_bfloat16_survives_and_changes_can_be_undone() -> None:
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    wide = {"w": torch.from_numpy((every.astype(np.uint32) << 16).view(np.float32).copy())}
    narrow = {"w": every.copy()}
    schema = ModelView(narrow).schema
    target = WideTarget(wide, schema)
    assert np.array_equal(target.bits("w"), every)
    new = np.roll(every, 7)
    region = next(regions(schema.tensors[0]))
    change = compare(region, every, new)
    target.write(change)
    assert np.array_equal(target.bits("w"), new)
    assert target.digest() == Target({"w": new}, schema).digest()
    target.undo(change)
    assert target.digest() == Target(narrow, schema).digest()


def test_every_float16_survives_but_signalling_nans_which_hardware_quiets() -> None:
    bits = specials("F16")
    is_nan = (bits & 0x7C00 == 0x7C00) & (bits & 0x3FF != 0)
    quiet = bits[~is_nan | (bits & 0x200 != 0)]
    narrow = {"w": quiet.view(np.float16)}
    schema = ModelView(narrow).schema
    target = WideTarget({"w": torch.zeros(quiet.size)}, schema)
    target.load(Target({"w": quiet.view(np.float16).copy()}, schema))
    assert np.array_equal(target.bits("w"), quiet)
    assert target.digest() == Target({"w": quiet.view(np.float16).copy()}, schema).digest()


def test_a_weight_between_two_bfloat16_is_no_version() -> None:
    model = tiny_model()
    narrow = narrow_copy(model, torch.bfloat16)
    schema = ModelView(narrow).schema
    target = WideTarget(model, schema)
    exact = target.digest()
    with torch.no_grad():
        # the upper half, which is the bfloat16, stays as it is
        model.model.norm.weight.view(torch.int32)[3] += 1
    assert np.array_equal(target.bits("model.norm.weight"), Target(narrow, schema).bits("model.norm.weight"))
    assert target.digest() != exact


def test_loading_overwrites_everything() -> None:
    model, other = tiny_model(), tiny_model()
    nudge(other, 1)
    narrow = {name: tensor.contiguous() for name, tensor in narrow_copy(other, torch.bfloat16).items()}
    schema = ModelView(narrow).schema
    source = Target(narrow, schema)
    target = WideTarget(model, schema)
    target.load(source)
    assert target.digest() == source.digest()
    for name, tensor in narrow.items():
        assert torch.equal(model.state_dict()[name], tensor.float())


def test_a_tie_that_this_model_does_not_have_is_written_twice() -> None:
    tied, untied = tiny_model(), tiny_model(tie_word_embeddings=False)
    nudge(tied, 3)
    schema = ModelView(tied, "bf16").schema
    assert schema.ties
    source = ModelView(tied, "bf16")
    target = WideTarget(untied, schema)
    target.load(source)
    assert torch.equal(untied.lm_head.weight, tied.lm_head.weight.bfloat16().float())
    proven = target.digest()
    with torch.no_grad():
        untied.lm_head.weight[0, 0] = 0.5
    assert target.digest() != proven


def test_another_model_is_refused_before_anything_is_written() -> None:
    model = tiny_model()
    schema = ModelView(tiny_model(hidden_size=32), "bf16").schema
    with pytest.raises(SchemaMismatch, match="in the run but"):
        WideTarget(model, schema)
    with pytest.raises(SchemaMismatch, match="this model does not"):
        WideTarget(model, ModelView(tiny_model(num_hidden_layers=3), "bf16").schema)
    with pytest.raises(SchemaMismatch, match="does not carry"):
        WideTarget(tiny_model(num_hidden_layers=3), ModelView(model, "bf16").schema)
    with pytest.raises(SchemaMismatch, match="in the run but"):
        WideTarget(model.bfloat16(), ModelView(tiny_model()).schema)
