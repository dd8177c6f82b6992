"""Servers by their heartbeats, which anybody who can write the bucket can write."""

from __future__ import annotations

import time
from typing import Any

import pytest

from deltawire.bucket.addresses import checked_address, host_and_port
from deltawire.bucket.roster import latest_heartbeats
from deltawire.bucket.run import Run
from deltawire.cli.allowed import Allowed, addresses
from deltawire.core import keys
from deltawire.core.errors import Misconfigured
from deltawire.core.manifest import Heartbeat, SyncRecord, dump
from deltawire.fleet import Fleet, Member
from deltawire.replica import Replica
from deltawire.store import ObjectInfo, Store
from deltawire.trainer import Publisher
from deltawire_wordle.counting import CountingStore
from support import HookedStore, blank, history, publish

HOSTILE = [
    "", ":", "8000", "host",
    "host:", ":8000", "host:0", "host:65536", "host:08000", "host:80 80", "host:-1", "host:+80",
    "host:8000;", "host:8000;\n}", "a b:80", "a;b:80", "a{b}:80", "a#b:80", "a$b:80", "a\"b:80", "a'b:80", "a\\b:80",
    "a/b:80", "a@b:80", "unix:/run/x.sock", "unix:80/x", "http://a:80", "a:80/", "a:80?x", "a:80 backup", "a:80\x00",
    "\n:80", "a\n:80", "a:80\n", "é:80", "a..b:80", ".a:80", "a.:80", "-a:80", "a-:80", "a_b:80", "*:80",
    "x" * 254 + ":80",
    "a" * 64 + ".b:80", "[::1]", "::1:80", "[::1%eth0]:80", "[::1:80", "::1]:80", "[1.2.3.4]:80", "[host]:80",
    "0x7f.0.0.1:80", "0x7f000001:80", "2130706433:80", "1.2.3.4.5:80", "256.1.1.1:80", "01.2.3.4:80", "1.2.3:80",
    "٣:80", "\u212a:80", "a:٣", "a:８０",
]  # fmt: skip


