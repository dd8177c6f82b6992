"""Each test runs with every set of kernels there is: plain torch, and Triton on a GPU or else in its interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

_CUDA = torch.cuda.is_available()
_TRITON = importlib.util.find_spec("triton") is not None
if _TRITON and not _CUDA:
    # read when a kernel is defined, so it must be set before the kernels are imported
    os.environ["TRITON_INTERPRET"] = "1"


if _TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _loop(bound, out):
        for i in range(tl.load(bound)):
            tl.store(out, i)


def _why_no_triton() -> str | None:
    if not _TRITON:
        return "Triton is not installed"
    try:
        _loop[(1,)](torch.tensor([2]), torch.zeros(1, dtype=torch.int64)) if not _CUDA else None
    except Exception as error:
        # some releases of the interpreter do not get along with some of numpy
        return f"Triton's interpreter does not run here: {error!r}"
    return None


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if _CUDA else "cpu")


@pytest.fixture(scope="session")
def without_triton() -> str | None:
    return _why_no_triton()


@pytest.fixture(params=["torch_ops", "triton_ops"])
def ops(request: pytest.FixtureRequest, without_triton: str | None) -> ModuleType:
    if request.param == "triton_ops" and without_triton:
        pytest.skip(without_triton)
    return importlib.import_module(f"deltawire.kernels.{request.param}")
