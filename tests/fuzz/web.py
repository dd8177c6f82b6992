"""Hostile answers to a reader over https.

https    each answer may be changed as bytes
proxy    all answers are wrong in one way, as those of a proxy that is configured wrongly; then they are right, and
         the same replica must go on
tls      no answer: a handshake that is changed as bytes, with a certificate that nobody trusts
"""

from __future__ import annotations

import gzip
import re
import socket
import ssl
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from unittest import mock

import mutate
from targets import Case, Wrong

from deltawire.core import keys
from deltawire.core.errors import DeltawireError, ObjectNotFound
from deltawire.replica import Replica
from deltawire.store import HttpStore, ObjectStore, Retrying, Store
from soak.certificate import certificate_of
from support import blank, copy, history, publish, same

STATUS = (200, 200, 200, 204, 206, 206, 301, 304, 400, 404, 410, 416, 429, 500, 503, 100, 0, 999)
ODD_HEADERS = (
    "Content-Length: 0", "Content-Length: -1", "Content-Length: x", f"Content-Length: {10**9}",
    f"Content-Length: {10**30}", f"Content-Length: {'9' * 5000}", "Transfer-Encoding: chunked",
    "Content-Encoding: gzip", "Content-Encoding: br\x1b[2J", "Content-Range: bytes 0-9/10",
    "Content-Range: bytes 0-0/*", "Content-Range: bytes */0", "Content-Range: pages 1-2/3",
    f"Content-Range: bytes {'9' * 19}-{'9' * 19}/{'9' * 19}", "ETag: ", "ETag: \xff\x00", 'ETag: "a"\r\n b',
    f"ETag: {'e' * 60_000}", "Age: 37", "Age: x", "Retry-After: 0", "Retry-After: nan", f"Retry-After: {'9' * 400}",
    "Retry-After: Wed, 99 Foo 99999 99:99:99 GMT", "Last-Modified: x", "Last-Modified: ",
    "Location: http://169.254.169.254/latest", "Location: //\x1b", "Connection: close", "Connection: upgrade", "x",
    ": y", "X: " + "y" * 70_000, "\r\n".join(f"X-{number}: y" for number in range(300)),
)  # fmt: skip

WRONG = (
    "stale head", "fixed etag", "kept 404", "compressed", "whole for a range", "half a range", "other range",
    "redirect", "cut off",
)  # fmt: skip


