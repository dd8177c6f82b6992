"""What tests start: a command in a process group of its own, to its end, or as a server with a port on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests import forks


def run_to_end(command: Sequence[str], log: Path, limit: float, **environment: str) -> int:
    """Its exit status; what it says goes to `log`. Nothing of it outlives the call."""
    with open(log, "w") as out:
        process = forks.Popen(
            [*command],
            env={**os.environ, **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def end(process: subprocess.Popen[Any], how: signal.Signals = signal.SIGTERM, patience: float = 120) -> int:
    """Its exit status, after it was asked to end. If it does not, it is aborted: started with `-X faulthandler`, it
    writes to stderr what each of its threads was doing."""
    process.send_signal(how)
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        said = process.communicate()[1] if process.stderr else "(stderr is not kept)"
        raise AssertionError(f"{process.args} had not ended {patience} s after {how.name}:\n{said}") from None


class Server:
    """Starts at once; nothing of it outlives the `with`."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        log: Path | None = None,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        out = open(log, "ab") if log else None  # noqa: SIM115 - the child has it from here on
        self._process = subprocess.Popen(
            [*command], env=env, cwd=cwd, start_new_session=True, stdout=out, stderr=subprocess.STDOUT if out else None
        )
        if out:
            out.close()

    def get(self, path: str) -> Any:
        """What it answers as JSON, None for an empty body; raises URLError while it does not, or not with a 2xx."""
        with urllib.request.urlopen(self.url + path, timeout=120) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def wait(self, path: str = "/health", **expected: Any) -> Any:
        """Until it answers, with these values; for as long as it lives."""
        while True:
            with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                answer = self.get(path)
                if all(answer[key] == value for key, value in expected.items()):
                    return answer
            ended = self._process.poll()
            assert ended is None, f"the server ended with {ended}: {self.said[-4000:]}"
            time.sleep(0.2)

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace") if self._log else "(see above)"

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Its exit status, after it was asked to end."""
        return end(self._process, how)

    def kill(self) -> None:
        """All of it, as a power cut would."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
