"""demo: a model trains, two processes follow, and every bit is compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_support import invoke, invoke_json, spawn

pytest.importorskip("torch")


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    """As `make demo` runs it, in a process of its own, with few versions."""
    run = tmp_path / "run"
    process = spawn("demo", "--versions", 4, "--run", run, env={**os.environ, "TMPDIR": str(tmp_path)})
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, out + err
    assert [line.split()[0] for line in out.splitlines() if line.startswith("v")] == ["v0", "v1", "v2", "v3"]
    assert "follower-2" in out
    last = out.splitlines()[-1]
    assert last.startswith("✓ all bit-identical: 4 versions, 2 followers, 8 proofs")
    log = invoke_json("log", run)
    assert [version["kind"] for version in log["versions"]] == ["delta", "delta", "delta", "anchor"]
    assert {replica["version"] for replica in log["replicas"]} == {3}
    assert not list(tmp_path.glob("deltawire-demo-*"))
    # and a second demo does not publish into the first one's run
    assert "already" in invoke("demo", "--run", run, code=2).stderr


def test_the_proof_sees_a_single_bit() -> None:
    from deltawire.cli.demo_model import TinyLM, fingerprint, same_bits, wire_weights

    weights = wire_weights(TinyLM())
    copy = {name: tensor.clone() for name, tensor in weights.items()}
    assert same_bits(weights, copy)
    assert fingerprint(weights) == fingerprint(copy)
    copy["norm.bias"][7] = -0.0  # equal as a number, another bit
    assert not same_bits(weights, copy)
    assert fingerprint(weights) != fingerprint(copy)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "deltawire[torch]" in invoke("demo", code=2).stderr


@pytest.mark.slow
def test_a_follower_with_other_bits_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is not for show: a trainer whose own list differs in one version finds out."""
    from deltawire.cli import demo

    before = demo.Demo.wait

    def wait(self: demo.Demo, show: object) -> None:
        before(self, None)
        self.expected[1] = "0" * 64

    monkeypatch.setattr(demo.Demo, "wait", wait)
    value = json.loads(invoke("demo", "--versions", 3, "--json", "--run", tmp_path / "run", code=1).stdout)
    assert value["problems"] == [f"follower-{n} has other bits in version 1" for n in (1, 2)]
    assert value["proofs"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_follower_outlives_the_demo(tmp_path: Path, sent: signal.Signals) -> None:
    # a killed demo cannot tidy up: what it leaves goes with the test
    home = {**os.environ, "TMPDIR": str(tmp_path)}
    process = spawn("demo", "--versions", 500, "--run", tmp_path / "run", env=home)
    try:
        assert any(line.startswith("v2") for line in process.stdout)
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        assert len(children) == 2
        process.send_signal(sent)
        assert process.wait(20) == (130 if sent == signal.SIGINT else -sent)
        deadline = time.monotonic() + 20
        while any(_alive(int(child)) for child in children):
            assert time.monotonic() < deadline, "a follower is still there"
            time.sleep(0.1)
    finally:
        process.kill()
        process.communicate()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
