"""`deltawire env`: an environment to train against, as a server."""

from __future__ import annotations

import os
from enum import Enum
from typing import Annotated

import typer

from deltawire.cli import ui
from deltawire.cli.quantities import seconds


class Environment(str, Enum):
    wordle = "wordle"


def command(
    environment: Annotated[Environment, typer.Argument(help="Which one.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any that is free.")] = 8000,
    words: Annotated[
        str, typer.Option(metavar="LIST", help="toy (64 words), scowl-10 (595), scowl-20 (1355), or a file.")
    ] = "scowl-20",
    guesses: Annotated[int, typer.Option(min=1, max=100, help="How many there are in a game.")] = 6,
    max_sessions: Annotated[int, typer.Option(min=1, help="How many may play at the same time.")] = 512,
    idle: Annotated[
        float, typer.Option(parser=seconds, metavar="TIME", help="A session ends when silent for so long: 30s, 10min.")
    ] = "10min",  # type: ignore[assignment]  # parsed like what is typed
    json: ui.JsonOption = False,
) -> None:
    """Serve an environment that speaks the OpenEnv protocol.

    Games are played over a WebSocket at /ws; /reset, /step, /state, /health,
    /metadata and /schema answer over HTTP. Prints one line when it is ready.
    Needs the extra named rl; torch is not imported. Ctrl-C ends it.

    \b
    Examples
      deltawire env wordle
      deltawire env wordle --words toy --guesses 5   what the small policy plays
      deltawire env wordle --host 0.0.0.0 --port 7860 --max-sessions 2000
      deltawire env wordle --port 0 --json           for programs
    """
    from deltawire.engines.live import access
    from deltawire.errors import MissingExtra

    if idle <= 0:
        raise typer.BadParameter("a session needs some time to play", param_hint="--idle")
    try:
        from .env_server import create_app, make_server, sessions_allowed
    except ModuleNotFoundError as error:
        missing = (error.name or "another package").partition(".")[0]
        raise MissingExtra(f"an environment needs {missing}", "rl") from None
    from .wordle import Rules
    from .wordlists import load

    try:
        rules = Rules(load(words), guesses)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--words") from None
    max_sessions = sessions_allowed(max_sessions)
    with access.listen(host, port) as listener, ui.ended_by_sigterm():
        taken = listener.getsockname()[1]
        url = f"http://[{host}]:{taken}" if ":" in host else f"http://{host}:{taken}"

        def ready() -> None:
            value = {
                "event": "ready",
                "url": url,
                "pid": os.getpid(),
                "environment": environment.value,
                "words": len(rules.words),
                "guesses": guesses,
                "max_sessions": max_sessions,
            }
            ui.emit_line(value, f"{environment.value} at {url}  ({len(rules.words)} words, {guesses} guesses)", json)

        server = make_server(create_app(rules, max_sessions=max_sessions, idle=idle), max_sessions)
        server.on_listening = ready
        server.run(sockets=[listener])