class Web:
    """`Replica.sync` from a server that answers wrongly."""

    kinds = ("https", "proxy", "tls")

    def __init__(self) -> None:
        self._models = history(6, changes=7)
        self._store: Store = ObjectStore.from_url("memory://fuzz-web")
        publish(self._store, self._models, anchor_ratio=1e9)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._seed, self._share, self._counts = "", 0.0, Counter[str]()
        self._wrong = ""
        """One of WRONG, or empty."""
        self._old_head = self._store.get(keys.HEAD).data.replace(b'"version":5', b'"version":3')
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:
            self._tls.load_cert_chain(certificate_of("127.0.0.1", Path(folder, "pem")))
        threading.Thread(target=self._serve, daemon=True).start()

    def make(self, rng: Random, kind: str) -> Case:
        how = rng.choice(WRONG).replace(" ", "-") if kind == "proxy" else rng.choice((0.03, 0.1, 0.5))
        return Case(kind, f"{rng.choice((None, 0, 3))} {how} {rng.getrandbits(64):x}", {})

    def run(self, case: Case) -> None:
        have, how, seed = case.action.split()
        live = blank(self._models[0]) if have == "None" else copy(self._models[int(have)])
        before = copy(live)
        scheme = "https" if case.kind == "tls" else "http"
        url = f"{scheme}://127.0.0.1:{self._socket.getsockname()[1]}/run"
        store = Retrying(HttpStore(url), attempts=2, sleep=lambda seconds: None)
        replica = Replica(store, heartbeat=0)
        self._seed = seed
        self._share, self._wrong = (0.0, how.replace("-", " ")) if case.kind == "proxy" else (float(how), "")
        self._counts.clear()

        def sync() -> None:
            try:
                with mock.patch("deltawire.store.http.SILENT_S", 5.0), mock.patch("deltawire.bucket.fetch.PART", 64):
                    replica.sync(live)
            finally:
                reached = replica.version
                if not same(live, before if reached is None else self._models[reached]):
                    raise Wrong(f"the weights are not those of version {reached}")

        if case.kind != "proxy":
            sync()
            return
        with suppress(DeltawireError):
            sync()
        self._wrong = ""
        try:
            sync()
        except DeltawireError as error:
            raise Wrong("it does not go on once answers are right") from error
        if replica.version != len(self._models) - 1:
            raise Wrong(f"version {replica.version} once answers are right")

    # ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(30)
            asked = b""
            while b"\r\n\r\n" not in asked:
                if not (part := connection.recv(1 << 16)):
                    return
                asked += part
                if asked[0] == 22:  # a handshake, and not a method
                    connection.sendall(self._handshake(asked))
                    return
            connection.sendall(self._answer(asked.decode("latin-1")))
            connection.shutdown(socket.SHUT_WR)

    def _handshake(self, hello: bytes) -> bytes:
        """What a server says to a client's first words, or something like it."""
        self._counts["tls"] += 1
        rng = Random(f"{self._seed}/{self._counts['tls']}")
        heard, said = ssl.MemoryBIO(), ssl.MemoryBIO()
        heard.write(hello)
        with suppress(ssl.SSLError):  # also where more would have to come
            self._tls.wrap_bio(heard, said, server_side=True).do_handshake()
        right = said.read()
        return rng.choice((right, mutate.of_bytes(rng, right), b"HTTP/1.1 400 No\r\n\r\n", rng.randbytes(300)))

    def _spoiled(self, key: str, asked: str) -> tuple[int, list[str], bytes]:
        """An answer that is wrong as `self._wrong` says."""
        status, lines, body = self._good(key, asked)
        ranged = status == 206
        match self._wrong:
            case "stale head" if key == keys.HEAD:
                return status, [*lines, "Age: 59"], self._old_head
            case "fixed etag":
                lines = ['ETag: "same"']
                if 'If-None-Match: "same"' in asked:
                    return 304, lines, b""
            case "kept 404" if key in (keys.HEAD, keys.manifest(5)) and "no-cache" not in asked:
                return 404, ["Age: 59"], b""
            case "compressed":
                return status, [*lines, "Content-Encoding: gzip"], gzip.compress(body)
            case "whole for a range" if ranged:
                return 200, lines[:2], self._store.get(key).data
            case "half a range" if ranged:
                return status, lines, body[: len(body) // 2]
            case "other range" if ranged:
                return status, [*lines[:2], f"Content-Range: bytes 1-{len(body)}/*"], body
            case "redirect":
                return 302, [f"Location: http://elsewhere.invalid/{key}"], b""
            case "cut off":
                return status, [*lines, f"Content-Length: {len(body) + 1}"], body
        return status, lines, body

    def _answer(self, asked: str) -> bytes:
        method, path, _ = asked.split(" ", 2)
        key = path.removeprefix("/run/")
        self._counts[asked] += 1
        rng = Random(f"{self._seed}/{method} {path}/{self._counts[asked]}")
        status, lines, body = self._spoiled(key, asked)
        hostile = rng.random() < self._share
        if hostile and rng.random() < 0.5:
            status = rng.choice(STATUS)
        if hostile and rng.random() < 0.3:
            body = mutate.of_bytes(rng, body)
        if self._wrong != "cut off" and not (hostile and rng.random() < 0.2):
            lines.append(f"Content-Length: {len(body)}")
        if hostile:
            lines = [line for line in lines if rng.random() < 0.8]
            lines += rng.choices(ODD_HEADERS, k=rng.choice((0, 1, 1, 2, 5)))
        head = "\r\n".join([f"HTTP/1.1 {status} Because", *lines, "", ""]).encode("latin-1", "replace")
        data = head + (b"" if method == "HEAD" else body)
        return mutate.of_bytes(rng, data) if hostile and rng.random() < 0.3 else data

    def _good(self, key: str, asked: str) -> tuple[int, list[str], bytes]:
        try:
            found = self._store.get(key)
        except ObjectNotFound:
            return 404, [], b"nothing here"
        lines = [f'ETag: "{found.etag}"', "Last-Modified: Wed, 18 Nov 2026 21:00:00 GMT"]
        if (part := re.search(r"(?im)^Range: bytes=(\d+)-(\d+)", asked)) is None:
            return 200, lines, found.data
        data = found.data[int(part[1]) : int(part[2]) + 1]
        return 206, [*lines, f"Content-Range: bytes {part[1]}-{int(part[1]) + len(data) - 1}/{len(found.data)}"], data
