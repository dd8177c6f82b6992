"""Adapters that are made whole and arranged in the decoder's process are what torch would make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deltawire.core import full  # noqa: E402
from deltawire.core.digest import StateDigest  # noqa: E402
from deltawire.core.dtypes import Bits  # noqa: E402
from deltawire.core.schema import Schema, TensorSpec  # noqa: E402
from deltawire.core.sparse import DeltaClaim  # noqa: E402
from deltawire.core.state import State  # noqa: E402
from deltawire.engines.live.adapter_worker import FILE  # noqa: E402
from deltawire.engines.live.arrangement import ALIGNED, Arrangement, Unusual, arrange  # noqa: E402
from deltawire.engines.live.decoder import _Process  # noqa: E402
from deltawire.engines.live.messages import ReadAdapter  # noqa: E402
from support import diff, encoded, moved_bag, random_bag  # noqa: E402

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
TORCH_UNITS = {2: torch.int16, 4: torch.int32}


def every_bf16() -> Any:
    """All finite normal numbers and zeros."""
    found = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    size = found.float().abs()
    return found[torch.isfinite(found) & ((size == 0) | (size >= torch.finfo(torch.bfloat16).tiny))]


def numbers(dtype: str) -> Any:
    if dtype == "BF16":
        return every_bf16()
    if dtype == "F16":
        found = torch.arange(1 << 16).to(torch.uint16).view(torch.float16)
        return found[torch.isfinite(found)]
    made = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    # ties between two bfloat16, and between two float16
    return torch.cat([made, (made.view(torch.int32) & -0x10000 | 0x8000).view(torch.float32),
                      (made.view(torch.int32) & -0x2000 | 0x1000).view(torch.float32)])  # fmt: skip


def bits_of(tensor: Any) -> Bits:
    width = tensor.element_size()
    return tensor.contiguous().view(TORCH_UNITS[width]).numpy().view(f"u{width}")  # type: ignore[no-any-return]


@pytest.mark.parametrize("scale", (1.0, 2.0, 0.5, 7 / 3, -1.1))
@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_become_what_torch_makes_of_them(tmp_path: Path, dtype: str, wanted: str, scale: float) -> None:
    given = numbers(dtype)
    own = given.clone().to(DTYPES[wanted])
    if scale != 1.0:
        own *= scale
    # what only an engine converts is refused below
    kept = own.float().abs()
    usual = torch.isfinite(own) & torch.isfinite(given.to(DTYPES[wanted])) & ((given == 0) | (kept > 1e-37))
    given, own = given[usual].clone(), own[usual].clone()
    spec = TensorSpec("a", dtype, (given.numel(),))
    arrange({"a": bits_of(given)}.__getitem__, {"a": spec}, Arrangement(wanted, [[("a", scale)]]), tmp_path / "out", 1)
    made = np.fromfile(tmp_path / "out", np.uint8)[: own.numel() * own.element_size()]
    assert np.array_equal(made.view(bits_of(own).dtype), bits_of(own))


@pytest.mark.parametrize("number", (float("nan"), float("inf"), 1e-39))
def test_numbers_that_processors_treat_differently_are_left_to_the_engine(tmp_path: Path, number: float) -> None:
    given = torch.tensor([1.0, number])
    spec = TensorSpec("a", "F32", (2,))
    with pytest.raises(Unusual, match="not finite, or below"):
        arrange({"a": bits_of(given)}.__getitem__, {"a": spec}, Arrangement("BF16", [[("a", 1.0)]]), tmp_path / "o", 1)
    assert not (tmp_path / "o").exists()
    # bits that are only copied are what they are
    arrange({"a": bits_of(given)}.__getitem__, {"a": spec}, Arrangement("F32", [[("a", 1.0)]]), tmp_path / "o", 1)
    assert (tmp_path / "o").read_bytes()[:8] == bits_of(given).tobytes()


def test_a_version_is_made_of_the_one_before_and_arranged(tmp_path: Path) -> None:
    schema = Schema.build([TensorSpec(f"{n}.lora_{half}", "BF16", (n, 64)) for n in (3, 5) for half in "AB"])
    old = random_bag(schema, 3)
    for bits in old.tensors.values():
        # finite
        bits &= 0xBFFF
        bits |= 0x2000
    new = moved_bag(old, 4, 0.3)
    state, expected = State(schema), State(schema)
    for name in state.tensors:
        state.tensors[name][:], expected.tensors[name][:] = old.tensors[name], new.tensors[name]
    before, folder, delta = tmp_path / "before", tmp_path / "after", tmp_path / "delta"
    for place in (before, folder):
        place.mkdir()
    full.write_checkpoint(before, state, stem="adapter_model")
    first = (before / "adapter_model.safetensors").read_bytes()
    said = {"run": "a run", "base_version": "3", "model_version": "4"}
    delta.write_bytes(encoded(old, diff(old, new), "packed", **said))
    wanted = Arrangement("BF16", [[("5.lora_B", 1.0), ("3.lora_A", 1.0)], [("3.lora_B", 1.0)]])
    claim = DeltaClaim("a run", 3, 4, StateDigest(1, 2))
    answer = _Process().call(ReadAdapter(schema, str(folder), str(before), [str(delta)], claim, wanted))
    assert (answer["digest"], answer["unusual"]) == (str(full.digest_of(expected)), "")
    made = full.Checkpoint(folder)
    assert full.digest_of(made) == full.digest_of(expected)
    assert (before / "adapter_model.safetensors").read_bytes() == first
    arranged = (folder / FILE).read_bytes()
    start = -(-2 * 64 * 8 // ALIGNED) * ALIGNED
    assert arranged[: 2 * 64 * 8] == new.tensors["5.lora_B"].tobytes() + new.tensors["3.lora_A"].tobytes()
    assert arranged[start : start + 2 * 64 * 3] == new.tensors["3.lora_B"].tobytes()
