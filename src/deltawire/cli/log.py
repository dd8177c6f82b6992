"""`deltawire log`: to come."""

from __future__ import annotations

import typer


def command() -> None:
    """To come."""
    typer.echo("log is not written yet", err=True)
    raise typer.Exit(1)
