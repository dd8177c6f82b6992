"""The stand-in for the Hub, by the client's own functions; and what it must refuse."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import pytest
from huggingface_hub import HfApi, HfFileSystem
from huggingface_hub.errors import BucketNotFoundError, EntryNotFoundError, HfHubHTTPError

from tests.hub_stand_in import Fault, HubStandIn, xet


@pytest.fixture
def api(hub: HubStandIn) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=hub.token)


@pytest.fixture
def bucket(api: HfApi) -> str:
    return str(api.create_bucket(f"me/{uuid.uuid4().hex}", private=True).bucket_id)


def call(hub: HubStandIn, method: str, path: str, token: str, body: bytes | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(hub.endpoint + path, body, {"Authorization": f"Bearer {token}"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


# ── the client ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_files_go_up_and_come_down(api: HfApi, bucket: str, tmp_path: Path) -> None:
    contents = {
        "noise": os.urandom(3_000_000),
        "text": b"the same words again, " * 100_000,
        "floats": b"".join(struct.pack("<f", number / 7) for number in range(50_001)) + b"odd",
        "small": b"x",
        "empty": b"",
        "deep/er/ünï cödé %20?#": b"odd name",
    }
    api.batch_bucket_files(bucket, add=[(data, path) for path, data in contents.items()])
    (tmp_path / "file").write_bytes(contents["noise"] + contents["text"])
    api.batch_bucket_files(bucket, add=[(tmp_path / "file", "file")])
    assert api.bucket_info(bucket).total_files == 7
    wanted = [(path, tmp_path / f"{number}") for number, path in enumerate(contents)]
    api.download_bucket_files(bucket, wanted, raise_on_missing_files=True)
    assert [path.read_bytes() for _, path in wanted] == [*contents.values()]
    files = HfFileSystem(endpoint=api.endpoint, token=api.token, skip_instance_cache=True)
    assert files.cat_file(f"buckets/{bucket}/file", start=2_999_990, end=3_000_010) == (
        contents["noise"][-10:] + contents["text"][:10]
    )
    with pytest.raises(EntryNotFoundError):
        api.download_bucket_files(bucket, [("absent", tmp_path / "absent")], raise_on_missing_files=True)


def test_listing_and_deleting(api: HfApi, bucket: str) -> None:
    api.batch_bucket_files(bucket, add=[(b"%d" % number, f"a/{number:03}") for number in range(120)] + [(b"x", "ab")])
    assert [x.path for x in api.list_bucket_tree(bucket, recursive=True)] == [f"a/{n:03}" for n in range(120)] + ["ab"]
    assert [x.path for x in api.list_bucket_tree(bucket)] == ["a", "ab"]
    assert [x.path for x in api.list_bucket_tree(bucket, "a/1", recursive=True)] == [f"a/{n}" for n in range(100, 120)]
    api.batch_bucket_files(bucket, delete=["a/001"])
    assert [x.path for x in api.get_bucket_paths_info(bucket, ["a/000", "a/001"])] == ["a/000"]
    with pytest.raises(HfHubHTTPError):
        api.batch_bucket_files(bucket, delete=["a/001"])
    api.delete_bucket(bucket)
    with pytest.raises(BucketNotFoundError):
        api.bucket_info(bucket)


def test_tokens_are_checked(hub: HubStandIn, bucket: str) -> None:
    path, hash = f"/api/buckets/{bucket}", "0" * 64
    for token, read, write in ((hub.token, 200, 200), (hub.read_token, 200, 403), ("hf_wrong", 401, 401)):
        assert call(hub, "GET", path, token)[0] == read
        assert call(hub, "GET", f"{path}/xet-read-token", token)[0] == read
        assert call(hub, "GET", f"{path}/xet-write-token", token)[0] == write
        assert call(hub, "POST", f"{path}/batch", token, b"")[0] == write
        assert call(hub, "POST", f"/api/buckets/me/{uuid.uuid4().hex}", token, b"{}")[0] == write
    for token, read, write in (
        (hub.xet_tokens["write"], 404, 400), (hub.xet_tokens["read"], 404, 403), (hub.token, 401, 401),
    ):  # fmt: skip
        assert call(hub, "GET", f"/v1/reconstructions/{'1' * 64}", token)[0] == read
        assert call(hub, "POST", "/v1/shards", token, b"bad")[0] == write
        assert call(hub, "POST", f"/v1/xorbs/default/{'1' * 64}", token, b"bad")[0] == write
    assert call(hub, "GET", f"/signed/00ff/{hash}", hub.token)[0] == 403


# ── what it refuses ──────────────────────────────────────────────────────────────────────────────────────────────────


def packed(data: bytes) -> bytes:
    return bytes([0]) + len(data).to_bytes(3, "little") + bytes([0]) + len(data).to_bytes(3, "little") + data


def upload(hub: HubStandIn, *chunks: bytes) -> tuple[bytes, list[tuple[bytes, int]]]:
    leaves = [(xet.chunk_hash(chunk), len(chunk)) for chunk in chunks]
    name = xet.tree_hash(leaves)
    path = f"/v1/xorbs/default/{xet.text(name)}"
    assert call(hub, "POST", path, hub.xet_tokens["write"], b"".join(map(packed, chunks)))[0] == 200
    return name, leaves


def shard(hash: bytes, xorb: bytes, size: int, first: int, end: int, range_hash: bytes) -> bytes:
    bookend = b"\xff" * 32 + bytes(16)
    entry = hash + struct.pack("<II8x", 1 << 31, 1) + xorb + struct.pack("<IIII", 0, size, first, end)
    return bytes(48) + entry + range_hash + bytes(16) + bookend + bookend


def test_hashes_are_recomputed(hub: HubStandIn) -> None:
    chunks = [b"a" * 1000, b"b" * 2000, os.urandom(500)]
    xorb, leaves = upload(hub, *chunks)
    hash, spans = xet.file_hash(leaves), xet.range_hash([leaf for leaf, _ in leaves])
    good = (hash, xorb, 3500, 0, 3, spans)
    send = hub.xet_tokens["write"]
    assert call(hub, "POST", "/v1/shards", send, shard(*good))[0] == 200
    wrong = bytes(31) + b"\x01"
    for place, value in enumerate((wrong, wrong, 3499, 1, 4, wrong)):
        bad = [value if at == place else right for at, right in enumerate(good)]
        assert call(hub, "POST", "/v1/shards", send, shard(*bad))[0] == 400, place  # type: ignore[arg-type]
    for cut in (0, 47, 48, 100, 144, 192):
        assert call(hub, "POST", "/v1/shards", send, shard(*good)[:cut])[0] == 400, cut


def test_a_xorb_with_another_name_or_a_flipped_bit_is_refused(hub: HubStandIn) -> None:
    chunk = os.urandom(1000)
    name = xet.text(xet.tree_hash([(xet.chunk_hash(chunk), 1000)]))
    body = packed(chunk)
    send = hub.xet_tokens["write"]
    for bad in (body[:-1], body[:-1] + bytes([body[-1] ^ 1]), body + body, body[:4] + b"\x01" + body[5:], b""):
        assert call(hub, "POST", f"/v1/xorbs/default/{name}", send, bad)[0] == 400
    assert call(hub, "POST", f"/v1/xorbs/default/{name}", send, body)[0] == 200


def test_a_path_needs_data_that_was_uploaded(hub: HubStandIn, bucket: str) -> None:
    line = json.dumps({"type": "addFile", "path": "x", "xetHash": "1" * 64, "mtime": 0}).encode()
    status, body = call(hub, "POST", f"/api/buckets/{bucket}/batch", hub.token, line)
    assert (status, json.loads(body)["failed"][0]["path"]) == (422, "x")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9, 10, 500])
def test_the_hash_tree_is_the_clients(api: HfApi, bucket: str, count: int) -> None:
    """The client splits and hashes in its own way; an upload is only taken when ours comes to the same."""
    data = os.urandom(count * 70_000)
    api.batch_bucket_files(bucket, add=[(data, "file")])
    assert next(iter(api.get_bucket_paths_info(bucket, ["file"]))).size == len(data)


# ── by itself ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_faults_by_request(hub: HubStandIn, bucket: str) -> None:
    order = json.dumps({"match": "GET /api", "status": 503, "times": 2}).encode()
    assert call(hub, "POST", "/admin/faults", "hf_wrong", order)[0] == 401
    assert call(hub, "POST", "/admin/faults", hub.token, order)[0] == 200
    path = f"/api/buckets/{bucket}"
    assert [call(hub, "GET", path, hub.token)[0] for _ in range(3)] == [503, 503, 200]
    assert f"GET {path} 503" in json.loads(call(hub, "GET", "/admin/requests", hub.token)[1])


def test_late_files(hub: HubStandIn, api: HfApi, bucket: str) -> None:
    hub.faults.add(Fault("addFile late", late_s=3600))
    api.batch_bucket_files(bucket, add=[(b"x", "late"), (b"x", "soon")])
    assert [x.path for x in api.list_bucket_tree(bucket)] == ["soon"]


def test_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.hub_stand_in", "--root", str(tmp_path), "--token", "hf_mine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as server:
        # whatever happens, it does not outlive the test
        killer = threading.Timer(250, server.kill)
        killer.start()
        try:
            assert server.stdout is not None
            endpoint = server.stdout.readline().split()[0].removeprefix("HF_ENDPOINT=")
            api = HfApi(endpoint=endpoint, token="hf_mine")
            api.create_bucket("me/one")
            api.batch_bucket_files("me/one", add=[(b"hello", "key")])
            assert api.bucket_info("me/one").size == 5
        finally:
            server.terminate()
            killer.cancel()
    assert server.returncode == 0
    assert len([*(tmp_path / "xorbs").iterdir()]) == 1
