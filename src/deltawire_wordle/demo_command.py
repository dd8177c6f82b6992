"""`deltawire demo`: a policy learns Wordle while its weights travel to two servers through a bucket."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltawire.cli.common import (
    JsonOption,
    console,
    duration,
    emit,
    ended_by_sigterm,
    percent,
    size,
    sparkline,
    table,
    times,
)

if TYPE_CHECKING:
    from rich.console import Group

    from .demo import Demo, DemoRecord, ReplicaStatus

PLAIN_EVERY = 10
"""Steps between two lines of output where there is no terminal."""


class Engine(str, Enum):
    builtin = "builtin"
    vllm = "vllm"


def command(
    bucket: Annotated[
        str, typer.Option(metavar="file|s3|URL", help="A folder, an S3 server of its own, or any address.")
    ] = "file",
    engine: Annotated[Engine, typer.Option(help="Who computes in the rollout servers.")] = Engine.builtin,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of training; evaluations come on top.")] = 3.5,
    steps: Annotated[int | None, typer.Option(min=1, help="End after so many, if that is sooner.")] = None,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of AdamW.")] = 1e-4,
    staleness: Annotated[int, typer.Option(min=0, help="Steps that a sample may be old.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the secrets and the evaluations.")] = 0,
    games: Annotated[int, typer.Option(min=0, help="In each evaluation; 0 for none.")] = 512,
    kill_replica: Annotated[bool, typer.Option("--kill-replica", help="Kill a server; it rejoins later.")] = False,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="Publish nothing between the first and the last step, to compare.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="For report and logs; a temporary folder.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the bucket too, where it lies in that folder.")] = False,
    json: JsonOption = False,
) -> None:
    """Train a policy by reinforcement learning, with everything on this machine.

    A trainer, two rollout servers and a Wordle environment, each a process of its
    own. Servers and trainer share nothing but a bucket: after every step the
    trainer publishes what changed, the servers fetch it, write it into their live
    weights and prove the result. They play, the trainer learns from their games,
    and solves more and more. At the end all bits are compared, the whole run is
    verified, and a report is written. Takes less than five minutes on two cores.

    \b
    Examples
      deltawire demo
      deltawire demo --kill-replica             one server dies and comes back
      deltawire demo --bucket s3                through a real S3 server
      deltawire demo --bucket s3://runs/wordle  through yours
      deltawire demo --no-sync                  the same without updates
    """
    _need_extras()
    from . import report
    from .demo import Demo, Plan

    if bucket not in ("file", "s3"):
        _need_nothing_at(bucket)
    folder = (out or Path(tempfile.mkdtemp(prefix="deltawire-demo-"))).absolute()
    if (folder / "run").exists() or (folder / "s3").exists():
        raise typer.BadParameter(f"{folder} has a run already; name another folder", param_hint="--out")
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        folder=folder,
        run=None if bucket == "file" else bucket,
        engine=engine.value,
        steps=steps,
        seconds=60 * minutes,
        rate=lr,
        staleness=staleness,
        seed=seed,
        games=games,
        kill_replica=kill_replica,
        sync=not no_sync,
    )
    demo = Demo(plan)
    try:
        with ended_by_sigterm(), _view(demo, json) as show:
            demo.run(show)
        page, data = report.write(demo.record)
    finally:
        if not keep:
            for made in ("run", "s3"):
                shutil.rmtree(folder / made, ignore_errors=True)
    figures = report.summary(demo.record)
    files = {"html": str(page), "json": str(data)}
    value = {"ok": not demo.record.problems, "problems": demo.record.problems, "report": files, **figures}
    emit(value, lambda out: _epilogue(demo.record, figures, page), json)
    if demo.record.problems:
        raise typer.Exit(1)


def _need_extras() -> None:
    from importlib.util import find_spec

    from deltawire.core.errors import MissingExtra
    from deltawire.core.extras import install_command

    for name in ("torch", "transformers", "httpx", "fastapi", "uvicorn", "websockets", "prometheus_client"):
        if find_spec(name) is None:
            raise MissingExtra(f"the demo needs {name} to train and serve: {install_command('rl,serve')}")


def _need_nothing_at(where: str) -> None:
    from deltawire.bucket.run import Run
    from deltawire.core.errors import RunNotFound

    try:
        Run.open(where)
    except RunNotFound:
        return
    raise typer.BadParameter(f"there is a run at {where} already; the demo wants an empty place", param_hint="--bucket")


# ── what is seen ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _view(demo: Demo, quiet: bool) -> Iterator[Callable[[], None]]:
    """A live picture on a terminal, else lines. Yields what is called whenever something may be new."""
    out = console()
    if quiet:
        yield lambda: None
    elif out.is_terminal:
        from rich.live import Live

        with Live(console=out, refresh_per_second=4, get_renderable=lambda: _picture(demo.record)):
            yield lambda: None
    else:
        yield _Lines(demo.record)


class _Lines:
    """One line for each thing that is new, for logs and pipes."""

    def __init__(self, record: DemoRecord) -> None:
        self._story = record
        self._phase, self._steps, self._evaluated, self._remarks = "", 0, 0, 0

    def __call__(self) -> None:
        record = self._story
        if record.phase != self._phase:
            self._phase = record.phase
            print(f"· {record.phase}", flush=True)
        for _, text in record.remarks[self._remarks :]:
            print(f"! {text}", flush=True)
        self._remarks = len(record.remarks)
        for found in record.evaluated[self._evaluated :]:
            print(f"v{found['version']}: {found['solved']:.1%} of {found['games']} games solved", flush=True)
        self._evaluated = len(record.evaluated)
        while self._steps + PLAIN_EVERY <= len(record.steps):
            self._steps += PLAIN_EVERY
            print("  ".join(f"{name} {text}" for name, text in _figures(record, self._steps).items()), flush=True)


def _figures(record: DemoRecord, upto: int) -> dict[str, str]:
    """What there is to say after so many steps."""
    recent = record.steps[max(0, upto - PLAIN_EVERY) : upto]
    last = recent[-1]
    before = record.steps[upto - len(recent) - 1]["seconds"] if upto > len(recent) else 0.0
    tokens = sum(step["figures"]["tokens"] for step in recent) / max(last["seconds"] - before, 1e-9)
    said = {
        "step": f"{last['step']}",
        "solved": f"{sum(step['figures']['solved'] for step in recent) / len(recent):.0%}",
        "tokens/s": f"{tokens:,.0f}",
        "staleness": f"{sum(step['staleness'] for step in recent) / len(recent):.1f}",
    }
    deltas = [version for version in record.published if version["version"]]
    if deltas:
        newest, sent = deltas[-1], sum(version["bytes"] for version in deltas)
        full = sum(2 * version["elements"] for version in deltas)
        said["version"] = f"{newest['version']}"
        said["changed"] = percent(newest["changed"], newest["elements"])
        said["sent"] = f"{size(sent)} of {size(full)} ({times(full, sent)})"
    for name, statuses in record.replicas.items():
        said[name] = _replica(statuses[-1])
    return said


def _replica(now: ReplicaStatus) -> str:
    if now.version is None:
        return now.state
    pause = f" pause {now.pause_s * 1e3:.0f} ms" if now.pause_s is not None else ""
    return f"v{now.version} lag {now.lag}{pause}"


def _picture(record: DemoRecord) -> Group:
    from rich.console import Group
    from rich.text import Text

    from .report import smoothed

    rates = smoothed([step["figures"]["solved"] for step in record.steps])
    rows = table("", " ", left=("", " "))
    rows.add_row("phase", record.phase)
    for found in [*record.evaluated]:
        rows.add_row(f"v{found['version']} plays", f"{found['solved']:.1%} of {found['games']} games solved")
    if rates:
        width = 60
        shown = rates if len(rates) <= width else [rates[at * (len(rates) - 1) // (width - 1)] for at in range(width)]
        rows.add_row("solve rate", f"{sparkline([*shown, 1.0])[:-1]} {rates[-1]:.0%}")
        done = int(record.progress * 60)
        rows.add_row("training", f"{'━' * done}{'╌' * (60 - done)} {duration(record.steps[-1]['seconds'])}")
        for name, text in _figures(record, len(record.steps)).items():
            if name not in record.replicas:
                rows.add_row(name, text)
    for name, statuses in [*record.replicas.items()]:
        rows.add_row(name, f"{_replica(statuses[-1]):<28} {sparkline([(g.lag or 0) for g in statuses[-30:]])}")
    title = Text(f"Wordle, learned through {record.url or 'a bucket'}", style="bold")
    return Group(title, rows, *(Text(f"! {text}", style="yellow") for _, text in record.remarks[-4:]))


def _epilogue(record: DemoRecord, figures: dict[str, Any], page: Path) -> None:
    out = console()
    for problem in record.problems:
        out.print(f"✗ {problem}", style="bold red", soft_wrap=True)
    if figures["solved_after"] is not None:
        out.print(
            f"solved {figures['solved_before']:.1%} before, {figures['solved_after']:.1%} after "
            f"{figures['steps']} steps in {duration(figures['seconds_training'])}, "
            f"{duration(figures['seconds_in_all'])} in all",
            soft_wrap=True,
        )
    if figures["bytes_sent"]:
        out.print(
            f"{figures['versions']} versions, {figures['changed_percent']:.1f} % of weights changed in each; "
            f"{size(figures['bytes_sent'])} sent instead of {size(figures['bytes_full'])}, anchors included",
            soft_wrap=True,
        )
    if not record.problems:
        versions = (record.verified or {}).get("versions", 0)
        said = f"✓ {len(record.equal)} replicas hold the trainer's bits, all {versions} versions verified"
        out.print(said, style="bold green", soft_wrap=True)
    out.print(f"report: {page}", soft_wrap=True)
