"""fp8-block against a real vLLM: `make test-vllm`. Not collected by the everyday run, whose environment has none.

The function: vLLM's own `per_block_cast_to_fp8`, as it casts a bf16 checkpoint online; on a GPU bit by bit. On a CPU
torch divides by 448 where it multiplies by 1/448 on a GPU, so that scales may differ by their last bit. Then a server
that follows a run derived from a bf16 run, dense and with experts, patched in place, on a GPU (DEVICE=cuda). On a CPU
vLLM itself refuses such a checkpoint, unless it has AMX and the operator for it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from vllm_fresh import fresh_checksums
from vllm_live import ON_GPU, Server, Trainer, make_model

from deltawire.bucket.run import Run
from deltawire.core.change import whole
from deltawire.core.schema import Schema, TensorSpec
from deltawire.derive.deriver import Deriver
from deltawire.engines.live.launch import write_version
from deltawire.models import ModelView, torch_bits
from deltawire.views import FP8_BLOCK, FP8_BLOCK_UE8M0
from deltawire.views.blocks import Blocks
from deltawire.views.device import BlockModel
from deltawire.views.host import BlockView

DEVICE = os.environ.get("DEVICE", "cpu")
SHAPES = ((128, 128), (256, 384), (1, 1), (130, 70), (300, 257), (127, 129), (1024, 640))


def cast(weights: torch.Tensor, compiled: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales by vLLM. Compiled, as vLLM runs it, a GPU divides 1 by a scale only almost exactly."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    with torch.compiler.set_stance("default" if compiled else "force_eager"):
        codes, scales = per_block_cast_to_fp8(weights.to(DEVICE), block_size=[128, 128], use_ue8m0=False)
    return torch_bits(codes), torch_bits(scales)


def ours(weights: torch.Tensor, view: str = FP8_BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales in host memory, which torch on the device must give as well."""
    source = ModelView({"w.weight": weights})
    schema = Schema.build([TensorSpec("w.weight", source.schema.tensors[0].dtype, tuple(weights.shape))])
    blocks = Blocks(schema, view)
    host, there = BlockView(source, blocks), BlockModel(ModelView({"w.weight": weights.to(DEVICE)}), blocks)
    found = []
    for tensor in host.schema.tensors:
        found.append(host.region(whole(tensor)))
        assert np.array_equal(found[-1], there.region(whole(tensor))), tensor.name
    return found[0], found[1]


