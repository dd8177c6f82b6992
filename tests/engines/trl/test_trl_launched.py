"""Two processes started by `accelerate launch`: Accelerate's DDP and transformers.Trainer publish what they train."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from deltawire.bucket.replay import checkout  # noqa: E402
from deltawire.bucket.run import Run  # noqa: E402
from deltawire.bucket.verify import verify  # noqa: E402
from deltawire.models import torch_bits  # noqa: E402
from deltawire_wordle.processes import free_port  # noqa: E402
from servers import run_to_end  # noqa: E402

LIMIT = 240.0
STEPS = 5

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT)]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    command += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={free_port()}"]
    command += [str(Path(__file__).parent / "launched.py"), str(folder)]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    code = run_to_end(command, folder / "log", LIMIT, **quiet)
    assert code == 0, (folder / "log").read_text()[-8000:]
    return folder


@pytest.mark.parametrize("name, first", [("accelerate", 1), ("trainer", 0), ("peft", 0)])
def test_every_version_is_what_was_trained(launched: Path, name: str, first: int) -> None:
    ranks = [torch.load(launched / f"{rank}.pt")[name] for rank in range(2)]
    assert all([*steps] == [*range(first, STEPS + 1)] for steps in ranks), "all ranks went on to the end"
    run = Run.open(str(launched / name))
    manifests = [run.manifest(version) for version in run.listed()]
    assert manifests[0].step == first
    assert manifests[-1].step == STEPS
    for manifest in manifests:
        state = checkout(run, manifest.version)
        for trained in ranks:
            expected = {n: torch_bits(t.to(torch.bfloat16)) for n, t in trained[manifest.step].items()}
            assert all(np.array_equal(state.bits(n), bits) for n, bits in expected.items()), manifest.version
            assert expected.keys() == {tensor.name for tensor in run.schema.tensors}
    parts = [blob.key.split("-")[-3:] for link in manifests[0].links for blob in link.objects]
    assert [part[0] for part in parts] == ["00001", "00002"], "each process puts its own part"
    assert verify(run).ok
