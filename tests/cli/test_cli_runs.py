"""runs: what runs there are below an address, in few requests, on every kind of store."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
from cli_support import invoke, invoke_json

from deltawire.bucket.browse import below, find, runs
from deltawire.bucket.run import Run
from deltawire.store import LocalStore, ObjectStore, Store, open_store
from deltawire_wordle.counting import CountingStore
from deltawire_wordle.seaweed import SeaweedFS
from support import history, publish
from tests.hub_stand_in import HubStandIn


def fill(url: str) -> None:
    for name in ("chat", "math/one", "math/two words"):
        config = json.dumps({"architectures": [name]}).encode()
        publish(below(open_store(url), name), history(3), files={"config.json": config})
    open_store(url).put("notes.txt", b"no run")
    open_store(url).put("empty/deep/down/here/file", b"no run")


def names(value: dict) -> list[tuple[str, int]]:
    return [(run["url"].partition(value["bucket"])[2], run["newest"]) for run in value["runs"]]


EXPECTED = [("/chat", 2), ("/math/one", 2), ("/math/two%20words", 2)]


def test_in_a_folder(tmp_path: Path) -> None:
    fill(str(tmp_path))
    value = invoke_json("runs", tmp_path)
    assert names(value) == EXPECTED
    assert [run["model"] for run in value["runs"]] == ["chat", "math/one", "math/two words"]
    schema = Run.open(str(tmp_path / "chat")).schema
    assert {(run["bytes"], run["elements"]) for run in value["runs"]} == {(schema.nbytes, schema.elements)}
    assert names(invoke_json("runs", tmp_path, "--depth", 1)) == EXPECTED[:1]
    assert len(invoke_json("runs", tmp_path / "chat")["runs"]) == 1, "the address may be a run itself"
    # what is listed can be typed
    assert invoke_json("log", value["runs"][2]["url"])["newest"] == 2
    stored = invoke_json("runs", tmp_path, "--stored")["runs"][0]["stored"]
    assert stored == sum(path.stat().st_size for path in (tmp_path / "chat").rglob("*") if path.is_file())
    text = invoke("runs", tmp_path, columns=60).stdout
    assert all(word in text for word in ("/chat", "v2"))
    assert all(len(line.rstrip()) <= 60 for line in text.splitlines())


def test_nothing_there(tmp_path: Path) -> None:
    assert "no runs below" in invoke("runs", tmp_path).stdout
    assert invoke_json("runs", tmp_path / "nowhere")["runs"] == []


def test_in_s3(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    url = f"s3://deltawire/{uuid.uuid4()}"
    fill(url)
    assert names(invoke_json("runs", url)) == EXPECTED
    with_query = f"{url}?endpoint={seaweed.endpoint}"
    found = invoke_json("runs", with_query)["runs"]
    assert found[0]["url"] == f"{url}/chat?endpoint={seaweed.endpoint}"


def test_in_a_hub_bucket(hub: HubStandIn) -> None:
    url = f"hf://buckets/me/b{uuid.uuid4().hex[:8]}/runs"
    fill(url)
    assert names(invoke_json("runs", url)) == EXPECTED


def test_requests_do_not_grow_with_a_run(store: Store) -> None:
    def cost(versions: int) -> int:
        place = f"memory://{uuid.uuid4()}"
        publish(f"{place}/run", history(versions, changes=1))
        counting = CountingStore(ObjectStore.from_url(place))
        assert find(counting, 3) == ["run/"]
        assert counting.requests["list"] == 0
        return counting.requests.total()

    assert cost(3) == cost(40) == 2


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(tmp_path: Path) -> None:
    fill(str(tmp_path))
    (tmp_path / "chat" / "run.json").write_bytes(b"{}")
    (tmp_path / "evil\x1b[2J").mkdir()
    found = {run.url.rpartition("/")[2]: run for run in runs(LocalStore(tmp_path), 3)}
    assert found.keys() == {"chat", "one", "two%20words"}
    assert "run.json" in found["chat"].error
    assert "cannot be read" in invoke("runs", tmp_path).stdout
