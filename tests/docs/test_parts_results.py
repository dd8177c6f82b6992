"""What docs/vllm.md says that a node fetches is what the benchmark found."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_what_a_node_fetches() -> None:
    found = json.loads((ROOT / "benchmarks/results/parts.json").read_text())["rows"]
    page = (ROOT / "docs/vllm.md").read_text()
    lines: dict[tuple[str, str, int], set[str]] = {}
    for row in found:
        if row["encoding"] == "context":
            packed = next(
                other for other in found
                if other["encoding"] == "packed" and all(other[k] == row[k] for k in ("model", "cut", "ranks", "nodes"))
            )  # fmt: skip
            shares = (row["held"], row["delta"]["share"], packed["delta"]["share"], row["anchor"]["share"])
            line = " | ".join(f"{share:.0%}" for share in shares)
            lines.setdefault((row["model"], row["cut"], row["nodes"]), set()).add(line)
    for (model, cut, nodes), shown in lines.items():
        # how many ranks a node has makes no difference
        assert len(shown) == 1
        assert f"| {model}, {cut} | {nodes} | {shown.pop()} |" in page
    assert max(row["grown"] for row in found) < 0.003, "docs/vllm.md says 0.3 %"
