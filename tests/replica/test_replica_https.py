"""Follow a run over https, behind proxies that behave and proxies that do not."""

from __future__ import annotations

import gzip
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deltawire.bucket import fetch
from deltawire.bucket import watch as watching
from deltawire.bucket.run import Run
from deltawire.bucket.versions import resolve
from deltawire.bucket.watch import Watcher, watch
from deltawire.core import keys
from deltawire.core.errors import MissingBase, RunNotFound, StoreError, StoreUnavailable, VersionNotFound
from deltawire.core.schema import Schema, TensorSpec
from deltawire.core.signing import SigningKey
from deltawire.replica import Replica
from deltawire.store import HttpStore, Retrying, Store, open_store
from deltawire.trainer import Publisher
from soak.certificate import certificate_of
from support import Model, blank, heartbeats, history, publish, same
from tests.web import Fault, Handler, WebServer, serving

COUNT = 40
HEAD, VERSION, OBJECT = "head.json", "versions/", "deltas/"


@pytest.fixture(scope="module")
def versions() -> list[Model]:
    return history(COUNT, changes=2)


@pytest.fixture
def server(store: Store) -> Iterator[WebServer]:
    with serving(store) as server:
        yield server


def hasty(url: str) -> Store:
    """A store over https that gives up soon."""
    return Retrying(HttpStore(url), attempts=2, first_delay_s=0.01)


# ── what needs no listing ────────────────────────────────────────────────────────────────────────────────────────────


def lose_head(store: Store) -> None:
    store.delete(keys.HEAD)


def old_head(store: Store) -> None:
    head = json.loads(store.get(keys.HEAD).data)
    store.put(keys.HEAD, json.dumps({**head, "version": 3}).encode())


def wrong_head(store: Store) -> None:
    head = json.loads(store.get(keys.HEAD).data)
    store.put(keys.HEAD, json.dumps({**head, "version": 10**12}).encode())


def lose_history(store: Store) -> None:
    for item in [*store.list(keys.HISTORY)]:
        store.delete(item.key)


def nothing(store: Store) -> None:
    pass


@pytest.mark.parametrize("damage", [nothing, lose_head, old_head, wrong_head, lose_history])
@pytest.mark.parametrize("have", [None, 2, 30, COUNT - 2])
def test_every_way_to_a_version_without_listings(
    store: Store, server: WebServer, versions: list[Model], damage: Callable[[Store], None], have: int | None
) -> None:
    publish(store, versions, anchor_every=16, anchor_ratio=1e9)
    replica, live = Replica(server.url, heartbeat=0), blank(versions[0])
    if have is not None:
        replica.sync(live, have)
    damage(store)
    assert replica.sync(live) == COUNT - 1
    assert same(live, versions[-1])
    assert all("?" not in key and not key.endswith("/") for key in server.requests)


def test_a_run_without_versions_and_an_address_without_a_run(store: Store, server: WebServer) -> None:
    with pytest.raises(RunNotFound, match="no run at"):
        Run.open(server.url + "/elsewhere")
    Run.create(store, Schema.build([TensorSpec("a", "BF16", (4,))]))
    assert Run.open(server.url).newest() is None


def test_marks_that_are_wrong_leave_it_to_head(store: Store, server: WebServer, versions: list[Model]) -> None:
    publish(store, versions[:3])
    run = Run.open(store).info.run
    store.put(keys.PRUNED, json.dumps({"run": run, "versions": [[3, 10**9]]}).encode())
    assert Run.open(server.url).newest() == 2


def test_links_that_are_all_gone_are_no_way(store: Store, server: WebServer, versions: list[Model]) -> None:
    publish(store, versions[:4], anchor_ratio=1e9)
    for item in [*store.list(keys.ANCHORS)]:
        store.delete(item.key)
    live = blank(versions[0])
    with pytest.raises((MissingBase, StoreError)):
        Replica(server.url, heartbeat=0).sync(live)
    assert same(live, blank(versions[0]))
    with pytest.raises(VersionNotFound, match="it has versions 0 to 3"):
        resolve(Run.open(server.url), 17)


def test_watching(store: Store, server: WebServer, versions: list[Model]) -> None:
    with Publisher(store) as publisher:
        publisher.publish(versions[0]).result(60)
        new = watch(server.url, since=-1, every=True, poll=0.05)
        for version in range(4):
            assert next(new) == version
            publisher.publish(versions[version + 1]).result(60)


# ── heartbeats and trust ─────────────────────────────────────────────────────────────────────────────────────────────


def test_heartbeats_go_to_the_bucket_that_is_named_or_nowhere(
    store: Store, server: WebServer, versions: list[Model], caplog: pytest.LogCaptureFixture
) -> None:
    publish(store, versions[:2])
    live = blank(versions[0])
    with caplog.at_level(logging.WARNING):
        replica = Replica(server.url, id="mute", heartbeat=1e-9)
        for _ in range(3):
            replica.sync(live)
            replica.beat()
    assert caplog.text.count("mute sends no heartbeats") == 1
    assert "grace period" in caplog.text
    assert heartbeats(Run.open(store)) == []
    Replica(server.url, id="heard", heartbeats=store).sync(live)
    (beat,) = heartbeats(Run.open(store))
    assert (beat.replica, beat.version) == ("heard", 1)


