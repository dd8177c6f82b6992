from __future__ import annotations

import uuid
from pathlib import Path

import pytest

import deltawire.store
import deltawire.testing
from deltawire.core.errors import BadURL
from deltawire.store import LocalStore, ObjectStore, Retrying, open_store


@pytest.mark.parametrize("module", [deltawire.store, deltawire.testing])
def test_exports_are_sorted_and_there(module) -> None:
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


def test_a_store_passes_through(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert open_store(store) is store


def test_what_is_no_address_and_no_store_is_refused() -> None:
    for wrong in (None, 3, ["s3://runs/chat"]):
        with pytest.raises(TypeError, match="neither an address"):
            open_store(wrong)  # type: ignore[arg-type]


def test_a_store_that_lacks_a_name_is_told_which(tmp_path: Path) -> None:
    class Half:
        url, creates_exclusively = "half://here", True
        get = get_if_changed = get_range = put = put_if_absent = list = None

    with pytest.raises(TypeError, match=r"^Half is no Store: it has no head and no delete$"):
        open_store(Half())  # type: ignore[arg-type]


def test_retry_is_the_default(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert isinstance(store, Retrying)
    assert isinstance(store.inner, LocalStore)
    assert store.url == tmp_path.as_uri()


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for where, root in {
        "run": "run",
        "./a b/c:d": "a b/c:d",
        "s3": "s3",
        "./s3//run": "s3/run",
        "~/run": "home/run",
        str(tmp_path / "x"): "x",
        f"file://{tmp_path}/a%20b%23": "a b#",
        f"file://{tmp_path}/a%2C/b,c": "a,/b,c",
        f"FILE://localhost{tmp_path}/y": "y",
    }.items():
        store = open_store(where, retry=False)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path / root
        assert open_store(store.url, retry=False).root == store.root, "the url leads back"
    assert list(tmp_path.iterdir()) == [], "opening creates nothing"


def test_memory_is_shared_by_name() -> None:
    name = f"memory://{uuid.uuid4()}"
    first, second, below = open_store(name), open_store(name), open_store(f"{name}/some/run/")
    first.put("some/run/key", b"x")
    assert second.get("some/run/key").data == b"x"
    assert below.get("key").data == b"x"
    assert below.url == f"{name}/some/run"
    below.put("more", b"y")
    assert [info.key for info in first.list()] == ["some/run/key", "some/run/more"]
    assert list(open_store(f"memory://{uuid.uuid4()}").list()) == []


def test_a_url_leads_back_to_the_same_place() -> None:
    name = f"memory://{uuid.uuid4()}/a%20b/100%2525"
    store = open_store(name + "/")
    store.put("key", b"x")
    assert store.url == name
    assert open_store(store.url).get("key").data == b"x"
    assert [info.key for info in open_store(name.rpartition("/a%20b")[0]).list()] == ["a b/100%25/key"]


def test_bucket_urls_open_without_contact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for url in ("s3://bucket", "s3://bucket/a/run", "gs://bucket/run", "az://container/run"):
        store = open_store(url, retry=False)
        assert isinstance(store, ObjectStore)
        assert store.url == url


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://run", r"there is no store for ftp://; use one of az://, file://, gs://, .*, s3:// or a path"),
        ("http://cdn.example/run", "without TLS"),
        ("s3:/bucket/run", "two slashes"),
        ("s3//bucket/run", r"write s3://…, or \./s3/… for a folder"),
        ("HF//buckets/me/b/run", r"write HF://…, or \./HF/… for a folder"),
        ("/a,/b", "each is a URL, a folder file:///path"),
        ("s3://bucket/run,/b", "%2C"),
        ("s3://", "no bucket"),
        ("s3:///run", "no bucket"),
        ("memory://", "no bucket"),
        ("s3://bucket/a/../b", "'..' part"),
        ("s3://bucket/a//b", "empty part"),
        ("s3://bucket/a#b", "%23"),
        ("file://host/run", "three slashes"),
        ("file://", "no path"),
        ("file:///a?b", "%3F"),
        ("", "empty"),
    ],
)
def test_bad_urls(url: str, says: str) -> None:
    with pytest.raises(BadURL, match=says):
        open_store(url)


@pytest.mark.parametrize("url", ["s3://key:hunter2@bucket/run", "s3://bucket/run?secret=hunter2", "az://hunter2@c/run"])
def test_a_url_with_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(BadURL, match="environment") as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


def test_places_of_an_address_where_a_secret_might_be_are_not_repeated() -> None:
    for address in (
        "hf://buckets/user:hunter2@a/b",
        "hf://buckets/me/b?token=hunter2",
        "file://user:hunter2@host/run",
        "s3://bucket/run#sig=hunter2",
    ):
        with pytest.raises(BadURL) as refused:
            open_store(address)
        assert "hunter2" not in str(refused.value)
