"""`make fuzz MODE=interrupt`: real signals at random moments into what publishes, syncs, keeps, prunes and follows.

A case is a process of its own, forked from one that has imported everything. For the first half of the time each loads
its kernels itself. Publishers and replicas catch what their signal handlers raise and go on, as a notebook does;
commands end by a signal, SIGKILL too, and are started again. In the end the bits must be the trainer's own. A process
that does not end has hung; the stacks of its threads are shown.

The seed fixes weights, options, delays and signals. It cannot fix at which instruction a signal arrives: to see a
finding again, repeat its case until the time is over (`--kind sync --number 7`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NoReturn

# Triton decides when it is imported whether it interprets kernels
os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1", DELTAWIRE_THREADS="1", NO_COLOR="1")
sys.path.append(str(Path(__file__).parent.parent / "trainer"))

import torch
import writers
from detector_support import Trainer, raw, replica_model
from typer.main import get_command

from deltawire import Publisher, Replica, kernels
from deltawire.bucket.checkpoint_folder import CurrentFolder
from deltawire.bucket.replay import checkout, load_folder
from deltawire.bucket.run import Run
from deltawire.bucket.verify import verify
from deltawire.cli import app
from deltawire.core import full, parallel
from deltawire.core.errors import DigestMismatch, DivergedRun, FormatError, PublishFailed
from deltawire.foreign import Importer
from deltawire.keeper import lease
from deltawire.kernels import host as kernels_host
from deltawire.kernels import torch_ops, triton_ops
from deltawire.models import ModelView
from deltawire.replica import host as replica_host
from deltawire.replica import model as replica_models
from deltawire.store import LocalStore
from deltawire.trainer import pipeline
from support import model, publish, trained

LIMIT_S = 120.0
"""Seconds that a process may take, on a busy machine, once nothing interrupts it any more."""
COMMANDS = get_command(app)
VERSIONS = 24
ENCODINGS = "packed", "context"
DEVICE = "snapshot", "streamed", "fused", "adamw"
"""Detectors that compare where the model is."""
SLOWED = "get", "get_if_changed", "get_range", "head", "put", "put_if_absent", "list", "delete"
Weights = dict[str, torch.Tensor]


class Interrupt(Exception):
    """What a handler raises that is not one of Python's own."""


RAISED: dict[int, Callable[[], BaseException]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: lambda: SystemExit(143),
    signal.SIGALRM: lambda: TimeoutError("a watchdog"),
    signal.SIGUSR1: Interrupt,
}


class Wrong(Exception):
    """Bits that are not the trainer's, or an error where there should be none."""


class Hung(Exception):
    """A process that did not end, with the stacks of its threads."""


def require(condition: object, message: object) -> None:
    if not condition:
        raise Wrong(message)


