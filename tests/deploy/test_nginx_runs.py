"""Runs read through a real nginx, as deploy/nginx configures it, in front of a real bucket."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltawire.bucket import fetch, watch
from deltawire.bucket.run import Run
from deltawire.core import keys
from deltawire.core.errors import DeltawireError, ObjectNotFound, TruncatedFile
from deltawire.replica import Replica
from deltawire.store import HttpStore, Retrying, Store
from deltawire.trainer import Publisher
from deltawire_wordle.seaweed import SeaweedFS
from soak.nginx import WRONG, Nginx, let_read
from support import Model, blank, heartbeats, history, publish, same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FOLLOWERS = 24


@pytest.fixture(scope="module")
def versions() -> list[Model]:
    return history(30, changes=2)


@pytest.fixture(scope="module")
def proxy(seaweed: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    let_read(seaweed, "deltawire")
    with Nginx(tmp_path_factory.mktemp("nginx"), seaweed.ports["s3.port"]) as server:
        yield server


@pytest.fixture
def place() -> str:
    return f"deltawire/{uuid.uuid4()}/run"


@pytest.fixture
def bucket(seaweed: SeaweedFS, place: str) -> Store:
    return seaweed.store(place)


@pytest.fixture
def url(proxy: Nginx, place: str) -> str:
    return f"{proxy.url}/{place}"


def status(url: str, method: str = "GET") -> tuple[int, str]:
    """Status and Cache-Control of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30) as answer:
            return answer.status, answer.headers.get("Cache-Control", "")
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("Cache-Control", "")


def test_what_is_served_and_for_how_long(bucket: Store, url: str, versions: list[Model]) -> None:
    publish(bucket, versions[:3])
    for key in (keys.replica("secret"), keys.ROSTER):
        bucket.put(key, b'{"address": "10.0.0.7:8000"}')
    delta = next(item.key for item in bucket.list(keys.DELTAS))
    assert status(f"{url}/{delta}") == (200, "public, max-age=31536000, immutable, no-transform")
    assert status(f"{url}/{keys.manifest(1)}") == (200, "public, max-age=60, no-transform")
    for key in (keys.HEAD, keys.RUN):
        assert status(f"{url}/{key}") == (200, "public, max-age=1, no-transform")
    for key in (keys.manifest(99), keys.PRUNED, "deltas/step_000099.00000000.safetensors"):
        assert status(f"{url}/{key}") == (404, "no-store")
    for key in (keys.replica("secret"), keys.ROSTER, keys.WRITER, keys.KEEPER, "", "?list-type=2"):
        assert status(f"{url}/{key}")[0] == 404
    for method in ("PUT", "POST", "DELETE"):
        assert status(f"{url}/{keys.HEAD}", method)[0] == 405
    assert bucket.get(keys.HEAD).data


def test_a_store_behind_a_real_proxy(bucket: Store, url: str) -> None:
    web, body = HttpStore(url), bytes(range(256)) * 80_000
    key = "anchors/step_000000.00000000.safetensors"
    bucket.put(key, body)
    bucket.put(keys.HEAD, b'{"one": 1}')
    for _ in range(2):
        assert web.head(key).size == len(body)
        for start, length in ((0, 100), (8 << 20, 8 << 20), ((8 << 20) - 1, 2), (len(body) - 7, 7), (5, len(body) - 5)):
            assert web.get_range(key, start, length) == body[start : start + length]
        with pytest.raises(TruncatedFile):
            web.get_range(key, len(body) - 7, 8)
        with pytest.raises(TruncatedFile):
            web.get_range(key, len(body), 1)
    found = web.get(keys.HEAD)
    assert found.data == b'{"one": 1}'
    assert web.get_if_changed(keys.HEAD, found.etag) is None
    bucket.put(keys.HEAD, b'{"two": 2}')
    while (later := web.get_if_changed(keys.HEAD, found.etag)) is None:
        time.sleep(0.05)
    assert later.data == b'{"two": 2}'


def test_a_404_is_never_kept(bucket: Store, url: str) -> None:
    web = HttpStore(url)
    for key in (keys.manifest(7), keys.HEAD, "deltas/step_000007.00000000.safetensors", keys.tag("best")):
        for _ in range(3):
            with pytest.raises(ObjectNotFound):
                web.get(key)
        bucket.put(key, b"{}")
        assert web.get(key).data == b"{}"


