"""The server of the page: what it answers, to whom, and how soon."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from dash_support import real_run

from deltawire.core.errors import Misconfigured
from deltawire.dash import PageServer, serve
from deltawire.dash.server import CONNECTIONS, LOOK_EVERY
from deltawire.store import ObjectStore, Store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from support import HookedStore, history, publish, trained

TOKEN = "correct horse"


@pytest.fixture
def store() -> Store:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


@pytest.fixture
def page(store: Store) -> Iterator[PageServer]:
    with serve(store) as server:
        yield server


def get(server: PageServer, path: str, **headers: str) -> tuple[int, Any, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        data = answer.read()
        is_json = answer.headers.get("Content-Type") == "application/json"
        return answer.status, json.loads(data) if is_json and data else data, answer.headers
    finally:
        connection.close()


def test_the_document_and_then_only_what_is_new(store: Store, page: PageServer) -> None:
    versions = real_run(store, 4)
    status, found, _ = get(page, "/api/run?have=0")
    assert (status, found["document"]["newest"]) == (200, 3)
    status, nothing, _ = get(page, f"/api/run?have={found['revision']}")
    assert (status, nothing) == (204, b"")
    with Publisher(store) as publisher:
        publisher.resume(versions[-1])
        publisher.publish(trained(versions[-1], 7)).result(120)
    began = time.monotonic()
    while (after := get(page, f"/api/run?have={found['revision']}"))[0] == 204:
        assert time.monotonic() - began < 120
        time.sleep(0.05)
    assert after[1]["document"]["newest"] == 4
    assert after[1]["revision"] != found["revision"]
    with serve(store) as another:
        assert get(another, f"/api/run?have={found['revision']}")[0] == 200


def test_details(store: Store, page: PageServer) -> None:
    real_run(store, 6)
    get(page, "/api/run")
    assert get(page, "/api/versions?first=2&last=4")[1]["version"] == [2, 3, 4]
    assert [found["version"] for found in get(page, "/api/chain?first=0&last=1")[1]] == [0, 1]
    assert 3 in get(page, "/api/tensors?versions=3")[1]["versions"]
    assert sum(up + down for _, up, down in get(page, "/api/steps?version=3")[1]["rows"]) > 0


def test_steps_that_cannot_be_shown_are_told_to_who_asked_and_to_nobody_else(store: Store, page: PageServer) -> None:
    real_run(store, 4)
    before = get(page, "/api/run")[1]["document"]["steps"]
    status, said, _ = get(page, "/api/steps?version=777")
    assert (status, "no version 777" in said["error"]) == (404, True)
    assert get(page, "/api/steps?version=1")[1]["version"] == 1
    time.sleep(LOOK_EVERY)
    assert get(page, "/api/run")[1]["document"]["steps"] == before


def raw(server: PageServer, request: str) -> bytes:
    """All that the server sends until it ends the connection."""
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=120) as connection:
        connection.sendall(request.encode())
        said = b""
        # where the server closes before all was read, the kernel resets the connection
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                said += part
        return said


def test_the_body_of_a_request_is_not_taken_for_another_request(page: PageServer) -> None:
    inner = "GET /api/none HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for header in (f"Content-Length: {len(inner)}", "Transfer-Encoding: chunked"):
        said = raw(page, f"GET /api HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n{inner}")
        assert said.count(b"HTTP/1.1 ") == 1
        assert b"Connection: close" in said


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://[/api", "localhost", 400),
        ("http://evil.example/api/run", "localhost", 400),
        ("http://x@localhost/api/run", "localhost", 400),
        ("/api/run", "evil.example@localhost", 403),
        ("http://localhost/api/run", "localhost", 200),
    ],
)
def test_targets_and_hosts_of_others(page: PageServer, target: str, host: str, status: int) -> None:
    said = raw(page, f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 %d " % status)


def test_head_is_get_without_the_body_and_other_methods_are_refused(page: PageServer) -> None:
    head, _, body = raw(page, "HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"Content-Length: %d" % len(get(page, "/")[1]) in head
    assert body == b""
    for method in ("POST", "DELETE", "OPTIONS", "BREW"):
        said = raw(page, f"{method} /api/run HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 405 ")
        assert b"Content-Security-Policy" in head
        assert "read-only" in json.loads(body)["error"]


def test_the_address_of_a_server_on_all_addresses_can_be_opened(store: Store) -> None:
    server = PageServer(store, host="0.0.0.0", token=TOKEN)
    server.server_close()
    assert urlsplit(server.url).hostname == socket.gethostname().lower()


@pytest.mark.parametrize(
    "path",
    [
        "/api/steps?version=x",
        "/api/steps?version=²",
        "/api/steps",
        "/api/versions?first=1",
        "/api/tensors?versions=1,,2",
    ],
)
def test_bad_requests(store: Store, page: PageServer, path: str) -> None:
    publish(store, history(2))
    assert get(page, path.replace("²", "%C2%B2"))[0] == 400


@pytest.mark.parametrize("path", ["/run.json", "/api", "/api/../run.json", "/%2e%2e/etc/passwd"])
def test_nothing_else_is_served(page: PageServer, path: str) -> None:
    assert get(page, path)[0] == 404


def test_the_page_itself_has_no_data_and_strict_headers(store: Store, page: PageServer) -> None:
    publish(store, history(1))
    status, body, headers = get(page, "/")
    assert status == 200
    assert b'id="data">null</script>' in body
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_site_that_points_its_name_here_reads_nothing(store: Store, page: PageServer) -> None:
    publish(store, history(1))
    port = urlsplit(page.url).port
    for host in ("[", "evil.example", f"evil.example:{port}", "0.0.0.0", "", "127.0.0.1.evil.example"):
        assert get(page, "/api/run", Host=host)[0] == 403
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:80"):
        assert get(page, "/api/run", Host=host)[0] == 200


def test_without_a_token_only_this_machine_is_served(store: Store) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(Misconfigured, match="DELTAWIRE_TOKEN"):
            PageServer(store, host=host)


def test_a_token_opens_the_data_and_nothing_else_does(store: Store) -> None:
    publish(store, history(2))
    with serve(store, token=TOKEN) as page:
        # the page asks for it
        status, body, _ = get(page, "/")
        assert status == 200
        assert TOKEN.encode() not in body
        for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            status, said, _ = get(page, "/api/run", **wrong)
            assert status == 401
            assert TOKEN not in str(said)
        assert get(page, "/api/run", Authorization=f"Bearer {TOKEN}", Host="page.example")[0] == 200


def test_a_port_that_is_taken(store: Store, page: PageServer) -> None:
    with pytest.raises(Misconfigured, match="--port"):
        PageServer(store, port=urlsplit(page.url).port or 0)


def test_many_pages_cost_the_bucket_as_much_as_one(store: Store) -> None:
    publish(store, history(3))
    counting = CountingStore(store)
    with serve(counting) as page:
        get(page, "/api/run")
        counting.reset()
        began = time.monotonic()
        for _ in range(20):
            get(page, "/api/run")
        looks = 1 + (time.monotonic() - began) / 0.7
        # each look is a request for head and a listing
        assert counting.requests.total() <= 2 * looks


def test_connections_that_say_nothing_keep_nobody_out(store: Store, page: PageServer) -> None:
    publish(store, history(1))
    where = urlsplit(page.url).hostname or "", urlsplit(page.url).port or 0
    silent = [socket.create_connection(where) for _ in range(3 * CONNECTIONS)]
    try:
        assert get(page, "/api/run")[0] == 200
    finally:
        for connection in silent:
            connection.close()


def test_a_store_that_hangs_holds_up_one_page_and_not_the_others(store: Store) -> None:
    publish(store, history(2))
    hanging, released = threading.Event(), threading.Event()

    def hook(moment: str, verb: str, key: str) -> None:
        if hanging.is_set() and moment == "before":
            released.wait(120)

    with serve(HookedStore(store, hook)) as page:
        revision = get(page, "/api/run")[1]["revision"]
        hanging.set()
        time.sleep(LOOK_EVERY)
        held = threading.Thread(target=get, args=(page, f"/api/run?have={revision}"))
        held.start()
        try:
            while not page.live._lock.locked():
                time.sleep(0.01)
            assert get(page, f"/api/run?have={revision}")[0] == 204
            assert get(page, "/api/run")[1]["document"]["newest"] == 1
        finally:
            released.set()
            held.join()


def test_the_end_of_the_server_ends_connections_that_pages_keep_open(store: Store) -> None:
    with serve(store) as page:
        connection = http.client.HTTPConnection(urlsplit(page.url).netloc, timeout=120)
        connection.request("GET", "/")
        connection.getresponse().read()
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.request("GET", "/")
        connection.getresponse()
    connection.close()


def test_the_page_says_that_there_is_no_run_yet(store: Store, page: PageServer) -> None:
    status, found, _ = get(page, "/api/run")
    assert status == 200
    assert "there is no run" in found["document"]["problem"]
    assert get(page, "/api/steps?version=1")[0] == 404