class Process:
    """A fork of this process that does some work and ends, with a code as a program has it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.code: int | None = None
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        # until it has its handlers
        signal.pthread_sigmask(signal.SIG_BLOCK, RAISED)
        self._pid = os.fork()
        if not self._pid:
            self._run(work)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, RAISED)

    def _run(self, work: Callable[[], object]) -> NoReturn:
        code: object = 1
        try:
            for stream in (1, 2):
                os.dup2(self._out.fileno(), stream)
            faulthandler.enable(self._out)
            # torch makes a pool of threads for a forked process, but not if two threads ask for it at once
            torch.set_num_threads(1)
            work()
            code = 0
        except SystemExit as end:
            code = end.code
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            sys.stdout.flush()
            os._exit(code if isinstance(code, int) else 1)

    def send(self, number: int) -> None:
        if self.code is None:
            os.kill(self._pid, number)

    def wait(self, seconds: float) -> bool:
        """Whether it ends by then."""
        end = time.monotonic() + seconds
        while self.code is None and time.monotonic() < end:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.0005)
        return self.code is not None

    def ended(self, seconds: float = LIMIT_S) -> int:
        """Its code; Hung if it does not end."""
        if not self.wait(seconds):
            # faulthandler writes the stacks
            self.send(signal.SIGABRT)
            if not self.wait(10):
                self.send(signal.SIGKILL)
                self.wait(10)
            raise Hung(f"no end after {seconds:g} s: {self.said()}")
        assert self.code is not None
        return self.code

    def said(self, most: int = 12_000) -> str:
        self._out.seek(0)
        return self._out.read().decode(errors="replace")[-most:]


# ── what goes on after an interrupt ──────────────────────────────────────────────────────────────────────────────────


class Signals:
    """Handlers that raise within `attempt`, at most so many times; at all other times they do nothing."""

    def __init__(self, counts: Counter[str]) -> None:
        self.handler: Callable[[], object] | None = None
        """What SIGUSR1 does instead of raising."""
        self._counts, self._left, self._raised = counts, 0, 0
        for number in RAISED:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, RAISED)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._left:
            return
        self._left -= 1
        self._counts["signals"] += 1
        # what a finding says of the interrupts before it
        places, at = "", frame
        while at is not None and at.f_code.co_filename != __file__:
            places, at = f" {Path(at.f_code.co_filename).name}:{at.f_lineno}{places}", at.f_back
        os.write(1, f"{signal.Signals(number).name}{places}\n".encode())
        if number == signal.SIGUSR1 and self.handler is not None:
            self.handler()
            return
        self._raised += 1
        raise RAISED[number]()

    def attempt(self, work: Callable[[], object], times: int) -> int:
        """Do work that is interrupted up to twice, and go on as a notebook does. Returns how often it was."""
        self._raised = 0
        try:
            # the second interrupt may come in a `finally`
            try:
                try:
                    self._left = times
                    work()
                finally:
                    self._left = 0
            finally:
                self._left = 0
        except BaseException as error:
            expected = self._raised or isinstance(error, PublishFailed | DivergedRun)
            if not expected or isinstance(error, DigestMismatch) or isinstance(error.__cause__, DigestMismatch):
                raise
        self._counts["interrupted"] += bool(self._raised)
        return self._raised


def slow_and_threaded(rng: Random) -> None:
    """Delay the bucket, and share tiny work among threads, each in some cases."""
    # threads draw from it in no certain order
    most, delays = rng.choice((0, 0.001, 0.005)), Random(rng.random())

    def slowed(verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            time.sleep(delays.uniform(0, most))
            return verb(*args, **options)

        return call

    for verb in SLOWED if most else ():
        setattr(LocalStore, verb, slowed(getattr(LocalStore, verb)))
    if rng.random() < 0.4:
        os.environ["DELTAWIRE_THREADS"] = "2"
        parallel.WORTH_THREADS = replica_host.WORTH_THREADS = kernels_host._WORTH_THREADS = 1


def on_a_device(rng: Random) -> None:
    """Weights in host memory are patched as on a device: by plain torch, or by interpreted kernels."""
    replica_models.is_on_device = lambda tensors, schema: True
    if rng.random() < 0.2:
        kernels.operations = lambda device: triton_ops
        # interpreted, a program takes as long for few weights as for many
        triton_ops.ADAMW["WORDS"] = 1024


def publishing(rng: Random, folder: Path, counts: Counter[str], *kinds: str) -> None:
    """Training that goes on after each interrupt. Every version is what a publish was given, the newest the last."""
    slow_and_threaded(rng)
    if kinds == DEVICE:
        on_a_device(rng)
    signals, store = Signals(counts), LocalStore(folder / "run")
    options = {"anchor_every": rng.choice((None, 2, 3)), "encoding": rng.choice(ENCODINGS)}
    if rng.random() < 0.3:
        # nothing is captured: all is streamed while `publish` waits
        pipeline.most_pending = lambda nbytes: 1
    trainer, seen = Trainer(rng.choice(kinds), store, **options), list[str]()
    print(trainer.kind, options, kernels.operations(trainer.model.steps.device).__name__)

    def publish(**options: Any) -> None:
        # without threads, which a handler could not start while its thread starts one
        seen.append(str(full.digest_of(ModelView(trainer.tensors(), "bf16"), threads=1)))
        trainer.publish(**options)

    def step() -> None:
        # an earlier step may have been interrupted in torch's own `no_grad`
        torch.set_grad_enabled(True)
        trainer.step()

    def publish_or_be_refused() -> None:
        with contextlib.suppress(PublishFailed):
            publish()

    # a last version on SIGUSR1, as people write it
    signals.handler = publish_or_be_refused if rng.random() < 0.3 else None

    def resume() -> None:
        trainer.publisher.resume(trainer.source())

    # an optimizer that was interrupted in its first step cannot go on
    step()
    others = lambda: publish(wait=True), trainer.publisher.flush, resume
    for _ in range(rng.randint(3, 10)):
        signals.attempt(step, rng.choice((0, 0, 1, 2)))
        signals.attempt(rng.choice((publish, publish, publish, *others)), rng.choice((0, 1, 1, 2)))
    signals.handler = None
    step()
    # an earlier failure is raised once
    signals.attempt(publish, 0)
    publish(wait=rng.random() < 0.5)
    signals.attempt(trainer.publisher.close, 2)
    with contextlib.suppress(PublishFailed):
        trainer.publisher.close()
    # slowly, by interpreted kernels, is no better
    kernels.operations = lambda device: torch_ops
    run = Run.open(store)
    found = {version: run.manifest(version).digest for version in run.listed()}
    require(found[max(found)] == seen[-1], "the newest version has not the weights of the last publish")
    require(set(found.values()) <= {*seen}, "a version has weights that no publish was given")
    weights, bits = replica_model(trainer), trainer.bits()
    Replica(store, heartbeat=0).sync(weights)
    require(all((raw(weights[name]) == bits[name]).all() for name in bits), "a replica has other bits than the trainer")
    for version, digest in found.items():
        require(str(full.digest_of(checkout(run, version))) == digest, f"version {version} is not what it says")
    require((report := verify(run)).ok, f"verify: {report}")


def syncing(rng: Random, folder: Path, counts: Counter[str], device: bool) -> None:
    """After each interrupt the weights are the version that the replica names; if deltas alone led there, whole."""
    slow_and_threaded(rng)
    if device:
        on_a_device(rng)
    signals, store = Signals(counts), LocalStore(folder.parent / rng.choice(ENCODINGS))
    run = Run.open(store)
    digests = {run.manifest(version).digest: version for version in run.listed()}
    wide = not device and rng.random() < 0.3
    weights = {name: torch.zeros_like(tensor) for name, tensor in HISTORY[0].items()}
    weights |= {name: t.float() for name, t in weights.items() if wide and t.dtype == torch.bfloat16}
    replica = Replica(store, id="replica", heartbeat=rng.choice((0, 0.01)), prove=rng.random() < 0.7)
    for _ in range(rng.randint(4, 16)):
        before, newest = replica.version, VERSIONS - 1
        ahead = before is not None and before < newest and rng.random() < 0.8
        want = rng.randint((before or 0) + 1, newest) if ahead else rng.randrange(VERSIONS)
        times = signals.attempt(lambda want=want: replica.sync(weights, want), rng.choice((0, 1, 1, 2)))  # type: ignore[misc]
        held = digests.get(str(replica_models.open_weights(weights, run.schema).digest()))
        require(replica.version in (None, held), f"a replica that names version {replica.version} holds {held}")
        whole = held is not None or not ahead or times > 1
        require(whole, f"weights on the way from {before} to {want}, by deltas alone, are no version")
    require(replica.sync(weights) == newest, "the last sync did not lead to the newest version")
    right = all((raw(tensor) == raw(HISTORY[-1][name].to(tensor.dtype))).all() for name, tensor in weights.items())
    require(right, "a replica has other bits than the trainer")


def importing(rng: Random, folder: Path, counts: Counter[str]) -> None:
    """Another system's versions, in a program that goes on after each interrupt. Each is imported once, in order."""
    slow_and_threaded(rng)
    signals, source, store = Signals(counts), folder / "source", LocalStore(folder / "run")
    if rng.random() < 0.3:
        pipeline.most_pending = lambda nbytes: 1
    history = [writers.model()]
    base = writers.write_base(folder / "base", history[0])
    made: list[Importer] = []

    def take() -> None:
        if not made or rng.random() < 0.2:
            # a later one of this process replaces the earlier one, also where it is interrupted before it is there
            made.clear()
            made.append(Importer(source, store, base=base))
        deque(made[-1].follow(once=True), maxlen=0)

    for number in range(1, rng.randint(4, 12)):
        history.append(writers.trained(history[-1], number))
        writers.write_delta(source, number, *history[-2:], rng.choice(("xor", "overwrite")))
        signals.attempt(take, rng.choice((0, 1, 1, 2)))
    signals.attempt(take, 0)
    signals.attempt(made[-1].close, 2)
    made[-1].close()
    run = Run.open(store)
    found = [run.manifest(version).digest for version in run.listed()]
    expected = [str(full.digest_of(ModelView(weights))) for weights in history]
    require(found == expected, f"versions {[expected.index(digest) for digest in found]} of {len(history)}")
    require((report := verify(run)).ok, f"verify: {report}")


