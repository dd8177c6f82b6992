"""`deltawire fleet`: the servers that follow a run, for people, for Prometheus and for proxies."""

from __future__ import annotations

import json as json_module
import re
import shlex
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Exit, Option, echo

import deltawire as dw

from ..errors import DeltawireError, ObjectNotFound
from . import ui
from .allowed import Allowed, addresses

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..fleet import Member

_SHOWN = 100
"""Replicas in a table, at most; those that need a look come first."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def command(
    run: ui.RunArgument,
    max_lag: Annotated[
        int | None, Option(metavar="N", min=0, help="For proxies: leave out servers that are more versions behind.")
    ] = None,
    fresh: Annotated[
        float, Option(metavar="SECONDS", min=1, help="Without a heartbeat for longer, a server is silent.")
    ] = 60.0,
    allow: Annotated[
        list[str] | None,
        Option(metavar="NETWORK|DOMAIN", help="Only use addresses in there: 10.0.0.0/8, .example.internal."),
    ] = None,
    replica: Annotated[
        list[str] | None,
        Option(metavar="PATTERN", help="Only read heartbeats with these names (serve --id): gpu-7, 'gpu-*'."),
    ] = None,
    nginx: Annotated[Path | None, Option(metavar="FILE|-", help="Write an upstream block for nginx.")] = None,
    haproxy: Annotated[Path | None, Option(metavar="FILE|-", help="Write a backend for HAProxy.")] = None,
    prometheus_sd: Annotated[
        Path | None, Option(metavar="FILE|-", help="Write all servers for Prometheus (file_sd).")
    ] = None,
    name: Annotated[str, Option(help="Name of the upstream or backend.")] = "deltawire",
    watch: Annotated[bool, Option("--watch", help="Continue, and write files again when they change.")] = False,
    every: Annotated[float, Option(metavar="SECONDS", min=0.1, help="With --watch: how often to look.")] = 5.0,
    exec: Annotated[
        str, Option("--exec", metavar="COMMAND", help="Run after files were written, such as 'nginx -s reload'.")
    ] = "",
    json: ui.JsonOption = False,
) -> None:
    """List the servers that follow a run: version, lag, health, last pause, address.

    All of it is from heartbeats in the bucket. With --nginx or --haproxy the
    healthy servers are written as a configuration, so that clients need only one
    address; --watch keeps the file current. A configuration without a server is
    never written: the last one stays.

    Anybody who can write the bucket can write a heartbeat. Addresses must be
    host:port in a strict form. Those of one machine (127.0.0.1), of one link,
    and names are used only if --allow covers them, and those where clouds keep
    credentials only if it names them. Use --allow if the proxy adds a token.
    The latest 1,000 heartbeats are read; if there are more, name yours with
    --replica.

    \b
    Examples
      deltawire fleet s3://runs/chat
      deltawire fleet s3://runs/chat --nginx - --max-lag 2 --allow 10.0.0.0/8
      deltawire fleet s3://runs/chat --nginx up.conf --watch
      deltawire fleet s3://runs/chat --prometheus-sd targets.json --watch
    """
    from ..fleet import Fleet

    outputs = (
        Output(nginx, lambda found: nginx_upstream(found, name), proxy=True),
        Output(haproxy, lambda found: haproxy_backend(found, name), proxy=True),
        Output(prometheus_sd, prometheus_targets, proxy=False),
    )
    wanted = [output for output in outputs if output.path is not None]
    if not _NAME.fullmatch(name):
        raise BadParameter("letters, digits, '_' and '-', from a letter on", param_hint="--name")
    if watch and (not wanted or any(str(output.path) == "-" for output in wanted)):
        raise BadParameter("needs files to write: --nginx, --haproxy or --prometheus-sd", param_hint="--watch")
    if exec and not wanted:
        raise BadParameter("needs files to write: --nginx, --haproxy or --prometheus-sd", param_hint="--exec")
    for output in wanted:
        if output.path is not None and not output.path.absolute().parent.is_dir():
            raise BadParameter(f"there is no folder {output.path.absolute().parent}: make it first")
    allowed, opened = Allowed(allow or ()), dw.Run.open(run)
    fleet = Fleet(opened, fresh=fresh, only=replica or ())
    if not watch:
        newest = opened.newest()
        fleet.read()
        found = fleet.members(newest)
        if not wanted:
            value = {"run": opened.store.url, "newest": newest, "replicas": found}

            def render(out: ui.Console) -> None:
                version = "no version yet" if newest is None else f"newest version {newest}"
                noun = "replica" if len(found) == 1 else "replicas"
                out.print(f"{opened.store.url}  {version}, {len(found)} {noun} with a heartbeat", soft_wrap=True)
                print_members(out, found, allowed)

            ui.emit(value, render, json)
        for output in wanted:
            if not output.write(found, allowed, max_lag):
                raise ObjectNotFound(f"{_none(found)}: nothing is written; without options, fleet lists each of them")
        if wanted and not _run(exec):
            raise Exit(1)
        return
    with ui.ended_by_sigterm() as stop:
        while not stop.is_set():
            try:
                newest = opened.newest()
                fleet.read()
                found = fleet.members(newest)
                before = [output.text for output in wanted]
                for output in wanted:
                    if not output.write(found, allowed, max_lag):
                        ui.complain(f"{_none(found)}: {output.path} stays as it is")
                if [output.text for output in wanted] != before:
                    _run(exec)
            except (DeltawireError, OSError) as error:
                ui.complain(f"keeping what is written, trying again: {error}")
            stop.wait(every)


@dataclass
class Output:
    """A file to write."""

    path: Path | None
    make: Callable[[list[str]], str]
    proxy: bool
    """Whether clients are sent to the addresses in it."""
    text: str = ""
    """The document that was written last."""

    def write(self, found: list[Member], allowed: Allowed, max_lag: int | None) -> bool:
        """Write it if it changed. False, and nothing is written, if a proxy would get no server."""
        from ..store import LocalStore

        chosen = addresses((m for m in found if (m.serves(max_lag) if self.proxy else m.health != "silent")), allowed)
        if self.proxy and not chosen:
            return False
        text = self.make(chosen)
        if str(self.path) == "-":
            echo(text, nl=False)
        elif text != self.text and self.path is not None:
            # as a whole or not at all, as every object in a folder
            LocalStore(self.path.absolute().parent).put(self.path.name, text.encode())
        self.text = text
        return True


def _none(found: list[Member]) -> str:
    return f"of {len(found)} replicas none is a server that is healthy, recent and at an address that --allow covers"


def _run(command: str) -> bool:
    """Run a command, if there is one. False if it failed."""
    try:
        if command:
            subprocess.run(shlex.split(command), check=True, timeout=60)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        ui.complain(f"--exec: {error}")
        return False
    return True


# ── what is written ──────────────────────────────────────────────────────────────────────────────────────────────────


def nginx_upstream(found: list[str], name: str) -> str:
    """An upstream block. A server that fails is left out for ten seconds, and its request goes to the next."""
    servers = "".join(f"    server {address} max_fails=1 fail_timeout=10s;\n" for address in found)
    return f"# written by deltawire fleet\nupstream {name} {{\n    least_conn;\n{servers}    keepalive 64;\n}}\n"


def haproxy_backend(found: list[str], name: str) -> str:
    """A backend that asks for /health."""
    servers = "".join(f"    server s{number} {address} check\n" for number, address in enumerate(found, 1))
    check = "    option httpchk GET /health\n    http-check expect status 200\n"
    return f"# written by deltawire fleet\nbackend {name}\n    balance leastconn\n{check}{servers}"


def prometheus_targets(found: list[str]) -> str:
    """A file for Prometheus' file_sd_configs. No labels that change: each value would be a series of its own."""
    return json_module.dumps([{"targets": found, "labels": {"job": "deltawire"}}], indent=2) + "\n"


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def print_members(out: ui.Console, found: list[Member], allowed: Allowed | None = None) -> None:
    """Print a table of replicas, and why some of them fail. Addresses that are not `allowed` are marked."""
    if len(found) > _SHOWN:
        counts = Counter(member.health for member in found)
        out.print(
            f"{len(found):,} replicas: {', '.join(f'{count:,} {health}' for health, count in counts.most_common())}; "
            f"these are the {_SHOWN} that need a look first, --json has all"
        )
        found = sorted(found, key=lambda member: (member.health == "ok", -(member.lag or 0)))[:_SHOWN]
    if found:
        columns = ("replica", "version", "lag", "health", "last pause", "seen", "address")
        rows, left = [_row(member, allowed) for member in found], ("replica", "health", "address")
        ui.print_table(out, columns, rows, left=left, drop=("seen", "last pause"), shorten="replica")
    for member in found:
        if member.error:
            out.print(ui.clean(f"{member.replica}: {member.error}"), soft_wrap=True)


def _row(member: Member, allowed: Allowed | None) -> list[str]:
    refused = allowed is not None and member.address and member.address not in allowed

    def known(value: Any, text: str) -> str:
        return "–" if value is None else text

    return [
        ui.clean(member.replica),
        known(member.version, f"v{member.version}"),
        known(member.lag, str(member.lag)),
        member.health,
        known(member.pause_s, ui.duration(member.pause_s or 0.0)),
        f"{ui.duration(max(member.seen_s, 1))} ago",
        (member.address or "–") + (" (needs --allow)" if refused else ""),
    ]
