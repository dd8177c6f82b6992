"""What a fleet of 10,000 replicas in three regions costs: a model, from measured figures and stated assumptions.

    python benchmarks/fleet_cost.py                     # 0.6B to 1T weights; writes benchmarks/results/fleet-cost.json
    python benchmarks/fleet_cost.py --price-between 0.05 --replicas 64 --regions 2

Five ways to move the same versions:

    deltas, mirrors, caches    a keeper copies objects to a bucket in every region; each site has an nginx that caches
    deltas, mirrors            the same without caches
    deltas, one bucket         all replicas read the trainer's bucket
    full, mirrors              full weights every time
    full, one bucket

Sizes and times of a version are those of `deltawire plan` (src/deltawire/cli/plan.py), whose figures are measured.
benchmarks/fleet.py has measured, with real followers, how many requests each makes for a version, how many of them an
nginx passes on, and how long a follower takes to notice a version. How often a follower looks depends on how often
versions come: that is counted with the follower's own schedule (bucket/watch.py), times what was measured against it.
All else is an assumption; every one is an option, and printed. A link that many share gives each an equal part.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from _report import write_json
from deltawire.bucket.watch import Rhythm
from deltawire.cli.plan import Setup, estimate
from deltawire.cli.ui import duration, size

RESULTS = Path(__file__).parent / "results"
HOUR = 3600.0
PART = 8 << 20
"""Bytes of one GET of a large object (bucket/fetch.py), and of a slice in the nginx."""

SAMPLED = 1000
"""Replicas whose delay is drawn."""

LIMIT = 5500
"""GETs per second that S3 promises for a prefix."""


@dataclass(frozen=True)
class Model:
    name: str
    params: float
    step_s: float
    """Seconds of a training step: a version is published after each, if the links allow."""
    cores: int
    """Cores for deltawire, of a trainer and of each replica: larger models have more hosts."""


MODELS = (
    Model("0.6B", 0.6e9, 10, 16),
    Model("8B", 8e9, 30, 16),
    Model("70B", 70e9, 60, 64),
    Model("405B", 405e9, 120, 192),
    Model("1T", 1e12, 180, 384),
)


@dataclass(frozen=True)
class World:
    """The assumptions."""

    replicas: int = 10_000
    regions: int = 3
    lr: float = 1e-6
    """Learning rate, which gives the share of changed weights."""
    trainer_gbit: float = 10.0
    """From the trainer into its bucket."""
    replica_gbit: float = 10.0
    """From a bucket to a replica, the median."""
    spread: float = 0.3
    """Standard deviation of the logarithm of a replica's bandwidth."""
    between_gbit: float = 100.0
    """From one region to another, shared by all that cross it there."""
    copy_gbit: float = 10.0
    """Of a keeper, from the trainer's bucket to one mirror; it copies to all mirrors at the same time."""
    site: int = 20
    """Servers that share a cache."""
    site_gbit: float = 25.0
    """From a cache to all servers of its site together."""
    poll_s: float = 1.0
    """Seconds between two looks of a replica at the bucket, the default of servers."""
    heartbeat_s: float = 10.0
    near_s: float = 0.02
    """Seconds of a request to a bucket of the same region."""
    far_s: float = 0.15
    """Seconds of a request to a bucket of another region."""
    joins: float = 0.5
    """How often in an hour a replica is replaced by a new one, as spot instances are."""
    join_objects: int = 12
    """Objects beside the anchor that a new replica reads at most."""
    price_between: float = 0.02
    """USD per GB from one region to another."""
    price_get: float = 0.0004
    """USD per 1,000 GETs, those that answer 304 included."""
    price_put: float = 0.005
    """USD per 1,000 PUTs."""
    seed: int = 0


@dataclass(frozen=True)
class Way:
    name: str
    deltas: bool
    mirrors: bool
    caches: bool


WAYS = (
    Way("deltas, mirrors, caches", True, True, True),
    Way("deltas, mirrors", True, True, False),
    Way("deltas, one bucket", True, False, False),
    Way("full, mirrors", False, True, False),
    Way("full, one bucket", False, False, False),
)


@dataclass(frozen=True)
class Measured:
    """What benchmarks/fleet.py has found."""

    every_s: float
    """Seconds between two versions there."""
    poll_s: float
    per_follower: float
    """Requests of a follower for a version, all of them."""
    head_rate: float
    """Requests per second for head.json that an nginx passes on, however many ask it."""
    notices: dict[bool, list[float]]
    """Seconds from a commit until a follower sees it, by quantiles; whether through an nginx."""

    @property
    def factor(self) -> float:
        """Requests of a follower, against those of its schedule: looks, a manifest, an object."""
        return self.per_follower / (looks(self.every_s, self.poll_s) + 2)


