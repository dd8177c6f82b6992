"""What `doctor` finds in stores that do not do what they should."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltawire import doctor
from deltawire.core import keys
from deltawire.core.errors import PermissionDenied, StoreUnavailable
from deltawire.doctor import Finding, Report
from deltawire.doctor import examine_store as examine
from deltawire.store import HttpStore, Store
from deltawire.store.base import Chunks, Fetched, ObjectInfo
from deltawire_wordle.counting import CountingStore
from support import history, publish
from tests.web import serving


def verdicts(report: Report) -> dict[str, str]:
    return {finding.check: finding.verdict for finding in report.findings}


def failed(report: Report) -> set[str]:
    return {check for check, verdict in verdicts(report).items() if verdict == "failed"}


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
def test_every_check_finds_the_store_that_fails_it(store: Store, kind: type[CountingStore], bad: set[str]) -> None:
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

    def tell(finding: Finding) -> None:
        if finding.check == "create":
            raise BrokenPipeError

    with pytest.raises(KeyboardInterrupt):
        examine(Interrupted(store))
    assert [*store.list()] == []
    with pytest.raises(BrokenPipeError):
        examine(store, tell)
    assert [*store.list()] == []


def test_announcements(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PATIENCE_S", 120.0)

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


def test_a_cache_in_a_folder_is_tried_and_left_as_it_was(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "object").write_bytes(b"x" * 2_000_000)
    monkeypatch.setenv("DELTAWIRE_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        (found,) = (finding for finding in examine(store).findings if finding.check == "cache")
        assert found.verdict == "ok"
        assert "1 objects, 2 MB" in found.detail
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["object"]
    monkeypatch.setenv("DELTAWIRE_CACHE", str(tmp_path / "cache" / "object"))
    (found,) = (finding for finding in examine(store).findings if finding.check == "cache")
    assert found.verdict == "warning"
    assert "replicas will fetch for themselves" in found.detail


def test_an_address_is_no_folder_for_a_cache(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("DELTAWIRE_CACHE", "http://10.0.0.5:8330")
    (found,) = (finding for finding in examine(store).findings if finding.check == "cache")
    assert found.verdict == "failed"
    assert "it is a folder of this host" in found.detail
    assert [*(tmp_path / "here").iterdir()] == []


def test_an_address_on_the_web_is_tried_as_a_reader_would(store: Store) -> None:
    publish(store, history(3))
    with serving(store) as server:
        web = HttpStore(server.url)
        before = [item.key for item in store.list()]
        report = examine(web)
        assert report.healthy, report.findings
        assert {finding.verdict for finding in report.findings} == {"ok"}
        assert {finding.check for finding in report.findings} >= {
            "run",
            "conditional get",
            "ranged read",
            "absent object",
        }
        assert [item.key for item in store.list()] == before
        server.fault = lambda handler, key: bool(handler.range) and handler.answer(200, store.get(key).data) is None
        assert failed(examine(web)) == {"ranged read"}
        server.fault = lambda handler, key: key == keys.HEAD and handler.answer(200, b"{}") is None
        (stale,) = [finding for finding in examine(web).findings if finding.check == "current"]
        assert stale.verdict == "warning"
        server.fault = lambda handler, key: handler.answer(403, b"") is None
        assert failed(examine(web)) == {"run"}
        assert not examine(HttpStore(f"{server.url}/elsewhere")).healthy
