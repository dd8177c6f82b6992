"""Azurite and moto, emulators of Azure and AWS: installed once outside the clone, started on a free port."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path

from deltawire_wordle.processes import free_port
from environments import CACHE, environment
from servers import Server

AZURITE = "3.37.0"
MOTO = "5.2.5"
CONTAINER = "runs"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""What every Azurite has; no secret."""


def azurite_program() -> Path:
    folder = CACHE / f"azurite-{AZURITE}"
    if not (folder / "ready").exists():
        if shutil.which("npm") is None:
            raise RuntimeError("Azurite comes from npm, which is not installed here: install Node.js 20 or newer")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", f"azurite@{AZURITE}"]
        subprocess.run(command, check=True, capture_output=True)
        (folder / "ready").touch()
    return folder / "node_modules" / ".bin" / "azurite-blob"


@contextmanager
def azurite(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment in which az:// addresses lead there."""
    port = free_port()
    options = ["--silent", "--skipApiVersionCheck", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with Server([str(azurite_program()), *options, "--location", str(folder)], port, log=folder / "log") as server:
        _wait(port, server)
        endpoint = f"{server.url}/{ACCOUNT}"
        _make_container(endpoint)
        parts = ("DefaultEndpointsProtocol=http", f"AccountName={ACCOUNT}", f"AccountKey={KEY}")
        yield {"AZURE_STORAGE_CONNECTION_STRING": ";".join((*parts, f"BlobEndpoint={endpoint};"))}


@contextmanager
def moto(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment in which s3:// addresses lead there."""
    python = environment("moto", [f"moto[s3,server]=={MOTO}"])
    port = free_port()
    command = [str(python.with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    with Server(command, port, log=folder / "log") as server:
        _wait(port, server)
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/{CONTAINER}", method="PUT"), timeout=60).close()
        keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}
        yield {"AWS_ENDPOINT_URL": server.url, **keys}


def _wait(port: int, server: Server) -> None:
    for _ in range(600):
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.2)
    raise AssertionError(f"the server did not start: {server.said[-2000:]}")


def _make_container(endpoint: str) -> None:
    """By hand, with a signature: the bucket client makes no containers."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT\n" + "\n" * 11 + signed + f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"}
    url = f"{endpoint}/{CONTAINER}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=60).close()