@cache
def measured() -> Measured:
    found = json.loads((RESULTS / "fleet.json").read_text())
    # the smallest fleets: of larger ones this machine was busy with the followers themselves
    rows = {way: next(row for row in found["rows"] if row["way"] == way) for way in ("nginx", "direct")}
    nginx, direct = rows["nginx"], rows["direct"]
    return Measured(
        found["every_s"],
        found["poll_s"],
        direct["per_version"]["requests"] / direct["followers"],
        nginx["per_version"]["at origin: head.json"] / found["every_s"],
        {way == "nginx": row["notice_s"] for way, row in rows.items()},
    )


@cache
def looks(every_s: float, poll_s: float) -> float:
    """Looks of a follower for each version, by its schedule, once it knows how often versions come."""
    rhythm, at, count = Rhythm(poll_s), 0.0, 0
    for version in range(12):
        if version == 2:
            count = 0
        while at < version * every_s:
            # the mean of what `Watcher.wait` draws
            at += rhythm.pause(at) * 0.875
            count += 1
        rhythm.saw(1, at)
    return count / 10


class Fleet:
    """One model in one world."""

    def __init__(self, model: Model, world: World) -> None:
        self.model, self.world = model, world
        self.costs = estimate(
            Setup(
                params=model.params,
                lr=world.lr,
                step_seconds=model.step_s,
                bandwidth=world.trainer_gbit * 1e9 / 8,
                replica_bandwidth=world.replica_gbit * 1e9 / 8,
                replicas=world.replicas,
                cores=model.cores,
            )
        )

    def simulate(self, way: Way) -> dict[str, Any]:
        costs, world = self.costs, self.world
        delta, anchor = costs["delta_bytes"], costs["anchor_bytes"]
        data = delta if way.deltas else anchor
        put = data / (world.trainer_gbit * 1e9 / 8)
        copy = data / (world.copy_gbit * 1e9 / 8) if way.mirrors else 0.0
        # nothing is published faster than the slowest link takes
        interval = max(self.model.step_s, put, copy, self._fetch(way, data, 1.0))
        versions = HOUR / interval
        abroad = world.replicas * (world.regions - 1) / world.regions
        readers = world.replicas / world.site if way.caches else world.replicas
        joins = world.replicas * world.joins
        joined = anchor + (world.join_objects * delta if way.deltas else 0.0)
        per_site = 1 / world.site if way.caches else 1.0
        # without anchors from the trainer, the keeper writes them: as often as `plan` says
        written = data + (anchor / costs["anchor_every"] if way.deltas else 0.0)
        if way.mirrors:
            between = (world.regions - 1) * written * versions
        else:
            between = abroad * data * versions + joins * (world.regions - 1) / world.regions * joined
        fetched = readers * data * versions + joins * joined * per_site
        parts = math.ceil(data / PART)
        found = measured()
        if way.caches:
            asked = versions * readers * (1 + parts)
            looked = HOUR * readers * found.head_rate
        else:
            asked = versions * world.replicas * (1 + parts)
            looked = versions * world.replicas * (found.factor * (looks(interval, world.poll_s) + 2) - 2)
        joining = joins * (math.ceil(anchor / PART) + world.join_objects + 20) * per_site
        gets = looked + asked + joining
        puts = world.replicas * HOUR / world.heartbeat_s
        copies = world.regions if way.mirrors else 1
        # the busiest second: all who read a bucket ask for a version as soon as they notice it, or as fast as it comes
        notices = found.notices[way.caches]
        takes = max(notices[-2] - notices[1], self._fetch(way, data, 1.0))
        busiest = (looked / HOUR + joining / HOUR + asked / versions / max(takes, 1.0)) / copies
        puts += versions * (parts + 2) * copies
        usd = between / 1e9 * world.price_between + gets / 1e3 * world.price_get + puts / 1e3 * world.price_put
        arrivals = self._arrivals(way, data, put, copy)
        return {
            "way": way.name,
            "version_bytes": data,
            "versions_per_hour": round(versions, 2),
            "between_regions_bytes_per_hour": between,
            "from_buckets_bytes_per_hour": fetched,
            "gets_per_hour": round(gets),
            "puts_per_hour": round(puts),
            "gets_per_second_and_bucket": round(gets / HOUR / copies, 1),
            "busiest_second_of_a_bucket": round(busiest, 1),
            "usd_per_hour": round(usd, 2),
            "usd_per_version": round(usd / versions, 4),
            "p50_s": round(statistics.median(arrivals), 2),
            "p99_s": round(arrivals[math.ceil(0.99 * len(arrivals)) - 1], 2),
        }

    def _arrivals(self, way: Way, data: float, put: float, copy: float) -> list[float]:
        """Seconds from a step's end until each replica serves the version, ascending."""
        costs, world, dice = self.costs, self.world, random.Random(self.world.seed)
        ready = costs["detect"] + put + (costs["encode"] if way.deltas else 0.0)
        applied = costs["prove"] + (costs["verify"] + costs["decode"] + costs["apply"] if way.deltas else 0.0)
        if not way.deltas:
            # read, hashed and written, with the cores there are; the digest once before and once after
            applied += data / (5e9 * self.model.cores) + costs["prove"]
        found = []
        notices = measured().notices
        mirrored = [dice.choice(notices[False]) + world.far_s + copy for _ in range(world.regions)]
        for number in range(min(world.replicas, SAMPLED)):
            region = number % world.regions
            home = region == 0
            latency = world.near_s if home or way.mirrors else world.far_s
            begin = ready + (mirrored[region] if way.mirrors and not home else 0.0)
            # head, manifest, first byte
            begin += dice.choice(notices[way.caches]) + 3 * latency
            found.append(begin + self._fetch(way, data, dice.lognormvariate(0.0, world.spread), home) + applied)
        return sorted(found)

    def _fetch(self, way: Way, data: float, luck: float, home: bool = False) -> float:
        """Seconds that a replica's fetch takes."""
        world = self.world
        own = data / (world.replica_gbit * 1e9 / 8 * luck)
        if way.caches:
            # the cache fetches it whole, then all servers of the site at the same time
            return data / (world.replica_gbit * 1e9 / 8) + max(own, data * world.site / (world.site_gbit * 1e9 / 8))
        if way.mirrors or home:
            return own
        return max(own, data * world.replicas / world.regions / (world.between_gbit * 1e9 / 8))


