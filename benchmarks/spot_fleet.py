"""A spot fleet: replicas that die and join at random while a trainer publishes, two keepers at once, one of them killed
again and again.

    python benchmarks/spot_fleet.py                    # ten minutes, 64 replicas; writes results/spot-fleet.json
    python benchmarks/spot_fleet.py --minutes 1 --processes 4

Everything is a real process, and dies by SIGKILL: the trainer's bucket is a folder, replicas keep a small model in
memory (four to a process, which die together), rollout servers are `deltawire serve`, keepers are `deltawire keep`.
Clients ask the servers for versions all the time, and look at every token's version.

What is checked, by what was written down and not by deltawire: every state that a replica named is, by a hash of its
bytes, what the trainer had published under that number; its digest is the manifest's; no answer has a token outside the
bound of its request. What is counted: data objects that a joining replica fetched, and the seconds until it was ready.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _report import about, print_about, write_json
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.core import full, keys
from deltawire.models import ModelView
from deltawire.replica import Replica
from deltawire.store import LocalStore
from deltawire_wordle.processes import free_port
from soak.ledger import Ledger, entries, hash_of

RESULTS = Path(__file__).parent / "results" / "spot-fleet.json"
PER_PROCESS = 4
MAX_OBJECTS = 12
"""Data objects beside one anchor that a joining replica may need."""

_QUIET = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "DELTAWIRE_THREADS": "1", "HF_HUB_OFFLINE": "1"}


# ── trainer ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(folder: str, run: str, every: float) -> None:
    """Publish a version every so many seconds, and write down a hash of what each was."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from deltawire.trainer import Publisher

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(f"{folder}/model")
    ledger, dice = Ledger(f"{folder}/published"), torch.Generator().manual_seed(1)
    with Publisher(run, files=f"{folder}/model") as publisher:
        while not Path(folder, "stop").exists():
            began = time.monotonic()
            with torch.no_grad():
                for weights in model.parameters():
                    moved = torch.rand(weights.shape, generator=dice) < 0.01
                    weights.add_((moved * 0.01).to(weights.dtype))
            # before it is published: who reads the version can be checked at once
            bits = {name: tensor.view(torch.int16).numpy() for name, tensor in model.state_dict().items()}
            state = hash_of({name: array.view(np.uint16) for name, array in bits.items()})
            ledger.note("published", version=publisher.publish(model).result(60).version, state=state)
            time.sleep(max(every - (time.monotonic() - began), 0))


# ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Recording(LocalStore):
    """A folder that remembers which data objects were read."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.read: set[str] = set()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if keys.is_object(key):
            self.read.add(key)
        return super().get_range(key, start, length)


def join(run: str, ledger: str, ids: list[str]) -> None:
    """Replicas in one process, until it is killed."""
    threads = [threading.Thread(target=follow, args=(run, ledger, id)) for id in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def follow(run: str, ledger: str, id: str) -> None:
    """Follow the run from nothing, and write down every state with a hash of its bytes and its digest."""
    began, note, store = time.monotonic(), Ledger(ledger).note, Recording(run)
    note("join", id=id)
    schema = Run.open(store).schema
    weights = {tensor.name: np.zeros(tensor.shape, np.uint16) for tensor in schema.tensors}
    for version in Replica(store, id=id).follow(weights, poll=1.0):
        state, digest = hash_of(weights), str(full.digest_of(ModelView(weights), threads=1))
        joined = {"ready_s": time.monotonic() - began, "objects": sorted(store.read)} if began else {}
        note("serves", id=id, version=version, state=state, digest=digest, **joined)
        began = 0.0


def wait_for(url: str) -> None:
    """Until a server is healthy."""
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                return
        except OSError:
            time.sleep(0.5)


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Command:
    """A command of deltawire in a process group of its own."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log, self._arguments = log, arguments
        self.lives = 0
        self.start()

    def start(self) -> None:
        self.lives += 1
        with open(self._log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deltawire.cli", *self._arguments],
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **_QUIET},
            )  # fmt: skip

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Clients:
    """Asks servers for versions and checks the tokens of every answer."""

    def __init__(self, folder: Path, urls: list[str]) -> None:
        self._folder, self._urls = folder, urls
        self.counts: Counter[str] = Counter()
        self.outside: list[Any] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(len(urls))]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        dice = random.Random(number)
        while not self._stop.wait(0.3):
            newest = max((entry["version"] for entry in entries(self._folder / "published")), default=0)
            kind, version = dice.choice(
                [("min", newest), ("min", newest + 1), ("min", max(newest - 3, 0)), ("exact", newest)]
            )
            stream = dice.random() < 0.5
            body = {"prompt": [1, 5, 9], "max_tokens": 24, "ignore_eos": True, "stream": stream}
            request = urllib.request.Request(
                dice.choice(self._urls) + "/v1/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json", f"deltawire-{kind}-version": str(version)},
            )
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    text = answer.read().decode()
            except urllib.error.HTTPError as error:
                self.counts[f"answered {error.code}"] += 1
            except (OSError, ValueError):
                self.counts["server away"] += 1
            else:
                self._check(text, stream, kind, version)

    def _check(self, text: str, stream: bool, kind: str, version: int) -> None:
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
        parsed = [json.loads(event) for event in events]
        if any("error" in event for event in parsed):
            self.counts["stream refused at its end"] += 1
            return
        choices = [choice for event in parsed for choice in event["choices"] if choice.get("finish_reason")]
        if not choices or choices[0]["finish_reason"] == "abort":
            self.counts["cut off"] += 1
            return
        made = [span["version"] for span in choices[0]["weight_versions"]]
        self.counts["answered with a sync in between" if len(made) > 1 else "answered"] += 1
        if not all(v >= version if kind == "min" else v == version for v in made):
            self.outside.append([kind, version, made])


