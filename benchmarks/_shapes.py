"""The models that the benchmarks are about, by their dimensions. No torch: a benchmark's small processes start fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    qk_norm: bool = True
    interleaved: bool = False


SMALL = Shape(layers=10, hidden=384, inner=1152, heads=12, kv_heads=6, head=64, vocabulary=20480)
QWEN3_06B = Shape(layers=28, hidden=1024, inner=3072, heads=16, kv_heads=8, head=128, vocabulary=151936)
