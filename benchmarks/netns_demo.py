"""Four machines that share a bucket, on one: the demo's parts in network namespaces, over slow links.

    sudo make netns-demo                         or: sudo python benchmarks/netns_demo.py

    trainer ───── 20 Mbit/s ───── services: environment, bucket (SeaweedFS)
     │    ╲                        │     │
     │     ╲──── replica-b ────────│─────╯          every line is a link of its own
     ╰────────── replica-a ────────╯

Routes exist for six doors and nothing else: trainer and replicas to the bucket, the trainer to the environment and to
the rollout HTTP of each replica (_namespaces.py says how). Every machine tries every port of every other, and must get
through these doors only. All packets are captured (_capture.py): weights must be found in what goes to and from the
bucket, and nowhere else.

Then what it is for: tokens trained per minute, with deltas and with full weights, over fast links and slow ones. The
policy is the one that ships with wider MLPs (--inner): it plays the same at first, and has weights enough to be felt on
a link next to what a step on a CPU takes. Ctrl-C ends it and takes everything away.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import queue
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

from _namespaces import Namespaces
from _report import about, print_about, write_json
from deltawire.cli.ui import ended_by_sigterm
from deltawire_wordle.demo import QUIET
from deltawire_wordle.processes import ChildProcess, uninterrupted

RESULTS = Path(__file__).parent / "results" / "netns.json"
REPLICAS = ("replica-a", "replica-b")
MACHINES = ("trainer", *REPLICAS, "services")
LINKS = [("trainer", "services"), *((name, "services") for name in REPLICAS), *(("trainer", name) for name in REPLICAS)]
ROLLOUTS, ENVIRONMENT, CLOSED = 8000, 8100, 7000
# ports; somebody listens at the last one on every machine, and nobody may get there
RUN = "s3://deltawire/wordle"
GAME = ("--words", "toy", "--guesses", "5")
EXCERPT, EXCERPTS = 24, 6
# bytes, and how many of each object are looked for: one may lie across two packets
WARM_S = 10.0
# of training that do not count
DIED_S = 400.0


# ── what runs on the machines ────────────────────────────────────────────────────────────────────────────────────────


def be_bucket(folder: str) -> None:
    from deltawire_wordle.seaweed import SeaweedFS

    with SeaweedFS(folder, host="0.0.0.0", secret_key=os.environ["AWS_SECRET_ACCESS_KEY"]) as server:
        say(event="ready", port=urlsplit(server.endpoint).port)
        signal.pause()


def be_listener(address: str) -> None:
    with socket.create_server((address, CLOSED)):
        say(event="ready")
        signal.pause()


def probe(*doors: str) -> None:
    """Which of these (address:port) can be reached from here."""
    for door in doors:
        host, _, port = door.partition(":")
        try:
            socket.create_connection((host, int(port)), timeout=2.0).close()
            say(door=door, answer="open")
        except OSError as error:
            say(door=door, answer=errno.errorcode.get(error.errno or 0, str(error)))


def compare(*urls: str) -> None:
    """What each server holds, by the SHA-256 of its live weights."""
    import httpx

    headers = {"Authorization": f"Bearer {os.environ['DELTAWIRE_TOKEN']}"}
    for url in urls:
        say(**httpx.get(f"{url}/deltawire/fingerprint", headers=headers, timeout=60.0).json())


def excerpts() -> None:
    """Verify the run, then a few bytes from random places of each of its data objects."""
    from deltawire.bucket.run import Run
    from deltawire.bucket.verify import verify

    run = Run.open(RUN)
    found = verify(run)
    say(verified=found.ok, versions=found.versions)
    dice = random.Random(0)
    for folder in ("anchors/", "deltas/"):
        for info in run.store.list(folder):
            header = 8 + int.from_bytes(run.store.get_range(info.key, 0, 8), "little")
            if info.size - header < EXCERPT:
                continue
            places = [dice.randrange(header, info.size - EXCERPT + 1) for _ in range(EXCERPTS)]
            data = run.store.get(info.key).data
            say(key=info.key, size=info.size, excerpts=[data[at : at + EXCERPT].hex() for at in places])


def say(**value: Any) -> None:
    print(json.dumps(value), flush=True)


ROLES: dict[str, Callable[..., None]] = {
    "bucket": be_bucket, "listener": be_listener, "probe": probe, "compare": compare, "excerpts": excerpts,
}  # fmt: skip


# ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Case:
    full: bool
    mbit: float | None
    # of every link; None is as fast as this machine

    @property
    def name(self) -> str:
        return f"{'full' if self.full else 'deltas'}, {'unlimited' if self.mbit is None else f'{self.mbit:g} Mbit/s'}"


class World:
    """The four machines with everything on them, for as long as a block lasts."""

    def __init__(self, case: Case, given: argparse.Namespace, policy: Path, folder: Path) -> None:
        self.case, self.spaces, self._given = case, Namespaces(LINKS, open_links=False), given
        self._policy, self._folder = policy, folder
        self._boxes: list[ChildProcess] = []
        self._environment = {
            **QUIET, "NO_PROXY": "*", "DELTAWIRE_TOKEN": secrets.token_hex(16), "AWS_ACCESS_KEY_ID": "deltawire",
            "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16), "AWS_REGION": "us-east-1",
        }  # fmt: skip
        self.doors: dict[tuple[str, str], set[int]] = {}
        self.bucket_port = 0

    def url(self, machine: str, port: int) -> str:
        return f"http://{self.spaces.address(machine)}:{port}"

    @contextmanager
    def up(self) -> Iterator[ChildProcess]:
        """Yields the trainer."""
        with self.spaces:
            try:
                yield self._start()
            finally:
                # the captures go last: they have to see the others end
                captures = [box for box in self._boxes if box.name.startswith("capture")]
                with uninterrupted():
                    ChildProcess.stop_all([box for box in self._boxes if box not in captures])
                    ChildProcess.stop_all(captures)

    def _start(self) -> ChildProcess:
        deltawire = [sys.executable, "-m", "deltawire.cli"]
        for machine in MACHINES:
            listener = self._role("listener", self.spaces.address(machine))
            self._box(f"listener-{machine}", machine, listener).ready("ready")
        bucket = self._box("bucket", "services", self._role("bucket", str(self._folder / "s3")))
        self.bucket_port = bucket.ready("ready")["port"]
        self._environment["AWS_ENDPOINT_URL"] = self.url("services", self.bucket_port)
        here = ("--host", self.spaces.address("services"), "--port", str(ENVIRONMENT), "--json")
        self._box("environment", "services", [*deltawire, "env", "wordle", *GAME, *here]).ready("ready")
        self._open("trainer", "services", ENVIRONMENT)
        self._open("trainer", "services", self.bucket_port)
        for machine in REPLICAS:
            self._open(machine, "services", self.bucket_port)
            self._open("trainer", machine, ROLLOUTS)
        self.spaces.shape(self.case.mbit)
        # these two are at every link
        for machine in ("trainer", "services"):
            wires = self._folder / f"wires-{machine}"
            wires.mkdir()
            # what full weights carry is too much to keep, and the same
            kept = [] if self.case.full else [str(wires)]
            capture = [sys.executable, str(Path(__file__).with_name("_capture.py")), *kept]
            self._box(f"capture-{machine}", machine, capture).ready("ready")
        for machine in REPLICAS:
            here = ("--host", self.spaces.address(machine), "--port", str(ROLLOUTS), "--id", machine)
            options = ("--threads", "1", "--poll", "0.1", "--grace", "1", "--json")
            self._box(machine, machine, [*deltawire, "serve", RUN, *here, *options])
        return self._box("trainer", "trainer", self._trainer())

    def _trainer(self) -> list[str]:
        given = self._given
        servers = [word for machine in REPLICAS for word in ("--server", self.url(machine, ROLLOUTS))]
        full = [str(Path(__file__).with_name("_full_weights.py"))]
        trainer = full if self.case.full else ["-m", "deltawire_wordle.train"]
        return [
            sys.executable, *trainer, "--run", RUN, "--env", self.url("services", ENVIRONMENT),
            *servers, *GAME, "--policy", str(self._policy), "--seconds", str(given.seconds), "--games", "0",
            "--lr", str(given.lr), "--secrets", str(given.secrets), "--generations", str(given.generations),
            "--seed", "1",
        ]  # fmt: skip

    def _open(self, client: str, server: str, port: int) -> None:
        self.spaces.open_door(client, server, port)
        self.doors.setdefault((client, server), set()).add(port)

    def _box(self, name: str, machine: str, command: Sequence[str]) -> ChildProcess:
        box = ChildProcess(name, [*self.spaces.command(machine), *command], self._folder, self._environment)
        self._boxes.append(box)
        box.start()
        return box

    def _role(self, role: str, *words: str) -> list[str]:
        return [sys.executable, str(Path(__file__)), "--role", role, *words]

    def ask(self, machine: str, role: str, *words: str) -> list[dict[str, Any]]:
        """What a role says that ends by itself."""
        command = [*self.spaces.command(machine), *self._role(role, *words)]
        done = subprocess.run(
            command, env={**os.environ, **self._environment}, capture_output=True, text=True, timeout=DIED_S
        )
        if done.returncode:
            raise SystemExit(f"{role} on {machine} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def look_after(self) -> None:
        for box in self._boxes:
            if box.exit_code:
                raise SystemExit(f"the {box.name} ended early ({box.exit_code}): {box.last_log_line}")

    def captured(self) -> list[dict[str, Any]]:
        """After the end: what both captures saw."""
        return [box.ready("seen") for box in self._boxes if box.name.startswith("capture")]


def run(case: Case, given: argparse.Namespace, policy: Path, folder: Path) -> dict[str, Any]:
    world = World(case, given, policy, folder)
    steps, published, done, reached = [], [], None, None
    with world.up() as trainer:
        deadline = time.monotonic() + given.seconds + DIED_S
        while not trainer.finished:
            world.look_after()
            if time.monotonic() > deadline:
                raise SystemExit(f"{case.name}: no end after {given.seconds + DIED_S:.0f} s")
            try:
                event = trainer.events.get(timeout=0.2)
            except queue.Empty:
                continue
            match event.pop("event"):
                case "step":
                    steps.append(event)
                    if reached is None:
                        # now all of them are there and at work
                        reached = reachable(world)
                case "published":
                    published.append(event)
                case "done":
                    done = event
        if done is None:
            raise SystemExit(f"{case.name}: the trainer ended early: {trainer.last_log_line}")
        live = world.ask("trainer", "compare", *(world.url(machine, ROLLOUTS) for machine in REPLICAS))
        verified, *objects = world.ask("services", "excerpts")
    counted = [step for step in steps if step["seconds"] > WARM_S]
    minutes = (given.seconds - WARM_S) / 60
    later = [one for one in published if one["version"]]
    return {
        "case": case.name,
        "full": case.full,
        "mbit": case.mbit,
        "tokens_per_minute": sum(step["figures"]["tokens"] for step in counted) / minutes,
        "steps_per_minute": len(counted) / minutes,
        "staleness": fmean(step["staleness"] for step in steps) if steps else None,
        "waited": sum(step["waited_s"] for step in counted) / (60 * minutes),
        "dropped": sum(step["dropped"] for step in steps),
        "steps": len(steps),
        "versions": len(published),
        "bytes_per_version": fmean(one["bytes"] for one in later) if later else None,
        "bytes_full": 2 * published[0]["elements"],
        "changed": fmean(one["changed"] / one["elements"] for one in later) if later else None,
        "equal": [one["sha256"] == done["sha256"] for one in live] == [True] * len(REPLICAS),
        "verified": verified["verified"],
        "doors": reached,
        "traffic": traffic(world, objects, folder),
    }


# ── what is reachable, what was sent ─────────────────────────────────────────────────────────────────────────────────


def reachable(world: World) -> list[dict[str, Any]]:
    """Every machine tries every port of every other that somebody listens at anywhere."""
    ports = (ROLLOUTS, ENVIRONMENT, CLOSED, world.bucket_port)
    names = {world.spaces.address(machine): machine for machine in MACHINES}
    found = []
    for client in MACHINES:
        tried = [f"{host}:{port}" for host, machine in names.items() if machine != client for port in ports]
        for one in world.ask(client, "probe", *tried):
            host, _, port = one["door"].partition(":")
            allowed = int(port) in world.doors.get((client, names[host]), ())
            found.append(
                {
                    "from": client,
                    "to": names[host],
                    "port": what_listens(world, int(port)),
                    "answer": one["answer"],
                    "as_meant": (one["answer"] == "open") == allowed,
                }
            )
    return found


def what_listens(world: World, port: int) -> str:
    names = {ROLLOUTS: "rollouts", ENVIRONMENT: "environment", CLOSED: "listener", world.bucket_port: "bucket"}
    return names.get(port, str(port))


def traffic(world: World, objects: Sequence[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Payload by flow, and how many of the run's data objects were seen in it."""
    names = {world.spaces.address(machine): machine for machine in MACHINES}
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    lost, others = 0, {}
    for place, seen in zip(("trainer", "services"), world.captured(), strict=True):
        lost += seen["lost"]
        others[place] = seen["others"]
        for flow in seen["flows"]:
            source, destination = names.get(flow["source"], "?"), names.get(flow["destination"], "?")
            key = (source, destination, what_listens(world, flow["port"]))
            if key in rows:
                # both captures are at the link between them
                continue
            file = (
                folder
                / f"wires-{place}"
                / "-".join((flow["source"], flow["destination"], str(flow["port"]), "to" if flow["asks"] else "from"))
            )
            rows[key] = {
                "from": source,
                "to": destination,
                "port": key[2],
                "packets": flow["packets"],
                "payload": flow["payload"],
                "objects": count_objects(file.read_bytes(), objects) if file.exists() else None,
            }
    return {"lost": lost, "not_tcp": others, "objects": len(objects), "flows": [*rows.values()]}


