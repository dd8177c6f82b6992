"""cache: a process that serves the objects of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cli_support import invoke

from deltawire.bucket import neighbour
from deltawire.bucket.run import Run
from tests import forks


def test_objects_of_a_run_for_a_site(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deltawire.cli", "cache", str(run), "--port", "0", "--json"]
    blob = Run.open(str(run)).manifest(3).links[0].objects[0]
    with forks.Popen([*command, "--folder", str(tmp_path / "objects")], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            near = neighbour.Neighbour(json.loads(process.stdout.readline())["url"], None)
            got = bytearray(blob.size)

            def write(start: int, data: bytes) -> None:
                got[start : start + len(data)] = data

            assert near.read(blob, write)
        finally:
            process.terminate()
    assert process.returncode == 0
    assert bytes(got) == (run / blob.key).read_bytes() == (tmp_path / "objects" / blob.hash).read_bytes()


def test_others_may_reach_it_only_with_a_token(run: Path) -> None:
    refused = invoke("cache", run, "--host", "0.0.0.0", code=2)
    assert "listening on 0.0.0.0 lets others read the run" in refused.stderr
