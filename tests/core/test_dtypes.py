"""Every dtype that travels has an integer view; what has none is refused."""

from __future__ import annotations

import numpy as np
import pytest

from deltawire.core import dtypes
from deltawire.core.errors import UnsupportedDtype
from deltawire.models import ModelView


@pytest.mark.parametrize("dtype", sorted(dtypes.DTYPES))
def test_every_dtype_has_a_view(dtype: str) -> None:
    kind = dtypes.lookup(dtype)
    assert kind.unit_size * kind.units_per_element == kind.size
    assert np.dtype(kind.unit).itemsize == kind.unit_size


@pytest.mark.parametrize(
    "array, dtype",
    [
        (np.zeros(2, np.uint16), "BF16"), (np.zeros(2, np.float16), "F16"), (np.zeros(2, np.float32), "F32"),
        (np.zeros(2, np.int8), "I8"), (np.zeros(2, bool), "BOOL"), (np.zeros(2, np.float64), "F64"),
        (np.zeros(2, np.int64), "I64"), (np.zeros(2, np.complex64), "C64"), (np.zeros(2, np.int16), "I16"),
    ],
)  # fmt: skip
def test_what_numpy_arrays_are_taken_for(array: np.ndarray, dtype: str) -> None:
    assert dtypes.of_numpy(array) == dtype
    assert dtypes.bits_of(array).nbytes == array.nbytes


@pytest.mark.parametrize("dtype", ["complex128", "longdouble", "M8[s]", "S4", "O", "V3", ">f4", ">u2", ">i8"])
def test_what_cannot_travel(dtype: str) -> None:
    """Bytes in the other order are other bits: a replica would hold them as other numbers."""
    with pytest.raises(UnsupportedDtype):
        ModelView({"w": np.zeros(2, dtype)})


def test_bits_of_what_is_not_contiguous() -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert dtypes.bits_of(matrix.T).tolist() == matrix.T.copy().view(np.uint32).reshape(-1).tolist()
    assert dtypes.bits_of(matrix[:, ::2]).tolist() == matrix[:, ::2].copy().view(np.uint32).reshape(-1).tolist()
    assert dtypes.bits_of(matrix).base is not None, "a contiguous array is viewed, not copied"


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "BF16"])
def test_numbers_are_those_of_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kinds = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
             "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "BF16": "bfloat16"}  # fmt: skip
    unit = dtypes.lookup(dtype).unit
    bits = np.arange(1 << (8 * np.dtype(unit).itemsize), dtype=np.uint32).astype(unit)
    view = torch.from_numpy(bits.view(np.int16) if unit is np.uint16 else bits).view(getattr(torch, kinds[dtype]))
    np.testing.assert_array_equal(dtypes.numbers(bits, dtypes.lookup(dtype)), view.to(torch.float64).numpy())
