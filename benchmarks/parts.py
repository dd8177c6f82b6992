"""Bytes that each node of a server fetches of a version, when it fetches what its ranks hold.

    python benchmarks/parts.py --experts 64 --layers 2          # as in docs/vllm.md; 6 GB
    python benchmarks/parts.py                                  # 128 experts and three layers

Two models in host memory, published to a folder: `experts` has the shapes of one layer of Qwen3-30B-A3B,
`dense` those of some layers of Qwen3-8B, each with its share of the embeddings. Weights are normal, of which about 2 %
change by a step or two, the smaller the likelier, as training changes them. Each node then fetches version 1 (a delta)
and version 0 (an anchor) as `engines/live` does, through a store that counts.

held    the share of the model's bytes that the ranks of the node hold: replicated norms, routers and heads of keys
        count on every node
delta   bytes fetched of the delta, as a share of it; and requests
anchor  the same of the anchor
grown   by how much a delta grows because its blocks are cut for this, against the same without
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from _report import about, print_about, write_json
from deltawire import Publisher
from deltawire.bucket import fetch, parts
from deltawire.bucket.run import Run
from deltawire.bucket.walk import fetch_link
from deltawire.core.change import Region
from deltawire.core.codecs.context import cuts
from deltawire.core.held import part_of
from deltawire.core.schema import Schema, TensorSpec
from deltawire.store import open_store
from deltawire_wordle.counting import CountingStore

Record = dict[str, Any]
VOCABULARY = 151936

CUTS = {
    "q_proj": "rows", "k_proj": "heads", "v_proj": "heads", "o_proj": "columns", "embed_tokens": "rows",
    "lm_head": "rows", "gate_proj": "rows", "up_proj": "rows", "down_proj": "columns",
}  # fmt: skip
"""How tensor parallelism cuts a tensor, by a part of its name; others are on every rank."""


def attention(layer: int, hidden: int, heads: int, kv: int) -> dict[str, tuple[int, ...]]:
    at = f"model.layers.{layer}"
    return {
        f"{at}.self_attn.q_proj.weight": (heads * 128, hidden),
        f"{at}.self_attn.k_proj.weight": (kv * 128, hidden),
        f"{at}.self_attn.v_proj.weight": (kv * 128, hidden),
        f"{at}.self_attn.o_proj.weight": (hidden, heads * 128),
        f"{at}.self_attn.q_norm.weight": (128,),
        f"{at}.self_attn.k_norm.weight": (128,),
        f"{at}.input_layernorm.weight": (hidden,),
        f"{at}.post_attention_layernorm.weight": (hidden,),
    }


def feed_forward(at: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.gate_proj.weight": (inner, hidden),
        f"{at}.up_proj.weight": (inner, hidden),
        f"{at}.down_proj.weight": (hidden, inner),
    }


def embeddings(hidden: int, share: float) -> dict[str, tuple[int, ...]]:
    rows = int(VOCABULARY * share) // 64 * 64
    return {
        "model.embed_tokens.weight": (rows, hidden),
        "lm_head.weight": (rows, hidden),
        "model.norm.weight": (hidden,),
    }


def experts(count: int) -> dict[str, tuple[int, ...]]:
    shapes = embeddings(2048, 1 / 48) | attention(0, 2048, 32, 4) | {"model.layers.0.mlp.gate.weight": (count, 2048)}
    for number in range(count):
        shapes |= feed_forward(f"model.layers.0.mlp.experts.{number}", 2048, 768)
    return shapes


def dense(layers: int) -> dict[str, tuple[int, ...]]:
    shapes = embeddings(4096, layers / 36)
    for layer in range(layers):
        shapes |= attention(layer, 4096, 32, 8) | feed_forward(f"model.layers.{layer}.mlp", 4096, 12288)
    return shapes


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(int(np.prod(shape)), np.float32) * np.float32(0.02)
        found[name] = (values.view(np.uint32) >> 16).astype(np.uint16).reshape(shape)
    return found


def train(model: dict[str, np.ndarray]) -> None:
    """Move weights as a step of training does: half the weight, twice as likely, mostly by one representable value."""
    rng = np.random.default_rng(1)
    chance = np.minimum(0.5, 0.0045 * 2.0 ** (121 - np.arange(256.0))).astype(np.float32)
    for bits in model.values():
        flat = bits.reshape(-1)
        for start in range(0, flat.size, 1 << 22):
            part = flat[start : start + (1 << 22)]
            moves = rng.random(part.size, np.float32) < chance[(part >> 7) & 255]
            steps = rng.choice(np.array([1, 1, 1, 65535, 65535, 65535, 2, 65534], np.uint16), int(moves.sum()))
            part[moves] += steps


# ── what a node holds ────────────────────────────────────────────────────────────────────────────────────────────────


def cut(tensor: TensorSpec, how: str, rank: int, ranks: int) -> Region:
    rows, columns = tensor.rows, tensor.columns
    if how == "rows":
        return Region(tensor, rows * rank // ranks, rows // ranks, 0, columns)
    if how == "columns":
        return Region(tensor, 0, rows, columns * rank // ranks, columns // ranks)
    if how == "heads":
        # with more ranks than heads, several hold the same
        count = min(ranks, rows // 128)
        return cut(tensor, "rows", rank * count // ranks, count)
    return Region(tensor, 0, rows, 0, columns)


def of_rank(schema: Schema, rank: int, ranks: int, by_expert: bool) -> Iterator[Region]:
    count = sum(tensor.name.endswith("down_proj.weight") for tensor in schema.tensors)
    for tensor in schema.tensors:
        words = tensor.name.split(".")
        if by_expert and "experts" in words:
            if int(words[words.index("experts") + 1]) * ranks // count == rank:
                yield cut(tensor, "", rank, ranks)
            continue
        yield cut(tensor, next((CUTS[word] for word in words if word in CUTS), ""), rank, ranks)


# ── fetching ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def fetched(run: Run, store: CountingStore, version: int, regions: list[Region]) -> Record:
    manifest = run.manifest(version)
    store.reset()
    with closing(fetch_link(run, manifest, manifest.main, held=part_of(run.schema, regions))) as found:
        return {
            "bytes": found.bytes,
            "of": manifest.main.bytes,
            "share": round(found.bytes / manifest.main.bytes, 4),
            "requests": store.requests["get_range"],
        }


def measure(name: str, shapes: dict[str, tuple[int, ...]], by_expert: bool, folder: Path) -> list[Record]:
    model = weights(shapes)
    rows: list[Record] = []
    stores = {}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        # the same step, published once for each encoding, with cuts and without
        publishers = {
            (encoding, is_cut): Publisher(f"{place}/{encoding}-{is_cut}", encoding=encoding)
            for encoding in ("packed", "context")
            for is_cut in (True, False)
        }
        sizes: dict[tuple[str, bool], int] = {}
        initial = {key: bits.copy() for key, bits in model.items()}
        train(model)
        for (encoding, is_cut), publisher in publishers.items():
            with patch.object(cuts, "PART_UNITS", cuts.PART_UNITS if is_cut else 1 << 62), publisher:
                publisher.publish(initial).result()
                publisher.publish(model).result()
            store = CountingStore(open_store(f"{place}/{encoding}-{is_cut}"))
            sizes[encoding, is_cut] = Run.open(store).manifest(1).main.bytes
            if is_cut:
                stores[encoding] = store
        for encoding, store in stores.items():
            run = Run.open(store)
            grown = round(sizes[encoding, True] / sizes[encoding, False] - 1, 5)
            for ranks, nodes in ((2, 2), (4, 2), (8, 2), (4, 4), (8, 8)):
                per = ranks // nodes
                found = []
                for node in range(nodes):
                    regions = [
                        region
                        for rank in range(node * per, (node + 1) * per)
                        for region in of_rank(run.schema, rank, ranks, by_expert)
                    ]
                    held = sum(region.nbytes for region in dict.fromkeys(regions)) / run.schema.nbytes
                    found.append((held, fetched(run, store, 1, regions), fetched(run, store, 0, regions)))
                held, delta, anchor = max(found, key=lambda each: each[1]["bytes"])
                rows.append(
                    {
                        "model": name, "cut": "experts" if by_expert else "rows and columns", "encoding": encoding,
                        "ranks": ranks, "nodes": nodes, "held": round(held, 4), "delta": delta, "anchor": anchor,
                        "grown": grown, "changed": run.manifest(1).changed / run.schema.elements,
                    }
                )  # fmt: skip
                print(line(rows[-1]), flush=True)
    return rows


def line(row: Record) -> str:
    delta, anchor = row["delta"], row["anchor"]
    return (
        f"{row['model']:<8} {row['cut']:<17} {row['encoding']:<8} {row['ranks']} ranks on {row['nodes']}   "
        f"held {row['held']:6.1%}   delta {delta['bytes'] / 1e6:7.2f} MB {delta['share']:6.1%} in {delta['requests']:3}"
        f"   anchor {anchor['bytes'] / 1e6:7.0f} MB {anchor['share']:6.1%} in {anchor['requests']:3}"
        f"   grown {row['grown']:.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "parts.json")
    chosen = parser.parse_args()
    facts = about()
    print_about(facts)
    clock = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure("experts", experts(chosen.experts), True, Path(folder))
        rows += measure("experts", experts(chosen.experts), False, Path(folder))
        rows += measure("dense", dense(chosen.layers), False, Path(folder))
    figures = {"gap": parts.GAP, "small": fetch.SMALL, "seconds": round(time.perf_counter() - clock), "rows": rows}
    write_json(chosen.out, facts | figures)


if __name__ == "__main__":
    main()
