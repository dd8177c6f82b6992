"""The demo, in two acts. `Demo.run` starts their processes and records in `Demo.record` what they report; the command
line displays that.

Act one: environment, rollout servers and trainer as processes that share a bucket and their HTTP addresses.
Act two: a larger model at a usual learning rate, over a link of limited bandwidth (larger_model.py).
"""

from __future__ import annotations

import os
import platform
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from deltawire import Run, __version__, verify
from deltawire.dash import serve, write_page
from deltawire.errors import RunNotFound
from deltawire.store import Store, open_store

from . import small_policy
from .errors import RLError, ServerUnavailable
from .evaluate import WINDOW
from .processes import ChildProcess, free_port, uninterrupted

KILL_AT, REJOIN_AT = 0.35, 0.55
"""When --kill-replica kills a server and starts it again, as a share of the training."""
LOOK_S = 0.5
"""Seconds between two looks at the servers."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The options of a demo."""

    folder: Path
    """Folder for logs, the report and, unless `run` says otherwise, the bucket."""
    run: str | None = None
    """Address of the run; "s3" starts an S3 server, None uses a folder."""
    replicas: int = 2
    engine: str = "builtin"
    acts: Sequence[int] = (1, 2)
    steps: int | None = None
    seconds: float | None = 180.0
    goal: float = 0.8
    """Training of act one ends once this share of the games of the last WINDOW steps is solved."""
    rate: float = 3e-5
    staleness: int = 4
    seed: int = 0
    games: int = 512
    """Games of each evaluation."""
    kill_replica: bool = False
    sync: bool = True
    model: str | None = None
    """Checkpoint folder for act two; None makes a Qwen3-shaped model."""
    link_mbit_s: float = 100.0
    """Bandwidth of act two, in each direction."""
    larger_steps: int = 4
    """Versions of act two after the first."""


@dataclass(slots=True)
class ReplicaStatus:
    """State of a rollout server at one moment."""

    at: float
    """Seconds since the demo began."""
    version: int | None
    lag: int | None
    pause_s: float | None
    """Pause of its last sync, in seconds."""
    state: str


@dataclass(slots=True)
class LargerRecord:
    """What act two has measured so far, as larger_model.py reports it."""

    model: dict[str, Any] = field(default_factory=dict)
    full: dict[str, Any] | None = None
    """The first version: full weights over the link."""
    versions: list[dict[str, Any]] = field(default_factory=list)
    encodings: dict[str, Any] | None = None
    """Bytes and seconds of the last change by encoding."""
    done: dict[str, Any] | None = None


