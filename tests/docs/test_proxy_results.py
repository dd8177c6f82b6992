"""The table of docs/https.md is what benchmarks/proxy.py measured."""

from __future__ import annotations

import json

from tests.docs.documents import ROOT


def test_the_table_is_the_measurement() -> None:
    page = (ROOT / "docs/https.md").read_text()
    rows = json.loads((ROOT / "benchmarks/results/proxy.json").read_text())["rows"]
    for row in rows:
        late = row["latest_s"]
        line = (
            f"| {row['followers']} | {row['requests_per_version']:,.0f} | {row['at_bucket_per_version']:.1f} | "
            f"{late['p50']} s, {late['p99']} s |"
        )
        assert line in page
    least, most = (row["at_bucket_per_version"] for row in rows)
    assert most < 2 * least, "whatever the number of followers"
