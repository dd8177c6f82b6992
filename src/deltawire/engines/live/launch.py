"""Start an engine's server from nothing but a run: write its newest version to a folder, then run that server."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from ...bucket import checkpoint_folder
from ...bucket.references import resolver
from ...bucket.run import Run
from ...bucket.watch import wait_for_run
from ...core import full
from ...core.errors import FolderError, SchemaMismatch
from ..names import model_name
from ..options import ServerOptions
from . import ahead
from .supervise import become

__all__ = ["Launcher", "launch", "listen_flags", "tokenizer_flags", "write_version"]

log = logging.getLogger("deltawire")


class Launcher(Protocol):
    """How an engine's own server is started: a module `launch` of an engine."""

    def find(self) -> Sequence[str]:
        """The command that starts a server. Raises MissingExtra if the engine is not installed."""

    def prepare(
        self, options: ServerOptions, model: str | Path, command: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """The command line and environment of a server that follows a run."""


def launch(engine: Launcher, options: ServerOptions) -> NoReturn:
    """Replace this process by one that runs a server which follows a run, once the run has a version (supervise.py).

    Without a model to start from, that version is written to `options.folder`: kept, and used again where it still is
    the version wanted; or to a temporary folder, which lies there while the server runs.
    """
    command, model, made = engine.find(), options.model, ""
    if options.run:
        ahead.start(options.run)
    try:
        if model is None:
            wait_for_run(options.run, options.poll)
            if not options.folder:
                made = tempfile.mkdtemp(prefix="deltawire-model-")
            folder = options.folder or Path(made, "m")
            write_version(options.run, options.pin, folder, reference=options.reference)
            model = str(folder)
        line, environment = engine.prepare(options, model, command, os.environ)
        sys.stdout.flush()
        become(line, environment, made)
    except BaseException:
        if made:
            shutil.rmtree(made, ignore_errors=True)
        raise


def listen_flags(options: ServerOptions) -> list[str]:
    """Flags that engines have in common."""
    name = options.name or model_name(options.run)
    return ["--host", options.host, "--port", str(options.port), *(["--served-model-name", name] if name else [])]


def tokenizer_flags(
    options: ServerOptions, model: str | Path, flags: Sequence[str], *, otherwise: str, requests: str
) -> Sequence[str]:
    """Flags that start an engine without a tokenizer, where the model to start from has none; logged in one line.

    flags        the flags, beginning with the one that leaves the tokenizer out
    otherwise    the flag that names a tokenizer; nothing is chosen where the user does that
    requests     what the engine then answers
    """
    given = {part.partition("=")[0].replace("_", "-") for part in options.extra}
    if not full.lacks_tokenizer(model) or not given.isdisjoint((flags[0], otherwise)):
        return ()
    log.warning(
        "%s has no tokenizer, so the server is started without one (%s): %s. For text, publish with "
        "Publisher(…, tokenizer=…), or name a tokenizer here: -- %s NAME",
        options.run or model,
        flags[0],
        requests,
        otherwise,
    )
    return flags


WRITTEN = ".deltawire"
"""A file in each folder that `write_version` made: it may be replaced."""


def write_version(
    run: str | Run, version: int | str | None, place: Path, *, reference: str | Path | None = None
) -> int:
    """A version of a run as a checkpoint folder (the newest by default), unless that is what `place` holds already."""
    opened = run if isinstance(run, Run) else Run.open(run)
    want = opened.resolve(version)
    if place.is_dir() and any(place.iterdir()):
        if not (place / "config.json").is_file():
            raise SchemaMismatch(f"{place} is not empty and not a checkpoint folder: name another folder")
        if str(full.digest_of(full.Checkpoint(place))) == opened.manifest(want).digest:
            return want
        if not (place / WRITTEN).exists():
            raise FolderError(
                f"{place} has other weights than version {want}, and was not written by deltawire serve, which "
                "replaces only its own folders: name another folder, or remove that one"
            )
    with checkpoint_folder.scratch(place) as made:
        checkpoint_folder.fill_for_engine(made, opened, want, resolver(reference))
        (made / WRITTEN).touch()
        checkpoint_folder.move_into(made, place, replace=True)
    return want
