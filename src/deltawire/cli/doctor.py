"""`deltawire doctor`: check that a store does what a run needs, or that a server follows its run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Exit, Option, echo

import deltawire as dw

from . import ui

if TYPE_CHECKING:
    from ..doctor import Finding

_MARKS = {"ok": "✓", "warning": "!", "failed": "✗", "skipped": "–"}


def command(
    run: Annotated[
        str | None, Argument(metavar="RUN", help="Address of the run; with --server also a version.")
    ] = None,
    server: Annotated[
        str | None, Option(metavar="URL", help="Check this rollout server instead, and that it follows RUN.")
    ] = None,
    token_file: ui.TokenFileOption = None,
    json: ui.JsonOption = False,
) -> None:
    """Try everything a run asks of its store: create, read, list, delete, speed, clocks.

    Works on any address, whether there is a run or not. Writes a few objects
    named doctor-… beside the run, one of them 32 MiB, and removes them again,
    also when it is interrupted. Each failure says what to do next. Of an
    https:// address it tries what a reader needs, and writes nothing.

    With --server it checks a rollout server instead, of any engine, and changes
    nothing: whether the server follows a run (RUN, if given), which version it
    serves (that of RUN@VERSION, if given), how far behind it is, whether weights
    are patched in place, and who may control it.

    Exit code 0 if everything works, 5 if the store does not do what a run needs,
    1 if the server does not follow.

    \b
    Examples
      deltawire doctor s3://runs/chat
      deltawire doctor 's3://runs/chat?endpoint=http://127.0.0.1:8333'
      deltawire doctor /mnt/shared/chat --json | jq .figures
      deltawire doctor --server http://localhost:8000
      deltawire doctor s3://runs/chat --server http://localhost:8000
      deltawire doctor s3://runs/chat@best --server http://localhost:8000
    """
    from .. import doctor

    said = None if json else _say
    if server is not None:
        from ..engines.live import access

        report = doctor.examine_server(server, access.read_token(token_file), run, said)
        value = {"server": server, "healthy": report.healthy, "checks": report.findings}
        failed, code = f"{server} does not follow a run as it should; failed", 1
    elif run is not None:
        from ..store import open_store

        # no patience on top of the client's own: what is wrong is to be seen now
        store = open_store(dw.split_version(run)[0], retry=False)
        with ui.ended_by_sigterm():
            report = doctor.examine_store(store, said)
        figures = {name: round(value, 6) for name, value in report.figures.items()}
        value = {"run": report.address, "healthy": report.healthy, "checks": report.findings, "figures": figures}
        failed, code = f"{report.address} does not do what a run needs", 5
    else:
        raise BadParameter("name a run: deltawire doctor RUN, or a server: deltawire doctor --server URL")
    # for people each finding is printed when it is made
    ui.emit(value, lambda out: None, json)
    if not report.healthy:
        bad = [finding.check for finding in report.findings if finding.verdict == "failed"]
        ui.complain(f"{failed}: {', '.join(bad)}")
        raise Exit(code)


def _say(finding: Finding) -> None:
    """Print a finding at once: the next check may hang."""
    took = ui.duration(finding.seconds) if finding.seconds else ""
    echo(f"{_MARKS[finding.verdict]} {finding.check:<19}{took:>8}  {ui.clean(finding.detail)}")
