"""Models of numpy and torch as bits."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

import deltawire as dw
from deltawire.core import full
from deltawire.core.change import blocks
from deltawire.core.errors import (
    UnsafeName,
    UnsupportedDtype,
    UnsupportedTensor,
)
from deltawire.models import ModelView
from deltawire.store import ObjectStore
from deltawire.trainer import SnapshotDetector, adapter
from support import column_cut, same
from test_api import TORCH_DTYPES, torch_noise


def test_views_of_different_parts_are_not_tied() -> None:
    whole = np.zeros((4, 6), np.uint16)
    old = {"all": whole, "upper": whole[:2], "lower": whole[2:], "transposed": whole.T, "empty": whole[:0]}
    assert ModelView({**old, "empty2": whole[:0]}).schema.ties == {}


def test_numpy_bits_and_torch_bfloat16_are_the_same_model() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, (4, 6), np.uint16)
    tensor = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    flipped = bits ^ np.uint16(3)
    blob = dw.encode({"w": tensor}, {"w": flipped})
    assert same(dw.decode(blob, {"w": bits}), {"w": flipped})


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_a_single_element_may_have_any_stride(dtype: torch.dtype) -> None:
    """Torch calls it contiguous, and cannot view it in another width."""
    every_other, column = torch_noise(dtype, (4,), 5)[1::2][:1], torch_noise(dtype, (4, 2), 6)[1:2, :1]
    model = {"a": every_other, "b": column}
    alone = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in model.items()}
    assert {n: b.tolist() for n, b in ModelView(model)} == {n: b.tolist() for n, b in ModelView(alone)}
    store = ObjectStore.from_url(f"memory://{uuid4().hex}")
    with dw.Publisher(store, detector=SnapshotDetector()) as publisher:
        publisher.publish(model, wait=True)
    for tensor in model.values():
        tensor.zero_()
    dw.Replica(store, heartbeat=0).sync(model)
    assert {n: b.tolist() for n, b in ModelView(model)} == {n: b.tolist() for n, b in ModelView(alone)}


@pytest.mark.parametrize("wire", [None, "bf16"])
def test_a_region_is_that_part_of_the_tensor(wire: str | None) -> None:
    """Cut before it is cast, or after, or of a tensor that is not contiguous: the same bits."""
    for dtype in TORCH_DTYPES:
        whole = torch_noise(dtype, (9, 14), 3)
        view = ModelView({"w": whole, "t": whole.T, "s": torch_noise(dtype, (), 4)}, wire)
        for plan in (*(blocks(view.schema, units) for units in (1, 10, 1000)), column_cut(view.schema, 4, 3)):
            for region in (region for block in plan for region in block):
                expected = region.cut(view.bits(region.tensor.name)).tolist()
                assert view.region(region).tolist() == expected, (dtype, region)


def test_only_the_region_asked_for_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region of a large embedding must not cost a copy of all of it."""
    cast = []
    real = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *to: (cast.append(self.numel()), real(self, *to))[1])
    view = ModelView({"w": torch.zeros(100, 10)}, "bf16")
    for block in blocks(view.schema, 50):
        for region in block:
            view.region(region)
    assert cast == [50] * 20


@pytest.mark.parametrize(
    ("wire", "dtype", "refused"),
    [
        ("bf16", "float32", True),
        ("fp16", "uint16", True),
        ("fp16", "float16", False),
        ("bf16", "int64", False),
        ("auto", "float32", False),
    ],
)
def test_arrays_that_a_wire_dtype_would_have_to_cast_are_refused(
    wire: str | None, dtype: str, refused: bool, tmp_path: Path
) -> None:
    """They were published as they are, without a word."""
    weights = {"w": np.ones(3, dtype)}
    full.write_checkpoint(tmp_path, ModelView(weights))
    for model in (weights, [*weights.items()], dw.Checkpoint(tmp_path)):
        with dw.Publisher(ObjectStore.from_url(f"memory://{uuid4()}"), wire_dtype=wire) as publisher:
            if refused:
                with pytest.raises(UnsupportedDtype, match=r"'w' is .* casts torch tensors only"):
                    publisher.publish(model)
            else:
                publisher.publish(model)


def test_a_wire_dtype_that_nobody_knows() -> None:
    with pytest.raises(UnsupportedDtype, match="known: auto, bf16"):
        ModelView({"w": torch.zeros(1)}, "fp4")