def assert_same(weights: torch.Tensor) -> None:
    (codes, scales), (our_codes, our_scales) = cast(weights), ours(weights)
    apart = np.abs(scales.astype(np.int64) - our_scales)
    assert apart.max() <= (0 if ON_GPU else 1), f"{np.count_nonzero(apart)} of {apart.size} scales differ"
    steps = np.abs(_in_order(codes) - _in_order(our_codes))
    # of blocks with the same scale, all weights are the same
    rows, columns = weights.shape
    blocks = (apart == 0).reshape(-(-rows // 128), -1).repeat(128, 0).repeat(128, 1)
    differing = np.count_nonzero(steps[blocks[:rows, :columns].reshape(-1)])
    assert differing == 0, f"{differing} of {codes.size} weights differ"
    assert steps.max() <= 1


def _in_order(codes: np.ndarray) -> np.ndarray:
    """Numbers that rise by one from each e4m3 number to the next."""
    return np.where(codes & 0x80, -(codes & 0x7F).astype(np.int64), codes)


def drawn(shape: tuple[int, ...], seed: int, size: float = 0.02) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_as_models_have_them(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for seed, size in enumerate((0.02, 1.0, 1e-3, 1e-6, 300.0)):
        assert_same(drawn(shape, seed, size).to(dtype))


def test_every_finite_bit_pattern() -> None:
    """In random order, so that all kinds of blocks occur; then by size, so that blocks are narrow."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    finite = bits[bits.view(torch.bfloat16).isfinite()]
    for order in (
        torch.randperm(finite.numel(), generator=torch.Generator().manual_seed(1)),
        torch.arange(finite.numel()),
    ):
        assert_same(finite[order].view(torch.bfloat16)[: finite.numel() // 128 * 128].view(-1, 128))


@pytest.mark.skipif(not ON_GPU, reason="on a CPU compiled divisions are exact")
def test_compiled_casts_differ_in_ties_alone() -> None:
    """Weights half-way between two e4m3 numbers, if the scale has few bits: one in 100,000, by one step."""
    weights = drawn((4096, 4096), 8)
    (codes, scales), (our_codes, our_scales) = cast(weights, compiled=True), ours(weights)
    assert np.array_equal(scales, our_scales)
    assert np.count_nonzero(codes != our_codes) <= codes.size / 100_000
    assert np.abs(_in_order(codes) - _in_order(our_codes)).max() <= 1


def test_zeros_negative_zeros_and_denormals() -> None:
    assert_same(torch.zeros(256, 256, dtype=torch.bfloat16))
    assert_same(-torch.zeros(256, 256, dtype=torch.bfloat16))
    tiny = torch.randint(-127, 128, (200, 200), generator=torch.Generator().manual_seed(2)).to(torch.int16)
    assert_same(torch.where(tiny < 0, tiny + 0x7FFF + 0x80 + 1 - (1 << 15), tiny).view(torch.bfloat16))


def test_one_large_weight_in_a_block() -> None:
    weights = drawn((256, 256), 5)
    weights[3, 200], weights[130, 1] = 3e38, -7.0
    assert_same(weights)


def test_nan_and_infinity_are_the_same_but_for_the_sign_of_a_nan() -> None:
    weights = drawn((256, 256), 6)
    weights[3, 200], weights[130, 1], weights[140, 2] = float("nan"), float("inf"), float("-inf")
    (codes, scales), (our_codes, our_scales) = cast(weights), ours(weights)
    assert np.array_equal(codes & 0x7F, our_codes & 0x7F)
    nan = np.isnan(scales.view(np.float32))
    assert np.array_equal(nan, np.isnan(our_scales.view(np.float32)))
    assert np.abs(scales[~nan].astype(np.int64) - our_scales[~nan]).max() <= (0 if ON_GPU else 1)


@pytest.mark.parametrize("size", (0.02, 1.0, 1e-3, 1e-6, 300.0))
def test_powers_of_two_are_what_vllm_makes_of_them_for_deepgemm(size: float) -> None:
    """Its own requantization changes nothing, and its own cast of the weights stands for nearly the same numbers."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    spread = torch.rand(1024, 1, generator=torch.Generator().manual_seed(9)).mul(6).exp()
    weights = drawn((1024, 640), 7, size) * spread.bfloat16()
    codes, scales = (torch.from_numpy(bits.copy()) for bits in ours(weights, FP8_BLOCK_UE8M0))
    codes, scales = codes.view(torch.float8_e4m3fn).view(1024, 640), scales.view(torch.float32).view(8, 5)
    again = codes.to(DEVICE), scales.to(DEVICE)
    requant_weight_ue8m0_inplace(*again, (128, 128))
    assert torch.equal(again[0].cpu().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(again[1].cpu(), scales)
    theirs, their_scales = per_block_cast_to_fp8(weights.to(DEVICE), block_size=[128, 128], use_ue8m0=True)
    ratio = their_scales.cpu() / scales
    assert set(ratio.unique().tolist()) <= {1.0, 2.0}
    numbers, their_numbers = (
        q.float().cpu() * s.cpu().repeat_interleave(128, 0).repeat_interleave(128, 1)
        for q, s in ((codes, scales), (theirs, their_scales))
    )
    # where theirs is twice as large, the smallest numbers of the block have a bit less there
    least = scales.repeat_interleave(128, 0).repeat_interleave(128, 1) * 2.0**-9
    assert ((numbers - their_numbers).abs() <= least).all()
    assert torch.equal(
        numbers[:128][ratio[0].repeat_interleave(128).expand(128, -1) == 1],
        their_numbers[:128][ratio[0].repeat_interleave(128).expand(128, -1) == 1],
    )


VERSIONS = 5
SIZES = {"head_dim": 64, "moe_intermediate_size": 128}
"""vLLM's kernels want whole blocks of each projection."""


class Cell(NamedTuple):
    """A back end, and what becomes of versions there."""

    kind: str
    backend: str
    said: str
    """In vLLM's log, where it computes with that back end."""
    guard: str = "patch"
    view: str = FP8_BLOCK


CELLS = {
    "cutlass": Cell("qwen3", "cutlass", "Selected CutlassFp8BlockScaledMMKernel"),
    "triton": Cell("qwen3", "triton", "Selected TritonFp8BlockScaledMMKernel"),
    "deepgemm": Cell("qwen3", "deep_gemm", "Selected DeepGemmFp8BlockScaledMMKernel", view=FP8_BLOCK_UE8M0),
    "experts-deepgemm": Cell("qwen3_moe", "deep_gemm", "Using DEEPGEMM Fp8 MoE backend", view=FP8_BLOCK_UE8M0),
    "marlin": Cell("qwen3", "marlin", "Selected MarlinFP8ScaledMMLinearKernel", "reload: "),
    "experts-triton": Cell("qwen3_moe", "triton", "Using TRITON Fp8 MoE backend"),
}
ON_CPU = {"dense": Cell("qwen3", "", ""), "experts": Cell("qwen3_moe", "", "")}


@pytest.mark.parametrize("name", CELLS if ON_GPU else ON_CPU)
def test_a_server_follows_a_derived_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bf16 trainer, `derive` beside it, and vLLM on the derived run: patched in place, equal to fresh loads."""
    cell = (CELLS if ON_GPU else ON_CPU)[name]
    # by default vLLM prefers it for dense layers where it is there, and requantizes weights for it
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", str(int(cell.backend == "deep_gemm")))
    sizes = SIZES if cell.kind == "qwen3_moe" else {"head_dim": 64}
    flags = [f"--{'moe' if cell.kind == 'qwen3_moe' else 'linear'}-backend", cell.backend] if ON_GPU else []
    trainer = Trainer(make_model(tmp_path / "model", cell.kind, **sizes), tmp_path / "bf16")
    trainer.publish(0)
    derived, noted = tmp_path / "fp8", {}

    def checked_out(version: int) -> Path:
        write_version(str(derived), version, tmp_path / f"v{version}")
        return tmp_path / f"v{version}"

    with Deriver(Run.open(str(trainer.run)), derived, cell.view) as deriver:
        list(deriver.follow(once=True))
        server = Server(checked_out(0), tmp_path / "log", run=derived, flags=flags)
        try:
            if not ON_GPU and not _computes_in_fp8():
                assert "AMX" in server.ended()
                return
            server.wait().until(version=0, state="healthy")
            assert cell.said in server.log.read_text()
            for version in range(1, VERSIONS + 1):
                trainer.publish(0.002)
                list(deriver.follow(once=True))
                status = server.until(version=version, state="healthy")
                assert status["guard"][: len(cell.guard)] == cell.guard, status
                noted[version] = server.checksums()
                assert len(server.greedy([5, 9, 11])) == 24
        finally:
            server.stop()
            trainer.close()
    fresh = fresh_checksums([checked_out(version) for version in noted], 1, flags)
    assert [*noted.values()] == fresh


def _computes_in_fp8() -> bool:
    from vllm import _custom_ops

    return torch.cpu._is_amx_tile_supported() and bool(_custom_ops._supports_cpu_fp8_w8a16)
