"""Each test runs with both sets of kernels: plain torch, and Triton on a GPU or else in its interpreter."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

_CUDA = torch.cuda.is_available()

LARGER = {
    "CLASS_RANKS": {"CHUNKS": 32, "BLOCK": 256},
    "PLACE": {"BLOCK": 256},
    "ADAMW": {"WORDS": 1024},
}
"""The interpreter takes its time per operation, however long the vectors are: fewer turns of a loop, but several."""


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if _CUDA else "cpu")


@pytest.fixture(params=["torch_ops", "triton_ops"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "triton_ops":
        pytest.importorskip("triton")
    module = importlib.import_module(f"deltawire.kernels.{request.param}")
    if request.param == "triton_ops" and not _CUDA:
        for name, options in LARGER.items():
            monkeypatch.setitem(vars(module), name, {**getattr(module, name), **options})
    return module