def simulate(world: World) -> dict[str, Any]:
    """All models and ways, with the assumptions."""
    models = [
        {
            **asdict(model),
            "anchor_bytes": Fleet(model, world).costs["anchor_bytes"],
            "density": Fleet(model, world).costs["density"],
            "ways": [Fleet(model, world).simulate(way) for way in WAYS],
        }
        for model in MODELS
    ]
    found = measured()
    calibration = {
        "sizes and speeds": "deltawire plan: benchmarks/costs_table.py, benchmarks/codec.py",
        "followers": "benchmarks/results/fleet.json",
        "requests of a follower for a version": round(found.per_follower, 2),
        "by its schedule": round(looks(found.every_s, found.poll_s) + 2, 2),
        "requests for head.json that an nginx passes on, per second": found.head_rate,
        "median seconds until a follower notices a version": {
            "through nginx": statistics.median(found.notices[True]),
            "directly": statistics.median(found.notices[False]),
        },
    }
    return {"assumptions": asdict(world), "calibration": calibration, "models": models}


def table(found: dict[str, Any]) -> list[str]:
    """The lines of the table in docs/fleet-cost.md."""
    lines = [
        "| weights | way | a version | per hour | between regions | requests | GET/s of a bucket: mean, busiest | "
        "USD per hour | 99 % serve it after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model in found["models"]:
        for way in model["ways"]:
            between, requests = way["between_regions_bytes_per_hour"], way["gets_per_hour"] + way["puts_per_hour"]
            cells = (
                model["name"],
                way["way"],
                size(way["version_bytes"]),
                f"{way['versions_per_hour']:.3g}",
                f"{size(between)}/h",
                f"{requests / 1e6:,.1f} M/h",
                f"{way['gets_per_second_and_bucket']:,.0f}, {way['busiest_second_of_a_bucket']:,.0f}",
                f"{way['usd_per_hour']:,.0f}" if way["usd_per_hour"] >= 100 else f"{way['usd_per_hour']:.2f}",
                duration(way["p99_s"]),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for field in fields(World):
        kind = {"int": int, "float": float}[str(field.type)]
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet-cost.json")
    given = vars(parser.parse_args())
    out = given.pop("out")
    found = simulate(World(**given))
    print("assumptions:", ", ".join(f"{name} {value:g}" for name, value in found["assumptions"].items()))
    print("calibration:", json.dumps(found["calibration"]))
    print("\n".join(table(found)))
    write_json(out, found)


if __name__ == "__main__":
    main()
