"""A Wordle server as a process of its own."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def wordle_server(*options: str, files: int | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yields its address and the process, which may open so many files; whatever is left of it is ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deltawire.cli", "env", "wordle", "--port", "0", "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=None if files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        ready = json.loads(line)
        assert ready["event"] == "ready"
        yield ready["url"], process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert "Traceback" not in errors, errors
