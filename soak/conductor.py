"""Starts everything, lets the adversary loose, stops it, and waits until all agree."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltawire.core.errors import DeltawireError
from deltawire.store import ObjectStore
from deltawire_wordle.seaweed import SeaweedFS

from .adversary import Fault, faults
from .damage import Undo, Vandal, damage_cache, try_to
from .disk import Disk
from .ledger import entries
from .nginx import WRONG, Nginx, let_read
from .nursery import Nursery
from .proxy import Proxy
from .record import Event, Options, Outcome

RUN = "s3://soak/run"
ANCHOR_EVERY = 12
SLEEP_VERSIONS = 100
KEEP_LAST, GRACE_S, LEASE_S = 40, 3.0, 5.0
DISK_MB = 900
MARK = "DELTAWIRE_SOAK"
"""In the environment of every process of a soak, so that none of them is overlooked at the end."""


class Conductor:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.folder = options.folder
        for name in ("logs", "dumps", "tmp", "cache"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        os.environ[MARK] = str(self.folder)
        self.outcome = Outcome()
        self.disk = Disk(self.folder / "disk", DISK_MB)
        self._server = SeaweedFS(
            self.disk.folder / "seaweed",
            options={"master.volumeSizeLimitMB": "64", "master.vacuumIntervalSeconds": "20"},
        )
        self._server.start()
        self._server.store("soak/bucket").put("made", b"buckets come into being with their first object")
        self._server_is_up = True
        self.trainer_client, self.prune_client = options.replicas, options.replicas + 1
        bucket = self._server.ports["s3.port"]
        self._nginx: Nginx | None = None
        # one after the other: each comes as soon as all others did
        self._wrong = itertools.cycle(random.Random(options.seed).sample([*WRONG], len(WRONG)))
        if options.proxy:
            let_read(self._server, "soak")
            self._nginx = Nginx(self.folder / "nginx", bucket, tls=True)
        read = bucket if self._nginx is None else self._nginx.port
        self._proxy = Proxy([read] * options.replicas + [bucket] * 2, self.folder / "logs" / "proxy")
        self._nursery = Nursery(self.folder / "logs")
        self._vandal = Vandal(self.direct_store(), self.disk.folder)
        self._pids: dict[int, int] = {}
        # client → process, of those that run
        self._killed: set[int] = set()
        self._prunes: set[int] = set()
        self._asleep: dict[int, tuple[int, Event]] = {}
        # client → the version at which it may wake up
        self._late = [*range(options.replicas - options.replicas // 3, options.replicas)]
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._at_the_very_end: list[Undo] = []
        self._impeded: dict[int, list[str]] = {}

    # ── paths and processes ──────────────────────────────────────────────────────────────────────────────────────────

    def ledger(self, client: int) -> Path:
        name = "trainer" if client == self.trainer_client else f"replica-{client}"
        return self.folder / "logs" / f"{name}.jsonl"

    def dump(self, client: int) -> Path:
        return self.folder / "dumps" / f"{client}.npz"

    def direct_store(self) -> ObjectStore:
        return ObjectStore.from_url(RUN, environ=self._server.environment)

    def environment(self, client: int | None) -> dict[str, str]:
        """What a process needs to find the bucket: through the proxy, or directly."""
        env = dict(self._server.environment)
        # behind nginx, only the heartbeats of a replica go to the bucket, and those directly
        if client is not None and (self._nginx is None or client >= self.options.replicas):
            env["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{self._proxy.ports[client]}"
        env |= {"AWS_READ_TIMEOUT": "3s", "AWS_TIMEOUT": "10s", "AWS_CONNECT_TIMEOUT": "2s"}
        # a trainer that is started after a kill waits for three renewals of the one before
        env["DELTAWIRE_WRITER_RENEWAL"] = "1"
        env["TMPDIR"] = str(self.folder / "tmp")
        if client is not None and self.uses_cache(client):
            env |= {"DELTAWIRE_CACHE": str(self.folder / "cache"), "DELTAWIRE_CACHE_GB": "0.05"}
        if self._nginx is not None:
            env["SSL_CERT_FILE"] = str(self._nginx.certificate)
        return env

    def uses_cache(self, client: int) -> bool:
        return client < self.options.replicas and client % 2 == 0

    def _start(self, client: int) -> None:
        task: dict[str, Any] = {"run": RUN, "ledger": str(self.ledger(client))}
        task["log"] = str(self.ledger(client).with_suffix(".log"))
        if client == self.trainer_client:
            role = "trainer"
            task |= {
                "seed": self.options.seed,
                "period": self.options.period,
                "anchor_every": ANCHOR_EVERY,
                "checkpoint": str(self.folder / "checkpoint.npz"),
                "stop": str(self.folder / "stop-trainer"),
            }
        else:
            role = "replica"
            task |= {
                "id": f"replica-{client}",
                "heartbeat": 0.0 if client % 5 == 4 else 1.0,
                "by": ("follow", "follow", "every", "sync")[client % 4],
                "dump": str(self.dump(client)),
                "stop": str(self.folder / "stop-replicas"),
            }
            if self._nginx is not None:
                path = RUN.partition("://")[2]
                task |= {"run": f"https://127.0.0.1:{self._proxy.ports[client]}/{path}", "heartbeats": RUN}
        self._pids[client] = self._nursery.start(role, task, self.environment(client))

    def _prune(self) -> int:
        task = {"run": RUN, "last": KEEP_LAST, "grace": GRACE_S, "lease": LEASE_S}
        task["log"] = str(self.folder / "logs" / "prune.log")
        pid = self._nursery.start("prune", task, self.environment(self.prune_client))
        self._prunes.add(pid)
        return pid

    def _look_after(self) -> None:
        """Whoever ended without being killed has failed."""
        for pid, code in self._nursery.ended().items():
            client = next((c for c, p in self._pids.items() if p == pid), None)
            if client is not None:
                del self._pids[client]
                asked = (self.folder / f"stop-{'trainer' if client == self.trainer_client else 'replicas'}").exists()
                if pid not in self._killed and (code != 0 or not asked):
                    self.outcome.failures.append(f"{self.ledger(client).stem} ended by itself with {code}")
            if pid in self._prunes and code not in (0, -signal.SIGKILL):
                self.outcome.skipped["prune, since the store was away"] += 1
            self._prunes.discard(pid)

    def newest(self) -> int:
        published = [e["version"] for e in entries(self.ledger(self.trainer_client)) if e["what"] == "published"]
        return max(published, default=-1)

    # ── the play ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def play(self) -> Outcome:
        out = self.outcome
        if self.disk.why_not:
            out.notes.append(f"no full disk: a file system of its own {self.disk.why_not}")
        self._start(self.trainer_client)
        for client in range(self.options.replicas):
            if client not in self._late:
                self._start(client)
        self._wait_for(lambda: self.newest() >= 3, self.options.deadline, "the first versions")
        without = frozenset({*(["fill disk"] if self.disk.why_not else ()), *(() if self._nginx else ["wrong proxy"])})
        end = time.monotonic() + self.options.minutes * 60
        following = time.monotonic()
        for fault in faults(self.options.seed, self.options.pace, without):
            following += fault.after
            self._run_until(min(following, end))
            if following >= end:
                break
            self._begin(fault)
        self._stop_faults()
        self._agree()
        self._clean_up()
        return out

    def _run_until(self, moment: float) -> None:
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            self._wake()
            self._look_after()
            if now >= moment:
                return
            time.sleep(0.05)

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._number), work))

    def _wake(self, everybody: bool = False) -> None:
        if not self._asleep:
            return
        newest = self.newest()
        for client, (version, event) in list(self._asleep.items()):
            if everybody or newest >= version:
                del self._asleep[client]
                if client in self._pids:
                    self._nursery.signal(self._pids[client], signal.SIGCONT)
                event.until = time.time()

    def _begin(self, fault: Fault) -> None:
        event = Event(fault.kind, time.time(), [])
        undo = self._inflict(fault, event)
        if undo is None:
            self.outcome.skipped[fault.kind] += 1
            return
        self.outcome.events.append(event)

        def end() -> None:
            undo()
            if event.until is None and fault.kind != "sleep":
                event.until = time.time()

        self._later(fault.lasts, end)

    def _inflict(self, fault: Fault, event: Event) -> Undo | None:
        """Do it; returns how to undo it, or None when there was nothing to do it to."""
        kind, everybody = fault.kind, [*range(self.options.replicas + 1)]
        awake = [c for c in self._pids if c != self.trainer_client and c not in self._asleep]
        chosen = awake[fault.who % len(awake)] if awake else None
        dice = random.Random(fault.who)
        if kind == "kill server":
            return self._kill_server(event, everybody)
        if kind == "kill trainer":
            return self._kill(event, self.trainer_client)
        if kind in ("cut all", "fill disk"):
            event.clients = everybody
            if kind == "fill disk":
                self.disk.fill()
                return self._make_room
            return self._impede(everybody, "cut")
        if kind == "join late":
            if not self._late:
                return None
            event.clients = [self._late[0]]
            self._start(self._late.pop(0))
            return _nothing
        if kind in ("prune", "two prunes"):
            for _ in range(2 if kind == "two prunes" else 1):
                self._prune()
            return _nothing
        if kind == "kill prune":
            pid = self._prune()
            return lambda: self._nursery.signal(pid, signal.SIGKILL)
        if kind == "damage cache":
            return _nothing if damage_cache(self.folder / "cache", dice) else None
        if kind == "wrong proxy" and self._nginx is not None:
            event.clients = [*range(self.options.replicas)]
            event.kind = next(self._wrong)
            self._nginx.configure(WRONG[event.kind])
            return lambda: self._nginx.configure({}) if self._nginx else None
        if kind in ("flip bits", "truncate", "lose object"):
            return self._damage(lambda: self._vandal.overwrite(dice, kind), for_good=dice.random() < 0.3)
        if kind == "rot on disk":
            return self._damage(lambda: self._vandal.rot(dice), for_good=dice.random() < 0.3)
        if chosen is None:
            return None
        if kind == "kill replica":
            return self._kill(event, chosen)
        event.clients = [chosen]
        if kind == "sleep":
            if len(self._asleep) >= 2:
                return None
            self._nursery.signal(self._pids[chosen], signal.SIGSTOP)
            self._asleep[chosen] = self.newest() + SLEEP_VERSIONS, event
            return _nothing
        # the trainer's network fails too
        client = self.trainer_client if fault.who % 4 == 0 else chosen
        event.clients = [client]
        return self._impede([client], kind)

    def _kill(self, event: Event, client: int) -> Undo | None:
        pid = self._pids.get(client)
        if pid is None:
            return None
        event.clients = [client]
        self._killed.add(pid)
        self._nursery.signal(pid, signal.SIGKILL)
        return lambda: self._start_again(client, pid)

    def _start_again(self, client: int, dead: int) -> None:
        # it may take a moment until the kernel has let go of it
        self._wait_for(lambda: self._pids.get(client) != dead, 120, "a killed process to be gone")
        if client not in self._pids:
            self._start(client)

    def _kill_server(self, event: Event, everybody: list[int]) -> Undo | None:
        if not self._server_is_up:
            return None
        event.clients = everybody
        self._server.kill()
        self._server_is_up = False
        return self._start_server

    def _start_server(self) -> None:
        self.disk.empty()  # it does not start on a full disk
        self._server.start()
        self._server_is_up = True

    def _make_room(self) -> None:
        """As an operator would: the server's index refuses all writes after the first that failed, until a restart."""
        self.disk.empty()
        if self._server_is_up:
            self._server.kill()
            self._server.start()

    def _impede(self, clients: list[int], mode: str) -> Undo:
        for client in clients:
            self._impeded.setdefault(client, []).append(mode)
        self._proxy.set(clients, mode)

        def undo() -> None:
            for client in clients:
                modes = self._impeded[client]
                modes.remove(mode)
                self._proxy.set([client], modes[-1] if modes else "pass")

        return undo

    def _damage(self, work: Callable[[], Undo | None], for_good: bool) -> Undo | None:
        undo = try_to(work) if self._server_is_up else None
        if undo is None:
            return None
        if for_good:
            self._at_the_very_end.append(undo)
            return _nothing
        return lambda: self._repair(undo)

    def _repair(self, undo: Undo) -> None:
        try:
            undo()
        except DeltawireError:
            self._later(2.0, lambda: self._repair(undo))

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _stop_faults(self) -> None:
        while self._due:
            heapq.heappop(self._due)[2]()
        self._wake(everybody=True)
        while self._late:
            self._start(self._late.pop(0))
        self.outcome.stopped_at = time.time()

    def _agree(self) -> None:
        """With the faults over, but not yet repaired what was damaged for good, everybody comes to the last version."""
        began = time.monotonic()
        goal = self.newest() + ANCHOR_EVERY + 3
        self._wait_for(lambda: self.newest() >= goal, self.options.deadline, f"the trainer to reach version {goal}")
        (self.folder / "stop-trainer").touch()
        self._wait_for(lambda: self.trainer_client not in self._pids, self.options.deadline, "the trainer to end")
        self.outcome.newest = self.newest()
        clients = range(self.options.replicas)
        self._wait_for(
            lambda: all(self._serves(client) >= self.outcome.newest for client in clients),
            self.options.deadline,
            "every replica to serve the last version",
            lambda: ", ".join(f"replica-{c} is at {self._serves(c)}" for c in clients),
        )
        self.outcome.seconds_to_agree = time.monotonic() - began
        (self.folder / "stop-replicas").touch()
        self._wait_for(lambda: not self._pids and not self._prunes, 180, "all processes to end")
        self.outcome.bytes_down = self._proxy.set([], "pass")["down"][: self.options.replicas]
        self.outcome.cached = [client for client in clients if self.uses_cache(client)]

    def _serves(self, client: int) -> int:
        """What it said last; -1 for one that has said nothing since its last start."""
        version = -1
        for entry in entries(self.ledger(client)):
            version = entry["version"] if entry["what"] == "serves" else -1 if entry["what"] == "start" else version
        return version

    def _clean_up(self) -> None:
        """As the documentation says, after a crash: repair what was damaged, and prune."""
        for undo in self._at_the_very_end:
            undo()
        done = subprocess.run(
            [sys.executable, "-m", "deltawire.cli", "prune", RUN, "--apply", "--json",
             "--grace", "0s", "--unfinished", "0s", "--keep-last", str(KEEP_LAST)],
            capture_output=True, text=True, env={**os.environ, **self.environment(None)}, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            self.outcome.failures.append(f"prune failed at the end: {done.stderr.strip()[-500:]}")
            return
        self.outcome.notes.append(f"the last prune deleted {len(json.loads(done.stdout)['deleted'])} objects")

    def _wait_for(
        self, met: Callable[[], bool], seconds: float, what: str, detail: Callable[[], str] = lambda: ""
    ) -> None:
        deadline = time.monotonic() + seconds
        while not met():
            self._look_after()
            if time.monotonic() > deadline:
                raise Hang(f"waited {seconds:.0f} s for {what}. {detail()}")
            time.sleep(0.1)

    def close(self) -> None:
        self._nursery.close()
        self._proxy.close()
        if self._nginx is not None:
            self._nginx.close()
        self._server.close()
        self.disk.close()


class Hang(Exception):
    """Something did not come to an end in time."""


def _nothing() -> None:
    pass
