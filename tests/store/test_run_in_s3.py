"""A whole run through a real S3 server, which dies in the middle and comes back."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import deltawire as dw
from deltawire.bucket.prune import Retention, prune
from deltawire.bucket.run import Run
from deltawire.store import Retrying, Store
from deltawire.trainer import Publisher
from deltawire_wordle.seaweed import SeaweedFS
from support import Model, blank, history, same


def follow(store: Store, versions: list[Model], stop: threading.Event) -> list[int]:
    """Every version is checked the moment it is reached."""
    live, seen = blank(versions[0]), []
    for version in dw.Replica(store, heartbeat=0).follow(live, poll=0.2, stop=stop):
        assert same(live, versions[version])
        seen.append(version)
        if version == len(versions) - 1:
            break
    return seen


def test_a_run(s3: Store) -> None:
    versions = history(6)
    with Publisher(s3) as publisher:
        for weights in versions:
            publisher.publish(weights).result(60)
    assert follow(s3, versions, threading.Event()) == [5]
    prune(Run.open(s3), Retention(last=2, grace=0))
    assert Run.open(s3).newest() == 5
    assert follow(s3, versions, threading.Event()) == [5]


def test_the_server_is_killed_in_the_middle(tmp_path: Path) -> None:
    versions = history(6)
    with SeaweedFS(tmp_path / "weed") as server:
        place = f"deltawire/{uuid.uuid4()}"
        store = Retrying(server.store(place, retries=1))
        seen: list[int] = []
        stop = threading.Event()
        follower = threading.Thread(target=lambda: seen.extend(follow(store, versions, stop)))
        follower.start()
        with Publisher(Retrying(server.store(place, retries=1))) as publisher:
            for version, weights in enumerate(versions):
                handle = publisher.publish(weights)
                if version == 3:
                    server.kill()
                    server.start()
                assert handle.result(120).version == version
        follower.join(120)
        stop.set()
        assert seen[-1] == len(versions) - 1
        assert seen == sorted(set(seen))
        assert Run.open(store).listed() == list(range(len(versions)))
