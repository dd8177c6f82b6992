"""Runs the blocks of a page as a reader would: in one folder, in order, against a real bucket.

What differs from what is printed is in `SUBSTITUTIONS`, and nowhere else. `pip install` does not install: a program of
that name checks that each thing named can be installed from this clone (pip_check.py); `make release-check` installs.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, Block

from deltawire_wordle.processes import free_port
from deltawire_wordle.seaweed import SeaweedFS, _free_ports
from tests import forks

PATIENCE_S = {"everyday": 240, "slow": 600, "vllm": 600}
"""How long a block of a suite may take before it is ended and fails."""

SUBSTITUTIONS: tuple[tuple[str, str], ...] = (
    (r"(?<![\w.])/tmp/", "{folder}/tmp/"),
    (r"/srv/weed", "{folder}/tmp/weed"),
    (r"s3://runs/", "{bucket}/"),
    (r"-bucket=runs\b", "-bucket={name}"),
    (r"Qwen/Qwen3-0\.6B", "my-model"),
    # this environment, with a pip that only looks
    (r"python3 -m venv \.venv && \. \.venv/bin/activate", "true"),
    # servers listen where nothing else does
    (r"\b(deltawire serve|deltawire env wordle|vllm serve)\b(?![^\n]*--port)", r"\1 --port 8000"),
    # a model this small on a CPU is not worth compiling
    (r"(--engine vllm \S+)(?= +#)", r"\1 -- --enforce-eager --max-model-len 128"),
    # an answer with an error is an error
    (r"\bcurl ", "curl -fsS "),
    (r"weed mini\b", "weed mini {weed}"),
    (r"--seconds 120\b", "--seconds 15"),
    (r"http://127\.0\.0\.1:8333(?=&region)", "{endpoint}"),
    (r"(?<=[:= ])8\d\d\d\b", "{port}"),
)
"""Pattern, and what stands in its place while a block runs: {folder} is the page's own, {bucket} a place of its own on
a real S3 server at {endpoint}, {port} a free port for each that is printed, {weed} ports of one that a page starts.
"""


Scene = Callable[["Stage"], Mapping[str, Any]]
"""Prepares what a block needs and returns names for Python."""


class Stage:
    """A folder that looks like a fresh clone, and what runs in it."""

    substitutions = SUBSTITUTIONS

    def __init__(
        self, folder: Path, server: SeaweedFS | None, bucket: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.bucket = folder, bucket
        self.endpoint = server.endpoint if server else ""
        self.clone = folder / "deltawire"
        self._s3 = server.environment if server else {}
        self.environment = {**os.environ, **self._s3, **(environment or {})}
        self._ports: dict[str, int] = {}
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self._threads: list[threading.Thread] = []
        self._left: list[subprocess.Popen[bytes]] = []
        (folder / "tmp").mkdir()
        self.lay_out()

    def lay_out(self) -> None:
        self.clone.mkdir()
        for entry in ROOT.iterdir():
            if entry.name not in (".git", ".venv", "models", "runs"):
                (self.clone / entry.name).symlink_to(entry)
        # where `make` looks for its environment: this one, which it has no reason to make again
        venv = self.folder / "venv"
        venv.mkdir()
        for entry in Path(sys.prefix).iterdir():
            (venv / entry.name).symlink_to(entry)
        (venv / ".deltawire-ready").unlink(missing_ok=True)
        (venv / ".deltawire-ready").touch()
        programs = self.folder / "bin"
        programs.mkdir()
        pip = programs / "pip"
        pip.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("pip_check.py")}" "$@"\n')
        pip.chmod(0o755)
        if command := forks.module("deltawire.cli"):
            program = programs / "deltawire"
            program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            program.chmod(0o755)
        self.environment |= {
            "VENV": str(venv),
            "DELTAWIRE_STATE": str(self.folder / "state"),
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}:{self.environment.get('PYTHONPATH', '')}",
        }

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._left:
            _end(process)

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run_all(self, blocks: Sequence[Block], suite: str, scenes: Mapping[str, Scene]) -> None:
        for block in blocks:
            if block.suite == suite:
                if block.scene:
                    self.names |= scenes[block.scene](self)
                self.run_block(block)

    def run_block(self, block: Block) -> None:
        code = self.substituted(block.code)
        if block.language == "python":
            self.run_python(block, code)
        elif block.until:
            first, terminals = _terminals(code)
            for command in terminals:
                self.run_bash(block, f"{first}\n{command}", block.until)
        else:
            self.run_bash(block, code)

    def substituted(self, code: str) -> str:
        for pattern, value in self.substitutions:
            if value == "{port}":
                code = re.sub(pattern, lambda found: str(self._ports.setdefault(found[0], free_port())), code)
            else:
                code = re.sub(pattern, self._value(value), code)
        return code

    def _value(self, value: str) -> str:
        known = {
            "{folder}": str(self.folder),
            "{bucket}": self.bucket,
            "{name}": self.bucket.split("/")[2],
            "{endpoint}": self.endpoint,
            "{weed}": self._weed(),
        }
        for name, text in known.items():
            value = value.replace(name, text)
        return value

    def _weed(self) -> str:
        """Ports for a SeaweedFS that a document starts; its S3 port is the printed one."""
        names = ("s3.port.grpc", "master.port", "filer.port", "volume.port", "admin.port")
        fixed = "-s3.port=8333 -s3.port.iceberg=0 -s3.port.lance=0 -webdav=false -admin.ui=false"
        return fixed + "".join(
            f" -{name}={port}" for name, port in zip(names, _free_ports("127.0.0.1", len(names)), strict=True)
        )

    def run_python(self, block: Block, code: str) -> None:
        """In this process, so that torch is not imported for each snippet anew."""

        def told(*words: object, **options: Any) -> None:
            builtins.print(*words, **options)
            if block.until and block.until in " ".join(map(str, words)):
                raise _Told

        program = compile(code, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with self.s3() as patch:
            patch.chdir(self.clone)
            self.names["print"] = told
            threads, self._threads = self._threads, []
            for thread in threads:
                thread.start()
            with suppress(_Told), _handlers_as_before():
                waiting = eval(program, self.names)
                if inspect.iscoroutine(waiting):
                    asyncio.run(waiting)
                assert not block.until, f"{block.place} ended without printing {block.until!r}"
            for thread in threads:
                thread.join(PATIENCE_S[block.suite])

    @contextmanager
    def s3(self) -> Iterator[pytest.MonkeyPatch]:
        """This process finds the page's S3 server, as the commands do."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._s3.items():
                patch.setenv(name, value)
            yield patch

    def meanwhile(self, work: Callable[[], None]) -> None:
        """Runs beside the next Python block."""
        self._threads.append(threading.Thread(target=work, daemon=True))

    def run_bash(self, block: Block, code: str, until: str = "") -> None:
        kept, log = self.folder / "environment", self.folder / f"{block.line}-{len(self._left)}.log"
        script = f"set -euo pipefail\n{code}\nenv -0 > {kept}\n"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", script], cwd=self.clone, env=self.environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._left.append(process)
        deadline = time.monotonic() + PATIENCE_S[block.suite]
        while time.monotonic() < deadline:
            ended = process.poll()
            said = log.read_text(errors="replace")
            if until and until in said:
                return
            if ended is not None:
                assert ended == 0, f"{block.place} ended with {ended}:\n{code}\n{said}"
                assert not until, f"{block.place} ended without printing {until!r}:\n{code}\n{said}"
                break
            time.sleep(0.02)
        else:
            raise AssertionError(f"{block.place} did not come to its end:\n{code}\n{log.read_text(errors='replace')}")
        _end(process)
        # what it exported holds for the blocks that follow
        for entry in kept.read_text().split("\0"):
            name, _, value = entry.partition("=")
            if name and name not in ("_", "SHLVL", "PWD", "OLDPWD"):
                self.environment[name] = value


class _Told(Exception):
    """A block has printed what its tag waits for."""


@contextmanager
def _handlers_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(120)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _terminals(code: str) -> tuple[str, list[str]]:
    """What is done once, and the commands that each have a terminal of their own because they do not end."""
    commands = [line for line in code.replace("\\\n", " ").split("\n") if line.strip()]
    once = [line for line in commands if re.match(r"(export|pip|cd) ", line)]
    return "\n".join(once), [line for line in commands if line not in once]