# ── commands, which end by a signal and are started again ────────────────────────────────────────────────────────────


def started(slow: Random | None, arguments: tuple[object, ...]) -> Process:
    """A command, as it runs in a process of its own."""

    def command() -> None:
        if slow is not None:
            slow_and_threaded(slow)
        for number in RAISED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, RAISED)
        COMMANDS([str(argument) for argument in arguments])

    return Process(command)


def ended(rng: Random, counts: Counter[str], longest_s: float, look: Callable[[], object], *arguments: object) -> None:
    """Start a command and end it by a signal at a random moment; `look` is called meanwhile."""
    process, end = started(rng, arguments), time.monotonic() + rng.uniform(0, longest_s)
    number = rng.choice((signal.SIGINT, signal.SIGTERM, signal.SIGKILL))
    while not process.wait(0.005) and time.monotonic() < end:
        look()
    counts["interrupted"] += process.code is None
    for pause in (rng.choice((0.002, 2.0)), 2.0, 2.0, 0.0):
        if process.code is None:
            # again, where an earlier one came in a finalizer, for instance, and Python went on
            process.send(number)
            counts["signals"] += 1
            process.wait(pause)
    codes = 0, 130, -signal.SIGKILL, -signal.SIGTERM
    require(process.ended() in codes, f"{arguments[0]} ended with {process.code}: {process.said()}")