def partitioned(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """A parameter as DeepSpeed ZeRO 3 leaves it outside of a layer's own computation."""
    parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
    parameter.data = torch.empty(0, dtype=parameter.dtype)
    return parameter


UNREADABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.ones(2, 2).to_sparse(), "to_dense"),
    "sparse_csr": (lambda: torch.ones(2, 2).to_sparse_csr(), "to_dense"),
    "meta": (lambda: torch.ones(2, 2, device="meta"), "load the checkpoint"),
    "conj": (lambda: torch.ones(2, 2, dtype=torch.complex64).conj(), "resolve_conj"),
    "neg": (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "dequantize"),
    "lazy": (lambda: torch.nn.LazyLinear(2).weight, "run the model once"),
    "partitioned": (lambda: partitioned(torch.nn.Parameter(torch.ones(2, 2))), "GatheredParameters"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "to_dense"),
    "list": (lambda: [1.0, 2.0], "numpy.asarray"),
    "number": (lambda: 1.0, "numpy.asarray"),
    "nothing": (lambda: None, "numpy.asarray"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_has_no_bits_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    make, advice = UNREADABLE[kind]
    bad = {"fine": np.zeros(3, np.float32), "odd.weight": make()}
    with pytest.raises(UnsupportedTensor, match=f"'odd.weight' is .*{advice}"):
        dw.encode(bad, bad)
    with dw.Publisher(tmp_path) as publisher, pytest.raises(UnsupportedTensor, match=advice):
        publisher.publish(bad)
    with dw.Publisher(tmp_path) as publisher:
        publisher.publish({"fine": np.zeros(3, np.float32)})
    with pytest.raises(UnsupportedTensor, match=advice):
        dw.Replica(tmp_path).sync(bad)


def zero3() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    partitioned(made[1].weight)
    return made


def offloaded() -> torch.nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.device("cpu"))  # type: ignore[no-any-return]


def flattened() -> torch.nn.Module:
    made = torch.nn.Module()
    made.register_parameter("_flat_param", torch.nn.Parameter(torch.ones(8)))
    return torch.nn.Sequential(made)


def lazy_pretrained() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
    )
    made: torch.nn.Module = transformers.LlamaForCausalLM(config)
    made.lm_head = torch.nn.LazyLinear(8, bias=False)
    return made


ABSENT: dict[str, tuple[Callable[[], torch.nn.Module], str, str]] = {
    "zero3": (zero3, "1.weight", "GatheredParameters"),
    "adapter": (lambda: adapter_of_zero3(), "base_model.model.0.lora_A.weight", "GatheredParameters"),
    "offloaded": (offloaded, "0.weight", "device_map"),
    "flattened": (flattened, "0._flat_param", "FullyShardedDataParallel"),
    "meta": (lambda: torch.nn.Linear(2, 2, device="meta"), "weight", "load the checkpoint"),
    "lazy": (lambda: torch.nn.LazyLinear(2), "weight", "run the model once"),
    "lazy_pretrained": (lazy_pretrained, "lm_head.weight", "run the model once"),
}


def adapter_of_zero3() -> Any:
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), peft.LoraConfig(r=1, target_modules=["0"]))
    for parameter in made.parameters():
        partitioned(parameter)
    return adapter(made)


@pytest.mark.parametrize("kind", ABSENT)
def test_a_model_whose_weights_are_elsewhere_is_refused(kind: str, tmp_path: Path) -> None:
    """Its placeholders would be published as the weights, or be patched."""
    make, name, advice = ABSENT[kind]
    bad = make()
    with dw.Publisher(tmp_path / "run") as publisher, pytest.raises(UnsupportedTensor, match=f"'{name}' is .*{advice}"):
        publisher.publish(bad)
    assert not (tmp_path / "run" / "run.json").exists()
    with dw.Publisher(tmp_path / "run") as publisher:
        publisher.publish({"fine": np.zeros(3, np.float32)})
    if kind != "adapter":
        with pytest.raises(UnsupportedTensor, match=f"'{name}' is .*{advice}"):
            dw.Replica(tmp_path / "run").sync(bad)


def test_a_state_dict_of_placeholders_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = zero3().state_dict()
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    with dw.Publisher(tmp_path) as publisher, pytest.raises(UnsupportedTensor, match=r"'1\.weight' is .*Gathered"):
        publisher.publish(state)


def test_a_tensor_of_no_elements_is_no_placeholder(tmp_path: Path) -> None:
    made = torch.nn.Linear(2, 2)
    made.register_buffer("nothing", torch.empty(0))
    with dw.Publisher(tmp_path) as publisher:
        assert publisher.publish(made).result(60).version == 0


def test_names_that_are_not_strings() -> None:
    bad = {0: np.zeros(3, np.float32)}
    with pytest.raises(UnsafeName, match="this mapping has 0, a int"):
        dw.encode(bad, bad)


def test_an_unsupported_dtype_is_named_with_its_tensor() -> None:
    for value in (torch.zeros(2, dtype=torch.complex128), np.zeros(2, "c16"), np.zeros(2, object)):
        with pytest.raises(UnsupportedDtype, match=r"'odd\.weight'.* cannot be published"):
            dw.encode({"odd.weight": value}, {"odd.weight": value})
