"""The functions of a real vLLM that lay out weights for kernels, as plain functions: `make test-vllm`.

Each one is run as the hook of a layer; what `learn` takes for a permutation must be one for other random bits too.
Which of these kernels can compute on this machine does not matter: the functions only move bytes. With DEVICE=cuda they
do so on a GPU. Two back ends lay weights out by functions of their own packages, whose tests are skipped without them:
`pip install --no-deps flashinfer-python==0.7.0.post1 nvidia-ml-py apache-tvm-ffi einops tabulate`, and `amd-aiter`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.utils import fp8_utils

from deltawire.core.change import Region, whole
from deltawire.core.schema import TensorSpec
from deltawire.engines.live.learn import Layer, Learned
from deltawire.engines.live.placement import Piece
from deltawire.engines.vllm.guard import experts_in_first_places, have_experts_moved, hold_experts
from deltawire.engines.vllm.hooks import requantizing_nothing
from deltawire.models import ModelView
from deltawire.views import FP8_BLOCK_UE8M0
from deltawire.views.blocks import Blocks
from deltawire.views.host import BlockView

DEVICE = os.environ.get("DEVICE", "cpu")
of_the_cpu_build = pytest.mark.skipif(DEVICE != "cpu", reason="an operator of vLLM's CPU build")

Convert = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Both projections of experts, [experts, 2 · inner, hidden] and [experts, hidden, inner]."""

SHAPES = [(2, 64, 128), (4, 96, 64), (3, 256, 192)]
"""Experts, inner and hidden size."""


class Experts(nn.Module):
    def __init__(self, experts: int, inner: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        w13, w2 = (experts, 2 * inner, hidden), (experts, hidden, inner)
        self.w13_weight = nn.Parameter(torch.zeros(w13, dtype=dtype, device=DEVICE), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.zeros(w2, dtype=dtype, device=DEVICE), requires_grad=False)

    def fill(self, seed: int) -> dict[str, Tensor]:
        """Random bits; a copy of them."""
        random = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            flat = parameter.data.view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=random))
        return {name: parameter.data.clone() for name, parameter in self.named_parameters()}


def hook_of(convert: Convert) -> Callable[[Any], None]:
    def hook(layer: Any) -> None:
        w13, w2 = convert(layer.w13_weight.data, layer.w2_weight.data)
        layer.w13_weight = nn.Parameter(w13, requires_grad=False)
        layer.w2_weight = nn.Parameter(w2, requires_grad=False)

    return hook


