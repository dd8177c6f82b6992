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


def _why_no_triton() -> str | None:
    if not _TRITON:
        return "Triton is not installed"
    if _CUDA:
        return None
    try:
        from deltawire.kernels import plan, triton_ops

        tensor = torch.arange(4, dtype=torch.int16)
        triton_ops.detect(plan.flat_plan([tensor]), [tensor], [tensor + 1])
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
