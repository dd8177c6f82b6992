"""The command line: one file per command, wired together here.

A command file has one function `command` whose docstring is its --help. Anything that takes time to import (numba,
torch, the stores) is imported inside it, so that --help answers at once.
"""

from __future__ import annotations

import errno
import importlib
import logging
import sys
import time
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from . import ui

__all__ = ["app", "main"]

EXIT_CODES = """\b
Exit codes
  0    done, or ended by SIGTERM
  1    failed
  2    used wrongly: an option, an address, a missing extra
  3    bad data, or a verification that failed
  4    not found: a run, a version, an object, a reference
  5    a failure of the store
  6    another writer was first, or the run is not what this writer published
  130  interrupted by Ctrl-C (SIGINT)
"""


class Commands(TyperGroup):
    """Turns what a command raises into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        from deltawire.errors import DeltawireError

        try:
            return super().invoke(ctx)
        except DeltawireError as error:
            ui.complain(str(error))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of our output has closed it
            ui.complain(str(error))
            raise typer.Exit(1) from None


class PassesFlagsOn(TyperCommand):
    """A command that becomes another program, which has flags of its own."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- FLAGS OF THE ENGINE]"]


HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="deltawire",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog=EXIT_CODES,
    context_settings=HELP,
)


class _Stderr(logging.Handler):
    """Log lines to wherever stderr is at that moment: a progress bar takes it over for as long as it stands."""

    def emit(self, record: logging.LogRecord) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        # one line, and nothing in it that a terminal would obey: messages quote buckets
        text = ui.clean(" ".join(record.getMessage().splitlines()), 2000)
        print(f"{clock} {record.levelname.lower()} {text}", file=sys.stderr, flush=True)


def _version(wanted: bool) -> None:
    if wanted:
        from deltawire import __version__

        typer.echo(f"deltawire {__version__}")
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", count=True, help="Say what happens, -vv in detail (on stderr).")
    ] = 0,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Move the weights of a model in training to the servers that sample from it, through nothing but a bucket.

    A RUN is an address: s3://bucket/run, hf://buckets/me/name/run,
    gs://bucket/run, az://container/run, file:///path or a plain path. A version
    of it is RUN@41, RUN@v41, RUN@latest, RUN@-2 (the last but one), or a tag as
    in RUN@best.

    \b
    Examples
      deltawire demo                               watch it work, here and now
      deltawire publish step-100 s3://runs/chat    the next version
      deltawire follow s3://runs/chat --dir models/chat
      deltawire log s3://runs/chat                 versions and replicas
      deltawire runs s3://runs                     all runs of a bucket
    """
    logger = logging.getLogger("deltawire")
    logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG))
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        logger.addHandler(_Stderr())


COMMANDS = {
    "demo": "deltawire_wordle.demo_command",
    "publish": "deltawire.cli.publish",
    "checkout": "deltawire.cli.checkout",
    "follow": "deltawire.cli.follow",
    "derive": "deltawire.cli.derive",
    "import": "deltawire.cli.import_",
    "keep": "deltawire.cli.keep",
    "serve": "deltawire.cli.serve",
    "env": "deltawire_wordle.env_command",
    "log": "deltawire.cli.log",
    "fleet": "deltawire.cli.fleet",
    "dash": "deltawire.cli.dash",
    "show": "deltawire.cli.show",
    "tag": "deltawire.cli.tag",
    "runs": "deltawire.cli.runs",
    "verify": "deltawire.cli.verify",
    "keygen": "deltawire.cli.keygen",
    "delegate": "deltawire.cli.delegate",
    "prune": "deltawire.cli.prune",
    "plan": "deltawire.cli.plan",
    "doctor": "deltawire.cli.doctor",
}
"""The module of each command. This table is the only place where deltawire refers to deltawire_wordle."""

for _name, _module in COMMANDS.items():
    _passes_on = _name == "serve"
    _settings = {**HELP, "allow_extra_args": _passes_on}
    app.command(_name, cls=PassesFlagsOn if _passes_on else TyperCommand, context_settings=_settings)(
        importlib.import_module(_module).command
    )


def main() -> None:
    app(prog_name="deltawire")
