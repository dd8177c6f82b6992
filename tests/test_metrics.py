"""on_version of a publisher and of a replica, and where its figures go."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from deltawire import Publisher, Replica
from deltawire.core.errors import Misconfigured
from deltawire.metrics import Prometheus
from deltawire.replica import Synced
from deltawire.store import Store
from deltawire.trainer import Published
from deltawire_wordle.processes import free_port
from environments import environment
from support import blank, history, same

WAIT = 60


@pytest.mark.parametrize("wait", [False, True], ids=["in the background", "streamed"])
def test_a_publisher_tells_of_every_version(store: Store, wait: bool) -> None:
    told: list[Published] = []
    with Publisher(store, on_version=told.append) as publisher:
        results = [publisher.publish(weights, wait=wait).result(WAIT) for weights in history(3)]
    assert told == results
    assert [version.version for version in told] == [0, 1, 2]
    assert told[1].report()["deltawire/bytes"] == told[1].bytes > 0
    assert 0 < told[1].report()["deltawire/density"] == told[1].changed / told[1].elements < 1
    assert "deltawire/held_ms" in told[2].report()


def test_a_replica_tells_of_every_version_that_it_reached(store: Store) -> None:
    told: list[Synced] = []
    versions = history(3)
    live = blank(versions[0])
    with Publisher(store) as publisher, Replica(store, heartbeat=0, on_version=told.append) as replica:
        for weights in versions:
            published = publisher.publish(weights).result(WAIT)
            replica.sync(live)
            replica.sync(live)
    assert [(sync.version, sync.previous, sync.lag) for sync in told] == [(0, None, 0), (1, 0, 0), (2, 1, 0)]
    assert (told[2].bytes, told[2].density) == (published.bytes, published.density)
    assert told[2].report()["deltawire/apply_ms"] >= 0


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
def test_what_it_raises_is_logged_and_harms_nothing(
    store: Store, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def broken(version: Any) -> None:
        raise kind(f"at {version.version}")

    versions = history(2)
    live = blank(versions[0])
    with caplog.at_level(logging.ERROR, "deltawire"), Publisher(store, on_version=broken) as publisher:
        for weights in versions:
            publisher.publish(weights).result(WAIT)
        assert Replica(store, heartbeat=0, on_version=lambda version: 1 / 0).sync(live) == 1
    assert same(live, versions[1])
    assert "published all the same" in caplog.text
    assert "in place all the same" in caplog.text


def test_prometheus_scrapes_a_plain_trainer(store: Store) -> None:
    port = free_port()
    told = Prometheus(port, registry=CollectorRegistry(), labels={"run": "wordle"})
    with Publisher(store, on_version=told) as publisher:
        for weights in history(2):
            publisher.publish(weights).result(WAIT)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        page = answer.read().decode()
    assert 'deltawire_version{run="wordle"} 1.0' in page
    assert "deltawire_put_ms" in page


def test_reprs_say_where_and_which_version(store: Store) -> None:
    publisher, replica = Publisher(store), Replica(store, heartbeat=0)
    assert repr(publisher) == f"<Publisher of {store.url}, no version yet>"
    assert repr(replica) == f"<Replica of {store.url}, no version yet>"
    weights = history(1)[0]
    with publisher:
        publisher.publish(weights).result(WAIT)
    replica.sync(blank(weights))
    assert repr(publisher) == f"<Publisher of {store.url}, at version 0>"
    assert repr(replica) == f"<Replica of {store.url}, at version 0>"


def test_a_replica_that_is_left_no_longer_follows(store: Store) -> None:
    weights = history(1)[0]
    with Publisher(store) as publisher:
        publisher.publish(weights).result(WAIT)
    with Replica(store, heartbeat=0) as replica:
        following = replica.follow(blank(weights), poll=0.05)
        assert next(following) == 0
    assert list(following) == []


LOGGERS = """
import os, sys
sys.path.append(sys.argv[1])    # after our own packages
import trackio
import wandb
import deltawire as dw
from support import history

run = wandb.init(project="deltawire", dir=sys.argv[2], mode="offline", settings=wandb.Settings(silent=True))
tracked = trackio.init(project="deltawire")

taken = []

def log(version):
    wandb.log(version.report(), commit=False)
    tracked.log(version.report())
    taken.append(version.version)    # what they raise would only be in a log

with dw.Publisher(sys.argv[2] + "/run", on_version=log) as publisher:
    for weights in history(3):
        publisher.publish(weights).result(60)
wandb.log({"loss": 1.0})
assert run.summary["deltawire/version"] == 2.0, run.summary
assert run.summary["deltawire/bytes"] > 0
assert taken == [0, 1, 2]
wandb.finish()
trackio.finish()
"""


@pytest.mark.slow
def test_wandb_and_trackio_take_a_report(tmp_path: Path) -> None:
    """The real ones, on this machine alone."""
    place = environment("loggers", ["wandb==0.31.0", "trackio==0.43.0"]).parents[1]
    packages = next(place.glob("lib/python*/site-packages"))
    alone = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", LOGGERS, str(packages), str(tmp_path)],
        env={**os.environ, **alone, "PYTHONPATH": path}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Misconfigured, match=rf"Prometheus\(port={port}\) cannot listen at 127\.0\.0\.1"):
            Prometheus(port, registry=CollectorRegistry())