METADATA = [
    "169.254.169.254:80", "169.254.170.2:80", "100.100.100.200:80", "168.63.129.16:80", "192.0.0.192:80",
    "[fd00:ec2::254]:80", "[fd00:ec2::23]:80", "[fd20:ce::254]:80", "[fd00:42::42]:80", "[::ffff:169.254.169.254]:80",
    "[::ffff:100.100.100.200]:80", "[2002:6464:64c8::]:80", "[64:ff9b::100.100.100.200]:80",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_no_address(text: str) -> None:
    assert host_and_port(text) is None
    assert text not in Allowed(["0.0.0.0/0", "::/0", "a", "host"])
    with pytest.raises(Misconfigured, match="write host:port"):
        checked_address(text)


@pytest.mark.parametrize(
    "text, form",
    [
        ("10.0.0.5:8000", "10.0.0.5:8000"),
        ("[2001:DB8::1]:80", "[2001:db8::1]:80"),
        ("Host-1.Example.internal:65535", "host-1.example.internal:65535"),
        ("localhost:1", "localhost:1"),
    ],
)
def test_addresses_in_their_usual_form(text: str, form: str) -> None:
    assert checked_address(text) == form


def test_places_where_servers_may_be() -> None:
    anywhere = Allowed()
    assert "10.0.0.5:8000" in anywhere
    assert "[2001:db8::1]:80" in anywhere
    # of one machine, one link (where clouds keep credentials), a group, none; and names
    for address in (
        "127.0.0.1:80",
        "[::1]:80",
        "169.254.169.254:80",
        "[::ffff:127.0.0.1]:80",
        "[::ffff:169.254.169.254]:80",
        "[64:ff9b::7f00:1]:80",
        "255.255.255.255:80",
        "[fe80::1]:80",
        "224.0.0.1:80",
        "0.0.0.0:80",
        "0.1.2.3:80",
        "a.b:80",
        # by an IPv4 address inside: mapped, 6to4, Teredo (its server and its client), NAT64
        "[2002:7f00:1::]:80",
        "[2002:a9fe:a9fe::1]:80",
        "[2001:0:7f00:1::1]:80",
        "[2001:0:cb00:7101:0:0:5601:5601]:80",
        "[64:ff9b::a9fe:a9fe]:80",
        "[64:ff9b:1::7f00:1]:80",
        "[fec0::1]:80",
        *METADATA,
    ):
        assert address not in anywhere, address
    for address in ("100.64.0.1:80", "[fd12:3456::1]:80", "[2002:c000:204::1]:80", "192.168.0.1:80"):
        assert address in anywhere, address
    # a network is no reason to send a token to where a cloud keeps credentials; to name the address is one
    networks = Allowed(["0.0.0.0/0", "::/0"])
    for address in METADATA:
        assert address not in networks, address
        assert address in Allowed([address.rpartition(":")[0].strip("[]")]), address
    assert "[2002:7f00:1::]:80" in networks
    some = Allowed(["10.0.0.0/8", ".example.internal", "127.0.0.1"])
    for address in ("10.9.9.9:1", "a.example.internal:80", "127.0.0.1:80"):
        assert address in some
    for address in ("11.0.0.1:80", "example.internal:80", "aexample.internal:80", "[::1]:80", "127.0.0.2:80"):
        assert address not in some, address
    with pytest.raises(Misconfigured, match=r"neither a network such as .* nor a domain"):
        Allowed(["10.0.0.0/33; drop"])


def beat(store: Store, name: str, run: str = "", key: str = "", **fields: object) -> None:
    values = {"version": 2, "newest": 2, "healthy": True, "at": time.time(), "address": "10.0.0.1:80", **fields}
    heartbeat = Heartbeat(run=run or Run.open(store).info.run, replica=name, **values)  # type: ignore[arg-type]
    store.put(keys.replica(key or name), dump(heartbeat))


def members(run: Run, **options: Any) -> list[Member]:
    fleet = Fleet(run, **options)
    newest = run.newest()
    fleet.read()
    return fleet.members(newest)


def test_members_of_a_fleet(store: Store) -> None:
    versions, now = history(3), time.time()
    publish(store, versions)
    Replica(store, id="real", address="10.0.0.9:8000").sync(blank(versions[0]))
    beat(store, "behind", version=0, address="10.0.0.2:80")
    beat(store, "failing", healthy=False, error="no")
    beat(store, "starting", version=None)
    beat(store, "impossible", version=10**17)
    beat(store, "hostile", address="10.0.0.1:80; } evil {")
    beat(store, "inside", address="127.0.0.1:80")
    beat(
        store, "paused", syncs=(SyncRecord(2, 1, now, 1.0, 1, {"pause": 0.25}), SyncRecord(3, 2, now, 1.0, 1, {}, "x"))
    )
    beat(store, "endless", syncs=(SyncRecord(2, 1, now, 1.0, 1, {"pause": 1e300}),))
    beat(store, "foreign", run="another")
    beat(store, "somebody", key="somebody-else")
    beat(store, "keeper-1", role="keeper")
    found = members(Run.open(store))
    by_name = {member.replica: member for member in found}
    assert sorted(by_name) == [
        "behind", "endless", "failing", "hostile", "impossible", "inside", "paused", "real", "starting",
    ]  # fmt: skip
    real = by_name["real"]
    assert (real.version, real.lag, real.health, real.address) == (2, 0, "ok", "10.0.0.9:8000")
    assert real.pause_s is not None
    assert real.pause_s >= 0
    assert (by_name["paused"].pause_s, by_name["endless"].pause_s) == (0.25, None)
    assert by_name["hostile"].address == ""
    assert (by_name["impossible"].version, by_name["impossible"].health) == (None, "failing")
    serving = [member.replica for member in found if member.serves(max_lag=1)]
    assert serving == ["endless", "inside", "paused", "real"]
    assert addresses((m for m in found if m.serves()), Allowed()) == ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.9:8000"]


def test_many_heartbeats_do_not_hide_those_that_are_known() -> None:
    clock = time.time()

    def listed(name: str, seconds_ago: float) -> ObjectInfo:
        return ObjectInfo(keys.replica(name), 100, clock - seconds_ago, None)

    forged = [listed(f"forged-{n}", 0.001 * n) for n in range(20_000)]
    future = [listed(f"future-{n}", -1e6) for n in range(20_000)]
    real = [listed(f"real-{n}", 20 + n) for n in range(10)]
    silent = [listed("real-silent", 1e4)]
    names = [item.key for item in (*real, *silent)]
    every = [*forged, *future, *real, *silent]
    # a time in the future is worth nothing
    assert {item.key for item in latest_heartbeats([*future, *real, *silent], 11)} == {*names}
    # those from before come first while they are written; new ones have half of the places, whatever is known
    found = latest_heartbeats(every, 1000, names)
    assert [item.key for item in found[:10]] == [item.key for item in real]
    assert found[10:] == forged[:990]
    found = latest_heartbeats([*real, *forged], 1000, [item.key for item in forged])
    assert len({item.key for item in found}) == 1000
    newest = [listed(f"newest-{n}", -1) for n in range(500)]
    assert set(newest) < set(latest_heartbeats([*forged, *newest], 1000, [item.key for item in forged]))


def test_members_that_are_named_or_known_are_found_among_forged_ones(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(store, history(3))
    run = Run.open(store)
    beat(store, "gpu-1")
    beat(store, "gpu-2")
    for number in range(40):
        beat(store, f"forged-{number}")
    monkeypatch.setattr("deltawire.fleet.HEARTBEATS", 10)
    hidden = [member.replica for member in members(run)]
    assert not {"gpu-1", "gpu-2"} & set(hidden)
    assert "42 heartbeats: 32 are left out" in caplog.text
    caplog.clear()
    for only in (["gpu-*"], ["gpu-1", "gpu-2"]):
        assert [member.replica for member in members(run, only=only)] == ["gpu-1", "gpu-2"]
    assert not caplog.text
    for item in [*store.list(keys.REPLICAS)]:
        if "forged" in item.key:
            store.delete(item.key)
    fleet = Fleet(run)
    for _ in range(3):
        fleet.read()
        assert {"gpu-1", "gpu-2"} <= {member.replica for member in fleet.members(2)}
        for number in range(40):
            beat(store, f"forged-{number}")
    assert fleet.left_out == 32


def test_a_trainer_and_a_replica_read_no_heartbeats(store: Store) -> None:
    """So a flood of forged ones costs them nothing."""
    asked: list[tuple[str, str]] = []
    heard = HookedStore(store, lambda when, verb, key: asked.append((verb, key)))
    versions = history(4)
    with Publisher(heard) as publisher:
        publisher.publish(versions[0]).result(60)
        live, replica = blank(versions[0]), Replica(heard, id="mine", heartbeat=1e-9)
        for weights in versions[1:]:
            publisher.publish(weights).result(60)
            replica.sync(live)
    with Publisher(heard) as publisher:  # after a restart
        publisher.publish(versions[0]).result(60)
    assert ("put", keys.replica("mine")) in asked
    touching = {(verb, key) for verb, key in asked if key.startswith(keys.REPLICAS) or keys.REPLICAS.startswith(key)}
    assert touching == {("put", keys.replica("mine"))}


def test_a_fleet_reads_what_is_new(store: Store) -> None:
    publish(store, history(3))
    beat(store, "a")
    beat(store, "b", version=1)
    counting = CountingStore(store)
    fleet = Fleet(Run(counting, Run.open(store).info))
    fleet.read(1)
    assert sorted(member.health for member in fleet.members(2)) == ["ok", "unread"]
    fleet.read()
    assert [(member.replica, member.lag, member.behind_s) for member in fleet.members(2)] == [
        ("a", 0, 0.0),
        ("b", 1, None),
    ]
    # without a request, as of now: the versions tell since when it is behind
    counting.reset()
    summaries = Run.open(store).timeline(2)
    behind = fleet.members(2, summaries)[1].behind_s
    assert behind is not None
    assert behind >= 0
    assert counting.requests.total() == 0
    fleet.read()
    assert (counting.requests.total(), fleet.requests) == (1, 1)
    beat(store, "b", version=2, healthy=False)
    store.put(keys.replica("c"), b"{")
    store.delete(keys.replica("a"))
    fleet.read()
    assert [(member.replica, member.version, member.health) for member in fleet.members(2)] == [("b", 2, "failing")]
    assert fleet.broken == ["c"]


def test_silence_is_told_by_the_stores_clock(store: Store) -> None:
    publish(store, history(3))
    beat(store, "from-the-future", at=time.time() + 1e9)
    beat(store, "from-the-past", at=0.0)
    run = Run.open(store)
    assert [member.health for member in members(run)] == ["ok", "ok"]
    assert [member.health for member in members(run, fresh=-1.0)] == ["silent", "silent"]


def test_a_server_that_ends_takes_its_address_back(store: Store) -> None:
    versions = history(1)
    publish(store, versions)
    replica = Replica(store, id="a", address="10.0.0.9:8000")
    replica.sync(blank(versions[0]))
    replica.leave()
    (member,) = members(Run.open(store))
    assert (member.address, member.serves()) == ("", False)


def test_a_wrong_address_is_an_error_at_the_start(store: Store) -> None:
    with pytest.raises(Misconfigured, match="write host:port"):
        Replica(store, address="http://10.0.0.5:8000")
