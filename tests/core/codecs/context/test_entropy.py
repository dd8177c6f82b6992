"""The range coder of `context` and its tables."""

from __future__ import annotations

import numpy as np

from deltawire.core.codecs.context import entropy
from deltawire.core.codecs.context.entropy import (
    ESCAPE,
    FEW,
    SYMBOLS,
    TOTAL,
    coarse,
    count_model,
    encode_ops,
    gap_model,
    models,
    quantise,
    scale,
    unscale,
)  # fmt: skip
from deltawire.core.codecs.context.head import _read_levels, _write_levels
from deltawire.core.dtypes import read_only


def test_symbols_are_read_as_they_were_written_and_cost_their_entropy() -> None:
    weights = 0.5 ** np.arange(SYMBOLS)
    table = quantise(weights)
    symbols = np.random.default_rng(2).choice(SYMBOLS, 4000, p=weights / weights.sum()).astype(np.uint8)
    ops, out = np.empty(symbols.size, np.uint64), np.empty(3 * symbols.size + 8, np.uint8)
    # of the kernels that code symbols these are the smallest
    data = out[: encode_ops(ops, _write_levels(symbols, table, ops), out, 0)]
    found = np.empty_like(symbols)
    assert _read_levels(read_only(data), table, coarse([table]), found)
    assert np.array_equal(found, symbols)
    assert data.size * 8 < 1.02 * 2 * symbols.size, "two bits for each symbol of a geometric distribution"


def test_tables_keep_every_symbol_that_occurs() -> None:
    table = quantise([1e9, 1, 0, 1] + [0] * (SYMBOLS - 4))
    frequencies = np.diff(table.astype(np.int64))
    assert table[-1] == TOTAL
    assert (frequencies[[0, 1, 3]] > 0).all()
    assert frequencies[2] == 0


def test_scaled_counts_are_close_to_the_counts() -> None:
    counts = np.array([1, 10, 1000, 123_456, 0])
    table = scale(counts)
    assert table[-1] == 0
    found = np.diff(unscale(table).astype(np.int64))[:5] / TOTAL
    assert np.allclose(found[2:4], counts[2:4] / counts.sum(), rtol=0.15)
    assert found[4] == 0


def test_every_gap_and_count_has_a_table() -> None:
    for n in (2, 63, 64, 1000, entropy.MAX_TILE):
        for k in (1, FEW, FEW + 1, n // 2, n - 1):
            if 0 < k < n:
                table, shift = gap_model(n, k)
                assert 0 <= table < models()[0].size // (SYMBOLS + 1)
                assert shift >= 0
    for expected in (1e-6, 0.5, 100.0, 1e9):
        table, extra = count_model(expected)
        assert 0 <= table < entropy.COUNT_LEVELS
        assert extra >= 0
    assert ESCAPE == SYMBOLS - 1
