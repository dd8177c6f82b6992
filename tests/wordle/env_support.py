"""A Wordle server, in a thread or as a process of its own."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deltawire.engines.access import listen
from deltawire_wordle.env_server import create_app, make_server
from deltawire_wordle.wordle import Rules
from deltawire_wordle.wordlists import load
from tests import forks


@contextmanager
def wordle_thread(words: str = "toy", max_sessions: int = 512, **options: Any) -> Iterator[str]:
    """Yields the address of a server in this process; ended with the block."""
    server = make_server(create_app(Rules(load(words), 5), max_sessions=max_sessions, **options), max_sessions)
    up = threading.Event()
    server.on_listening = up.set
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            assert up.wait(120)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def wordle_server(*options: str, files: int | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yields its address and the process, which may open so many files; whatever is left of it is ended."""
    process = forks.Popen(
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
        _, errors = process.communicate(timeout=120)
        assert "Traceback" not in errors, errors