def done(*arguments: object) -> None:
    process = started(None, arguments)
    require(process.ended() == 0, f"{arguments} ended with {process.code}: {process.said()}")


def check_run(store: LocalStore) -> None:
    """The run verifies, has what was published, and is followed from each version, also from one that is gone."""
    require((report := verify(Run.open(store))).ok, f"verify: {report}")
    run, newest = Run.open(store), VERSIONS - 1
    digests = [str(full.digest_of(ModelView(weights))) for weights in HISTORY]
    for version in run.listed():
        require(str(full.digest_of(checkout(run, version))) == digests[version], f"version {version} has other weights")
    for version, weights in enumerate(HISTORY):
        live = {name: tensor.clone() for name, tensor in weights.items()}
        reached = Replica(store, heartbeat=0).sync(live)
        found = str(full.digest_of(ModelView(live)))
        require((reached, found) == (newest, digests[newest]), f"from version {version} to {reached}, {found}")


def keeping(rng: Random, folder: Path, counts: Counter[str]) -> None:
    """Keepers that are ended again and again: what the last one leaves is whole, and so is the mirror."""
    run, mirror = folder / "run", folder / "mirror"
    shutil.copytree(folder.parent / rng.choice(ENCODINGS), run)
    keep = ["keep", run, "--once", "--since", 0, "--id", "keeper", "--anchor-every", rng.choice((4, 16))]
    keep += ["--mirror", mirror] if rng.random() < 0.5 else []
    keep += ["--keep-last", 6, "--keep-every", 5, "--grace", "0s"] if rng.random() < 0.5 else []
    for _ in range(rng.randint(2, 6)):
        ended(rng, counts, 0.8, int, *keep)
    done(*keep)
    check_run(LocalStore(run))
    if mirror.exists():
        check_run(LocalStore(mirror))


def pruning(rng: Random, folder: Path, counts: Counter[str]) -> None:
    """Prunes that are ended again and again, of runs with and without what a keeper adds."""
    run = folder / "run"
    shutil.copytree(folder.parent / rng.choice((*ENCODINGS, "kept")), run)
    prune = ["prune", run, "--keep-last", rng.randint(1, 6), "--grace", "0s", "--apply"]
    prune += ["--keep-every", rng.choice((5, 7))] if rng.random() < 0.5 else []
    for _ in range(rng.randint(3, 8)):
        ended(rng, counts, 0.15, int, *prune)
    # marked, then deleted
    done(*prune)
    done(*prune)
    check_run(LocalStore(run))


