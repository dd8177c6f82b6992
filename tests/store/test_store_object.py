"""The protocol on a real S3 server, and what a server does when it is used wrongly."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from deltawire.core.errors import BadURL, DeltawireError, PermissionDenied
from deltawire.replica import Replica
from deltawire.store import ObjectStore, Store, open_store
from deltawire.testing import StoreTests
from deltawire_wordle.seaweed import SeaweedFS
from support import blank, history, publish, same


class TestS3Store(StoreTests):
    @pytest.fixture
    def store(self, s3: Store) -> Store:
        return s3


# ── who asks, and where ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment that says nothing about S3, not even by files."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def address(seaweed: SeaweedFS, more: str = "") -> str:
    return f"s3://deltawire/{uuid.uuid4()}/run?endpoint={seaweed.endpoint}{more}"


def works(where: str) -> None:
    store = open_store(where)
    store.put_if_absent("a/key", b"x")
    assert open_store(store.url).get("a/key").data == b"x", "the url leads back"
    assert [info.key for info in store.list()] == ["a/key"]


def test_the_endpoint_in_the_address(clean: pytest.MonkeyPatch, seaweed: SeaweedFS) -> None:
    clean.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    clean.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret_key)
    works(address(seaweed, "&region=eu-central-1"))
    # it outranks the variable
    clean.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    works(address(seaweed))
    # but for this one, which the client takes first
    clean.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with pytest.raises(BadURL, match="AWS_ENDPOINT_URL_S3 names another"):
        open_store(address(seaweed))
    clean.setenv("AWS_ENDPOINT_URL_S3", seaweed.endpoint)
    works(f"s3://deltawire/{uuid.uuid4()}/run")


def test_messages_name_the_object_not_the_endpoint(clean: pytest.MonkeyPatch, seaweed: SeaweedFS) -> None:
    for name, value in seaweed.environment.items():
        clean.setenv(name, value)
    store = open_store(address(seaweed))
    with pytest.raises(DeltawireError, match=r"no object at s3://deltawire/[0-9a-f-]+/run/key$"):
        store.get("key")


def write_profiles(folder: Path, seaweed: SeaweedFS) -> None:
    (folder / ".aws").mkdir()
    (folder / ".aws/config").write_text(
        f"[default]\nregion = us-east-1\ns3 =\n    max_concurrent_requests = 20\n\n"
        f"[profile work]\nendpoint_url = {seaweed.endpoint}\n\n"
        f"[profile program]\nendpoint_url = {seaweed.endpoint}\n"
        f"credential_process = {sys.executable} {folder}/login.py\n\n"
        "[profile office]\nsso_session = office\nsso_account_id = 1\n"
    )
    (folder / ".aws/credentials").write_text(
        f"[work]\naws_access_key_id = {seaweed.access_key}\naws_secret_access_key = {seaweed.secret_key}\n"
        "[default]\naws_access_key_id = stranger\naws_secret_access_key = 100%nothing\n"
    )
    login = {"Version": 1, "AccessKeyId": seaweed.access_key, "SecretAccessKey": seaweed.secret_key}
    login["Expiration"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    (folder / "login.py").write_text(f"print({json.dumps(login)!r})")


def test_profiles(clean: pytest.MonkeyPatch, tmp_path: Path, seaweed: SeaweedFS) -> None:
    write_profiles(tmp_path, seaweed)
    bare = f"s3://deltawire/{uuid.uuid4()}/run"
    works(f"{bare}/1?profile=work")
    works(f"{bare}/2?profile=program")
    clean.setenv("AWS_PROFILE", "work")
    works(f"{bare}/3")
    # as with the AWS tools: keys in the environment outrank a profile, unless the address names it
    clean.setenv("AWS_ACCESS_KEY_ID", "stranger")
    clean.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    with pytest.raises(PermissionDenied):
        works(f"{bare}/4")
    works(f"{bare}/4?profile=work")


def test_profiles_that_do_not_help(clean: pytest.MonkeyPatch, tmp_path: Path, seaweed: SeaweedFS) -> None:
    write_profiles(tmp_path, seaweed)
    with pytest.raises(PermissionDenied, match=r"no AWS profile 'nobody' in .*credentials"):
        open_store("s3://bucket/run?profile=nobody")
    with pytest.raises(PermissionDenied, match=r"'office' gave no credentials .*aws sts get-caller-identity"):
        open_store("s3://bucket/run?profile=office").get("key")
    with pytest.raises(PermissionDenied, match="InvalidAccessKeyId"):
        open_store(address(seaweed)).get("key")
    for wrong in ("raise SystemExit('hunter2')", "print('hunter2')"):
        (tmp_path / "login.py").write_text(wrong)
        with pytest.raises(PermissionDenied, match="'program' gave no credentials") as caught:
            open_store(address(seaweed, "&profile=program")).get("key")
        assert "hunter2" not in repr(caught.value)
    (tmp_path / ".aws/credentials").write_text("hunter2 without a section")
    with pytest.raises(PermissionDenied, match="does not parse") as caught:
        open_store("s3://bucket/run")
    assert "hunter2" not in repr(caught.value.__context__)
    clean.setenv("AWS_ACCESS_KEY_ID", "half")
    with pytest.raises(PermissionDenied):
        open_store("s3://bucket/run")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://bucket/run?endpoint=ftp://host", "write https://host"),
        ("s3://bucket/run?endpoint=http://me:hunter2@host", "no place for credentials"),
        ("s3://bucket/run?endpoint=http://storage.example.com", "unencrypted through the internet.*AWS_ALLOW_HTTP"),
        ("s3://bucket/run?aws_secret_access_key=hunter2", "AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket/run?region=", "has no place"),
        ("s3://bucket/run?region=a&region=b", "has no place"),
        ("gs://bucket/run?endpoint=http://127.0.0.1", "has no place"),
    ],
)
def test_addresses_that_are_refused(clean: pytest.MonkeyPatch, url: str, says: str) -> None:
    with pytest.raises(BadURL, match=says) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


# ── what the server says no to ───────────────────────────────────────────────────────────────────────────────────────


def as_other(seaweed: SeaweedFS, path: str = "deltawire/run", **changes: str) -> ObjectStore:
    return ObjectStore.from_url(f"s3://{path}", retries=0, environ=seaweed.environment | changes)


def test_a_wrong_secret(seaweed: SeaweedFS) -> None:
    with pytest.raises(PermissionDenied, match=r"SignatureDoesNotMatch.*check AWS_SECRET_ACCESS_KEY"):
        as_other(seaweed, AWS_SECRET_ACCESS_KEY="wrong").get("key")


def test_a_wrong_key(seaweed: SeaweedFS) -> None:
    with pytest.raises(PermissionDenied, match=r"InvalidAccessKeyId.*check AWS_ACCESS_KEY_ID"):
        as_other(seaweed, AWS_ACCESS_KEY_ID="stranger").get("key")


def test_no_such_bucket(seaweed: SeaweedFS) -> None:
    with pytest.raises(BadURL, match="no such bucket; create it first"):
        list(as_other(seaweed, f"no-{uuid.uuid4()}/run").list())


def test_a_key_that_may_only_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    identities = [
        {"name": "owner", "credentials": [{"accessKey": "owner", "secretKey": "o"}], "actions": ["Admin"]},
        {"name": "reader", "credentials": [{"accessKey": "reader", "secretKey": "r"}], "actions": ["Read", "List"]},
    ]
    (tmp_path / "identities.json").write_text(json.dumps({"identities": identities}))
    options = {"s3.config": str(tmp_path / "identities.json")}
    with SeaweedFS(tmp_path / "weed", access_key="owner", secret_key="o", options=options) as server:
        server.store("some-bucket/run").put("key", b"x")
        reader = as_other(server, "some-bucket/run", AWS_ACCESS_KEY_ID="reader", AWS_SECRET_ACCESS_KEY="r")
        assert reader.get("key").data == b"x"
        for write in (
            lambda: reader.put("key", b"y"),
            lambda: reader.put("key", lambda: iter([b"y"])),
            lambda: reader.put_if_absent("new", b"y"),
            lambda: reader.delete("key"),
        ):
            with pytest.raises(PermissionDenied, match="may not do that here"):
                write()
        assert [info.key for info in reader.list()] == ["key"]
        # all that a replica needs
        versions = history(3)
        publish(server.store("some-bucket/other"), versions)
        live = blank(versions[0])
        place = as_other(server, "some-bucket/other", AWS_ACCESS_KEY_ID="reader", AWS_SECRET_ACCESS_KEY="r")
        replica = Replica(place, heartbeat=0.001, id="reader")
        with caplog.at_level(logging.WARNING, "deltawire"):
            assert next(replica.follow(live, poll=0.1)) == 2
            assert replica.sync(live, 1) == 1
        assert same(live, versions[1])
        assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["reader sends no heartbeats"]


# ── what writers leave behind ────────────────────────────────────────────────────────────────────────────────────────

HALF = """
import os, sys, time
from deltawire.store import open_store

