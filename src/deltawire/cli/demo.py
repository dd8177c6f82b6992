"""`deltawire demo`: a model trains and publishes, two processes follow and prove that they hold its bits."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import JsonOption, console, duration, emit, percent, size, sparkline, table, times

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from ..trainer import Published

FOLLOWERS = 2
PATIENCE = 120.0
"""Seconds a follower may need to start, or to catch up at the end."""


def command(
    run: Annotated[str | None, typer.Option(metavar="URL", help="Where to publish; a temporary folder.")] = None,
    versions: Annotated[int, typer.Option(min=2, help="How many versions to publish.")] = 30,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder.")] = False,
    json: JsonOption = False,
) -> None:
    """Train a small model, publish every step, and watch two processes follow it.

    A transformer of 3.3 million weights trains with AdamW at 1e-6, in fp32, and
    publishes bf16. Each follower patches a live model of its own. The trainer keeps
    a list of SHA-256 hashes of its weights, made by torch alone; a follower that
    ever has a different hash, or a different bit at the end, fails the demo.

    \b
    Examples
      deltawire demo
      deltawire demo --versions 100
      deltawire demo --run s3://runs/demo
    """
    _need_torch()
    with tempfile.TemporaryDirectory(prefix="deltawire-demo-") if not keep else _kept() as folder:
        where = run or (Path(folder) / "run").as_uri()
        _need_nothing_at(where)
        demo = Demo(where, versions, Path(folder))
        with demo.followers_running(), nullcontext(None) if json else _view(demo) as show:
            demo.train(show)
            demo.wait(show)
        demo.compare()
        if json:
            demo.verify()
            emit(demo.summary(), lambda out: None, True)
        else:
            _epilogue(demo, keep)
    if demo.problems:
        raise typer.Exit(1)


def _need_torch() -> None:
    from importlib.util import find_spec

    from ..core.errors import MissingExtra

    if find_spec("torch") is None:
        raise MissingExtra("the demo trains a model, which needs torch: pip install 'deltawire[torch]'")


def _need_nothing_at(where: str) -> None:
    from ..bucket.run import Run
    from ..core.errors import RunNotFound

    try:
        Run.open(where)
    except RunNotFound:
        return
    raise typer.BadParameter(f"there is a run at {where} already; the demo wants an empty place", param_hint="--run")


@contextmanager
def _kept() -> Iterator[str]:
    yield tempfile.mkdtemp(prefix="deltawire-demo-")


# ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Follower:
    """A follower process, seen from the trainer."""

    def __init__(self, name: str, run: str, until: int, weights: Path) -> None:
        self.name, self.weights = name, weights
        self.proofs: dict[int, str] = {}
        self.timings: dict[str, float] = {}
        module = f"{__package__}.demo_follower"
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, run, name, str(until), str(weights)],
            # a session of its own: Ctrl-C is ours to handle. Its stdin ends when we do, however we end.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # two cores must do for a trainer and two followers
            env={**os.environ, "DELTAWIRE_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def version(self) -> int | None:
        return max(list(self.proofs), default=None)  # a copy: the listener adds to it

    def _listen(self) -> None:
        import msgspec

        assert self.process.stdout is not None
        for line in self.process.stdout:
            proof = msgspec.json.decode(line)
            self.timings = proof["timings"]
            self.proofs[proof["version"]] = proof["fingerprint"]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._listener.join()


@dataclass(slots=True)
class Demo:
    run: str
    versions: int
    folder: Path
    followers: list[Follower] = field(default_factory=list)
    expected: dict[int, str] = field(default_factory=dict)
    # the trainer's own fingerprints
    published: list[Published] = field(default_factory=list)
    loss: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)
    # as they must arrive
    elements: int = 0
    # parameters of the model, tied ones once
    problems: list[str] = field(default_factory=list)

    @contextmanager
    def followers_running(self) -> Iterator[None]:
        for number in range(1, FOLLOWERS + 1):
            name = f"follower-{number}"
            self.followers.append(Follower(name, self.run, self.versions - 1, self.folder / f"{name}.pt"))
        try:
            yield
        finally:
            for follower in self.followers:
                follower.stop()

    def train(self, show: Callable[[], None] | None) -> None:
        from ..trainer import Publisher
        from .demo_model import Trainer, fingerprint, wire_weights

        trainer = Trainer()
        self.elements = sum(parameter.numel() for parameter in trainer.model.parameters())
        with Publisher(self.run, wire_dtype="bf16", model_name="demo") as publisher:
            for version in range(self.versions):
                self.loss = trainer.step()
                self.weights = wire_weights(trainer.model)
                self.expected[version] = fingerprint(self.weights)
                handle = publisher.publish(trainer.model, step=version, metrics={"loss": self.loss})
                # a trainer would go on; here every step is to be a version of its own
                self.published.append(handle.result())
                if show:
                    show()

    def wait(self, show: Callable[[], None] | None) -> None:
        """Until the followers have ended, or can no longer be hoped for."""
        deadline = time.monotonic() + PATIENCE
        for follower in self.followers:
            while follower.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
                if show:
                    show()
            if follower.process.poll() != 0:
                self.problems.append(f"{follower.name} did not get to the end: exit code {follower.process.poll()}")

    def compare(self) -> None:
        import torch

        from .demo_model import same_bits

        for follower in self.followers:
            for version, expected in self.expected.items():
                found = follower.proofs.get(version)
                if found != expected:
                    what = "never had" if found is None else "has other bits in"
                    self.problems.append(f"{follower.name} {what} version {version}")
            if not follower.weights.is_file() or not same_bits(torch.load(follower.weights), self.weights):
                self.problems.append(f"{follower.name} ended with other weights than the trainer")

    def verify(self) -> None:
        from ..bucket.run import Run
        from ..bucket.verify import verify

        failure = verify(Run.open(self.run)).failure
        if failure is not None:
            self.problems.append(f"the run does not verify: {failure.what}")

    @property
    def proofs(self) -> int:
        return sum(follower.proofs.get(v) == mark for follower in self.followers for v, mark in self.expected.items())

    def summary(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "ok": not self.problems,
            "problems": self.problems,
            "versions": self.published,
            "followers": {follower.name: follower.proofs for follower in self.followers},
            "fingerprints": self.expected,
            "proofs": self.proofs,
        }


# ── what is seen ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _view(demo: Demo) -> Iterator[Callable[[], None]]:
    """A live table on a terminal, else a line per version. Yields what is called whenever something may be new."""
    out = console()
    out.print("a small transformer learns with AdamW at lr 1e-6 and publishes bf16; two processes follow", style="bold")
    out.print(f"run: {demo.run}\n", soft_wrap=True)
    if not out.is_terminal:
        said: list[int] = []
        yield lambda: _say_new(demo, said)
        return
    from rich.live import Live

    with Live(console=out, refresh_per_second=8, get_renderable=lambda: _picture(demo)) as live:
        yield live.refresh


def _say_new(demo: Demo, said: list[int]) -> None:
    for published in demo.published[len(said) :]:
        said.append(published.version)
        followers = "  ".join(f"{f.name} {_at(f)}" for f in demo.followers)
        print(f"{_line(demo, published)}  |  {followers}", flush=True)


def _line(demo: Demo, published: Published) -> str:
    smaller = f"{times(2 * demo.elements, published.bytes)} smaller" if published.version else "anchor"
    share = percent(published.changed, demo.elements)
    return f"v{published.version}  loss {demo.loss:.3f}  {share} changed  {size(published.bytes)}  {smaller}"


def _at(follower: Follower) -> str:
    return "starting" if follower.version is None else f"v{follower.version}"


def _picture(demo: Demo) -> Table:
    rows = table("", "version", "", left=("",))
    deltas = [published.bytes for published in demo.published if published.version]
    newest = demo.published[-1] if demo.published else None
    line = _line(demo, newest).partition("  ")[2] if newest else "starting"
    rows.add_row("trainer", f"{len(demo.published)} of {demo.versions}", line)
    for follower in demo.followers:
        right = sum(follower.proofs.get(v) == mark for v, mark in list(demo.expected.items()))
        took = f", the last in {duration(sum(follower.timings.values()))}" if right else ""
        rows.add_row(follower.name, _at(follower), f"{right} versions proven bit-identical{took}")
    rows.add_row("delta sizes", "", f"{sparkline(deltas[-60:])} {size(deltas[-1]) if deltas else ''}")
    return rows


def _epilogue(demo: Demo, keep: bool) -> None:
    from . import log, verify

    print()
    log.command(demo.run, number=10)
    try:
        verify.command(demo.run)
    except typer.Exit as ended:
        if ended.exit_code:
            demo.problems.append("the run does not verify")
    out = console()
    if keep:
        out.print(f"kept in {demo.folder}", soft_wrap=True)
    for problem in demo.problems:
        out.print(f"✗ {problem}", style="bold red", soft_wrap=True)
    sent = sum(published.bytes for published in demo.published if published.version)
    full = 2 * demo.elements * max(len(demo.published) - 1, 0)
    verdict = "✓ all bit-identical" if not demo.problems else "✗ NOT identical"
    out.print(
        f"{verdict}: {len(demo.published)} versions, {FOLLOWERS} followers, {demo.proofs} proofs; "
        f"{size(sent)} of deltas instead of {size(full)}, {times(full, sent)} smaller",
        style="bold green" if not demo.problems else "bold red",
        soft_wrap=True,
    )
