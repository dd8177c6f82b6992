"""`make hub-proof`: against the Hub's own client and a stand-in, and a real S3 server, as a user would run it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from deltawire.store import open_store
from deltawire_wordle.seaweed import SeaweedFS
from tests.hub_stand_in import HubStandIn

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "service_proof.py"
STEPS = (
    "doctor", "publish and follow", "verify", "tag and prune", "follow after the prune", "two writers",
    "delete everything",
)  # fmt: skip


def prove(bucket: str, out: Path, code: int = 0) -> str:
    command = [sys.executable, str(SCRIPT), bucket, "--megabytes", "4", "--versions", "4", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return out.read_text()


def verdicts(report: str) -> dict[str, str]:
    cells = (line.split("|")[1:3] for line in report.partition("## doctor")[0].splitlines() if line.startswith("| "))
    return {name.strip(): mark.strip() for mark, name in cells if mark.strip() in ("✓", "✗")}


@pytest.mark.slow
def test_on_the_hub(hub: HubStandIn, tmp_path: Path) -> None:
    report = prove("hf://buckets/me/scratchpad/below", tmp_path / "proof.md")
    assert verdicts(report) == dict.fromkeys(STEPS, "✓")
    assert "everything held" in report
    for secret in (hub.token, "scratchpad", hub.endpoint):
        assert secret not in report
    assert not list(open_store("hf://buckets/me/scratchpad").list()), "nothing is left"


@pytest.mark.slow
def test_on_s3(seaweed: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    report = prove("s3://deltawire/proofs", tmp_path / "proof.md")
    assert verdicts(report) == dict.fromkeys(STEPS, "✓")
    assert seaweed.secret_key not in report
    assert not list(seaweed.store("deltawire/proofs").list())


@pytest.mark.slow
def test_what_does_not_hold_is_reported(hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrongwrong")
    report = prove("hf://buckets/me/scratchpad", tmp_path / "proof.md", code=1)
    assert "something did not hold" in report
    assert verdicts(report)["doctor"] == "✗"
    assert "hf_wrong" not in report


def _script() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("service_proof", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["service_proof"] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(SCRIPT.parent))


def test_the_report_holds_no_secrets() -> None:
    environ = {
        "HF_TOKEN": "hf_0123456789abcdef", "AWS_SECRET_ACCESS_KEY": "s3cr3t/k3y+", "AWS_PROFILE": "acme-prod",
        "USER": "jane.doe", "LANG": "C",
    }  # fmt: skip
    scrub = _script().Scrubber("s3://acme-weights/team/deltawire-proof-1?endpoint=https://minio.acme.test", environ)
    said = scrub(
        "PermissionDenied: s3://acme-weights/team/chat?endpoint=https://minio.acme.test&region=eu denied for jane.doe "
        f"({os.path.expanduser('~')}/.aws, acme-prod, s3cr3t/k3y+, hf_0123456789abcdef, AKIA0123456789ABCDEF) in 3 s"
    )
    for secret in ("acme", "team", "minio", "jane", "s3cr3t", "hf_", "AKIA", os.path.expanduser("~") + "/"):
        assert secret not in said
    assert said.startswith("PermissionDenied: s3://")
    assert said.endswith(" in 3 s")
