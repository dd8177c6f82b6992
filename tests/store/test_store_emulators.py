"""The store protocol and whole runs on emulators of others: Azurite (az://) and moto (s3://). `make test-stores`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import emulators
import pytest

import deltawire as dw
from deltawire.bucket.prune import Retention, prune
from deltawire.bucket.run import Run
from deltawire.core.errors import DivergedRun, PermissionDenied, WriterConflict
from deltawire.store import ObjectStore, Store, open_store
from deltawire.testing import StoreTests
from deltawire.trainer import Publisher
from support import blank, copy, history, same, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STARTS: dict[str, Any] = {"az": emulators.azurite, "s3": emulators.moto}


@pytest.fixture(scope="module", params=STARTS)
def emulator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The scheme of its addresses, in an environment that leads them there."""
    with STARTS[request.param](tmp_path_factory.mktemp(request.param)) as variables, pytest.MonkeyPatch.context() as it:
        for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
            it.delenv(name)
        for name, value in variables.items():
            it.setenv(name, value)
        yield request.param


@pytest.fixture
def address(emulator: str) -> str:
    return f"{emulator}://{emulators.CONTAINER}/{uuid.uuid4()}/run"


class TestEmulators(StoreTests):
    @pytest.fixture
    def store(self, address: str) -> Store:
        return ObjectStore.from_url(address)


def test_doctor_finds_nothing_wrong(address: str) -> None:
    command = [sys.executable, "-m", "deltawire.cli", "doctor", address, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["healthy"]
    again = next(check for check in report["checks"] if check["check"] == "create again")
    assert again["detail"] == "refused, as it must be"


def test_publish_follow_and_prune(address: str) -> None:
    versions = history(6)
    live, seen, stop = blank(versions[0]), [], threading.Event()

    def follow() -> None:
        for version in dw.Replica(address, id="follower").follow(live, poll=0.1, stop=stop):
            assert same(live, versions[version])
            seen.append(version)
            if version == len(versions) - 1:
                return

    with Publisher(address, anchor_every=3) as publisher:
        publisher.publish(versions[0]).result(60)
        follower = threading.Thread(target=follow)
        follower.start()
        for weights in versions[1:]:
            publisher.publish(weights).result(60)
        follower.join(120)
        stop.set()
    assert seen[-1] == 5
    run = Run.open(address)
    prune(run, Retention(last=2, grace=0))
    prune(run, Retention(last=2, grace=0))
    assert Run.open(address).listed()[-2:] == [4, 5]
    fresh = blank(versions[0])
    assert dw.Replica(address, heartbeat=0).sync(fresh) == 5
    assert same(fresh, versions[5])


def test_of_two_writers_one_is_refused(address: str) -> None:
    start = history(1)[0]
    with Publisher(address) as publisher:
        publisher.publish(start).result(60)
    gate, outcomes = threading.Barrier(2), {}

    def write(mark: int) -> None:
        weights = copy(start)
        # closing says again what the last publish said
        with suppress(WriterConflict, DivergedRun), Publisher(address) as publisher:
            gate.wait(60)
            for step in range(3):
                weights = trained(weights, mark * 100 + step)
                try:
                    outcomes[mark, step] = publisher.publish(weights).result(60).version, weights
                except (WriterConflict, DivergedRun) as error:
                    outcomes[mark, step] = error
                    return

    writers = [threading.Thread(target=write, args=(mark,)) for mark in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(300)
    won = dict(value for value in outcomes.values() if isinstance(value, tuple))
    versions = [value[0] for value in outcomes.values() if isinstance(value, tuple)]
    assert len(versions) == len(set(versions)), "two writers hold one version"
    assert any(isinstance(value, Exception) for value in outcomes.values())
    run = Run.open(address)
    for version, weights in won.items():
        live = blank(weights)
        assert dw.Replica(run.store, heartbeat=0).sync(live, version) == version
        assert same(live, weights)


def test_a_wrong_key_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Azurite refuses it. moto does not look: it tells nothing about keys and permissions."""
    if address.startswith("az:"):
        good = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", good.replace("AccountKey=Eby8", "AccountKey=AAAA"))
        with pytest.raises(PermissionDenied):
            open_store(address, retry=False).put("key", b"x")
    else:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        open_store(address, retry=False).put("key", b"x")


def test_nothing_is_left_in_this_folder() -> None:
    assert not (Path.cwd() / "__blobstorage__").exists(), "Azurite keeps its data where it is told to"
