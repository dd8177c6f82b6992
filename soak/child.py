"""A process of the soak that takes orders: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Child:
    def __init__(self, module: str, *words: str, log: Path, env: Mapping[str, str] | None = None) -> None:
        self._module, self._log = module, log
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=Path(__file__).parents[1],
                env={**os.environ, **(env or {})},
            )
        self.first = self._heard()
        # what it says when it is ready

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._heard()

    def close(self, patience: float) -> None:
        """The end of its orders tells it to go. TimeoutExpired where it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(patience)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} is gone: {self._log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer
