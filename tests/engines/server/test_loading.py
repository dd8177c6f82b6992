"""Load a model from a run: what the run must carry, and what `--dtype auto` computes in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from serving import checkpoint, publisher, tiny_model

from deltawire import Publisher
from deltawire.bucket.run import Run
from deltawire.core.errors import SchemaMismatch
from deltawire.core.schema import Schema, TensorSpec
from deltawire.engines.server import ServerOptions
from deltawire.engines.server.loading import compute_dtype, dtype_of, load, load_options


@pytest.mark.parametrize("device, dtype", [("cpu", torch.float32), ("cuda:1", torch.bfloat16)])
def test_a_run_that_began_with_a_wider_checkpoint(tmp_path: Path, device: str, dtype: torch.dtype) -> None:
    trainer = tiny_model()
    folder = checkpoint(tmp_path / "model", trainer)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    with publisher(tmp_path / "run", folder) as publish:
        publish.publish(trainer).result(60)
    run = str(tmp_path / "run")
    assert compute_dtype(ServerOptions(device=device), lambda: Run.open(run)) == dtype
    assert compute_dtype(ServerOptions(device=device, dtype="float16"), lambda: Run.open(run)) == torch.float16


def test_a_run_without_a_config_is_refused_and_the_next_step_named(tmp_path: Path) -> None:
    with Publisher(tmp_path / "run", files={}) as publish:
        publish.publish({"w": np.zeros(4, np.uint16)}).result(60)
    with pytest.raises(SchemaMismatch, match=r"carries no config\.json.*serve MODEL --run RUN"):
        load_options(ServerOptions(poll=0.01), str(tmp_path / "run"))


def test_quantized_weights_are_refused_and_the_next_step_named(tmp_path: Path) -> None:
    with Publisher(tmp_path / "run", view="fp8-block") as publish:
        publish.publish(tiny_model()).result(60)
    with pytest.raises(SchemaMismatch, match="serve the run that these weights are derived from, or use --engine vllm"):
        load_options(ServerOptions(poll=0.01), str(tmp_path / "run"))


def test_a_folder_that_lacks_a_file_of_weights_is_refused_by_name(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", tiny_model())
    tiny_model().save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    lost = max(folder.glob("*.safetensors"))
    lost.unlink()
    with pytest.raises(SchemaMismatch, match=f"is not a whole checkpoint folder: .*{lost.name}"):
        load(str(folder), dtype=torch.float32)


def test_most_weights_decide() -> None:
    few, many, counts = TensorSpec("a", "F32", (8,)), TensorSpec("b", "F16", (64,)), TensorSpec("c", "I64", (128,))
    assert dtype_of(Schema.build([few, many, counts])) == torch.float16
    assert dtype_of(Schema.build([counts])) == torch.bfloat16