def count_objects(carried: bytes, objects: Sequence[dict[str, Any]]) -> int:
    return sum(any(bytes.fromhex(excerpt) in carried for excerpt in one["excerpts"]) for one in objects)


def faults(result: dict[str, Any]) -> list[str]:
    """What must not be, whatever the figures are."""
    found = [f"{one['from']} → {one['to']} {one['port']}: {one['answer']}" for one in result["doors"] or ()
             if not one["as_meant"]]  # fmt: skip
    if not result["doors"]:
        found.append("nobody tried the doors: there was no step")
    if not result["equal"]:
        found.append("a replica does not hold the trainer's weights")
    if not result["verified"]:
        found.append("the run does not verify")
    for flow in result["traffic"]["flows"]:
        if flow["objects"] and flow["port"] != "bucket":
            found.append(f"weights went from {flow['from']} to {flow['to']} ({flow['port']})")
        sent = (flow["from"], flow["to"], flow["port"]) == ("trainer", "services", "bucket")
        if sent and flow["objects"] is not None and flow["objects"] < result["traffic"]["objects"]:
            found.append("the capture missed objects that the trainer sent")
    return found


# ── the demo ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_policy(inner: int, folder: Path) -> Path:
    """The policy that ships with more neurons in its MLPs, in pairs that cancel out: the same function, more weights.

    They are as large as any, since a weight of zero changes its bits at every step, which others do not.
    """
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from deltawire_wordle import small_policy

    disable_progress_bar()
    torch.manual_seed(0)
    ships, config = small_policy.load().state_dict(), small_policy.config()
    config.intermediate_size = max(inner, config.intermediate_size)
    model = Qwen3ForCausalLM(config)
    weights = model.state_dict()
    for name, tensor in ships.items():
        if tensor.shape != weights[name].shape:
            across = int(name.endswith("down_proj.weight"))
            old, pairs = tensor.shape[across], (weights[name].shape[across] - tensor.shape[across]) // 2
            one, other = weights[name].narrow(across, old, pairs), weights[name].narrow(across, old + pairs, pairs)
            other.copy_(-one if across else one)
        weights[name][tuple(slice(size) for size in tensor.shape)] = tensor
    small_policy.save(model, folder)
    return folder