@dataclass(slots=True)
class DemoRecord:
    """Everything that has happened so far."""

    plan: DemoPlan
    began: float = field(default_factory=time.time)
    phase: str = "starting"
    act: int = 1
    url: str = ""
    """Address of the run."""
    pages: dict[int, str] = field(default_factory=dict)
    """Address of the live page of each act."""
    reports: dict[int, str] = field(default_factory=dict)
    """File with the page of each act, once it is over."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    published: list[dict[str, Any]] = field(default_factory=list)
    evaluated: list[dict[str, Any]] = field(default_factory=list)
    done: dict[str, Any] | None = None
    replicas: dict[str, list[ReplicaStatus]] = field(default_factory=dict)
    remarks: list[tuple[float, str]] = field(default_factory=list)
    """(seconds since the demo began, what happened)"""
    verified: dict[str, Any] | None = None
    equal: dict[str, str] = field(default_factory=dict)
    """How the weights of each replica were compared with the trainer's."""
    larger: LargerRecord = field(default_factory=LargerRecord)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds that the whole demo took."""

    def remark(self, text: str) -> None:
        self.remarks.append((time.time() - self.began, text))

    @property
    def progress(self) -> float:
        """Share of the training that is done, 0 to 1."""
        if not self.steps:
            return 0.0
        last, plan = self.steps[-1], self.plan
        by_steps = last["step"] / plan.steps if plan.steps else 0.0
        by_time = last["seconds"] / plan.seconds if plan.seconds else 0.0
        by_goal = 0.0
        if self.evaluated and len(self.steps) >= WINDOW:
            start = self.evaluated[0]["solved"]
            by_goal = (self.recently_solved - start) / max(plan.goal - start, 1e-9)
        return min(max(by_steps, by_time, by_goal), 1.0)

    @property
    def recently_solved(self) -> float:
        """Share of the games of the last WINDOW steps that were solved."""
        recent = self.steps[-WINDOW:]
        return fmean(step["figures"]["solved"] for step in recent) if recent else 0.0

    def as_dict(self) -> dict[str, Any]:
        machine = {"cpus": os.cpu_count(), "load": os.getloadavg(), "python": platform.python_version()}
        return {
            "ok": not self.problems,
            "deltawire": __version__,
            "machine": machine,
            **asdict(self),
            "plan": {**asdict(self.plan), "folder": str(self.plan.folder)},
        }


class Demo:
    """Runs the processes of a demo."""

    def __init__(self, plan: DemoPlan) -> None:
        self.record = DemoRecord(plan)
        self._plan = plan
        self._logs = plan.folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._environment = ChildProcess(
            "environment", _deltawire("env", "wordle", *_GAME, "--port", "0", "--json"), self._logs
        )
        self._replicas: dict[str, RolloutServer] = {}
        self._down: RolloutServer | None = None
        """The replica that was killed on purpose and is not back yet."""

    @property
    def _processes(self) -> list[ChildProcess]:
        return [self._environment, *(replica.process for replica in self._replicas.values())]

    # ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, show: Callable[[], None]) -> None:
        """Run the demo, and end all its processes. `show` is called whenever the record may have changed."""
        record, acts = self.record, {1: self._wordle, 2: self._larger}
        with self._bucket() as bucket, ExitStack() as pages:
            record.url = bucket.url
            runs = {1: bucket.run, 2: open_store((self._plan.folder / "larger").as_uri())}
            for act in self._plan.acts:
                record.pages[act] = pages.enter_context(serve(runs[act])).url
            for act in self._plan.acts:
                record.act = act
                acts[act](bucket, show)
                record.phase = "writing the report"
                show()
                with suppress(RunNotFound):
                    page = self._plan.folder / ("report.html" if act == 1 else "report-larger.html")
                    write_page(runs[act], page)
                    record.reports[act] = str(page)
        record.phase = "done"
        record.seconds = time.time() - record.began
        show()

    def _wordle(self, bucket: Bucket, show: Callable[[], None]) -> None:
        try:
            self._train(bucket, show)
        except RLError as error:
            self.record.problems.append(str(error))
        self.record.phase = "verifying the run"
        show()
        self._verify(bucket)

    def _larger(self, bucket: Bucket, show: Callable[[], None]) -> None:
        plan, record = self._plan, self.record
        words = ["--run", (plan.folder / "larger").as_uri(), "--link", str(plan.link_mbit_s), "--seed", str(plan.seed)]
        words += ["--steps", str(plan.larger_steps), *(["--model", plan.model] if plan.model else [])]
        program = [sys.executable, "-m", f"{__package__}.larger_model", *words]
        process = ChildProcess("larger", program, self._logs, QUIET)
        try:
            process.start()
            while not process.finished:
                self._note_event(process)
                show()
        finally:
            with uninterrupted():
                ChildProcess.stop_all([process])
        if record.larger.done is None:
            record.problems.append(f"act two ended early ({process.exit_code}): {process.last_log_line}")
        elif not record.larger.done["equal"]:
            record.problems.append("the replica of act two does not hold the trainer's weights")

    @contextmanager
    def _bucket(self) -> Iterator[Bucket]:
        where = self._plan.run
        if where == OWN_S3:
            from deltawire_wordle.seaweed import BUCKET, SeaweedFS

            with SeaweedFS(self._plan.folder / "s3") as server:
                yield Bucket(f"s3://{BUCKET}/wordle", server.store(f"{BUCKET}/wordle"), server.environment, near=True)
        else:
            where = where or (self._plan.folder / "run").as_uri()
            yield Bucket(where, open_store(where), {}, near=where.startswith(("file:", "/", ".")))

    def _train(self, bucket: Bucket, show: Callable[[], None]) -> None:
        record, plan = self.record, self._plan
        environment = {**QUIET, **bucket.environment}
        for number in range(1, plan.replicas + 1):
            self._replicas[f"replica-{number}"] = RolloutServer(
                f"replica-{number}", bucket, plan.engine, self._logs, environment
            )
        trainer = None
        ended = threading.Event()
        try:
            self._environment.start()
            address = self._environment.ready("ready")["url"]
            trainer = ChildProcess("trainer", self._trainer(bucket, address), self._logs, environment)
            trainer.start()
            threading.Thread(target=self._poll_replicas, args=(ended,), daemon=True).start()
            while not trainer.finished:
                self._note_event(trainer)
                if record.published or plan.engine == "builtin":
                    # the built-in server waits for the first version, the others need one to start
                    self._manage_replicas()
                self._check_processes()
                show()
            if record.done is None:
                raise ServerUnavailable(f"the trainer ended early ({trainer.exit_code}): {trainer.last_log_line}")
            record.phase = "comparing bits"
            show()
            self._compare(record.done)
        finally:
            ended.set()
            # a second Ctrl-C must not interrupt the clean-up
            with uninterrupted():
                ChildProcess.stop_all([*([trainer] if trainer else []), *self._processes])

    def _trainer(self, bucket: Bucket, environment: str) -> list[str]:
        plan = self._plan
        servers = [word for replica in self._replicas.values() for word in ("--server", replica.url)]
        ends = [
            *_option("--steps", plan.steps), *_option("--seconds", plan.seconds), *_option("--goal", plan.goal),
        ]  # fmt: skip
        return [
            sys.executable, "-m", f"{__package__}.train", "--run", bucket.url, "--env", environment, *servers, *ends,
            "--lr", str(plan.rate), "--staleness", str(plan.staleness), "--seed", str(plan.seed),
            "--games", str(plan.games), *_GAME, *([] if plan.sync else ["--no-sync"]),
        ]  # fmt: skip

    def _note_event(self, process: ChildProcess) -> None:
        try:
            event = process.events.get(timeout=0.2)
        except queue.Empty:
            return
        record, kind = self.record, event.pop("event")
        match kind:
            case "phase":
                record.phase = event["text"]
            case "remark":
                record.remark(event["text"])
            case "step":
                record.steps.append(event)
            case "published":
                record.published.append(event)
            case "evaluated":
                record.evaluated.append(event)
            case "version":
                record.larger.versions.append(event)
            case "model":
                record.larger.model = event
            case "full":
                record.larger.full = event
            case "encodings":
                record.larger.encodings = event["encodings"]
            case "done" if record.act == 1:
                record.done = event
            case "done":
                record.larger.done = event

    def _manage_replicas(self) -> None:
        """Start the replicas; with `kill_replica`, kill one and start it again later."""
        for replica in self._replicas.values():
            if replica.process.pid is None:
                replica.process.start()
        if not self._plan.kill_replica:
            return
        last = [*self._replicas.values()][-1]
        if self._down is None and last.deaths == 0 and self.record.progress >= KILL_AT:
            self.record.remark(f"{last.name} is killed (SIGKILL)")
            self._down = last
            last.deaths += 1
            last.process.kill()
        elif self._down is not None and self.record.progress >= REJOIN_AT:
            self.record.remark(f"{last.name} starts again, with nothing but the address of the run")
            self._down = None
            last.process.start()

    def _check_processes(self) -> None:
        for process in self._processes:
            if process.exit_code is not None and (self._down is None or process is not self._down.process):
                raise ServerUnavailable(
                    f"the {process.name} ended early ({process.exit_code}): {process.last_log_line}"
                )

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _poll_replicas(self, ended: threading.Event) -> None:
        """Record the status of the replicas every LOOK_S seconds."""
        with httpx.Client(timeout=5.0) as client:
            while not ended.wait(LOOK_S):
                newest = self.record.published[-1]["version"] if self.record.published else None
                for replica in self._replicas.values():
                    at = time.time() - self.record.began
                    self.record.replicas.setdefault(replica.name, []).append(replica.status(client, at, newest))

    def _compare(self, done: dict[str, Any]) -> None:
        with httpx.Client(timeout=60.0) as client:
            for replica in self._replicas.values():
                how, found = replica.weights(client)
                self.record.equal[replica.name] = how
                if found != (done["sha256"] if how == SHA else done["digest"]):
                    self.record.problems.append(
                        f"{replica.name} does not hold the trainer's weights of version {done['version']}: {found}"
                    )

    def _verify(self, bucket: Bucket) -> None:
        try:
            result = verify(Run.open(bucket.run))
        except RunNotFound as error:
            self.record.problems.append(str(error))
            return
        self.record.verified = {"ok": result.ok, "versions": result.versions, "proven": result.proven}
        if result.failure is not None:
            self.record.problems.append(f"the run does not verify: {result.failure.message}")


# ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────────────

OWN_S3 = "s3"
SHA, DIGEST = "SHA-256 of the live weights", "state digest of the live weights"
_GAME = ("--words", small_policy.WORDS, "--guesses", str(small_policy.GUESSES))
QUIET = {"OMP_NUM_THREADS": "1", "DELTAWIRE_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
"""Environment of every process: two cores must do for all of them."""
_ENGINES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # some virtual machines promise instructions (AMX) that they do not have
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
}
"""Environment of engines that are not our own."""
_FLAGS = {
    "vllm": ("--enforce-eager",),
    "sglang": ("--max-total-tokens", "16384", "--mem-fraction-static", "0.1", "--skip-server-warmup"),
}
"""Their flags, for a tiny model."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where the run of a demo is."""

    url: str
    run: Store
    environment: dict[str, str]
    """Environment variables that another process needs to reach it."""
    near: bool
    """Whether it may be polled often."""


