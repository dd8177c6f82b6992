"""Each test runs with both sets of kernels: plain torch, and Triton on a GPU or else in its interpreter."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

_CUDA = torch.cuda.is_available()

LARGER = {
    "CLASS_RANKS": {"CHUNKS": 32, "BLOCK": 256},
    "PLACE": {"BLOCK": 256},
    "ADAMW": {"WORDS": 2048},
    "GATHER": {"BLOCK": 4096},
}
"""The interpreter takes its time per operation, however long the vectors are: fewer turns of a loop, but several."""


@pytest.fixture(scope="session", autouse=True)
def _hurry_the_interpreter() -> Iterator[None]:
    """Triton's interpreter patches `triton.language` again at each call of a function within a kernel: once per launch
    and module is enough. It computes whether integers overflow for an assertion that is off. It makes its table of
    dtypes anew for each value."""
    if _CUDA or not importlib.util.find_spec("triton"):
        yield
        return
    from triton.runtime import interpreter

    patched: set[int] = set()
    known: dict[str, np.dtype] = {}
    launch, patch, look_up = interpreter.GridExecutor.__call__, interpreter._patch_lang, interpreter._get_np_dtype

    def launched(self: object, *arguments: object, **options: object) -> object:
        patched.clear()
        return launch(self, *arguments, **options)

    def patch_once(function: FunctionType) -> object:
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch(function)

    def looked_up(dtype: Any) -> np.dtype:
        # some have no hash
        return known.get(dtype.name) or known.setdefault(dtype.name, look_up(dtype))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
        monkeypatch.setattr(interpreter, "_get_np_dtype", looked_up)
        yield


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