def show_doors(result: dict[str, Any]) -> None:
    doors = result["doors"]
    opened = [f"{one['from']} → {one['to']} ({one['port']})" for one in doors if one["answer"] == "open"]
    answers = sorted({one["answer"] for one in doors if one["answer"] != "open"})
    print(f"{len(doors)} ways tried; open: {', '.join(opened)}; all others: {', '.join(answers)}")


def show_traffic(result: dict[str, Any]) -> None:
    seen = result["traffic"]
    print(f"\ncaptured with {result['case']} ({seen['lost']} packets lost), and how many of the run's data objects")
    print(f"({seen['objects']} anchors and deltas) were found in each flow, by their bytes:")
    for flow in sorted(seen["flows"], key=lambda flow: -flow["payload"]):
        objects = "" if flow["objects"] is None else f"{flow['objects']:6} objects"
        print(f"  {flow['from']:>10} → {flow['to']:10} {flow['port']:12}{flow['payload'] / 1e6:10.3f} MB{objects}")
    print(f"  not TCP, in packets: {seen['not_tcp']}")


def show_cases(results: Sequence[dict[str, Any]]) -> None:
    print("\n                        tokens/min  steps/min  waiting  sample age  dropped   kB/version  bits equal")
    for one in results:
        size = f"{one['bytes_per_version'] / 1e3:10.0f}" if one["bytes_per_version"] else f"{'–':>10}"
        age = f"{one['staleness']:.1f}" if one["staleness"] is not None else "–"
        print(
            f"{one['case']:22}{one['tokens_per_minute']:12,.0f}{one['steps_per_minute']:11.1f}{one['waited']:9.0%}"
            f"{age:>12}{one['dropped']:9}   {size}{'yes' if one['equal'] else 'NO':>12}"
        )
    for full in (False, True):
        fast, slow = (
            [one["tokens_per_minute"] for one in results if one["full"] is full and (one["mbit"] is None) is free]
            for free in (True, False)
        )
        if fast and slow and fast[0]:
            print(f"{'full weights' if full else 'deltas'} keep {slow[0] / fast[0]:.0%} of their pace on slow links")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=20.0, help="of each slow link (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training in each case (%(default)s)")
    parser.add_argument("--inner", type=int, default=3072, help="neurons of an MLP (%(default)s); 0: as it ships")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--secrets", type=int, default=2, help="per step (%(default)s)")
    parser.add_argument("--generations", type=int, default=4, help="games per secret (%(default)s)")
    parser.add_argument("--only", choices=["deltas"], help="deltas over slow links, and nothing to compare with")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        ROLES[given.role[0]](*given.role[1:])
        return
    if os.geteuid():
        raise SystemExit("network namespaces need root: sudo make netns-demo")
    if given.seconds <= WARM_S:
        parser.error(f"the first {WARM_S:g} seconds do not count: --seconds must be more")
    facts = about()
    print_about(facts)
    slow = Case(False, given.mbit)
    cases = [slow] if given.only else [Case(False, None), slow, Case(True, None), Case(True, given.mbit)]
    results = []
    scratch = tempfile.TemporaryDirectory(prefix="deltawire-netns-", ignore_cleanup_errors=True)
    with ended_by_sigterm(), scratch as place:
        policy = make_policy(given.inner, Path(place) / "policy")
        for number, case in enumerate(cases):
            folder = Path(place) / str(number)
            folder.mkdir()
            results.append(run(case, given, policy, folder))
            if case is slow:
                show_doors(results[-1])
                show_traffic(results[-1])
    show_cases(results)
    write_json(given.out, {"about": facts, "results": results})
    if wrong := [f"{one['case']}: {fault}" for one in results for fault in faults(one)]:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
