"""`deltawire follow`: keep a checkpoint folder current, or run a command per version."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

from typer import BadParameter, Exit, Option

import deltawire as dw

from ..errors import DeltawireError, FolderError, RunNotFound
from . import ui

T = TypeVar("T")

RETRY_S = 5.0
"""Seconds between attempts to write a folder."""


def command(
    run: ui.RunArgument,
    folder: Annotated[Path | None, Option("--dir", metavar="DIR", help="Checkpoint folder to keep.")] = None,
    exec: Annotated[str | None, Option("--exec", metavar="CMD", help="Shell command to run for each version.")] = None,
    every: Annotated[bool, Option("--every", help="Write every version, also when behind.")] = False,
    poll: ui.PollOption = 1.0,
    once: Annotated[bool, Option("--once", help="Go to the newest version, then end.")] = False,
    reference: ui.ReferenceOption = None,
    trust: ui.TrustOption = None,
    refuse_delegated: ui.RefuseDelegatedOption = False,
    id: ui.NameOption = None,
    heartbeats: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="The run's bucket, for heartbeats, if RUN takes none (https://); else DELTAWIRE_HEARTBEATS.",
        ),
    ] = None,
    json: ui.JsonOption = False,
) -> None:
    """Follow a run: keep a checkpoint folder current, run a command per version.

    DIR is a symlink to a folder beside it and is swapped in one step, so a
    reader always finds one whole version. The previous version stays for readers
    that still have it open. After a restart the command continues from what is
    on disk.

    It polls when the next version is due, by the rhythm of earlier ones, and at
    once if the store announces a change. If another run takes the address, it
    ends with exit code 3 and changes nothing.

    CMD runs for each version once it is proven and in place, and at the start
    also for a version that is on disk already. Its environment has
    DELTAWIRE_RUN, DELTAWIRE_VERSION and, with --dir, DELTAWIRE_DIR. A failing CMD
    is reported and stops nothing; with --once the exit code is then 1.

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
    if folder is None and exec is None:
        raise BadParameter("give --dir, --exec or both")
    if once and every:
        raise BadParameter("--once goes straight to the newest version; leave out --every")
    trusted = dw.Trust.of(trust, refuse_delegated or None)
    try:
        # a new name for every short visit would fill `log` with replicas that are gone
        replica = dw.Replica(
            run,
            id=id,
            reference=reference,
            heartbeat=0 if once and id is None else 10.0,
            heartbeats=heartbeats or os.environ.get("DELTAWIRE_HEARTBEATS") or None,
            trust=trusted,
        )
    except ValueError as error:
        raise BadParameter(str(error), param_hint="--id") from None
    with ui.ended_by_sigterm() as stop, dw.CurrentFolder(folder) if folder is not None else nullcontext() as current:
        opening = partial(dw.Run.open, run, trust=trusted)
        if once:
            keeper = _Keeper(opening(), current)
            reached: Iterable[int] = [replica.sync(keeper.state)]
        else:
            keeper = _Keeper(_retry(opening, RunNotFound, poll, "{}; waiting for it", stop), current)
            reached = replica.follow(keeper.state, poll=poll, every=every, stop=stop)
        code = 0
        for version in reached:
            if once:
                keeper.keep(version)
            else:
                text = f"version {version}: {{}}; trying again every {RETRY_S:.0f} s"
                _retry(partial(keeper.keep, version), FolderError, RETRY_S, text, stop)
            code = _exec(exec, keeper, version) if exec else 0
            _say(replica, version, current, code, json)
    if once and code:
        raise Exit(1)


def _retry(work: Callable[[], T], on: type[DeltawireError], every: float, text: str, stop: threading.Event) -> T:
    """Repeat `work` until it succeeds, and report only the first failure.

    A run that is not there yet or a full disk does not end a follower; `stop` does.
    """
    told = False
    while not stop.is_set():
        try:
            return work()
        except on as error:
            if not told:
                ui.complain(text.format(error))
            told = True
        stop.wait(every)
    raise SystemExit(0)


class _Keeper:
    """The weights that the replica updates, and the folder they are written to."""

    def __init__(self, run: dw.Run, current: dw.CurrentFolder | None) -> None:
        self.run, self.current = run, current
        self._shown: str | None = None
        """State digest of what is in the folder."""
        if current is not None and current.folder is not None:
            try:
                # so that a restart needs deltas only
                self.state = dw.State(run.schema)
                self.state.load(run.weights_in(current.folder))
                self._shown = str(self.state.digest)
                return
            except (DeltawireError, OSError) as error:
                ui.complain(f"starting from the bucket: {error}")
        self.state = dw.State(run.schema)

    def keep(self, version: int) -> None:
        """Write the weights to the folder, unless it holds this version already."""
        manifest = self.run.anywhere(lambda: self.run.manifest(version))
        if self.current is None or (self._shown == manifest.digest and self.current.holds(version)):
            return
        self.current.write(self.run, version, self.state)
        self._shown = manifest.digest


def _exec(command: str, keeper: _Keeper, version: int) -> int:
    given = {"DELTAWIRE_RUN": keeper.run.store.url, "DELTAWIRE_VERSION": str(version)}
    if keeper.current is not None:
        given["DELTAWIRE_DIR"] = str(keeper.current.link)
    code = subprocess.run(command, shell=True, env={**os.environ, **given}, check=False).returncode
    if code:
        ui.complain(f"the command for version {version} ended with exit code {code}")
    return code


def _say(replica: dw.Replica, version: int, current: dw.CurrentFolder | None, code: int, json: bool) -> None:
    value = {
        "version": version,
        "newest": replica.newest,
        "dir": str(current.link) if current else None,
        "timings": replica.timings,
        "exit_code": code,
    }
    took = ui.durations(replica.timings)
    where = f"  → {current.link}" if current else ""
    behind = f"  ({replica.lag} behind)" if replica.lag else ""
    ui.emit_line(value, f"v{version}  {took or 'already here'}{where}{behind}", json)