def following(rng: Random, folder: Path, counts: Counter[str]) -> None:
    """Followers that are ended again and again: their folder is one whole version at all times."""
    store, place = LocalStore(folder / "run"), folder / "folder"
    publish(store, HISTORY[:1])

    def train() -> None:
        with Publisher(store, continues=True) as publisher:
            for weights in HISTORY[1:]:
                publisher.publish(weights, wait=True)
                time.sleep(0.05)

    def look() -> None:
        """As a reader does, who may be overtaken by two versions."""
        if place.is_symlink():
            held = place.resolve()
            try:
                found = load_folder(Run.open(store), held).digest
            except (FormatError, OSError):
                require(place.resolve() != held, f"{held} is not whole: {traceback.format_exc()}")
            else:
                expected = Run.open(store).manifest(int(held.name[:6])).digest
                require(str(found) == expected, f"{held} has the weights {found}, not {expected}")

    trainer = Process(train)
    follow = "follow", store.url, "--dir", place, "--poll", 0.01
    for _ in range(rng.randint(2, 6)):
        ended(rng, counts, 0.8, look, *follow, *rng.choice(((), ("--every",))))
        look()
    require(trainer.ended() == 0, trainer.said())
    done(*follow, "--once")
    look()
    require(int(place.resolve().name[:6]) == VERSIONS - 1, f"{place.resolve()} is not the newest version")
    with CurrentFolder(place):
        left = sorted(path.name for path in place.resolve().parent.iterdir())
    require(len(left) <= 2, f"{left} are left beside the folder")


# ── all of them in turn ──────────────────────────────────────────────────────────────────────────────────────────────

Case = Callable[[Random, Path, Counter[str]], None]
CASES: dict[str, tuple[Case, bool]] = {
    "publish": (lambda *given: publishing(*given, "host"), True),
    "publish pairs": (lambda *given: publishing(*given, "pairs"), True),
    "publish device": (lambda *given: publishing(*given, *DEVICE), True),
    "import": (importing, True),
    "sync": (lambda *given: syncing(*given, device=False), True),
    "sync device": (lambda *given: syncing(*given, device=True), True),
    "keep": (keeping, False),
    "prune": (pruning, False),
    "follow": (following, False),
}
"""Each operation, and whether its process is the one that gets the signals."""


def history() -> list[Weights]:
    """Versions of a small model of several dtypes."""
    versions = [model(0, rows=1024)]
    while len(versions) < VERSIONS:
        versions.append(trained(versions[-1], len(versions), changes=9))
    tensors = [{name: torch.from_numpy(array) for name, array in weights.items()} for weights in versions]
    return [{n: t.view(torch.bfloat16) if t.dtype == torch.uint16 else t for n, t in w.items()} for w in tensors]


HISTORY = history()


def prepare(folder: Path) -> None:
    """Runs to begin with."""
    for encoding in ENCODINGS:
        publish(LocalStore(folder / encoding), HISTORY, encoding=encoding, anchor_ratio=1e9)
    shutil.copytree(folder / "packed", folder / "kept")
    done("keep", folder / "kept", "--once", "--since", 0, "--anchor-every", 4)
    check_run(LocalStore(folder / "kept"))


def load_kernels(folder: Path) -> None:
    """Load what cases need: those from now on meet their signals elsewhere."""
    for encoding in ENCODINGS:
        live = {name: t.float() if t.dtype == torch.bfloat16 else t.clone() for name, t in HISTORY[0].items()}
        for version in (0, 1):
            Replica(LocalStore(folder / encoding), heartbeat=0).sync(live, version)
        for kind in ("host", "pairs", *DEVICE):
            trainer = Trainer(kind, LocalStore(folder / f"{encoding} {kind}"), encoding=encoding)
            for wait in (False, True):
                trainer.step()
                trainer.publish(wait=wait)
            trainer.publisher.close()
            Replica(trainer.publisher.url, heartbeat=0).sync(replica_model(trainer))
    while threading.active_count() > 1:
        time.sleep(0.01)