# ── all of it ────────────────────────────────────────────────────────────────────────────────────────────────────────


def run(minutes: float, processes: int, servers: int, keeper_kills: int, every: float, seed: int) -> dict[str, Any]:
    dice, seconds = random.Random(seed), 60 * minutes
    # forked from a process that has imported everything: a join is not the time that Python takes to start
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["_warm", "spot_fleet"])
    os.environ.update(_QUIET)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        address, ledger = str(folder / "run"), str(folder / "states")
        trainer = multiprocessing.get_context("spawn").Process(target=train, args=(temporary, address, every))
        trainer.start()
        started = 0
        commands: list[Command] = []
        fleet: list[Any] = []

        def one_more() -> Any:
            nonlocal started
            ids = [f"r{started + number:05d}" for number in range(PER_PROCESS)]
            started += PER_PROCESS
            made = context.Process(target=join, args=(address, ledger, ids), daemon=True)
            made.start()
            return made

        clients: Clients | None = None
        try:
            while not entries(folder / "published"):
                time.sleep(0.2)
            keepers = [
                Command(folder / f"keeper-{n}.log", "keep", address, "--lease", "5s", "--poll", "0.5", "--json")
                for n in range(2)
            ]
            ports = [free_port() for _ in range(servers)]
            serving = [
                Command(folder / f"server-{port}.log", "serve", address, "--port", str(port), "--threads", "1")
                for port in ports
            ]
            commands += [*keepers, *serving]
            fleet += [one_more() for _ in range(processes)]
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            for url in urls:
                wait_for(url)
            clients = Clients(folder, urls)
            began, killed, keepers_killed, servers_killed = time.monotonic(), 0, 0, 0
            while (now := time.monotonic() - began) < seconds:
                # a process lives for a minute on average
                time.sleep(dice.uniform(0.5, 1.5) * min(60 / processes, 10))
                at = dice.randrange(processes)
                fleet[at].kill()
                fleet[at].join()
                killed += PER_PROCESS
                fleet[at] = one_more()
                if keepers_killed < keeper_kills and now > seconds * (keepers_killed + 0.5) / keeper_kills:
                    victim = keepers[dice.randrange(2)]
                    victim.kill()
                    keepers_killed += 1
                    victim.start()
                if servers_killed < minutes / 2 - 0.5 and now > 120 * (servers_killed + 1):
                    victim = serving[servers_killed % servers]
                    victim.kill()
                    victim.start()
                    servers_killed += 1
            (folder / "stop").touch()
            trainer.join(60)
            # the last version arrives everywhere
            time.sleep(5)
        finally:
            if clients is not None:
                clients.close()
            for process in (*fleet, trainer):
                process.kill()
            for command in commands:
                command.kill()
        found = judge(folder, address, ledger)
        found["clients"] = dict(clients.counts) if clients else {}
        found["answers_outside_bounds"] = clients.outside if clients else []
        found["killed"] = {"replicas": killed, "keepers": keepers_killed, "servers": servers_killed}
        found["setup"] = {
            "minutes": minutes, "replicas": processes * PER_PROCESS, "processes": processes, "servers": servers,
            "keepers": 2, "a version every, s": every, "seed": seed,
        }  # fmt: skip
        return found


