"""`deltawire doctor`: it finds what is wrong with a store, says what to do, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import queue
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import invoke, invoke_json

from deltawire.bucket.doctor import Report, examine
from deltawire.core.errors import PermissionDenied, StoreUnavailable
from deltawire.store import ObjectStore, Store
from deltawire.store.base import Chunks, Fetched, ObjectInfo
from deltawire.testing import CountingStore
from deltawire.testing.seaweed import SeaweedFS

CHECKS = {
    "extras", "cache", "create", "read back", "create again", "overwrite", "conditional get", "ranged read", "list",
    "latency", "clock", "upload in parts", "download in ranges", "announcements", "delete", "run",
}  # fmt: skip


def verdicts(report: Report) -> dict[str, str]:
    return {finding.check: finding.verdict for finding in report.findings}


def failed(report: Report) -> set[str]:
    return {check for check, verdict in verdicts(report).items() if verdict == "failed"}


def test_a_folder(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    value = invoke_json("doctor", run)
    assert value["healthy"] is True
    assert {check["check"] for check in value["checks"]} == CHECKS
    assert {check["verdict"] for check in value["checks"]} == {"ok"}
    assert "newest version 3" in next(check["detail"] for check in value["checks"] if check["check"] == "run")
    assert value["figures"].keys() == {
        "latency_s", "clock_skew_s", "upload_bytes_per_s", "download_bytes_per_s",
    }  # fmt: skip
    assert before.keys() == {*run.rglob("*")}, "nothing stays behind"


def test_a_folder_that_was_not_there_is_not_left(tmp_path: Path) -> None:
    assert invoke_json("doctor", tmp_path / "new" / "run")["healthy"] is True
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    invoke("doctor", tmp_path / "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"], "what was there stays"


def test_a_bucket(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    place = f"s3://deltawire/{uuid.uuid4()}/run"
    said = invoke("doctor", place).stdout
    assert "✓ create again" in said
    assert "✓ upload in parts" in said
    assert "✗" not in said
    assert [*ObjectStore.from_url(place).list()] == []


def test_wrong_keys(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (seaweed.environment | {"AWS_SECRET_ACCESS_KEY": "hunter2"}).items():
        monkeypatch.setenv(name, value)
    result = invoke("doctor", "s3://deltawire/run", code=5)
    assert "✗ create" in result.stdout
    assert "check AWS_SECRET_ACCESS_KEY" in result.stdout
    assert "does not do what a run needs: create, run" in result.stderr
    assert "hunter2" not in result.stdout + result.stderr
    value = invoke_json("doctor", "s3://deltawire/run", code=5)
    assert value["healthy"] is False
    assert {check["verdict"] for check in value["checks"] if check["check"] == "list"} == {"skipped"}


def test_an_address_that_is_none() -> None:
    assert "no store speaks ftp://" in invoke("doctor", "ftp://host/run", code=2).stderr


# ── stores that do not do what they should ───────────────────────────────────────────────────────────────────────────


class Careless(CountingStore):
    """Creates whatever is there already."""

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.inner.put(key, data)


class Stale(CountingStore):
    """Says that nothing changed."""

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Fetched | None:
        return None if etag else super().get_if_changed(key, etag, limit=limit)


class Restless(CountingStore):
    """Says that everything changed."""

    def get_if_changed(self, key: str, etag: str | None, *, limit: int | None = None) -> Fetched | None:
        return super().get_if_changed(key, None, limit=limit)


class Lying(CountingStore):
    """Gives other bytes for ranges."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = super().get_range(key, start, length)
        return bytes([data[0] ^ 1]) + data[1:]


class Late(CountingStore):
    """Lists nothing yet."""

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[ObjectInfo]:
        return iter(())


class Clinging(CountingStore):
    """Deletes nothing."""

    def delete(self, key: str) -> None:
        raise PermissionDenied("you may not")


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (Careless, {"create again"}),
        (Stale, {"conditional get"}),
        (Restless, {"conditional get"}),
        (Lying, {"ranged read", "download in ranges"}),
        (Late, {"list"}),
        (Clinging, {"delete", "clean up"}),
    ],
)
def test_what_is_wrong(store: Store, kind: type[CountingStore], bad: set[str]) -> None:
    report = examine(kind(store))
    assert failed(report) == bad
    assert not report.healthy
    assert [*store.list()] == [] or kind is Clinging


def test_a_clock_that_is_off(store: Store) -> None:
    class Ahead(CountingStore):
        def head(self, key: str) -> ObjectInfo:
            info = super().head(key)
            return ObjectInfo(info.key, info.size, info.modified + 1000, info.etag)

    report = examine(Ahead(store))
    assert verdicts(report)["clock"] == "warning"
    assert report.healthy
    assert 990 < report.figures["clock_skew_s"] < 1001


def test_interrupted(store: Store) -> None:
    class Interrupted(CountingStore):
        def put(self, key: str, data: bytes | Chunks) -> None:
            super().put(key, data)
            if callable(data):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine(Interrupted(store))
    assert [*store.list()] == []


def test_announcements(store: Store) -> None:
    class Talking(CountingStore):
        said: queue.Queue[str] = queue.Queue()

        def put(self, key: str, data: bytes | Chunks) -> None:
            super().put(key, data)
            self.said.put(key)

        def announcements(self, stop: threading.Event) -> Iterator[str]:
            yield ""
            while not stop.is_set():
                with contextlib.suppress(queue.Empty):
                    yield self.said.get(timeout=0.01)

    report = examine(Talking(store))
    assert verdicts(report)["announcements"] == "ok"
    assert report.figures["announced_s"] >= 0

    class Broken(CountingStore):
        def announcements(self, stop: threading.Event) -> Iterator[str]:
            raise StoreUnavailable("no line")

    assert failed(examine(Broken(store))) == {"announcements"}