def pieces_of(loaded: dict[str, Tensor], dtype: str) -> list[Piece]:
    """As a loader fills experts: gate, up and down of each."""
    found = []
    for name, meta in loaded.items():
        experts, rows, columns = meta.shape
        parts = 2 if name.startswith("w13") else 1
        for expert in range(experts):
            for part in range(parts):
                view = meta[expert].narrow(0, part * rows // parts, rows // parts)
                spec = TensorSpec(f"{expert}.{name}.{part}", dtype, (rows // parts, columns))
                region: Region = whole(spec)
                found.append(Piece(region, view))
    return found


def is_learned(convert: Convert, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Learn the layout, convert other random bits, and find each of them where the layout says."""
    layer = Experts(*shape, dtype)
    loaded = {name: torch.empty_like(p, device="meta") for name, p in layer.named_parameters()}
    learned = Learned([Layer("experts", layer, loaded, hook_of(convert))])
    pieces = pieces_of(loaded, "BF16" if dtype == torch.bfloat16 else "F8_E4M3")
    before = layer.fill(7)
    hook_of(convert)(layer)
    found, problems = learned.compose(pieces)
    assert problems == []
    units = torch.int16 if dtype.itemsize == 2 else torch.uint8
    for piece, place in zip(pieces, found, strict=True):
        name = piece.region.tensor.name.split(".")[1]
        offset, (rows, columns), stride = piece.view.storage_offset(), piece.view.shape, piece.view.stride()
        expected = torch.as_strided(before[name], (rows, columns), stride, offset)
        if place.places is None:
            live = place.view
        else:
            at = torch.from_numpy(place.places.rows[:, None] + place.places.columns).to(DEVICE)
            live = place.view[at]
        assert torch.equal(live.view(units), expected.view(units)), piece.region.tensor.name


def unquantized(backend: str) -> Convert:
    """vLLM's own choice of a conversion for experts that are not quantized."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized as oracle

    def convert(w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        inner = w2.shape[2]
        config: Any = SimpleNamespace(
            is_act_and_mul=True, intermediate_size_per_partition=inner, intermediate_size_per_partition_unpadded=inner
        )
        return oracle.convert_to_unquantized_kernel_format(oracle.UnquantizedMoeBackend[backend], config, w13, w2)

    return convert


def packed_for_cpu(isa: str) -> Convert:
    from vllm._custom_ops import cpu_prepack_moe_weight

    return lambda w13, w2: (cpu_prepack_moe_weight(w13, isa), cpu_prepack_moe_weight(w2, isa))


def padded_for_cpu(w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """All that vLLM's experts on a CPU do: pad the inner size, then pack."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    experts: Any = CPUUnquantizedExperts.__new__(CPUUnquantizedExperts)
    experts.moe_config = SimpleNamespace(intermediate_size_per_partition=w2.shape[2], activation=MoEActivation.SILU)
    layer = Experts(1, 32, 32, w13.dtype)
    layer.w13_weight, layer.w2_weight = (nn.Parameter(w, requires_grad=False) for w in (w13, w2))
    experts._pad_moe_intermediate(layer)
    return packed_for_cpu("vec")(layer.w13_weight.data, layer.w2_weight.data)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", ("TRITON", "BATCHED_TRITON", "FLASHINFER_CUTLASS"))
def test_experts_for_a_gpu(backend: str, shape: tuple[int, int, int]) -> None:
    is_learned(unquantized(backend), shape, torch.bfloat16)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_for_trtllm(shape: tuple[int, int, int]) -> None:
    """Padded to 128, rows in the order of the kernel's tiles, blocks of 128 bytes after one another."""
    is_learned(unquantized("FLASHINFER_TRTLLM"), shape, torch.bfloat16)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
@pytest.mark.parametrize("shape", [(2, 128, 128), (3, 256, 128)])
def test_fp8_experts_for_trtllm(shape: tuple[int, int, int]) -> None:
    """The weights' part of it."""
    from vllm.model_executor.layers.quantization.utils import flashinfer_utils as utils

    is_learned(
        lambda w13, w2: utils._shuffle_deepseek_fp8_moe_weights(utils.swap_w13_to_w31(w13), w2),
        shape,
        torch.float8_e4m3fn,
    )


@pytest.mark.skipif(importlib.util.find_spec("aiter") is None, reason="AITER is not installed")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float8_e4m3fn))
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_for_aiter(shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package imports only where there is ROCm; the module with this function needs none."""
    from vllm._aiter_ops import rocm_aiter_ops

    package: Any = importlib.util.find_spec("aiter")
    spec: Any = importlib.util.spec_from_file_location(
        "aiter.ops.shuffle", Path(package.origin).parent / "ops" / "shuffle.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("aiter", "aiter.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "aiter.ops.shuffle", module)
    is_learned(lambda w13, w2: rocm_aiter_ops.shuffle_weights(w13, w2), shape, dtype)  # type: ignore[return-value]


@of_the_cpu_build
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("isa", ("vec", "amx"))
def test_experts_packed_for_a_cpu(isa: str, shape: tuple[int, int, int]) -> None:
    is_learned(packed_for_cpu(isa), shape, torch.bfloat16)


@of_the_cpu_build
@pytest.mark.parametrize("shape", [(2, 48, 64), (3, 40, 96)])
def test_experts_padded_for_a_cpu(shape: tuple[int, int, int]) -> None:
    is_learned(padded_for_cpu, shape, torch.bfloat16)


@pytest.mark.parametrize("shape", [(2, 128, 128), (3, 256, 128)])
def test_fp8_experts_with_halves_swapped(shape: tuple[int, int, int]) -> None:
    """The weights' part of what vLLM does for FlashInfer CUTLASS."""
    from vllm.model_executor.layers.quantization.utils.flashinfer_utils import swap_w13_to_w31

    is_learned(lambda w13, w2: (swap_w13_to_w31(w13), w2.clone()), shape, torch.float8_e4m3fn)


def test_requantization_to_powers_of_two_is_refused() -> None:
    """What vLLM does for DeepGEMM with UE8M0 scales computes new weights."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace

    def convert(w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        for weight in (w13, w2):
            experts, rows, columns = weight.shape
            scales = torch.full((experts, rows // 128, columns // 128), 0.3, device=weight.device)
            requant_weight_ue8m0_inplace(weight, scales, (128, 128))
        return w13, w2

    layer = Experts(2, 128, 128, torch.float8_e4m3fn)
    loaded = {name: torch.empty_like(p, device="meta") for name, p in layer.named_parameters()}
    _, problems = Learned([Layer("experts", layer, loaded, hook_of(convert))]).compose(pieces_of(loaded, "F8_E4M3"))
    assert len(problems) == 1
    assert "'0.w13_weight.0'" in problems[0]


@pytest.mark.parametrize("layout", ("as they are", "columns after one another"))
def test_powers_of_two_are_only_rearranged(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM does for DeepGEMM with UE8M0 scales. DeepGEMM itself, which arranges the scales, needs a GPU: here they
    stay as they are, or get their columns after one another."""

    def arranged(sf: Tensor, **_: Any) -> Tensor:
        return sf if layout == "as they are" else sf.transpose(-1, -2).contiguous().transpose(-1, -2)

    monkeypatch.setattr(fp8_utils, "transform_sf_into_required_layout", arranged)

    def hook(layer: Any) -> None:
        made = fp8_utils.deepgemm_post_process_fp8_weight_block(
            wq=layer.weight.data, ws=layer.weight_scale_inv.data, quant_block_shape=(128, 128), use_e8m0=True
        )
        for name, tensor in zip(("weight", "weight_scale_inv"), made, strict=True):
            setattr(layer, name, nn.Parameter(tensor, requires_grad=False))

    def learned_hook(layer: Any) -> None:
        with requantizing_nothing():
            hook(layer)

    layer = nn.Module()
    random = torch.Generator().manual_seed(3)
    spread = torch.rand(384, 1, generator=random).mul(12).sub(6).exp()
    given = {"w.weight": (torch.randn(384, 640, generator=random) * spread).bfloat16()}
    source = ModelView(given)
    view = BlockView(source, Blocks(source.schema, FP8_BLOCK_UE8M0))
    expected, pieces, loaded = {}, [], {}
    for spec, name, dtype in zip(
        view.schema.tensors, ("weight", "weight_scale_inv"), (torch.float8_e4m3fn, torch.float32), strict=True
    ):
        expected[name] = torch.from_numpy(view.region(whole(spec)).view(f"i{dtype.itemsize}").copy()).view(spec.shape)
        layer.register_parameter(name, nn.Parameter(expected[name].clone().view(dtype).to(DEVICE), requires_grad=False))
        loaded[name] = torch.empty_like(getattr(layer, name), device="meta")
        pieces.append(Piece(whole(spec), loaded[name]))
    hook(layer)
    for name, bits in expected.items():
        assert torch.equal(getattr(layer, name).cpu().view(bits.dtype), bits), "requantized, and the same"
    learned = Learned([Layer("w", layer, loaded, learned_hook)])
    found, problems = learned.compose(pieces)
    assert problems == []
    for piece, (name, bits) in zip(found, expected.items(), strict=True):
        live = piece.view if piece.places is None else _at(piece)
        assert torch.equal(live.cpu().view(bits.dtype), bits), name
    _, problems = Learned([Layer("w", layer, loaded, hook)]).compose(pieces)
    assert len(problems) == 1, "random bits are no fixed point"


def _at(piece: Piece) -> Tensor:
    assert piece.places is not None
    return piece.view[torch.from_numpy(piece.places.rows[:, None] + piece.places.columns).to(piece.view.device)]


def test_block_scales_that_a_hook_raises_are_refused() -> None:
    """For both FlashInfer kernels vLLM raises scales to 1e-10: smaller ones would not be what a fresh load has."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization.utils.flashinfer_utils import prepare_fp8_moe_layer_for_fi

    names = ("w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv")
    about: Any = SimpleNamespace(
        moe_config=SimpleNamespace(is_act_and_mul=True), weight_block_size=[128, 128], activation=MoEActivation.SILU
    )

    def hook(layer: Any) -> None:
        w13, w2, scales13, scales2 = (getattr(layer, name).data for name in names)
        converted = prepare_fp8_moe_layer_for_fi(about, w13, w2, scales13, None, scales2, None)
        for name, tensor in zip(names, converted, strict=True):
            setattr(layer, name, nn.Parameter(tensor, requires_grad=False))

    layer = Experts(2, 128, 256, torch.float8_e4m3fn)
    for name in names[:2]:
        experts, rows, columns = getattr(layer, name).shape
        scales = torch.zeros(experts, rows // 128, columns // 128, device=DEVICE)
        layer.register_parameter(f"{name}_scale_inv", nn.Parameter(scales, requires_grad=False))
    loaded = {name: torch.empty_like(p, device="meta") for name, p in layer.named_parameters()}
    of_kind = {
        kind: {n: t for n, t in loaded.items() if n.endswith("inv") == (kind == "F32")} for kind in ("F8_E4M3", "F32")
    }
    pieces = [piece for kind, tensors in of_kind.items() for piece in pieces_of(tensors, kind)]
    _, problems = Learned([Layer("experts", layer, loaded, hook)]).compose(pieces)
    assert len(problems) == 1
    assert "_scale_inv" in problems[0]


# ── experts that move ────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_find_experts_that_a_reload_put_back() -> None:
    """vLLM loads all experts to their first places; its own tables must say so, whatever EPLB moved before."""
    from vllm.distributed.eplb.eplb_state import EplbModelState, EplbState, compute_logical_maps

    layers, experts, redundant = 2, 4, 2
    routed = SimpleNamespace(num_routed_experts=experts, num_redundant_experts=redundant, num_logical_experts=experts)
    first = torch.tensor(EplbState.build_initial_global_physical_to_logical_map(experts, redundant)).expand(layers, -1)
    moved = torch.tensor([[3, 1, 2, 0, 1, 2], [0, 2, 0, 1, 0, 3]])

    def tables(places: Tensor) -> dict[str, Tensor]:
        logical, count = compute_logical_maps(places, experts)
        padded = torch.nn.functional.pad(logical, (0, 8 - logical.shape[-1]), value=-1)
        return {
            "physical_to_logical_map": places.clone(),
            "logical_to_physical_map": padded,
            "logical_replica_count": count,
        }

    state: Any = EplbState.__new__(EplbState)
    state.is_async, state.device = False, torch.device("cpu")
    made: Any = EplbModelState.__new__(EplbModelState)
    vars(made).update(tables(moved), model=routed, expert_load_pass=torch.ones(layers, experts + redundant))
    made.physical_to_logical_map_buffer = made.physical_to_logical_map
    made.expert_load_window = torch.ones(3, layers, experts + redundant)
    state.model_states = {"a": made}
    runner = SimpleNamespace(eplb_state=state, model_config=SimpleNamespace(compute_hash=lambda: "a"))
    hold_experts(runner)
    assert runner.eep_eplb_suppressed
    assert have_experts_moved(runner)
    with experts_in_first_places(runner):
        assert torch.equal(made.physical_to_logical_map, moved)
    for name, expected in tables(first).items():
        assert torch.equal(getattr(made, name), expected), name
    assert not made.expert_load_window.any()
    assert not runner.eep_eplb_suppressed
    assert not have_experts_moved(runner)