def test_reading_without_a_key_warns_once(
    store: Store, versions: list[Model], caplog: pytest.LogCaptureFixture
) -> None:
    key = SigningKey.generate()
    publish(store, versions[:2], sign=key)
    with caplog.at_level(logging.WARNING), serving(store) as server:
        live = blank(versions[0])
        Replica(server.url, heartbeat=0, trust=key.public).sync(live)
        assert "without a trusted key" not in caplog.text
        for _ in range(3):
            Run.open(server.url)
    assert caplog.text.count("is read without a trusted key") == 1
    assert same(live, versions[1])


# ── bad answers ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Follower:
    """A replica that follows in a thread; nothing but its versions may ever be seen in its weights."""

    def __init__(self, store: Store, versions: list[Model]) -> None:
        self.versions, self.live = versions, blank(versions[0])
        self.replica = Replica(store, heartbeat=0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def _follow(self) -> None:
        for _ in self.replica.follow(self.live, poll=0.02, stop=self._stop):
            pass

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not until():
            assert time.monotonic() < deadline, (self.replica, self.replica.trouble)
            assert self._thread.is_alive()
            time.sleep(0.005)

    def reaches(self, version: int) -> None:
        self.wait(lambda: self.replica.version == version)
        with self.replica.lock:
            assert same(self.live, self.versions[version])

    def fails(self, said: str) -> None:
        self.wait(lambda: said in self.replica.trouble)
        with self.replica.lock:
            assert same(self.live, self.versions[0]), "weights are untouched"

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def answers(keys: str, status: int, data: bytes = b"", **headers: str) -> Fault:
    def fault(handler: Handler, key: str) -> bool:
        if not key.startswith(keys):
            return False
        handler.answer(status, data, **headers)
        return True

    return fault


def compressed(handler: Handler, key: str) -> bool:
    try:
        data = handler.server.store.get(key).data
    except StoreError:
        return False
    handler.answer(200, gzip.compress(data), **{"Content-Encoding": "gzip"})
    return True


def half_a_range(handler: Handler, key: str) -> bool:
    if not key.startswith(OBJECT) or handler.range is None:
        return False
    first, last = handler.range
    data = handler.server.store.get(key).data
    last = (first + min(last, len(data) - 1)) // 2
    handler.answer(206, data[first : last + 1], **{"Content-Range": f"bytes {first}-{last}/{len(data)}"})
    return True


def whole_for_a_range(handler: Handler, key: str) -> bool:
    if not key.startswith(OBJECT):
        return False
    handler.answer(200, handler.server.store.get(key).data)
    return True


def broken_off(handler: Handler, key: str) -> bool:
    if not key.startswith((OBJECT, HEAD)):
        return False
    data = handler.server.store.get(key).data
    handler.answer(200, data[:-1], **{"Content-Length": str(len(data))})
    handler.close_connection = True
    return True


def other_bits(handler: Handler, key: str) -> bool:
    if not key.startswith(OBJECT) or handler.range is None:
        return False
    first, last = handler.range
    data = bytearray(handler.server.store.get(key).data)[first : last + 1]
    data[-1] ^= 1
    handler.answer(206, bytes(data), **{"Content-Range": f"bytes {first}-{first + len(data) - 1}/*"})
    return True


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (compressed, "compressed (gzip)"),
        (half_a_range, "came back"),
        (whole_for_a_range, "let the proxy pass ranges on"),
        (broken_off, "1 bytes before its end"),
        (other_bits, "has the hash"),
        (answers("", 302, Location="https://elsewhere.example/run"), "redirects are not followed"),
        (answers("", 403), "no credentials"),
        (answers("", 429), "429"),
        (answers(VERSION, 500), "500"),
        (answers(OBJECT, 404), "no object at"),
        (answers(OBJECT, 200, b"<html>captive portal</html>"), ""),
    ],
    ids=lambda value: getattr(value, "__name__", "") or str(value),
)
def test_bad_answers_touch_no_weight_and_need_no_restart(
    store: Store,
    server: WebServer,
    versions: list[Model],
    fault: Fault,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # several ranges for the few bytes of an object
    monkeypatch.setattr(fetch, "PART", 256)
    with Publisher(store, anchor_ratio=1e9) as publisher, Follower(hasty(server.url), versions) as follower:
        publisher.publish(versions[0]).result(60)
        follower.reaches(0)
        server.fault = fault
        publisher.publish(versions[1]).result(60)
        follower.wait(lambda: bool(follower.replica.trouble))
        follower.fails(said)
        server.fault = None
        follower.reaches(1)


def test_a_head_that_stays_stale(
    store: Store, server: WebServer, versions: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "PROBE_WEB_S", 0.1)
    with Publisher(store) as publisher, Follower(hasty(server.url), versions) as follower:
        publisher.publish(versions[0]).result(60)
        follower.reaches(0)
        old = store.get(HEAD)
        server.fault = answers(HEAD, 200, old.data, ETag='"old"', Age="59")
        for version in range(1, 4):
            publisher.publish(versions[version]).result(60)
            follower.reaches(version)


def test_what_is_not_there_is_rarely_asked_for(store: Store, server: WebServer, versions: list[Model]) -> None:
    """No cache keeps a 404, so each reaches the bucket."""
    publish(store, versions[:1])
    with Follower(hasty(server.url), versions) as follower:
        follower.reaches(0)
        follower.wait(lambda: server.requests[HEAD] > 100)
    assert server.requests[keys.manifest(1)] <= 3, "at the start, and once in a minute"


def test_an_etag_that_never_changes(store: Store, server: WebServer, versions: list[Model]) -> None:
    def same_etag(handler: Handler, key: str) -> bool:
        handler.serve(key, ETag='"same"')
        return True

    server.fault = same_etag
    with Publisher(store) as publisher, Follower(hasty(server.url), versions) as follower:
        for version in range(4):
            publisher.publish(versions[version]).result(60)
            follower.reaches(version)


def test_a_damaged_object_that_a_cache_has_kept(store: Store, server: WebServer, versions: list[Model]) -> None:
    def kept(handler: Handler, key: str) -> bool:
        return handler.headers.get("Cache-Control") != "no-cache" and other_bits(handler, key)

    server.fault = kept
    with Publisher(store, anchor_ratio=1e9) as publisher, Follower(hasty(server.url), versions) as follower:
        for version in range(3):
            publisher.publish(versions[version]).result(60)
            follower.reaches(version)
            assert not follower.replica.trouble


def test_a_certificate_that_is_not_trusted_for_a_while(
    store: Store, versions: list[Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = certificate_of("127.0.0.1", tmp_path / "right.pem"), certificate_of("127.0.0.1", tmp_path / "wrong")
    monkeypatch.setenv("SSL_CERT_FILE", str(right))
    with serving(store, right) as server:

        def one_request_each(handler: Handler, key: str) -> bool:
            handler.close_connection = True
            return False

        server.fault = one_request_each
        with Publisher(store) as publisher, Follower(hasty(server.url), versions) as follower:
            publisher.publish(versions[0]).result(60)
            follower.reaches(0)
            server.present(wrong)
            publisher.publish(versions[1]).result(60)
            follower.fails("certificate is not trusted")
            server.present(right)
            follower.reaches(1)


def test_a_server_that_is_gone_for_a_while(store: Store, versions: list[Model]) -> None:
    with Publisher(store) as publisher, serving(store) as server, Follower(hasty(server.url), versions) as follower:
        publisher.publish(versions[0]).result(60)
        follower.reaches(0)
        server.fault = answers("", 503, **{"Retry-After": "0"})
        publisher.publish(versions[1]).result(60)
        follower.fails("503")
        server.fault = None
        follower.reaches(1)


def test_a_follower_stays_away_for_as_long_as_it_is_told() -> None:
    """Not by the clock: by what it waits for."""

    class Counted(threading.Event):
        waited = 0.0

        def wait(self, timeout: float | None = None) -> bool:
            self.waited += timeout or 0.0
            now[0] += timeout or 0.0
            return False

    now = [1000.0]
    rests = set()
    for _ in range(50):
        stop = Counted()
        with (
            Watcher(open_store("memory://rest"), poll=1.0, stop=stop) as watcher,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr("deltawire.bucket.watch.time.monotonic", lambda: now[0])
            watcher._listener = threading.Thread()  # ended: nothing is announced
            watcher.failed(StoreUnavailable("slow down", retry_after=60.0))
            watcher.wait()
        assert 60 <= stop.waited <= 77
        rests.add(round(stop.waited, 1))
    assert len(rests) > 10, "followers that were told the same come back one after the other"
    with Watcher(open_store("memory://rest"), poll=1.0, stop=Counted()) as watcher:
        watcher.failed(StoreUnavailable("never", retry_after=1e9))
        assert watcher._rests_until - time.monotonic() < 400


def test_addresses_in_a_row(store: Store, server: WebServer, versions: list[Model], tmp_path: Path) -> None:
    """A CDN first, and the bucket itself where the CDN is of no use."""
    bucket = open_store(tmp_path / "run")
    publish(bucket, versions[:3])
    for item in bucket.list():
        store.put(item.key, bucket.get(item.key).data)
    for fault in (None, compressed, answers("", 302, Location="https://elsewhere.example/"), answers("", 403)):
        server.fault = fault
        live = blank(versions[0])
        assert Replica(f"{server.url},{bucket.url}", heartbeat=0).sync(live) == 2
        assert same(live, versions[2])