def chunks():
    for _ in range(4):
        yield bytes(16 << 20)
    print("half way", flush=True)
    time.sleep(600)

open_store(sys.argv[1]).put("anchors/killed", chunks)
"""


def unfinished(seaweed: SeaweedFS, path: str) -> list[str]:
    client = boto3.client(
        "s3", endpoint_url=seaweed.endpoint, region_name="us-east-1",
        aws_access_key_id=seaweed.access_key, aws_secret_access_key=seaweed.secret_key,
    )  # fmt: skip
    bucket, _, prefix = path.partition("/")
    found = client.list_multipart_uploads(Bucket=bucket, Prefix=prefix)
    return [upload["Key"] for upload in found.get("Uploads", ())]


def test_a_failed_put_ends_its_upload_and_a_killed_one_shows_no_object(seaweed: SeaweedFS) -> None:
    path = f"deltawire/{uuid.uuid4()}/run"
    store = seaweed.store(path)

    def broken() -> Iterator[bytes]:
        for _ in range(4):
            yield bytes(16 << 20)
        assert len(unfinished(seaweed, path)) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put("anchors/broken", broken)
    assert unfinished(seaweed, path) == []
    environment = os.environ | seaweed.environment
    command = [sys.executable, "-c", HALF, f"s3://{path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half way\n"
        writer.kill()
    assert list(store.list()) == []


def test_a_fork_of_a_process_that_used_a_bucket_is_refused(tmp_path: Path) -> None:
    """The client's threads are in the other process, and a request would wait for them for ever."""
    code = """
import os
from deltawire.core.errors import ObjectNotFound, StoreError, Unsupported
from deltawire.store import ObjectStore

store = ObjectStore.from_url("s3://bucket/run", retries=0)

def request():
    try:
        store.get("run.json")
    except Unsupported:
        return 5
    except (StoreError, ObjectNotFound):
        return 6

child = os.fork()
if not child:
    os._exit(request())
before = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert request() == 6
child = os.fork()
if not child:
    os._exit(request())
print(before, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    nobody = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    environment = (
        os.environ | nobody | {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "HOME": str(tmp_path)}
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert found.stdout.split() == ["6", "5"], found.stderr
