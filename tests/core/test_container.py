"""The safetensors header: written so that others read it, and every claim checked."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load, save

from deltawire.core import container
from deltawire.core.errors import HeaderError, TruncatedFile


def opened(blob: bytes) -> container.Header:
    return container.read_header(lambda start, length: blob[start : start + length], len(blob))


def test_what_is_built_is_a_safetensors_file() -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(3, dtype=np.uint8)}
    head = container.build([("a", "F32", (2, 3)), ("b", "U8", (3,))], {"who": "me"})
    assert len(head) % 8 == 0, "tensors of a memory map are aligned"
    blob = head + b"".join(array.tobytes() for array in arrays.values())
    assert all(np.array_equal(load(blob)[name], array) for name, array in arrays.items())
    header = opened(blob)
    assert header.metadata == {"who": "me"}
    assert [(i.name, i.dtype, i.shape, i.start, i.nbytes) for i in header.items.values()] == [
        ("a", "F32", (2, 3), len(head), 24),
        ("b", "U8", (3,), len(head) + 24, 3),
    ]


def test_what_others_save_is_read() -> None:
    blob = save({"x": np.zeros((2, 2), np.float16), "empty": np.zeros((0, 3), np.float32)}, {"k": "v"})
    header = opened(blob)
    assert header.items["x"].shape == (2, 2)
    assert header.items["empty"].nbytes == 0
    assert header.metadata == {"k": "v"}


def test_claims_are_checked_before_anything_is_read() -> None:
    blob = container.build([("a", "U8", (4,))], {}) + bytes(4)
    for broken, error in (
        (blob[:4], TruncatedFile),
        (blob[:20], TruncatedFile),
        (blob[:-1], TruncatedFile),
        (blob + b"x", HeaderError),
        ((1 << 40).to_bytes(8, "little") + blob[8:], HeaderError),
        (blob.replace(b'"U8"', b'"F9"'), Exception),
        (blob.replace(b"[0,4]", b"[1,5]"), HeaderError),
        (blob[:8] + b"[" + blob[9:], HeaderError),
    ):
        with pytest.raises(error):
            opened(broken)
