"""A Hugging Face bucket: the real client against the stand-in."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltawire.core.errors import (
    AlreadyExists,
    BadURL,
    MissingExtra,
    ObjectNotFound,
    PermissionDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    Unsupported,
)
from deltawire.store import HubStore, Store, open_store
from deltawire.store.base import Announcing
from deltawire.testing import StoreTests
from tests.hub_stand_in import Fault, HubStandIn


def address() -> str:
    return f"hf://buckets/me/{uuid.uuid4().hex}/runs/one"


def bucket_of(store: Store) -> str:
    return "/".join(store.url.split("/")[3:5])


@pytest.fixture
def store(hub: HubStandIn) -> HubStore:
    return HubStore.from_url(address())


class TestHubStore(StoreTests):
    page_size = 20

    @pytest.fixture
    def store(self, hub: HubStandIn) -> Store:
        return HubStore.from_url(address())


# ── addresses and buckets ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "url",
    ["hf://me/name", "hf://buckets/me", "hf://buckets/me/", "hf://buckets", "hf://buckets/me/x/../y", "hf:///me/x"],
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(BadURL):
        open_store(url)


@pytest.mark.parametrize("url", ["hf://hf_secret@buckets/me/x", "hf://buckets/me/x?token=hf_secret"])
def test_an_address_with_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(BadURL) as caught:
        open_store(url)
    assert "hf_secret" not in str(caught.value)


def test_runs_share_a_bucket(hub: HubStandIn) -> None:
    bucket = f"hf://buckets/me/{uuid.uuid4().hex}"
    one, two, whole = (open_store(bucket + path) for path in ("/a/b", "/a/bc/", ""))
    one.put("key", b"1")
    two.put("key", b"2")
    assert [x.key for x in one.list()] == [x.key for x in two.list()] == ["key"]
    assert [x.key for x in whole.list()] == ["a/b/key", "a/bc/key"]
    assert (one.get("key").data, two.get("key").data, two.url) == (b"1", b"2", f"{bucket}/a/bc")


def test_the_first_put_makes_a_private_bucket(hub: HubStandIn, store: HubStore) -> None:
    with pytest.raises(ObjectNotFound, match="no such bucket"):
        store.get("key")
    assert list(store.list()) == []
    store.delete("key")
    others = [HubStore.from_url(store.url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda x: x[1].put(f"{x[0]}", b"x"), enumerate(others)))
    assert [x.key for x in store.list()] == ["0", "1", "2", "3"]
    assert hub.contents.buckets[bucket_of(store)].private


def test_a_bucket_that_may_not_be_made(hub: HubStandIn) -> None:
    store = open_store("hf://buckets/somebody/else")
    with pytest.raises(PermissionDenied, match="hf buckets create somebody/else"):
        store.put("key", b"x")


# ── who we are ───────────────────────────────────────────────────────────────────────────────────────────────────────


def each_call(store: Store) -> list[Callable[[], object]]:
    return [
        lambda: store.get("key"),
        lambda: store.get_if_changed("key", "etag"),
        lambda: store.get_range("key", 0, 1),
        lambda: store.head("key"),
        lambda: list(store.list()),
        lambda: store.put("key", os.urandom(8)),
        lambda: store.put("key", lambda: [os.urandom(8)]),
        lambda: store.put_if_absent("other", os.urandom(8)),
        lambda: store.delete("key"),
    ]


def test_a_wrong_token(store: HubStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("key", b"x")
    for token in ("hf_wrong", ""):
        monkeypatch.setenv("HF_TOKEN", token)
        for call in each_call(HubStore.from_url(store.url)):
            with pytest.raises(PermissionDenied, match="hf auth login"):
                call()


def test_a_token_that_may_only_read(hub: HubStandIn, store: HubStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("key", b"x")
    monkeypatch.setenv("HF_TOKEN", hub.read_token)
    reader = HubStore.from_url(store.url)
    assert reader.get("key").data == b"x"
    for call in each_call(reader)[-4:]:
        with pytest.raises(PermissionDenied, match="settings/tokens"):
            call()


def test_the_token_of_the_login_file(hub: HubStandIn, store: HubStore, tmp_path: Path) -> None:
    store.put("key", b"from the file")
    (tmp_path / "token").write_text(hub.token)
    code = f"from deltawire.store import open_store; print(open_store({store.url!r}).get('key').data)"
    env = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**env, "HF_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "b'from the file'", done.stderr


def test_without_the_client(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[hub\]"):
        open_store(address())


def test_offline(store: HubStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StoreError, match="HF_HUB_OFFLINE") as caught:
        store.get("key")
    assert not isinstance(caught.value, StoreUnavailable)


def test_a_hub_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    store = HubStore.from_url(address())
    for call in each_call(store):
        with pytest.raises(StoreUnavailable):
            call()


# ── answers without an end ────────────────────────────────────────────────────────────────────────────────────────────


def test_nesting_without_an_end(hub: HubStandIn, store: HubStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("key", b"x")
    monkeypatch.setattr("httpx2.Response.json", lambda _: json.loads("[" * 100_000))
    with pytest.raises(StoreError, match="not how the Hub answers"):
        store.head("key")


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────

CONTROL = ["HEAD /buckets/", "POST .*/paths-info", "GET .*/tree", "POST .*/batch"]
DATA = ["GET /v2/reconstructions", "GET /signed/", "POST /v1/xorbs", "POST /v1/shards"]


def round_trip(store: Store) -> None:
    """Every kind of request, over data that no earlier upload had."""
    big = os.urandom(200_000)
    store.put("big", lambda: [big[:150_000], big[150_000:]])
    store.put("key", os.urandom(32))
    assert store.head("big").size == 200_000
    assert [info.key for info in store.list()] == ["big", "key"]
    assert store.get("big").data == big
    assert store.get_range("big", 100_000, 50_000) == big[100_000:150_000]
    store.delete("key")
    assert [info.key for info in store.list()] == ["big"]


@pytest.mark.parametrize("request_", CONTROL)
def test_a_busy_hub_is_left_alone_for_as_long_as_it_asks(hub: HubStandIn, store: HubStore, request_: str) -> None:
    store.put("key", b"x")
    hub.faults.add(Fault(request_, status=429, retry_after=7))
    told = []
    for call in each_call(store):
        try:
            call()
        except StoreUnavailable as error:
            told.append(error.retry_after)
    assert told == [7.0]


@pytest.mark.parametrize("request_", [*CONTROL, *DATA, "GET .*/xet-read-token", "GET .*/xet-write-token"])
def test_faults_are_overcome(hub: HubStandIn, store: HubStore, request_: str) -> None:
    """One after the other, all on the same kind of request: busy, broken, cut off, slow, answer lost."""
    hub.faults.add(
        Fault(request_, status=429, retry_after=0),
        Fault(request_, status=503),
        Fault(request_, drop=True),
        Fault(request_, delay_s=0.2),
        Fault(request_, drop=True, after=True),
    )
    round_trip(open_store(store.url))


def test_a_truncated_download(hub: HubStandIn, store: HubStore) -> None:
    data = os.urandom(300_000)
    store.put("key", data)
    hub.faults.add(Fault("GET /signed/", truncate=100_000))
    assert store.get("key").data == data


def test_data_that_never_comes(hub: HubStandIn, store: HubStore) -> None:
    store.put("key", os.urandom(100))
    hub.faults.add(Fault("GET /v2/reconstructions", times=1000, status=404), Fault("GET /v1/rec", times=9, status=404))
    # the engine says so, or ends without a byte
    with pytest.raises((ObjectNotFound, StoreUnavailable)):
        store.get("key")


def test_a_create_whose_answer_was_lost_is_recognised(hub: HubStandIn, store: HubStore) -> None:
    patient = open_store(store.url)
    patient.put("other", b"x")
    hub.faults.add(Fault("POST .*/batch", drop=True, after=True))
    patient.put_if_absent("key", b"mine")
    with pytest.raises(AlreadyExists):
        patient.put_if_absent("key", b"mine")


def test_a_storage_token_that_is_withdrawn_is_asked_for_again(hub: HubStandIn, store: HubStore) -> None:
    patient = open_store(store.url)
    round_trip(patient)
    for kind in ("read", "write"):
        hub.xet_tokens[kind] = uuid.uuid4().hex
    round_trip(patient)
    # and one that is refused from the start is an answer
    hub.faults.add(Fault("GET /v2/rec", times=1000, status=401))

    def get() -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):  # the engine says so, or ends without a byte
                HubStore.from_url(store.url).get("big")
                return

    with pytest.raises(PermissionDenied):
        get()


@pytest.mark.parametrize("request_", [*CONTROL, "GET .*/xet-write-token"])
def test_answers_that_the_hub_would_not_give_are_refused(hub: HubStandIn, request_: str) -> None:
    """Such as those of a proxy that wants a login: status 200, and something else in it."""
    store = HubStore.from_url(address())
    HubStore.from_url(store.url).put("key", b"x")
    said = []
    for call in each_call(store):
        hub.faults.add(Fault(request_, status=200))
        try:
            call()
        except StoreError as error:
            said.append(str(error))
        hub.faults.clear()
    # a batch that says nothing of failures has gone well
    assert said or "batch" in request_
    assert all("Hub" in text for text in said)


def test_a_full_bucket(hub: HubStandIn, store: HubStore) -> None:
    store.put("key", b"old")
    hub.faults.add(Fault("POST .*/batch", status=507))
    with pytest.raises(StoreFull):
        store.put("key", b"new")
    assert store.get("key").data == b"old"


def test_an_overwrite_that_is_late_shows_the_old_object(hub: HubStandIn, store: HubStore) -> None:
    store.put("key", b"old")
    hub.faults.add(Fault("addFile .*key", late_s=3600))
    store.put("key", b"new")
    assert store.get("key").data == b"old"
    assert store.head("key").size == 3


# ── what it costs ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_idle_poll_is_one_head_request(hub: HubStandIn, store: HubStore) -> None:
    store.put("head.json", b"{}")
    etag = store.get("head.json").etag
    hub.requests.clear()
    for _ in range(100):
        assert store.get_if_changed("head.json", etag) is None
    assert len(hub.requests) == 100
    assert all(line.startswith("HEAD /buckets/") for line in hub.requests)


def test_parts_of_one_object_ask_once_what_it_is(hub: HubStandIn, store: HubStore) -> None:
    data = os.urandom(2_000_000)
    store.put("key", data)
    hub.requests.clear()
    parts = [store.get_range("key", start, 100_000) for start in range(0, len(data), 100_000)]
    assert b"".join(parts) == data
    asked = [line for line in hub.requests if line.startswith("HEAD")]
    tokens = [line for line in hub.requests if "token" in line]
    assert (len(asked), len(tokens)) == (1, 1)


def test_small_puts_take_one_token(hub: HubStandIn, store: HubStore) -> None:
    store.put("first", b"x")
    hub.requests.clear()
    for number in range(10):
        store.put("key", b"%d" % number)
    assert sum("token" in line for line in hub.requests) == 0
    assert sum("/api/" in line for line in hub.requests) == 10


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Listener:
    """Collects announcements on a thread, as a watcher would."""

    def __init__(self, store: Announcing) -> None:
        self.stop, self.heard, self.error = threading.Event(), [], None
        self._news = threading.Condition()
        self._store = store
        self.thread = threading.Thread(target=self._listen)
        self.thread.start()

    def _listen(self) -> None:
        try:
            for key in self._store.announcements(self.stop):
                with self._news:
                    self.heard.append(key)
                    self._news.notify_all()
        except Exception as error:
            self.error = error
        with self._news:
            self._news.notify_all()

    def wait_for(self, *ways: list[str]) -> None:
        """Until it has heard one of these."""
        with self._news:
            assert self._news.wait_for(lambda: self.heard in ways or self.error, 120), self.heard
        assert self.error is None

    def end(self) -> None:
        self.stop.set()
        self.thread.join(120)
        assert not self.thread.is_alive()


@pytest.fixture
def listen() -> Iterator[Callable[[Announcing], Listener]]:
    listeners: list[Listener] = []

    def start(store: Announcing) -> Listener:
        listeners.append(Listener(store))
        return listeners[-1]

    yield start
    for listener in listeners:
        listener.end()


def test_changes_are_announced(hub: HubStandIn, store: HubStore, listen: Callable[[Announcing], Listener]) -> None:
    store.put("before", b"x")
    listener = listen(open_store(store.url))
    listener.wait_for([""])
    store.put("versions/000001.json", b"x")
    HubStore.from_url(store.url.removesuffix("/one") + "/another").put("key", b"x")
    store.delete("before")
    listener.wait_for(["", "versions/000001.json", "before"])
    listener.end()
    assert listener.error is None


def test_a_listener_is_moved_on_without_missing_anything(
    hub: HubStandIn, store: HubStore, listen: Callable[[Announcing], Listener]
) -> None:
    store.put("a", b"x")
    listener = listen(store)
    listener.wait_for([""])
    hub.faults.add(Fault(f"EVENTS {bucket_of(store)}"))
    store.put("b", b"x")
    # the server moves it on when it has news, or has been silent for a second
    listener.wait_for(["", "b", ""], ["", "", "b"])


def test_a_listener_that_has_missed_something_is_told_to_look(
    hub: HubStandIn, store: HubStore, listen: Callable[[Announcing], Listener]
) -> None:
    store.put("a", b"x")
    listener = listen(store)
    listener.wait_for([""])
    hub.faults.add(Fault(f"EVENTS {bucket_of(store)}", status=410))
    listener.wait_for(["", "", ""])
    store.put("b", b"x")
    listener.wait_for(["", "", "", "b"])


def test_a_hub_without_events(hub: HubStandIn, store: HubStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnavailable, match="no such bucket"):
        list(store.announcements(threading.Event()))
    store.put("key", b"x")
    monkeypatch.setattr(hub, "announces", False)
    with pytest.raises(Unsupported):
        list(store.announcements(threading.Event()))
    # 501 is a server that will never do it, 502 one that may
    for status, kind in ((501, Unsupported), (502, StoreUnavailable)):
        hub.faults.add(Fault("GET .*/events", status=status))
        with pytest.raises(kind):
            list(store.announcements(threading.Event()))
    hub.faults.add(Fault("GET .*/events", status=429, retry_after=3))
    with pytest.raises(StoreUnavailable) as caught:
        list(store.announcements(threading.Event()))
    assert caught.value.retry_after == 3.0


def test_a_stream_that_breaks(hub: HubStandIn, store: HubStore, listen: Callable[[Announcing], Listener]) -> None:
    store.put("key", b"x")
    hub.faults.add(Fault("GET .*/events", drop=True))
    with pytest.raises(StoreUnavailable):
        list(store.announcements(threading.Event()))


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_secret_is_in_any_message(
    hub: HubStandIn, store: HubStore, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    # not httpcore2, whose debug log is a trace of the wire
    for logger in ("deltawire", "huggingface_hub", "httpx2", "hf_xet"):
        caplog.set_level(logging.DEBUG, logger=logger)
    told = [repr(store), repr(vars(store)), store.url]
    faults: list[tuple[str, int, Sequence[int]]] = [
        (request_, 403, range(9)) for request_ in (*CONTROL, "GET .*-token")
    ]
    # a get and a put: the engine repeats by itself what fails, which takes its time
    faults += [(request_, 500, (0, 5)) for request_ in DATA]
    for request_, status, numbers in faults:
        before = len(told)
        for number in numbers:
            store.put("key", os.urandom(8))
            hub.faults.add(Fault(request_, times=50, status=status))
            try:
                each_call(HubStore.from_url(store.url))[number]()
            except StoreError:
                told.append(traceback.format_exc())
            hub.faults.clear()
        assert len(told) > before
    told += [caplog.text, *capfd.readouterr()]
    secrets = [hub.token, hub.signature, *hub.xet_tokens.values()]
    assert not [text for text in told for secret in secrets if secret in text]
