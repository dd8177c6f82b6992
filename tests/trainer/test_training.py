"""Real training of a small Qwen3 with every detector: what is emitted is what changed, no more and no less.

pytest -m slow -s tests/trainer/test_training.py       # prints the figures
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from detector_support import Trainer, raw, replica_model  # noqa: E402

from deltawire import Replica  # noqa: E402
from deltawire.bucket.fetch import fetch  # noqa: E402
from deltawire.bucket.run import Run  # noqa: E402
from deltawire.core.sparse import DeltaFile  # noqa: E402
from deltawire.store import Store  # noqa: E402

STEPS = 200
WAIT = 60

pytestmark = pytest.mark.slow


class Qwen3(Trainer):
    tied = "lm_head.weight"

    def make_model(self) -> Any:
        config = transformers.Qwen3Config(
            vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
        )  # fmt: skip
        return transformers.Qwen3ForCausalLM(config)

    def logits(self, ids: Any) -> Any:
        return self.model(input_ids=ids).logits


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def emitted(run: Run, version: int, base: dict[str, np.ndarray]) -> set[tuple[str, int]]:
    """Every (tensor, position) in the delta that lies in the bucket."""
    link = next(link for link in run.manifest(version).links if link.kind == "delta")
    found = set()
    for blob in link.objects:
        with fetch(run.store, blob) as data:
            delta = DeltaFile(data.read, blob.size, run.schema)
            for changes in delta.changes(lambda name: base[name], threads=1):
                for change in changes:
                    first = change.region.start
                    found |= {(change.region.tensor.name, first + int(p)) for p in change.positions}
    return found


@pytest.mark.parametrize("kind", ["host", "pairs", "snapshot", "streamed", "fused", "adamw"])
def test_two_hundred_steps(kind: str, store: Store) -> None:
    trainer = Qwen3(kind, store, anchor_ratio=1e9)
    live, replica = replica_model(trainer), Replica(store, heartbeat=0)
    hits = sent = wanted = weights = 0
    last: dict[str, np.ndarray] = {}
    for step in range(STEPS + 1):
        if step:
            trainer.step(lr=(1e-6, 1e-5, 3e-5)[step % 3])
        published = trainer.publish().result(WAIT)
        assert published.version == step
        now = {name: bits.view(np.uint16) for name, bits in trainer.bits().items()}
        replica.sync(live)
        assert all(np.array_equal(raw(live[name]).view(np.uint16), now[name]) for name in now), step
        if last:
            changed = {(name, int(p)) for name in now for p in np.flatnonzero(last[name] != now[name])}
            told = emitted(Run.open(store), step, last)
            hits, sent, wanted = hits + len(told & changed), sent + len(told), wanted + len(changed)
            weights += sum(bits.size for bits in now.values())
        last = now
    trainer.publisher.close()
    recall, precision = hits / wanted, hits / sent
    print(f"\n{kind}: {STEPS} steps, {100 * wanted / weights:.2f} % changed; recall {recall}, precision {precision}")
    assert (recall, precision) == (1.0, 1.0)
