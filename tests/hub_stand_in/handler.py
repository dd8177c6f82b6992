"""The routes: the Hub's bucket API, and the Xet storage behind it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from .contents import Bucket, stamp
from .faults import Fault
from .xet import Refused

if TYPE_CHECKING:
    from . import HubStandIn

_BLOCK = 1 << 20
_PING_S = 1.0


class Answer(Exception):
    """Ends a request early, with this."""

    def __init__(self, status: int, error: str, code: str = "", **headers: str) -> None:
        super().__init__(error)
        self.status, self.error = status, error
        self.headers = {**({"X-Error-Code": code} if code else {}), "X-Error-Message": error, **headers}


class _CutOff(Exception):
    """A fault ended this connection."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: HubStandIn
    # set by the subclass that each server makes

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (_CutOff, ConnectionError, TimeoutError):
            self.close_connection = True

    def _request(self) -> None:
        self._url = urlsplit(self.path)
        self._query = {name: values[0] for name, values in parse_qs(self._url.query).items()}
        self._base = f"http://{self.headers.get('Host')}"
        self._left = int(self.headers.get("Content-Length") or 0)
        self._chunked = self.headers.get("Transfer-Encoding", "").lower() == "chunked"
        self._fault = self.hub.faults.take(f"{self.command} {self._url.path}")
        self._started = False
        try:
            if self._fault is not None:
                time.sleep(self._fault.delay_s)
                if not self._fault.after:
                    self._fail(self._fault)
            self._route()
        except Answer as answer:
            self._reply(answer.status, {"error": answer.error}, answer.headers)
        except Refused as refused:
            self._reply(400, {"error": str(refused)})

    do_GET = do_HEAD = do_POST = do_DELETE = _request

    def _fail(self, fault: Fault) -> None:
        if fault.drop:
            raise _CutOff
        if fault.status:
            self._fault = None
            wait = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
            raise Answer(fault.status, HTTPStatus(fault.status).phrase, **wait)

    def _route(self) -> None:
        for method, pattern, handle in _ROUTES:
            if self.command in method and (found := re.fullmatch(pattern, self._url.path)):
                handle(self, *found.groups())
                return
        raise Answer(404, f"no route {self.command} {self._url.path}")

    # ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _body(self) -> Iterator[bytes]:
        """What was sent, in blocks, so that a xorb need not fit in memory."""
        if self._chunked:
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            self._chunked = False
            return
        while self._left:
            data = self.rfile.read(min(_BLOCK, self._left))
            if not data:
                raise ConnectionError("the request ended early")
            self._left -= len(data)
            yield data

    def _json(self) -> Any:
        return json.loads(b"".join(self._body()) or b"{}")

    def _reply(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        data = b"" if content is None or status == 304 else json.dumps(content).encode()
        self._send(status, len(data), iter([data]), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, size: int, blocks: Iterator[bytes], headers: dict[str, str]) -> None:
        for _ in self._body():
            pass  # what nobody read would be taken for the next request
        self.hub.note(self.command, self.path, status)
        fault = self._fault
        if fault is not None and fault.after:
            self._fault = None
            if fault.status:
                self._fail(fault)
            raise _CutOff
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(size))
        if self.command == "HEAD" or not size:
            self.end_headers()
            return
        limit = size if fault is None or fault.truncate is None else fault.truncate
        # head and first block in one packet
        self._headers_buffer.append(b"\r\n")  # type: ignore[attr-defined]
        pending = b"".join(self._headers_buffer)  # type: ignore[attr-defined]
        self._headers_buffer = []
        sent = 0
        for data in blocks:
            data = data[: limit - sent]
            self.wfile.write(pending + data)
            pending, sent = b"", sent + len(data)
            if sent >= limit:
                break
        if sent < size:
            raise _CutOff

    # ── who may do what ──────────────────────────────────────────────────────────────────────────────────────────────

    def _bearer(self) -> str | None:
        kind, _, token = (self.headers.get("Authorization") or "").partition(" ")
        return token if kind == "Bearer" else None

    def _bucket(self, namespace: str, name: str, *, write: bool = False) -> Bucket:
        bucket = self.hub.contents.buckets.get(f"{namespace}/{name}")
        self._authorize(write=write, needed=write or bucket is None or bucket.private)
        if bucket is None:
            raise Answer(404, "Repository not found", "RepoNotFound")
        return bucket

    def _authorize(self, *, write: bool, needed: bool = True) -> None:
        token = self._bearer()
        if token is None and not needed:
            return
        if token not in (self.hub.token, self.hub.read_token):
            raise Answer(401, "Invalid credentials in Authorization header" if token else "Unauthorized")
        if write and token != self.hub.token:
            raise Answer(403, "this token may only read")

    def _authorize_storage(self, *, write: bool) -> None:
        token = self._bearer()
        if token not in (self.hub.xet_tokens["write"], self.hub.xet_tokens["read"]):
            raise Answer(401, "Unauthorized")
        if write and token != self.hub.xet_tokens["write"]:
            raise Answer(403, "this token may only read")

    # ── the Hub ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _create(self, namespace: str, name: str) -> None:
        wanted = self._json()
        self._authorize(write=True)
        id, buckets = f"{namespace}/{name}", self.hub.contents.buckets
        if namespace not in self.hub.namespaces:
            raise Answer(403, f"this token may not create buckets in {namespace}")
        with self.hub.contents.lock:
            if id in buckets:
                raise Answer(409, "this bucket exists already")
            buckets[id] = Bucket(id, wanted.get("visibility") == "private")
        self._reply(200, {"url": f"{self._base}/buckets/{id}"})

    def _info(self, namespace: str, name: str) -> None:
        bucket = self._bucket(namespace, name)
        entries = bucket.listed()
        times = {"createdAt": stamp(bucket.created), "updatedAt": stamp(bucket.created)}
        sizes = {"size": sum(entry.size for entry in entries), "totalFiles": len(entries)}
        self._reply(200, {"id": bucket.id, "private": bucket.private, **times, **sizes})

    def _remove(self, namespace: str, name: str) -> None:
        bucket = self._bucket(namespace, name, write=True)
        del self.hub.contents.buckets[bucket.id]
        self._reply(200, {})

    def _xet_token(self, namespace: str, name: str, kind: str) -> None:
        self._bucket(namespace, name, write=kind == "write")
        token, expires = self.hub.xet_tokens[kind], int(time.time()) + 3600
        said = {"X-Xet-Cas-Url": self._base, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expires)}
        self._reply(200, {"accessToken": token, "exp": expires, "casUrl": self._base}, said)

    def _batch(self, namespace: str, name: str) -> None:
        lines = b"".join(self._body()).splitlines()
        bucket = self._bucket(namespace, name, write=True)
        changes, failed = [], []
        for line in lines:
            operation = json.loads(line)
            path = operation["path"]
            if operation["type"] == "deleteFile":
                change = bucket.delete(path)
                if change is None:
                    failed.append({"path": path, "error": "no such file"})
                    continue
            else:
                hash = operation["xetHash"]
                try:
                    size = self.hub.contents.size(hash)
                except KeyError:
                    failed.append({"path": path, "error": f"no file {hash} was uploaded"})
                    continue
                late = self.hub.faults.take(f"addFile {path}")
                change = bucket.add(path, hash, size, operation["mtime"] / 1000, late.late_s if late else 0.0)
            changes.append(change)
        if changes:
            with bucket.changed:
                bucket.events.append(changes)
                bucket.changed.notify_all()
        counts = {"processed": len(lines), "succeeded": len(changes), "failed": failed}
        self._reply(422 if failed and not changes else 200, {"success": not failed, **counts})

    def _tree(self, namespace: str, name: str, encoded: str | None) -> None:
        prefix = unquote((encoded or "")[1:])
        recursive = self._query.get("recursive", "false").lower() == "true"
        after, limit = self._query.get("cursor", ""), int(self._query.get("limit", self.hub.page))
        found: dict[str, dict[str, Any]] = {}
        for entry in self._bucket(namespace, name).listed():
            if entry.path.startswith(prefix):
                inside = entry.path[len(prefix) :].lstrip("/")
                if recursive or "/" not in inside:
                    found[entry.path] = entry.json()
                else:
                    folder = entry.path[: len(entry.path) - len(inside)] + inside.split("/")[0]
                    found[folder] = {"type": "directory", "path": folder, "uploadedAt": stamp(entry.uploaded)}
        paths = sorted(path for path in found if path > after)
        headers = {}
        if len(paths) > limit:
            paths = paths[:limit]
            query = f"recursive={recursive}&limit={limit}&cursor={quote(paths[-1], safe='')}"
            headers["Link"] = f'<{self._base}{self._url.path}?{query}>; rel="next"'
        self._reply(200, [found[path] for path in paths], headers)

    def _paths_info(self, namespace: str, name: str) -> None:
        wanted = self._json()["paths"]
        bucket = self._bucket(namespace, name)
        found = (bucket.entry(path) for path in wanted)
        self._reply(200, [entry.json() for entry in found if entry is not None])

    def _resolve(self, namespace: str, name: str, encoded: str) -> None:
        bucket = self._bucket(namespace, name)
        entry = bucket.entry(unquote(encoded))
        if entry is None:
            raise Answer(404, "Entry not found", "EntryNotFound")
        auth = f'<{self._base}/api/buckets/{bucket.id}/xet-read-token>; rel="xet-auth"'
        headers = {
            "X-Xet-Hash": entry.hash, "X-Linked-Size": str(entry.size), "ETag": f'"{entry.hash}"', "Link": auth,
            "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream",
        }  # fmt: skip
        if self.command == "HEAD":
            self._send(200, 0, iter(()), {**headers, "Content-Length": str(entry.size)})
            return
        start, end = self._range(entry.size)
        part = (start, end) != (0, entry.size)
        if part:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{entry.size}"
        blocks = self.hub.contents.read(entry.hash, start, end)
        self._send(206 if part else 200, end - start, blocks, headers)

    def _range(self, size: int) -> tuple[int, int]:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "bytes=0-")
        if found is None:
            raise Answer(400, "only one range, from its first byte")
        start, end = int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)
        if start >= size and size:
            raise Answer(416, "the range begins past the end")
        return start, end

    def _events(self, namespace: str, name: str) -> None:
        bucket = self._bucket(namespace, name)
        if not self.hub.announces:
            raise Answer(404, "not served here")
        self.hub.note(self.command, self.path, 200)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        seen = int(self._query.get("cursor", len(bucket.events)))
        if seen > len(bucket.events):
            self._event("reset", {"reason": "no such cursor"})
            raise _CutOff
        seen = self._tell(bucket, seen)
        self._event("ready", {"cursor": str(seen)})
        while not self.hub.stopping.is_set():
            with bucket.changed:
                if len(bucket.events) == seen:
                    bucket.changed.wait(_PING_S)
            if fault := self.hub.faults.take(f"EVENTS {bucket.id}"):
                # 410: what was missed is no longer known
                self._event("reset" if fault.status == 410 else "reconnect", {"cursor": str(seen)})
                raise _CutOff
            if len(bucket.events) > seen:
                seen = self._tell(bucket, seen)
            else:
                self.wfile.write(b": ping\n\n")
        raise _CutOff

    def _tell(self, bucket: Bucket, seen: int) -> int:
        for number, changes in enumerate(bucket.events[seen:], seen + 1):
            self._event("changes", {"cursor": str(number), "changes": changes})
            seen = number
        return seen

    def _event(self, name: str, content: dict[str, Any]) -> None:
        self.wfile.write(f"event: {name}\ndata: {json.dumps(content)}\n\n".encode())

    # ── the storage ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _put_xorb(self, hash: str) -> None:
        self._authorize_storage(write=True)
        self._reply(200, {"was_inserted": self.hub.contents.put_xorb(hash, self._body())})

    def _put_shard(self) -> None:
        data = b"".join(self._body())
        self._authorize_storage(write=True)
        self.hub.contents.put_shard(data)
        self._reply(200, {"result": 1})

    def _reconstruct(self, version: str, hash: str) -> None:
        self._authorize_storage(write=False)
        try:
            start, end = self._range(self.hub.contents.size(hash))
        except KeyError:
            raise Answer(404, f"no file {hash}") from None
        base = f"{self._base}/signed/{self.hub.signature}/"
        found = self.hub.contents.reconstruction(hash, start, end, base)
        if version == "2":
            found["xorbs"] = {
                xorb: [{"url": x["url"], "ranges": [{"chunks": x["range"], "bytes": x["url_range"]}]} for x in fetch]
                for xorb, fetch in found.pop("fetch_info").items()
            }
        self._reply(200, found)

    def _signed(self, signature: str, hash: str) -> None:
        """As a storage provider's signed link: no token, and the signature is checked."""
        if signature != self.hub.signature:
            raise Answer(403, "bad signature")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if found is None:
            raise Answer(400, "a signed link is for one range")
        start, end = int(found[1]), int(found[2]) + 1
        headers = {"Content-Range": f"bytes {start}-{end - 1}/*", "Content-Type": "application/octet-stream"}
        self._send(206, end - start, self.hub.contents.xorb_range(hash, start, end), headers)

    # ── the tests' own ───────────────────────────────────────────────────────────────────────────────────────────────

    def _admin_fault(self) -> None:
        fault = Fault(**self._json())
        self._authorize(write=True)
        self.hub.faults.add(fault)
        self._reply(200, {})

    def _admin_requests(self) -> None:
        self._authorize(write=True)
        self._reply(200, list(self.hub.requests))


