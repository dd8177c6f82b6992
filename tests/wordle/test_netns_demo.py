"""`make netns-demo`, for a short while: four machines as network namespaces. Root and Linux only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ("--only", "deltas", "--inner", "0", "--secrets", "1", "--generations", "2")

needs_root = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")),
    reason="network namespaces need root and iproute2",
)


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(BENCHMARKS / "netns_demo.py"), *SMALL, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def namespaces(process: subprocess.Popen[str]) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"dw{process.pid}-")]


def test_what_a_capture_makes_of_packets() -> None:
    sys.path.insert(0, str(BENCHMARKS))
    from _capture import parse

    tcp = bytes([0x1F, 0x40, 0xC0, 0x00, *bytes(8), 0x60, *bytes(11)]) + b"four"
    packet = bytes([0x45, 0, 0, 20 + len(tcp), *bytes(5), 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]) + tcp + b"padding"
    segment = parse(memoryview(packet))
    assert segment is not None
    assert (segment.source, segment.destination, segment.ports) == ("10.0.0.1", "10.0.0.2", (8000, 49152))
    # options of TCP are no payload, nor is what the link appends
    assert bytes(segment.payload) == b"four"
    assert parse(memoryview(packet[:30])) is None
    assert parse(memoryview(packet[:9] + b"\x11" + packet[10:])) is None, "UDP"


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weights_cross_only_between_each_side_and_the_bucket(tmp_path: Path) -> None:
    process = start("--seconds", "20", "--out", str(tmp_path / "out.json"))
    text, _ = process.communicate()
    assert process.returncode == 0, text
    assert not namespaces(process)
    [result] = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["equal"]
    assert result["verified"]
    assert result["steps"] > 0
    opened = {(one["from"], one["to"], one["port"]) for one in result["doors"] if one["answer"] == "open"}
    replicas = ("replica-a", "replica-b")
    assert opened == {
        ("trainer", "services", "bucket"), ("trainer", "services", "environment"),
        *(("trainer", replica, "rollouts") for replica in replicas),
        *((replica, "services", "bucket") for replica in replicas),
    }  # fmt: skip
    assert {one["answer"] for one in result["doors"]} == {"open", "ENETUNREACH"}
    carried = {(f["from"], f["to"], f["port"]): f["objects"] for f in result["traffic"]["flows"]}
    with_weights = {flow for flow, objects in carried.items() if objects}
    assert with_weights == {("trainer", "services", "bucket"), *(("services", one, "bucket") for one in replicas)}
    assert carried["trainer", "services", "bucket"] == result["traffic"]["objects"]
    assert {flow[0] for flow in carried} == {"trainer", *replicas, "services"}, "every machine was heard"


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left(tmp_path: Path, sent: signal.Signals) -> None:
    process = start("--seconds", "600", "--out", str(tmp_path / "out.json"))
    try:
        deadline = time.monotonic() + 200
        children: list[psutil.Process] = []
        while len(children) < 8:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
            children = psutil.Process(process.pid).children(recursive=True)
        assert len(namespaces(process)) == 4
        process.send_signal(sent)
        assert process.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 0}[sent]
        _, left = psutil.wait_procs(children, timeout=120)
        assert not left
        assert not namespaces(process)
    finally:
        process.kill()
        process.communicate()