def test_many_followers_are_one_to_the_bucket(
    proxy: Nginx, bucket: Store, url: str, versions: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, reached = threading.Event(), threading.Barrier(FOLLOWERS + 1)
    models = [blank(versions[0]) for _ in range(FOLLOWERS)]

    def follow(model: Model) -> None:
        replica = Replica(url, heartbeat=0)
        for version in replica.follow(model, poll=0.2, every=True, stop=stop):
            assert same(model, versions[version])
            reached.wait(120)

    with Publisher(bucket, anchor_ratio=1e9) as publisher, ThreadPoolExecutor(FOLLOWERS) as pool:
        publisher.publish(versions[0]).result(60)
        following = [pool.submit(follow, model) for model in models]
        reached.wait(120)
        for version in range(1, 6):
            publisher.publish(versions[version]).result(60)
            reached.wait(120)
        stop.set()
        for one in following:
            one.result(60)
    counts = {path: count for path, count in proxy.at_origin().items() if url.partition("/deltawire/")[2] in path}
    objects = [item.key for item in bucket.list() if item.key.startswith((keys.DELTAS, keys.ANCHORS))]
    for key in objects:
        path = next((path for path in counts if path.endswith(key)), None)
        assert path is None or counts[path] == 1, f"{key} was fetched once"
    assert sum(path.endswith(tuple(objects)) for path in counts) == 6


def test_a_run_is_followed_by_hash_and_by_key(bucket: Store, url: str, versions: list[Model]) -> None:
    publish(bucket, versions, anchor_every=8, anchor_ratio=1e9)
    live = blank(versions[0])
    replica = Replica(url, id="mine", heartbeats=bucket)
    for want in (0, 3, 17, 2, len(versions) - 1):
        assert replica.sync(live, want) == want
        assert same(live, versions[want])
    (beat,) = heartbeats(Run.open(bucket))
    assert beat.version == len(versions) - 1


def test_a_damaged_object_that_the_proxy_has_kept(bucket: Store, url: str, versions: list[Model]) -> None:
    with Publisher(bucket, anchor_ratio=1e9) as publisher:
        publisher.publish(versions[0]).result(60)
        live, replica = blank(versions[0]), Replica(url, heartbeat=0)
        replica.sync(live)
        publisher.publish(versions[1]).result(60)
        (key,) = [item.key for item in bucket.list(keys.DELTAS)]
        whole = bucket.get(key).data
        for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-9]):
            bucket.put(key, damaged)
            with pytest.raises(DeltawireError):
                Replica(url, heartbeat=0).sync(blank(versions[0]))
            with pytest.raises(DeltawireError):
                replica.sync(live)
            assert same(live, versions[0])
        bucket.put(key, whole)
        assert replica.sync(live) == 1
        assert same(live, versions[1])
        fresh = blank(versions[0])
        Replica(url, heartbeat=0).sync(fresh)
        assert same(fresh, versions[1]), "and the proxy has the right one by now"


# ── configurations that are wrong ────────────────────────────────────────────────────────────────────────────────────


REFUSED = {
    "no ranges": "let the proxy pass ranges on",
    "short ranges": "came back",
    "certificate": "certificate is not trusted",
    "redirect": "it leads to http://elsewhere.invalid/.*; redirects are not followed",
    "unavailable": "503",
}
"""What is said where nothing can be read."""


@pytest.mark.parametrize("wrong", [*WRONG])
def test_a_proxy_that_is_configured_wrongly(
    seaweed: SeaweedFS,
    bucket: Store,
    place: str,
    tmp_path: Path,
    versions: list[Model],
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may delay versions, and never gives wrong ones; once it is right, followers go on."""
    let_read(seaweed, "deltawire")
    # several ranges for the few bytes of an object
    monkeypatch.setattr(fetch, "PART", 256)
    monkeypatch.setattr(watch, "PROBE_WEB_S", 0.5)
    with (
        Nginx(tmp_path / "nginx", seaweed.ports["s3.port"], WRONG[wrong], tls=True) as proxy,
        Publisher(bucket) as publisher,
    ):
        monkeypatch.setenv("SSL_CERT_FILE", str(proxy.certificate))
        publisher.publish(versions[0]).result(60)
        live = blank(versions[0])
        web = Retrying(HttpStore(f"{proxy.url}/{place}"), attempts=2, first_delay_s=0.01)
        replica = Replica(web, heartbeat=0)
        if (said := REFUSED.get(wrong)) is not None:
            with pytest.raises(DeltawireError, match=said):
                replica.sync(live)
            assert same(live, blank(versions[0])), "no weight was touched"
            proxy.configure({})
        following = replica.follow(live, poll=0.1)
        for version in range(3):
            if version:
                publisher.publish(versions[version]).result(60)
            while next(following) < version:
                pass
            assert same(live, versions[version])
