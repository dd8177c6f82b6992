"""Models of numpy and torch as bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deltawire as dw
from deltawire.core.change import blocks
from deltawire.core.errors import (
    UnsafeName,
    UnsupportedDtype,
    UnsupportedTensor,
)
from deltawire.models import ModelView
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


def test_a_wire_dtype_that_nobody_knows() -> None:
    with pytest.raises(UnsupportedDtype, match="known: auto, bf16"):
        ModelView({"w": torch.zeros(1)}, "fp4")


UNREADABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.ones(2, 2).to_sparse(), "to_dense"),
    "sparse_csr": (lambda: torch.ones(2, 2).to_sparse_csr(), "to_dense"),
    "meta": (lambda: torch.ones(2, 2, device="meta"), "load the checkpoint"),
    "conj": (lambda: torch.ones(2, 2, dtype=torch.complex64).conj(), "resolve_conj"),
    "neg": (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "dequantize"),
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


def test_names_that_are_not_strings() -> None:
    bad = {0: np.zeros(3, np.float32)}
    with pytest.raises(UnsafeName, match="this mapping has 0, a int"):
        dw.encode(bad, bad)


def test_an_unsupported_dtype_is_named_with_its_tensor() -> None:
    for value in (torch.zeros(2, dtype=torch.complex128), np.zeros(2, "c16"), np.zeros(2, object)):
        with pytest.raises(UnsupportedDtype, match=r"'odd\.weight'.* cannot travel"):
            dw.encode({"odd.weight": value}, {"odd.weight": value})