_ID = r"/([^/]+)/([^/]+)"
_HASH = r"([0-9a-f]{64})"
_ROUTES: list[tuple[tuple[str, ...], str, Callable[..., None]]] = [
    (("POST",), rf"/api/buckets{_ID}", Handler._create),
    (("GET",), rf"/api/buckets{_ID}", Handler._info),
    (("DELETE",), rf"/api/buckets{_ID}", Handler._remove),
    (("GET",), rf"/api/buckets{_ID}/xet-(read|write)-token", Handler._xet_token),
    (("POST",), rf"/api/buckets{_ID}/batch", Handler._batch),
    (("GET",), rf"/api/buckets{_ID}/tree(/.*)?", Handler._tree),
    (("POST",), rf"/api/buckets{_ID}/paths-info", Handler._paths_info),
    (("GET",), rf"/api/buckets{_ID}/events", Handler._events),
    (("GET", "HEAD"), rf"/buckets{_ID}/resolve/(.+)", Handler._resolve),
    (("POST",), rf"/v1/xorbs/default/{_HASH}", Handler._put_xorb),
    (("POST",), r"/v1/shards", Handler._put_shard),
    (("GET",), rf"/v([12])/reconstructions/{_HASH}", Handler._reconstruct),
    (("GET",), rf"/signed/([0-9a-f]+)/{_HASH}", Handler._signed),
    (("POST",), r"/admin/faults", Handler._admin_fault),
    (("GET",), r"/admin/requests", Handler._admin_requests),
]
