"""The formats of others, re-implemented from their descriptions, and the entropy floors. For comparison only.

Each format is (encode, decode) over flat uint16 arrays of one tensor, its columns known to both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zstandard

from deltawire.core.dtypes import lookup
from deltawire.core.ulps import in_ulps

Array = np.ndarray


@dataclass(frozen=True)
class Format:
    name: str
    encode: Callable[[Array, Array, int], bytes]
    # (old, new, columns) → bytes
    decode: Callable[[bytes, Array, int], Array]
    # (bytes, old, columns) → new


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def _unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _apply(old: Array, positions: Array, values: Array) -> Array:
    new = old.copy()
    new[positions] = values
    return new


# ── int32 indices and bf16 values ────────────────────────────────────────────────────────────────────────────────────


def _int32(old: Array, new: Array, columns: int) -> bytes:
    positions = np.flatnonzero(old != new)
    return positions.astype(np.int32).tobytes() + new[positions].tobytes()


def _un_int32(data: bytes, old: Array, columns: int) -> Array:
    n = len(data) // 6
    return _apply(old, np.frombuffer(data, np.int32, n), np.frombuffer(data, np.uint16, n, 4 * n))


# ── uint16 gaps and bf16 values ──────────────────────────────────────────────────────────────────────────────────────


def _gaps16(positions: Array) -> Array:
    """Gaps as uint16; 65535 says "that many more, and read on"."""
    gaps = np.diff(positions, prepend=-1) - 1
    extra = gaps // 65535
    out = np.full(gaps.size + int(extra.sum()), 65535, np.uint16)
    out[np.arange(gaps.size) + np.cumsum(extra)] = gaps % 65535
    return out


def _un_gaps16(stream: Array) -> Array:
    more = stream == 65535
    ends = np.cumsum(stream.astype(np.int64) + ~more)[~more]
    return ends - 1


def _gap16(old: Array, new: Array, columns: int) -> bytes:
    positions = np.flatnonzero(old != new)
    return _gaps16(positions).tobytes() + new[positions].tobytes() + len(positions).to_bytes(8, "little")


def _un_gap16(data: bytes, old: Array, columns: int) -> Array:
    n = int.from_bytes(data[-8:], "little")
    values = np.frombuffer(data, np.uint16, n, len(data) - 8 - 2 * n)
    return _apply(old, _un_gaps16(np.frombuffer(data[: len(data) - 8 - 2 * n], np.uint16)), values)


# ── counts per row, column gaps, bf16 values, zstd ───────────────────────────────────────────────────────────────────


def _rows(old: Array, new: Array, columns: int) -> bytes:
    positions = np.flatnonzero(old != new)
    row, column = np.divmod(positions, columns)
    counts = np.bincount(row, minlength=old.size // columns).astype(np.uint32)
    first = np.r_[True, row[1:] != row[:-1]] if row.size else np.zeros(0, bool)
    gaps = np.where(first, column, np.diff(column, prepend=0)).astype(np.uint32)
    streams = [_zstd(s.tobytes()) for s in (counts, gaps, new[positions])]
    return b"".join(len(s).to_bytes(8, "little") + s for s in streams)


def _un_rows(data: bytes, old: Array, columns: int) -> Array:
    streams, at = [], 0
    for _ in range(3):
        n = int.from_bytes(data[at : at + 8], "little")
        streams.append(_unzstd(data[at + 8 : at + 8 + n]))
        at += 8 + n
    counts, gaps = (np.frombuffer(s, np.uint32).astype(np.int64) for s in streams[:2])
    total = np.cumsum(gaps)
    starts = np.cumsum(counts) - counts
    before = np.where(starts > 0, total[np.minimum(starts, max(total.size, 1)) - 1] if total.size else 0, 0)
    row = np.repeat(np.arange(counts.size), counts)
    return _apply(old, row * columns + total - np.repeat(before, counts), np.frombuffer(streams[2], np.uint16))


# ── gaps and XOR, zstd ───────────────────────────────────────────────────────────────────────────────────────────────


def _xor(old: Array, new: Array, columns: int) -> bytes:
    positions = np.flatnonzero(old != new)
    gaps, bits = _zstd(_gaps16(positions).tobytes()), _zstd((old[positions] ^ new[positions]).tobytes())
    return len(gaps).to_bytes(8, "little") + gaps + bits


def _un_xor(data: bytes, old: Array, columns: int) -> Array:
    n = int.from_bytes(data[:8], "little")
    positions = _un_gaps16(np.frombuffer(_unzstd(data[8 : 8 + n]), np.uint16))
    return _apply(old, positions, old[positions] ^ np.frombuffer(_unzstd(data[8 + n :]), np.uint16))


# ── dense XOR, zstd ──────────────────────────────────────────────────────────────────────────────────────────────────


def _dense(old: Array, new: Array, columns: int) -> bytes:
    return _zstd((old ^ new).tobytes())


def _un_dense(data: bytes, old: Array, columns: int) -> Array:
    return old ^ np.frombuffer(_unzstd(data), np.uint16)


FORMATS = (
    Format("int32 + bf16", _int32, _un_int32),
    Format("uint16 gaps + bf16", _gap16, _un_gap16),
    Format("row/column gaps + bf16, zstd-1", _rows, _un_rows),
    Format("gaps + XOR, zstd-1", _xor, _un_xor),
    Format("dense XOR, zstd-1", _dense, _un_dense),
)


# ── floors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _choose(n: float, k: float) -> float:
    """Bits to say which k of n."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def _entropy(counts: Array) -> float:
    """Bits in all for symbols with this histogram."""
    counts = counts[counts > 0].astype(np.float64)
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def floors(old: dict[str, Array], new: dict[str, Array], dtype: str = "BF16") -> dict[str, float]:
    """Bits per changed element: positions counted per tensor or per (tensor, old exponent); steps order 0 alike."""
    kind = lookup(dtype)
    plain = context = 0.0
    changed = 0
    everywhere: list[Array] = []
    by_exponent: dict[int, list[Array]] = {}
    for name, a in old.items():
        a, b = a.reshape(-1), new[name].reshape(-1)
        mask = a != b
        k = int(mask.sum())
        changed += k
        plain += _choose(a.size, k)
        exponent = (a >> kind.exponent_shift) & ((1 << kind.exponent_bits) - 1)
        total, hit = np.bincount(exponent, minlength=256), np.bincount(exponent[mask], minlength=256)
        context += sum(_choose(float(n), float(h)) for n, h in zip(total, hit, strict=True) if h)
        steps = in_ulps(a[mask], b[mask], kind)
        everywhere.append(steps)
        for e in np.flatnonzero(hit):
            by_exponent.setdefault(int(e), []).append(steps[exponent[mask] == e])
    plain += _entropy(np.unique(np.concatenate(everywhere), return_counts=True)[1])
    context += sum(_entropy(np.unique(np.concatenate(s), return_counts=True)[1]) for s in by_exponent.values())
    return {"order-0 floor": plain / max(changed, 1), "exponent-context floor": context / max(changed, 1)}