class RolloutServer:
    """A rollout server as a process."""

    def __init__(self, name: str, bucket: Bucket, engine: str, logs: Path, environment: dict[str, str]) -> None:
        port = str(free_port())
        self.name, self.url, self.deaths = name, f"http://127.0.0.1:{port}", 0
        words = ["serve", bucket.url, "--engine", engine, "--port", port, "--poll", "0.1" if bucket.near else "1"]
        if engine == "builtin":
            words += ["--id", name, "--threads", "1", "--grace", "1", "--json"]
        else:
            words += ["--max-model-len", "128", "--", "--dtype", "bfloat16", *_FLAGS[engine]]
            environment = {**environment, **_ENGINES}
        self.process = ChildProcess(name, _deltawire(*words), logs, environment)

    def status(self, client: httpx.Client, at: float, newest: int | None) -> ReplicaStatus:
        try:
            status = client.get(f"{self.url}/deltawire/status").json()
        except (httpx.TransportError, ValueError):
            return ReplicaStatus(at, None, None, None, "away")
        version = status.get("version")
        # it may know a version before its publish has been reported here
        newest = max(newest or 0, status.get("newest") or 0)
        lag = None if version is None else max(newest - version, 0)
        return ReplicaStatus(at, version, lag, (status.get("timings") or {}).get("pause"), str(status.get("state")))

    def weights(self, client: httpx.Client) -> tuple[str, Any]:
        """Return how its weights were fingerprinted, and the fingerprint."""
        try:
            answer = client.get(f"{self.url}/deltawire/fingerprint", params={"dtype": "bf16"})
            if answer.status_code == 404:
                # other engines lay weights out differently, so only their digest can be compared
                answer = client.get(f"{self.url}/deltawire/digest")
                return DIGEST, answer.json().get("digest", answer.text)
            return SHA, answer.json().get("sha256", answer.text)
        except (httpx.TransportError, ValueError) as error:
            return SHA, repr(error)


def _deltawire(*words: str) -> list[str]:
    return [sys.executable, "-m", "deltawire.cli", *words]


def _option(name: str, value: float | None) -> list[str]:
    return [] if value is None else [name, str(value)]
