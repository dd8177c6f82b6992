"""`deltawire demo`: to come."""

from __future__ import annotations

import typer


def command() -> None:
    """To come."""
    typer.echo("demo is not written yet", err=True)
    raise typer.Exit(1)
