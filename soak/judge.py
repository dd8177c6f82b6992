"""Compares what everybody wrote down with what the trainer had, and looks for what was left behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from deltawire.bucket.replay import checkout
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import keys

from .conductor import MARK, Conductor
from .ledger import Weights, blank, entries, hash_of
from .record import Event


class Judge:
    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._trainer = entries(conductor.ledger(conductor.trainer_client))
        self._hashes: dict[int, str] = {e["state"]: e["hash"] for e in self._trainer if e["what"] == "state"}
        self._states: dict[int, int] = {e["version"]: e["state"] for e in self._trainer if e["what"] == "published"}
        self._times = sorted((e["at"], e["version"]) for e in self._trainer if e["what"] == "published")
        self._logs = {c: entries(conductor.ledger(c)) for c in range(conductor.options.replicas)}
        self.failures: list[str] = [*conductor.outcome.failures]
        self.wrong = 0

    def verdict(self) -> dict[str, Any]:
        out = self._conductor.outcome
        served = self._check_states()
        self._check_dumps()
        kept = self._check_bucket()
        self._check_leftovers()
        lags, times = self._lags(), self._recoveries(out.events)
        kinds = Counter(event.kind for event in out.events)
        return {
            "seed": self._conductor.options.seed,
            "minutes": self._conductor.options.minutes,
            "replicas": self._conductor.options.replicas,
            "versions": out.newest + 1,
            "versions_kept": kept,
            "states_checked": served,
            "wrong_states": self.wrong,
            "kills": sum(count for kind, count in kinds.items() if kind.startswith("kill")),
            "faults": sum(kinds.values()),
            "faults_by_kind": dict(sorted(kinds.items())),
            "nothing_to_break": dict(out.skipped),
            "recovery_s": _percentiles(times),
            "lag_versions": _percentiles(lags),
            "seconds_to_agree": round(out.seconds_to_agree, 1),
            "trainer_troubles": dict(Counter(e["error"].split(":")[0] for e in self._trainer if "error" in e)),
            "megabytes_per_replica": {
                "with the shared cache": self._mean_bytes(out.cached),
                "without": self._mean_bytes([c for c in self._logs if c not in out.cached]),
            },
            "notes": out.notes,
            "failures": self.failures,
        }

    def _mean_bytes(self, clients: list[int]) -> float:
        down = self._conductor.outcome.bytes_down
        return round(sum(down[c] for c in clients) / max(len(clients), 1) / 1e6, 1) if down else 0.0

    # ── right or wrong ───────────────────────────────────────────────────────────────────────────────────────────────

    def _wrong(self, what: str) -> None:
        self.wrong += 1
        self.failures.append(what)

    def _check(self, who: str, version: int, state: int, hash: str) -> None:
        """These weights are what the trainer had, and all who name this version mean the same."""
        if self._hashes.get(state) != hash:
            self._wrong(f"{who} names version {version} and holds weights the trainer never had")
        elif self._states.setdefault(version, state) != state:
            self._wrong(f"{who} names version {version}, but holds state {state} instead of {self._states[version]}")

    def _check_states(self) -> int:
        count = 0
        for client, log in self._logs.items():
            before = -1
            for entry in log:
                if entry["what"] == "start":
                    before = -1
                if entry["what"] == "serves":
                    count += 1
                    self._check(f"replica-{client}", entry["version"], entry["state"], entry["hash"])
                    if entry["version"] < before:
                        self.failures.append(f"replica-{client} went back from {before} to {entry['version']}")
                    before = entry["version"]
        return count

    def _check_dumps(self) -> None:
        newest = self._conductor.outcome.newest
        for client in self._logs:
            path = self._conductor.dump(client)
            if not path.exists():
                self.failures.append(f"replica-{client} left no weights")
                continue
            with np.load(path) as saved:
                weights: Weights = {name: saved[name] for name in blank()}
                version = int(saved["version"])
            if version != newest:
                self.failures.append(f"replica-{client} ended at version {version}, the newest is {newest}")
            self._check(f"replica-{client} at the end", version, int(weights["state"][0]), hash_of(weights))

    def _check_bucket(self) -> int:
        """Every version that was acknowledged is there, bit for bit, or was pruned."""
        run = Run.open(self._conductor.direct_store())
        listed, pruned = run.listed(), run.pruned()
        for version in sorted(self._states):
            if version not in listed and version not in pruned:
                self.failures.append(f"version {version} was published and is lost")
        found = verify(run)
        if found.failure is not None:
            self.failures.append(f"verify: {found.failure}")
            return 0
        state = None
        for version in listed:
            state = checkout(run, version, state)
            like = blank()
            weights = {name: state.bits(name).view(like[name].dtype).reshape(like[name].shape) for name in like}
            self._check("the bucket", version, int(weights["state"][0]), hash_of(weights))
        return len(listed)

    def _check_leftovers(self) -> None:
        store = self._conductor.direct_store()
        run = Run.open(store)
        named = {b.key for v in run.listed() for link in run.manifest(v).links for b in link.objects}
        newest = run.newest() or 0
        for item in store.list():
            version = keys.data_version(item.key)
            if version is not None and version <= newest and item.key not in named:
                self.failures.append(f"{item.key} was left behind")
        for place, pattern in (("tmp", "*"), ("cache", "*.part"), ("dumps", "*.new.npz")):
            for path in (self._conductor.folder / place).glob(pattern):
                self.failures.append(f"{path.relative_to(self._conductor.folder)} was left behind")

    # ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _newest_at(self, moment: float) -> int:
        return max((version for at, version in self._times if at <= moment), default=-1)

    def _lags(self) -> list[float]:
        """Once a second, for every replica that had started: how many versions it was behind."""
        end, lags = self._conductor.outcome.stopped_at, []
        for log in self._logs.values():
            if not log:
                continue
            served = [(e["at"], e["version"] if e["what"] == "serves" else -1) for e in log if e["what"] != "trouble"]
            # a replica that has just started is as far behind as it gets: it has nothing
            moment, index = served[0][0], 0
            while moment < end:
                while index + 1 < len(served) and served[index + 1][0] <= moment:
                    index += 1
                lags.append(float(self._newest_at(moment) - served[index][1]))
                moment += 1.0
        return lags

    def _recoveries(self, events: list[Event]) -> list[float]:
        """From the end of a fault to the first version served that was newest then or later, for whom it concerned.

        Where the next fault came before that, its end counts instead.
        """
        times = []
        for client, log in self._logs.items():
            served = [(e["at"], e["version"]) for e in log if e["what"] == "serves"]
            mine = sorted((e.at, e.until) for e in events if client in e.clients and e.until is not None)
            for at, until in mine:
                assert until is not None
                newest = self._newest_at(until)
                reached = next((when for when, version in served if when >= until and version >= newest), None)
                interrupted = any(at < start and start < (reached or float("inf")) for start, _ in mine)
                if reached is not None and not interrupted:
                    times.append(reached - until)
        return times


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "count": len(values),
        "p50": round(float(np.percentile(values, 50)), 2),
        "p99": round(float(np.percentile(values, 99)), 2),
        "max": round(max(values), 2),
    }


def leftover_processes(folder: Path) -> list[str]:
    """Processes that were started for this soak and are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            marked = f"{MARK}={folder}\0".encode() in (path / "environ").read_bytes()
        except OSError:
            continue
        if marked or (str(folder / "disk") in command):
            found.append(f"process {path.name} is still there: {command[:200]}")
    return found
