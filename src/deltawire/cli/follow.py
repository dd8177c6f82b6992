"""`deltawire follow`: keep a checkpoint folder current, or run a command per version."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import JsonOption, ReferenceOption, RunArgument, complain, console, duration, json_line, size

if TYPE_CHECKING:
    from ..bucket.current import CurrentFolder
    from ..bucket.replay import State
    from ..bucket.run import Run
    from ..replica import Replica


def command(
    run: RunArgument,
    folder: Annotated[Path | None, typer.Option("--dir", metavar="DIR", help="Checkpoint folder to keep.")] = None,
    exec: Annotated[
        str | None, typer.Option("--exec", metavar="CMD", help="Shell command to run for each version.")
    ] = None,
    every: Annotated[bool, typer.Option("--every", help="Go through every version, also when behind.")] = False,
    poll: Annotated[float, typer.Option(metavar="SECONDS", min=0.01, help="How often to look.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Go to the newest version, then end.")] = False,
    reference: ReferenceOption = None,
    id: Annotated[str | None, typer.Option(metavar="NAME", help="Name in `log`; host and process by default.")] = None,
    json: JsonOption = False,
) -> None:
    """Follow a run: keep a checkpoint folder current, run a command per version.

    DIR is a symlink to a folder beside it and is swapped in one step, so whoever
    opens it finds one whole version. The version before stays for readers that
    are still in it. After a restart it continues from what is on disk.

    CMD runs once a version is proven and in place (and at the start, for the
    version found there). It sees DELTAWIRE_RUN, DELTAWIRE_VERSION and, with --dir,
    DELTAWIRE_DIR, the folder of that very version. A failing CMD is reported and
    does not stop anything; with --once it is exit code 1.

    With --json there is one JSON object per line and version.

    \b
    Examples
      deltawire follow s3://runs/chat --dir /models/chat
      deltawire follow s3://runs/chat --dir /models/chat --once

    \b
      # tell a server to load each version
      deltawire follow s3://runs/chat --dir /models/chat \\
          --exec 'curl -fsS -X POST localhost:8000/reload'
    """
    from ..bucket.current import CurrentFolder
    from ..replica import Replica

    if folder is None and exec is None:
        raise typer.BadParameter("give --dir, --exec or both")
    if once and every:
        raise typer.BadParameter("--once goes straight to the newest version; leave out --every")
    try:
        replica = Replica(run, id=id, reference=reference)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--id") from None
    signal.signal(signal.SIGTERM, _end)
    failed = False
    with CurrentFolder(folder) if folder is not None else nullcontext() as current:
        opened = _open(run, poll, wait=not once)
        state = _start(opened, current)
        steps = _once(replica, state) if once else replica.follow(state, poll=poll, every=every)
        for version in steps:
            place = _place(opened, version, state, current)
            code = _exec(exec, opened.store.url, version, place) if exec else None
            failed = bool(code)
            _say(opened, replica, version, place, code, json)
    if once and failed:
        raise typer.Exit(1)


def _end(*_: object) -> None:
    # not an Exception, so nothing on the way mistakes it for trouble and goes on
    raise SystemExit(0)


def _once(replica: Replica, state: State) -> Iterator[int]:
    yield replica.sync(state)


def _open(where: str, poll: float, *, wait: bool) -> Run:
    from ..bucket.run import Run
    from ..core.errors import RunNotFound

    waiting = False
    while True:
        try:
            return Run.open(where)
        except RunNotFound as error:
            if not wait:
                raise
            if not waiting:
                complain(f"{error}; waiting for it")
            waiting = True
        threading.Event().wait(poll)


def _start(run: Run, current: CurrentFolder | None) -> State:
    """The weights that are on disk already, or none."""
    from ..bucket.replay import State, as_run
    from ..core.errors import DeltawireError
    from ..core.full import Checkpoint

    state = State(run.schema)
    if current is not None and current.folder is not None:
        try:
            state.load(as_run(Checkpoint(current.folder), run.schema, str(current.folder)))
        except (DeltawireError, OSError) as error:
            complain(f"starting anew: {error}")
    return state


def _place(run: Run, version: int, state: State, current: CurrentFolder | None) -> Path | None:
    """Put the version on disk, unless it is what is there."""
    from ..bucket import folder

    if current is None:
        return None
    before = current.folder
    if before is not None and before.name.partition(".")[0] == f"{version:06d}" and state.version == version:
        return before
    made = current.put(
        version, lambda place: folder.fill(place, run, run.manifest(version), state, before=before)
    )
    state.version = version
    return made


def _exec(command: str, run: str, version: int, place: Path | None) -> int:
    given = {"DELTAWIRE_RUN": run, "DELTAWIRE_VERSION": str(version)}
    if place is not None:
        given["DELTAWIRE_DIR"] = str(place)
    code = subprocess.run(command, shell=True, env={**os.environ, **given}, check=False).returncode
    if code:
        complain(f"the command for version {version} ended with exit code {code}")
    return code


def _say(run: Run, replica: Replica, version: int, place: Path | None, code: int | None, json: bool) -> None:
    if json:
        value: dict[str, Any] = {"version": version, "newest": replica.newest, "timings": replica.timings}
        json_line({**value, "dir": place and str(place), "exec": code})
        return
    took = "  ".join(f"{name} {duration(seconds)}" for name, seconds in replica.timings.items())
    sent = size(min(link.bytes for link in run.manifest(version).links))
    behind = f"  {replica.lag} behind" if replica.lag else ""
    console().print(f"v{version}  {sent}  {took or 'already here'}{f'  → {place}' if place else ''}{behind}")
