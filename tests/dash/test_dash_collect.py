"""What the page shows is what is in the bucket, in few requests, whatever the bucket holds."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dash_support import beat, long_run, real_run

from deltawire.bucket.run import Run
from deltawire.core import keys
from deltawire.core.errors import RunNotFound
from deltawire.core.manifest import SyncRecord, dump
from deltawire.dash import Collector, write_page
from deltawire.dash.document import POINTS, Document, encode, groups
from deltawire.dash.html import embedded, html
from deltawire.dash.trace import trace
from deltawire.replica import Replica
from deltawire.store import ObjectStore, Store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from support import HookedStore, blank, history, model, publish, trained


@pytest.fixture
def store() -> Store:
    return ObjectStore.from_url(f"memory://{uuid.uuid4()}")


@pytest.fixture(scope="module")
def long() -> Store:
    store: Store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    long_run(store)
    return store


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_figures_of_a_run(store: Store) -> None:
    real_run(store, 12, anchor_ratio=1e9)
    run = Run.open(store)
    found = Collector(store).look()
    deltas = [run.manifest(v).link("delta", v - 1).bytes for v in range(1, 12)]
    assert (found.problem, found.newest, found.totals.versions, found.totals.deltas) == ("", 11, 12, 11)
    assert found.totals.delta_bytes == sum(deltas)
    assert found.headline.smaller == round(11 * run.schema.nbytes / sum(deltas), 2)
    assert found.headline.saved_bytes == 11 * run.schema.nbytes - sum(deltas)
    assert found.totals.anchors == 1
    assert found.versions is not None
    assert found.versions.version == list(range(12))
    assert found.versions.bytes[1:] == deltas
    assert found.versions.metrics == {"reward": [step / 10 for step in range(12)]}
    assert found.versions.step == [10 * step for step in range(12)]
    assert [link.base for link in found.recent[8].links] == [7]


def test_replicas_their_syncs_and_what_they_proved(store: Store) -> None:
    real_run(store, 8)
    found = Collector(store).look()
    assert [(r.replica, r.version, r.lag, r.health) for r in found.replicas] == [
        ("far", 6, 1, "ok"),
        ("near", 7, 0, "ok"),
    ]
    far, near = found.replicas
    assert [sync.version for sync in near.syncs] == list(range(8))
    assert [(sync.version, sync.previous) for sync in far.syncs] == [(0, None), (2, 0), (4, 2), (6, 4)]
    assert all(sync.proven and sync.pause > 0 and sync.at > 0 for sync in near.syncs)
    assert [version.proven for version in found.recent] == [2, 1] * 4
    assert (found.headline.slowest, found.headline.slowest_lag) == ("far", 1)
    assert (found.headline.current, found.headline.following) == (1, 2)
    assert far.behind_s is not None
    assert near.behind_s == 0


def test_changes_per_tensor_equal_those_that_were_made(store: Store) -> None:
    before = model()
    after = {name: array.copy() for name, array in before.items()}
    after["embed.weight"].reshape(-1)[:32] ^= 1
    publish(store, [before, after], encoding="packed", anchor_ratio=1e9)
    found = Collector(store).look()
    assert found.heat is not None
    assert found.heat.versions == [1]
    shares = dict(zip(found.heat.tensors, found.heat.shares[0], strict=True))
    assert shares["embed.weight"] == pytest.approx(32 / before["embed.weight"].size, rel=1e-3)
    assert shares["layer.weight"] == 0
    assert found.steps is not None
    assert sum(up + down for _, up, down in found.steps.rows) == 32
    assert found.steps.rows[0][0] == "1"


def test_steps_of_a_context_delta_are_computed_from_its_base(tmp_path: Path) -> None:
    before = model(rows=512)
    after = {name: array.copy() for name, array in before.items()}
    after["embed.weight"].reshape(-1)[:64] ^= 1
    publish(tmp_path, [before, after], encoding="context", anchor_ratio=1e9)
    found = Collector(tmp_path).look()
    assert found.steps is not None
    assert (found.steps.note, sum(up + down for _, up, down in found.steps.rows)) == ("", 64)


def test_failures_come_with_their_reasons(store: Store) -> None:
    versions = history(3)
    publish(store, versions, anchor_ratio=1e9)
    replica, live = Replica(store, id="unlucky"), blank(versions[0])
    replica.sync(live, 1)
    key = Run.open(store).manifest(2).link("delta", 1).objects[0].key
    store.put(key, b"x" * len(store.get(key).data))
    for _ in range(2):
        with pytest.raises(Exception, match="hash"):
            replica.sync(live)
    (found,) = Collector(store).look().replicas
    assert (found.health, found.version, found.lag) == ("failing", 1, 1)
    assert (found.syncs[-1].version, found.syncs[-1].times) == (2, 2)
    assert key in found.syncs[-1].error


# ── live ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_look_finds_what_is_new_in_few_requests(store: Store) -> None:
    versions = real_run(store, 20)
    counting = CountingStore(store)
    collector = Collector(counting)
    collector.look()
    counting.reset()
    assert collector.look().newest == 19
    # head, which has not changed, and the listing of heartbeats
    assert counting.requests.total() == 2
    with Publisher(store, encoding="packed") as publisher:
        publisher.resume(versions[-1])
        publisher.publish(trained(versions[-1], 99)).result(120)
    counting.reset()
    found = collector.look()
    assert (found.newest, found.recent[-1].version, found.totals.versions) == (20, 20, 21)
    assert counting.requests.total() <= 8
    assert found.heat is not None
    assert found.heat.versions[-1] == 20


def test_syncs_are_kept_beyond_what_a_heartbeat_holds(store: Store) -> None:
    publish(store, history(22))
    run, collector = Run.open(store), Collector(store)
    now = time.time()
    for start in (0, 10):
        syncs = tuple(SyncRecord(v, None, now - 100 + v, 0.1, 1, {"prove": 0.1}) for v in range(start, start + 12))
        beat(store, run, "r", 1, syncs=syncs)
        (found,) = collector.look().replicas
        time.sleep(0.02)
    assert [sync.version for sync in found.syncs] == list(range(22))


def test_a_run_that_appears_later(store: Store) -> None:
    collector = Collector(store)
    found = collector.look()
    assert found.newest is None
    assert "there is no run" in found.problem
    Run.create(store, Run.open(_one(history(1))).schema)
    found = collector.look()
    assert (found.problem, found.newest, found.versions and found.versions.version) == ("", None, [])
    publish(store, history(3))
    found = collector.look()
    assert (found.problem, found.newest) == ("", 2)
    assert found.heat is not None


def _one(versions: list[Any]) -> Store:
    store: Store = ObjectStore.from_url(f"memory://{uuid.uuid4()}")
    publish(store, versions)
    return store


def test_a_run_that_is_deleted_stays_on_the_page_and_its_successor_replaces_it(store: Store) -> None:
    publish(store, history(3))
    collector = Collector(store)
    first = collector.look()
    for item in [*store.list()]:
        store.delete(item.key)
    for _ in range(40):
        found = collector.look()
    assert "no run" in found.problem
    assert found.newest == 2
    publish(store, history(2, seed=5))
    for _ in range(40):
        found = collector.look()
    assert (found.newest, found.problem) == (1, "")
    assert found.run != first.run


# ── long runs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ten_thousand_versions_and_64_replicas_take_fewer_than_50_requests(long: Store) -> None:
    counting = CountingStore(long)
    found = Collector(counting).look()
    assert counting.requests.total() < 50
    assert (found.newest, found.totals.versions, len(found.replicas)) == (9999, 10_000, 64)
    assert found.versions is not None
    assert len(found.versions.version) <= POINTS
    assert sum(found.versions.count) == 10_000
    assert max(found.versions.count) == 9
    assert [version.version for version in found.recent] == list(range(9744, 10_000))
    assert found.heat is not None
    assert len(found.heat.versions) >= 3
    assert len(encode(found)) < 2_000_000
    assert any("64 replicas" in note for note in found.notes)


def test_no_look_lists_the_whole_run(long: Store) -> None:
    listed: set[str] = set()
    heard = HookedStore(long, lambda when, verb, key: listed.add(key) if verb == "list" else None)
    collector = Collector(heard)
    for _ in range(2):
        assert collector.look().newest == 9999
    # a store lists a folder at a time: a prefix without one is all there is
    assert all("/" in prefix for prefix in listed), listed


def test_later_looks_read_the_replicas_that_the_first_left_out(long: Store) -> None:
    collector = Collector(long)
    unread = [sum(r.health == "unread" for r in collector.look().replicas) for _ in range(3)]
    assert unread == [42, 20, 0]


def test_a_zoomed_range_has_every_version(long: Store) -> None:
    collector = Collector(long)
    collector.look()
    found = collector.versions(1000, 1500)
    assert found.version == list(range(1000, 1501))
    assert [version.version for version in collector.details(3, 5)] == [3, 4, 5]


# ── hostile buckets ──────────────────────────────────────────────────────────────────────────────────────────────────

SCRIPT = "</script><script>document.title='owned'</script><!--"


def test_text_of_a_bucket_cannot_leave_its_block() -> None:
    found = Document("file:///x", 0.0, problem=SCRIPT)
    page = html(encode(found), SCRIPT)
    assert SCRIPT not in page
    block = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(block)["problem"] == SCRIPT
    assert "<" not in embedded(encode(found))
    assert page.count("</script>") == 3


def test_marks_of_the_template_are_only_marks_in_the_template() -> None:
    found = Document("file:///x", 0.0, problem="@scripts@ @data@")
    block = html(encode(found), "@data@").partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(block)["problem"] == "@scripts@ @data@"


def test_heartbeats_from_the_future_are_put_on_the_clock_of_the_store(store: Store) -> None:
    publish(store, history(2))
    run, ahead = Run.open(store), time.time() + 3 * 3600
    beat(store, run, "ahead", 1, at=ahead, syncs=(SyncRecord(1, 0, ahead - 5, 0.1, 10, {"prove": 0.05}),))
    beat(store, run, "absurd", 1, at=1e300, syncs=(SyncRecord(1, 0, 1e300, 1e300, 10**30, {"prove": 1e300}),))
    absurd, found = Collector(store).look().replicas
    assert found.clock_s == pytest.approx(3 * 3600, abs=100)
    assert found.syncs[0].at == pytest.approx(time.time() - 5, abs=100)
    assert (absurd.clock_s, absurd.syncs) == (1e7, ())


def test_a_copied_run_has_the_figures_of_the_original(tmp_path: Path) -> None:
    real_run(tmp_path / "run", 4)
    hours = 3 * 3600
    # made three hours ago, and its objects are from today: a copy
    for path in [tmp_path / "run" / keys.RUN, *(tmp_path / "run" / keys.REPLICAS).iterdir()]:
        data = json.loads(path.read_text())
        for name in {"at", "created"} & data.keys():
            data[name] -= hours
        for sync in data.get("syncs", ()):
            sync[2] -= hours
        path.write_text(json.dumps(data))
    for replica in Collector(tmp_path / "run").look().replicas:
        assert (replica.health, replica.clock_s) == ("silent", 0.0)
        assert replica.seen_s == pytest.approx(hours, abs=100)
        assert replica.syncs[-1].at == pytest.approx(time.time() - hours, abs=100)


def test_a_heartbeat_that_is_older_than_its_object_tells_nothing_of_a_clock(store: Store) -> None:
    publish(store, history(2))
    then = time.time() - 3600
    beat(store, Run.open(store), "slow", 1, at=then, syncs=(SyncRecord(1, 0, then, 0.1, 10, {"prove": 0.05}),))
    (found,) = Collector(store).look().replicas
    assert (found.health, found.clock_s) == ("ok", 0.0)
    assert found.syncs[0].at == pytest.approx(then, abs=0.01)


def test_one_bad_heartbeat_does_not_spoil_the_key_figures(store: Store) -> None:
    real_run(store, 4, ("good",))
    run, now = Run.open(store), time.time()
    before = Collector(store).look().headline
    syncs = (
        SyncRecord(10**6, 3, now, 1.0, 1, {"pause": 1.0}),
        SyncRecord(3, 10**6, now - 1, 1.0, 1, {"pause": 1.0}),
        SyncRecord(3, -5, now - 2, 1.0, 1, {"pause": 1.0}),
        SyncRecord(3, 2, now - 3, 1e8, 1, {"pause": 1e8}),
        SyncRecord(2, 1, now - 4, 1e-9, 1, {"pause": 5000.0, "apply": 3.0, "prove": 1e8}),
    )
    beat(store, run, "bad", 10**6, syncs=syncs)
    found = Collector(store).look()
    bad = found.replicas[0]
    assert (bad.version, bad.lag, bad.behind_s) == (None, None, None)
    assert [(sync.version, sync.pause, max(sync.phases.values())) for sync in bad.syncs] == [(2, 1e-9, 1e-9)]
    assert (found.headline.pause_s, found.headline.pause_replica) == (before.pause_s, "good")
    assert (found.headline.current, found.headline.following) == (1, 2)


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_newest_manifest_leaves_the_versions_before_it(store: Store, damaged: int) -> None:
    versions = history(6)
    publish(store, versions)
    good = {v: store.get(keys.manifest(v)).data for v in range(6)}
    for version in range(6 - damaged, 6):
        store.delete(keys.manifest(version))
        store.put(keys.manifest(version), b"{")
    collector = Collector(store)
    for _ in range(3):
        found = collector.look()
        assert (found.newest, found.totals.versions) == (5 - damaged, 6 - damaged)
        assert f"up to version {5 - damaged}" in found.problem
        assert "deltawire verify" in found.problem
    for version, data in good.items():
        store.delete(keys.manifest(version))
        store.put(keys.manifest(version), data)
    found = collector.look()
    assert (found.newest, found.totals.versions, found.problem) == (5, 6, "")


def test_absurd_figures_are_left_out(store: Store) -> None:
    publish(store, history(3))
    key = keys.manifest(2)
    data = json.loads(store.get(key).data)
    data["created"], data["step"] = 1e300, 10**17
    data["metrics"] = {"big": 1e308, "small": -5e-324, **{f"m{n}": float(n) for n in range(990)}, "x" * 5000: 1.0}
    data["timings"] = {"put": -1.0, "encode": 1e300, "held": 0.5}
    data["changed"] = 10**18
    store.delete(key)
    store.put(key, json.dumps(data).encode())
    found = Collector(store).look()
    assert (found.problem, found.newest) == ("", 2)
    last = found.recent[-1]
    assert (last.at, last.changed) == (None, 1.0)
    assert len(last.metrics) <= 6
    assert "big" not in last.metrics
    assert found.trainer[-1].phases == {"held": 0.5}
    json.loads(encode(found), parse_constant=pytest.fail)


@pytest.mark.parametrize("text", ["9" * 5000, "NaN", "1e999", '"x"', "[" * 5000])
def test_a_manifest_that_does_not_parse_is_a_problem_not_a_crash(store: Store, text: str) -> None:
    publish(store, history(3))
    key = keys.manifest(2)
    data = store.get(key).data.replace(b'"changed":', b'"changed":%s,"was":' % text.encode(), 1)
    store.delete(key)
    store.put(key, data)
    found = Collector(store).look()
    assert keys.manifest(2) in found.problem
    assert len(found.problem) <= 500
    encode(found)


def test_many_tensors_are_grouped() -> None:
    names = [f"layers.{n // 10}.experts.{n % 10}.weight" for n in range(20_000)] + ["9" * 1000, ""]
    found = groups(names, 400)
    assert len(found) <= 400
    assert sorted(name for row in found for name in row) == sorted(names)
    assert groups(["l.10", "l.9", "l.1"], 400) == [["l.1"], ["l.9"], ["l.10"]]


def test_no_heartbeat_of_another_run_and_none_that_is_broken(store: Store) -> None:
    publish(store, history(1))
    run = Run.open(store)
    beat(store, run, "ours", 0)
    store.put(keys.replica("broken"), b"{")
    store.put(keys.replica("large"), b" " * (1 << 20))
    other = msgspec.structs.replace(beat(store, run, "other", 0), run="another")
    store.put(keys.replica("other"), dump(other))
    collector = Collector(store)
    found = collector.look()
    assert [replica.replica for replica in found.replicas] == ["ours"]
    assert found.notes == ["2 heartbeats cannot be read: broken, large."]
    for number in range(5):
        store.put(keys.replica(f"a{number}" + "x" * 100), b"nan")
    assert found.notes != collector.look().notes
    (note,) = collector.look().notes
    assert note.startswith("7 heartbeats cannot be read: a0")
    assert note.endswith("….")
    assert len(note) < 200


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_is_one_file(store: Store, tmp_path: Path) -> None:
    real_run(store, 5)
    found = write_page(store, tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert found.newest == 4
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]
    block = page.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(block)["totals"]["versions"] == 5
    # code without data; nothing is loaded from elsewhere
    assert len(html(None).encode()) < 500_000
    for loads in ("src=", "@import", "url(", '<link rel="stylesheet'):
        assert loads not in html(None).replace("data:,", "")
    with pytest.raises(RunNotFound):
        write_page(tmp_path / "nothing", tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()


def test_a_trace_has_a_track_per_replica(store: Store) -> None:
    real_run(store, 6)
    events = trace(Collector(store).look())["traceEvents"]
    tracks = {e["args"]["name"]: (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert tracks.keys() == {"versions", "near", "far"}
    slices = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == tracks["near"]]
    outer = [e for e in slices if e["name"][1:].isdigit()]
    assert [e["name"] for e in outer] == [f"v{v}" for v in range(6)]
    inner = [e for e in slices if e["name"] in ("fetch", "decode", "prove")]
    for event in inner:
        assert any(o["ts"] <= event["ts"] and event["ts"] + event["dur"] <= o["ts"] + o["dur"] + 2 for o in outer)
    # a phase that took less than can be told is left out: which ones, depends on the machine
    assert inner
    json.dumps(events, allow_nan=False)