def run_case(kind: str, seed: int, number: int, folder: Path) -> dict[str, Any]:
    """Run one case. "found" in the answer is what is wrong."""
    case, is_signalled = CASES[kind]
    rng, counts, place = Random(f"{seed}/{kind}/{number}"), Counter[str](), Path(tempfile.mkdtemp(dir=folder))

    def work() -> None:
        answer: dict[str, Any] = {}
        try:
            case(rng, place, counts)
        except BaseException as error:
            answer = {"found": traceback.format_exc()[-6000:], "hung": isinstance(error, Hung)}
        print("\n" + json.dumps({**counts, **answer}))

    process, dice = Process(work), Random(f"{seed}/{kind}/{number}/signals")
    pause_s, end = dice.choice((0.001, 0.004, 0.016)), time.monotonic() + LIMIT_S
    try:
        while is_signalled and not process.wait(dice.expovariate(1 / pause_s)) and time.monotonic() < end:
            process.send(dice.choice([*RAISED]))
        code = process.ended(0 if is_signalled else 3 * LIMIT_S)
        require(code == 0, f"the process ended with {code}: {process.said()}")
    except (Hung, Wrong) as error:
        return {"found": str(error), "hung": isinstance(error, Hung)}
    finally:
        process.send(signal.SIGKILL)
        shutil.rmtree(place, ignore_errors=True)
    *said, last = process.said(20_000).splitlines()
    answer: dict[str, Any] = json.loads(last)
    if "found" in answer:
        answer["found"] += "\n".join(said)
    return answer


def fuzz(minutes: float, seed: int, kinds: list[str], number: int | None, most: int) -> dict[str, Any]:
    """Cases of all kinds in turn until the time is over or `most` findings are there."""
    lease.SETTLE_S, are_loaded, began = 0.0, False, time.monotonic()
    tallies = {kind: Counter[str](cases=0, signals=0, interrupted=0, wrong=0, hung=0) for kind in kinds or CASES}
    findings: list[dict[str, Any]] = []
    spent = dict.fromkeys(tallies, 0.0)
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with (
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory(prefix="deltawire-fuzz-", dir=memory) as folder,
    ):
        preparing = Process(lambda: prepare(Path(folder)))
        require(preparing.ended(3 * LIMIT_S) == 0, preparing.said())
        began = told = time.monotonic()
        end = began + 60 * minutes
        while time.monotonic() < end and len(findings) < most:
            if not are_loaded and time.monotonic() > end - 30 * minutes:
                clock = time.monotonic()
                load_kernels(Path(folder))
                end, are_loaded = end + time.monotonic() - clock, True
            # as much time for each
            kind, clock = min(spent, key=spent.__getitem__), time.monotonic()
            tally = tallies[kind]
            case = tally["cases"] if number is None else number
            answer = run_case(kind, seed, case, Path(folder))
            spent[kind] += time.monotonic() - clock
            tally.update(cases=1, signals=answer.get("signals", 0), interrupted=answer.get("interrupted", 0))
            if "found" in answer:
                tally["hung" if answer["hung"] else "wrong"] += 1
                findings.append({"kind": kind, "number": case, **answer})
                print(f"FOUND in {kind} {case}: {answer['found']}", flush=True)
            if time.monotonic() - told > 30:
                told = time.monotonic()
                cases = sum(tally["cases"] for tally in tallies.values())
                print(f"{(told - began) / 60:6.1f} min  {cases:,} cases  {len(findings)} findings", flush=True)
    return {
        "mode": "interrupt", "seed": seed, "minutes": round((time.monotonic() - began) / 60, 2),
        "machine": f"{os.cpu_count()} × {platform.machine()}, Python {platform.python_version()}",
        "kinds": {kind: dict(tally) for kind, tally in tallies.items()}, "findings": findings,
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    columns = "cases", "signals", "interrupted", "wrong", "hung"
    print(f"\n{'operation':<16}" + "".join(f"{name:>12}" for name in columns))
    for kind, tally in result["kinds"].items():
        print(f"{kind:<16}" + "".join(f"{tally[name]:>12,}" for name in columns))
    total = {name: sum(tally[name] for tally in result["kinds"].values()) for name in columns}
    print(
        f"\nseed {result['seed']}: {total['cases']:,} cases in {result['minutes']} min, {total['signals']:,} signals, "
        f"{total['interrupted']:,} operations interrupted, {total['wrong']} wrong, {total['hung']} hung "
        f"({result['machine']})"
    )
