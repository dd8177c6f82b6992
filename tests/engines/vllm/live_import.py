"""A run that is imported from another system's deltas, served by a real vLLM: `make test-vllm`."""

from __future__ import annotations

import shutil
from pathlib import Path

from vllm_live import Trainer, make_model, serving

from deltawire.foreign import Importer
from tests.engines.live.live_tests import greedy
from tests.foreign.writers import Model, trained, write_base, write_delta


def test_an_imported_run_is_served_as_its_checkpoints_are(tmp_path: Path) -> None:
    model, source = make_model(tmp_path / "model", "qwen3"), tmp_path / "source"
    reader = Trainer(model, tmp_path / "unused")
    weights: Model = reader.weights
    with Importer(source, tmp_path / "run", base=model) as importer:
        versions = importer.follow(poll=0.1)
        assert next(versions).kind == "base"
        with serving(model, tmp_path / "log", run=tmp_path / "run") as server:
            server.until(version=0, state="healthy")
            first = greedy(server)
            for number, encoding in enumerate(("xor", "overwrite", "xor"), 1):
                after = trained(weights, number, density=0.2)
                write_delta(source, number, weights, after, encoding, "blake3", files=2)
                weights = after
                assert next(versions).source_version == str(number)
                server.until(version=number, state="healthy")
            sums, tokens = server.checksums(), greedy(server)
    reader.close()
    assert tokens != first
    full = write_base(tmp_path / "full", weights)
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, full)
    with serving(full, tmp_path / "full.log") as fresh:
        assert fresh.checksums() == sums
        assert greedy(fresh) == tokens
