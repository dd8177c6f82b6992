"""`deltawire.encode` and `deltawire.decode`: numpy mappings, torch modules, state dicts, and files others can read."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import deltawire as dw
from deltawire.core import full
from deltawire.core.codecs import ENCODINGS
from deltawire.core.dtypes import of_numpy
from deltawire.core.errors import (
    DigestMismatch,
    SchemaMismatch,
    UnknownFormat,
)
from deltawire.models import ModelView, torch_bits
from support import copy, densities, model, moved, same, seeds, trained

every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)

NUMPY_DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32", "int64", "uint64",
                "float64", "complex64")  # fmt: skip
TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32,
    torch.uint32, torch.float32, torch.int64, torch.uint64, torch.float64, torch.complex64,
]  # fmt: skip


def noise(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bits at all, seen as this dtype (a bool stays a bool)."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    data = rng.integers(0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
    return data.view(dtype).reshape(shape)


def changed(array: np.ndarray, seed: int, density: float) -> np.ndarray:
    if array.dtype == bool:
        return array ^ (np.random.default_rng(seed).random(array.shape) < density)
    bits = np.ascontiguousarray(array).reshape(-1).view(f"u{min(array.itemsize, 4)}")
    return moved(np.random.default_rng(seed), bits, of_numpy(array), density).view(array.dtype).reshape(array.shape)


# ── numpy ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_encoding
@given(
    tensors=st.lists(
        st.tuples(st.sampled_from(NUMPY_DTYPES), st.lists(st.integers(0, 6), max_size=4).map(tuple)), max_size=4
    ),
    density=densities,
    seed=seeds,
)
def test_numpy_mappings(encoding: str, tensors: list[tuple[str, tuple[int, ...]]], density: float, seed: int) -> None:
    old = {f"t{i}": noise(dtype, shape, seed + i) for i, (dtype, shape) in enumerate(tensors)}
    new = {name: changed(array, seed, density) for name, array in old.items()}
    kept = copy(old)
    result = dw.decode(dw.encode(old, new, encoding), old)
    assert same(result, new)
    assert same(old, kept)
    assert all(result[n].dtype == new[n].dtype and result[n].shape == new[n].shape for n in new)
    assert not any(np.shares_memory(result[n], old[n]) for n in old)


@every_encoding
def test_the_example_of_the_docstring_runs(encoding: str) -> None:
    shown = (dw.encode.__doc__ or "").split("\n\n")[1]
    old = {"a": np.arange(6, dtype=np.uint16).reshape(2, 3), "b": np.zeros(4, np.float32)}
    new = {name: array + 1 for name, array in old.items()}
    for first, second in ((old, new), [{name: torch.tensor(a) for name, a in each.items()} for each in (old, new)]):
        exec(
            textwrap.dedent(shown).replace("old, new", f"old, new, {encoding!r}"),
            {"dw": dw, "old": first, "new": second},
        )


@every_encoding
def test_arrays_that_are_not_contiguous(encoding: str) -> None:
    whole = np.random.default_rng(0).integers(0, 1 << 16, (12, 10), np.uint16)
    old = {"transposed": whole.T, "strided": whole[::2, 1::3], "reversed": whole[::-1]}
    new = {name: array.copy() ^ np.uint16(1) for name, array in old.items()}
    assert same(dw.decode(dw.encode(old, new, encoding), old), {n: np.ascontiguousarray(a) for n, a in new.items()})


@every_encoding
def test_tied_views_travel_once_and_are_tied_again(encoding: str) -> None:
    def build(shared: np.ndarray, other: np.ndarray) -> dict[str, np.ndarray]:
        return {"lm_head": shared, "b": other, "embed": shared, "again": shared[:]}

    rng = np.random.default_rng(1)
    shared, other = rng.integers(0, 1 << 16, (50, 8), np.uint16), rng.integers(0, 1 << 16, 9, np.uint16)
    old = build(shared, other)
    new = build(shared ^ np.uint16(1), other.copy())
    assert ModelView(old).schema.ties == {"embed": "lm_head", "again": "lm_head"}
    blob = dw.encode(old, new, encoding)
    result = dw.decode(blob, old)
    assert same(result, new)
    assert result["embed"] is result["lm_head"]
    assert result["again"] is result["lm_head"]
    # once: no larger than without the other names
    names = ("lm_head", "b")
    alone = dw.encode({n: old[n] for n in names}, {n: new[n] for n in names}, encoding)
    assert len(blob) == len(alone)


@pytest.mark.parametrize(
    "other, words",
    [
        ({"a": np.zeros(4, np.float32)}, "'a' is BF16"),
        ({"a": np.zeros((2, 2), np.uint16)}, "'a' is BF16"),
        ({"a": np.zeros(4, np.uint16), "b": np.zeros(1)}, "'b' is in"),
        ({}, "'a' is in"),
    ],
)
def test_models_that_differ_in_more_than_bits(other: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(SchemaMismatch, match=words):
        dw.encode({"a": np.zeros(4, np.uint16)}, other)


def test_ties_that_differ() -> None:
    shared = np.zeros(4, np.uint16)
    with pytest.raises(SchemaMismatch, match="'b' is in"):
        dw.encode({"a": shared, "b": shared}, {"a": shared, "b": shared.copy()})


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match="pass a module, a state dict or a mapping"):
        dw.encode([1, 2], [1, 2])
    with pytest.raises(UnknownFormat, match="choose packed, context or raw"):
        dw.encode({}, {}, "zip")


# ── torch ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def torch_noise(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(np.asarray(rng.random(shape) < 0.5))
    count = int(np.prod(shape)) * dtype.itemsize
    if not count:
        # as numpy makes it, with a stride of 0
        return torch.from_numpy(np.empty(0, np.int64)).to(dtype).reshape(shape)
    return torch.from_numpy(rng.integers(0, 256, count, np.uint8)).view(dtype).reshape(shape)


@every_encoding
def test_torch_tensors_of_every_dtype(encoding: str) -> None:
    for dtype, shape in itertools.product(TORCH_DTYPES, [(), (0,), (33,), (5, 7), (2, 3, 4)]):
        old, new = {"w": torch_noise(dtype, shape, 1)}, {"w": torch_noise(dtype, shape, 2)}
        result = dw.decode(dw.encode(old, new, encoding), old)
        assert (result["w"].dtype, result["w"].shape) == (dtype, shape)
        assert torch_bits(result["w"]).tolist() == torch_bits(new["w"]).tolist(), (dtype, shape)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight


@every_encoding
def test_a_module_with_tied_weights(encoding: str) -> None:
    torch.manual_seed(0)
    old, new = Tied().bfloat16(), Tied().bfloat16()
    assert ModelView(old).schema.ties == {"head.weight": "embed.weight"}
    result = dw.decode(dw.encode(old, new, encoding), old)
    expected = new.state_dict()
    assert result.keys() == expected.keys()
    assert all(torch_bits(result[n]).tolist() == torch_bits(expected[n]).tolist() for n in expected)
    assert result["head.weight"] is result["embed.weight"]


# ── files others can read ────────────────────────────────────────────────────────────────────────────────────────────


def opened(path: Path, blob: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    path.write_bytes(blob)
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118 (not a dict)


def test_raw_opens_in_any_safetensors_reader(tmp_path: Path) -> None:
    old = model()
    new = trained(old, 1)
    tensors, metadata = opened(tmp_path / "raw.safetensors", dw.encode(old, new, "raw"))
    flat = {name: (old[name].reshape(-1), new[name].reshape(-1)) for name in old}
    for name, (a, b) in flat.items():
        if name in ("empty", "steps"):
            continue  # nothing changed in it; pairs of 4-byte units (below)
        bits = f"u{a.itemsize}"
        where = np.flatnonzero(a.view(bits) != b.view(bits))
        indices, values = tensors[f"{name}.indices"], tensors[f"{name}.values"]
        assert indices.dtype == torch.int32
        assert indices.tolist() == where.tolist()
        assert torch_bits(values).tolist() == b.view(bits)[where].tolist()
    assert tensors["embed.weight.values"].dtype == torch.bfloat16
    assert tensors["layer.bias.values"].dtype == torch.float32
    assert tensors["steps.values"].dtype == torch.uint32
    assert "empty.indices" not in tensors
    elements = sum(array.size for array in old.values())
    count = sum(int((a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")).sum()) for a, b in flat.values())
    assert metadata["sparse"] == "true"
    assert metadata["model_version"] == "1"
    assert metadata["base_version"] == "0"
    assert metadata["changed_params"] == str(count)
    assert metadata["total_params"] == str(elements)
    assert float(metadata["sparsity"]) == pytest.approx(1 - count / elements, abs=1e-6)


@every_encoding
def test_every_delta_opens_in_any_safetensors_reader(tmp_path: Path, encoding: str) -> None:
    old = model()
    blob = dw.encode(old, trained(old, 1), encoding, metadata={"model_version": "41", "base_version": "40"})
    tensors, metadata = opened(tmp_path / "delta.safetensors", blob)
    assert tensors
    assert (metadata["encoding"], metadata["model_version"], metadata["base_version"]) == (encoding, "41", "40")


def test_a_file_that_somebody_else_wrote(tmp_path: Path) -> None:
    """The layout of the first public delta-sync work, with no metadata of ours."""
    from safetensors.numpy import save

    old = {"w": np.zeros((4, 5), np.float32), "v": np.zeros(3, np.float32)}
    blob = save({"w.indices": np.array([2, 19], np.int32), "w.values": np.array([1.5, -0.0], np.float32)})
    with pytest.raises(UnknownFormat, match="check=False"):
        dw.decode(blob, old)
    result = dw.decode(blob, old, check=False)
    expected = copy(old)
    expected["w"].reshape(-1)[[2, 19]] = 1.5, -0.0
    assert same(result, expected)


@every_encoding
def test_decode_says_which_weights_do_not_fit(encoding: str) -> None:
    old = model()
    new, other = trained(old, 1), trained(old, 2)
    blob = dw.encode(old, new, encoding, metadata={"base_version": "7", "model_version": "8", "digest": "mine"})
    with pytest.raises(DigestMismatch, match=r"version 7 .*`old` is not what it was made from") as wrong:
        dw.decode(blob, other)
    assert wrong.value.expected == str(full.digest_of(ModelView(old)))
    digest = str(full.digest_of(ModelView(new))).encode()
    with pytest.raises(DigestMismatch, match=r"version 8 .*the delta is damaged"):
        dw.decode(blob.replace(digest, digest[::-1]), old)
    assert same(dw.decode(blob, old), new)


def test_sparsity_of_8_byte_elements_is_never_negative(tmp_path: Path) -> None:
    old, new = {"w": np.zeros(8, np.int64)}, {"w": np.full(8, -1)}
    _, metadata = opened(tmp_path / "raw.safetensors", dw.encode(old, new, "raw"))
    assert (metadata["changed_params"], float(metadata["sparsity"])) == ("8", 0.0)