def judge(folder: Path, address: str, ledger: str) -> dict[str, Any]:
    """Compare all states with what the trainer wrote down and with the manifests."""
    opened = Run.open(address)
    published = {entry["version"]: entry["state"] for entry in entries(folder / "published")}
    states = [entry for entry in entries(ledger) if entry["what"] == "serves"]
    digests = {version: opened.manifest(version).digest for version in {entry["version"] for entry in states}}
    wrong = [
        entry
        for entry in states
        if entry["digest"] != digests[entry["version"]] or entry["state"] != published.get(entry["version"])
    ]
    joins = [entry for entry in states if "ready_s" in entry]
    ready = sorted(entry["ready_s"] for entry in joins)
    objects = [len([key for key in entry["objects"] if key.startswith(keys.DELTAS)]) for entry in joins]
    anchors = [len([key for key in entry["objects"] if key.startswith(keys.ANCHORS)]) for entry in joins]
    verified = verify(opened)
    return {
        "versions": len(published),
        "states_checked": len(states),
        "wrong_states": wrong[:10],
        "joined": len([entry for entry in entries(ledger) if entry["what"] == "join"]),
        "ready": len(joins),
        "join_to_ready_s": {
            "p50": round(statistics.median(ready), 3),
            "p99": round(ready[int(0.99 * (len(ready) - 1))], 3),
            "max": round(ready[-1], 3),
        },
        "anchors_per_join": {"max": max(anchors)},
        "objects_per_join": {"p50": statistics.median(objects), "max": max(objects), "limit": MAX_OBJECTS},
        "run_verifies": verified.failure is None,
    }


def table(found: dict[str, Any]) -> list[str]:
    """The lines of the table in docs/fleet.md."""
    setup, killed, ready = found["setup"], found["killed"], found["join_to_ready_s"]
    answers = found["clients"]["answered"] + found["clients"].get("answered with a sync in between", 0)
    minutes = "a minute" if setup["minutes"] == 1 else f"{setup['minutes']:g} minutes"
    servers = "a server" if setup["servers"] == 1 else f"{setup['servers']} servers"
    rows = (
        (f"one run of {minutes}: {setup['replicas']} replicas, two keepers, {servers}", ""),
        ("---", "---"),
        ("killed: replicas, keepers, servers", f"{killed['replicas']}, {killed['keepers']}, {killed['servers']}"),
        ("versions published", str(found["versions"])),
        ("wrong states, by a hash and by the digest", f"{len(found['wrong_states'])} of {found['states_checked']:,}"),
        ("answers with a token outside the bound", f"{len(found['answers_outside_bounds'])} of {answers:,}"),
        ("data objects beside the anchor that a new replica read, at most", str(found["objects_per_join"]["max"])),
        ("from join to ready, p50 and p99", f"{ready['p50']} s, {ready['p99']} s"),
    )
    return [f"| {text} | {value} |" for text, value in rows]


def problems(found: dict[str, Any]) -> list[str]:
    """What must not be."""
    said = []
    if found["wrong_states"]:
        said.append(f"wrong states: {found['wrong_states']}")
    if found["answers_outside_bounds"]:
        said.append(f"answers outside their bounds: {found['answers_outside_bounds']}")
    if not found["run_verifies"]:
        said.append("the run does not verify")
    if found["anchors_per_join"]["max"] > 1 or found["objects_per_join"]["max"] > MAX_OBJECTS:
        said.append(f"a join took {found['anchors_per_join']} anchors and {found['objects_per_join']} objects")
    if not found["clients"].get("answered"):
        said.append(f"no answers: {found['clients']}")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=16, help=f"of {PER_PROCESS} replicas each (%(default)s)")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--keeper-kills", type=int, default=10)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between versions (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    facts = about()
    print_about(facts)
    found = run(given.minutes, given.processes, given.servers, given.keeper_kills, given.every, given.seed)
    print(json.dumps(found, indent=2))
    print("\n".join(table(found)))
    write_json(given.out, {"about": facts, **found})
    if said := problems(found):
        raise SystemExit("; ".join(said))


if __name__ == "__main__":
    main()
