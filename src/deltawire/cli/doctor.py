"""`deltawire doctor`: whether a store does what a run needs, and how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from .common import JsonOption, RunArgument, clean, complain, duration, emit, ended_by_sigterm

if TYPE_CHECKING:
    from ..bucket.doctor import Finding, Report

_MARKS = {"ok": "✓", "warning": "!", "failed": "✗", "skipped": "–"}


def command(
    run: RunArgument,
    json: JsonOption = False,
) -> None:
    """Try everything a run asks of its store: create, read, list, delete, speed, clocks.

    Works on any address, whether there is a run or not. Writes a few objects named
    doctor-… beside the run, one of them 32 MiB, and removes them again, also when
    it is interrupted. Each failure says what to do next.

    Exit code 0 when everything a run needs works, 5 when something does not.

    \b
    Examples
      deltawire doctor s3://runs/chat
      deltawire doctor 's3://runs/chat?endpoint=http://127.0.0.1:8333'
      deltawire doctor /mnt/shared/chat --json | jq .figures
    """
    from ..bucket.doctor import examine
    from ..bucket.versions import split
    from ..store import open_store

    # no patience on top of the client's own: what is wrong is to be seen now
    store = open_store(split(run)[0], retry=False)
    with ended_by_sigterm():
        report = examine(store, None if json else _say)
    emit(_value(report), lambda out: None, json)
    if not report.healthy:
        bad = [finding.check for finding in report.findings if finding.verdict == "failed"]
        complain(f"{report.run} does not do what a run needs: {', '.join(bad)}")
        raise typer.Exit(5)


def _say(finding: Finding) -> None:
    """At once: a step may take its time, and the next may be the one that hangs."""
    took = duration(finding.seconds) if finding.seconds else ""
    typer.echo(f"{_MARKS[finding.verdict]} {finding.check:<19}{took:>8}  {clean(finding.detail)}")


def _value(report: Report) -> dict[str, Any]:
    return {
        "run": report.run,
        "healthy": report.healthy,
        "checks": report.findings,
        "figures": {name: round(value, 6) for name, value in report.figures.items()},
    }
