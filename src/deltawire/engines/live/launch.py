"""Start an engine's server from nothing but a run: write its newest version to a folder, then run that server."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from ...bucket import checkpoint_folder
from ...bucket.references import resolver
from ...bucket.run import Run
from ...bucket.versions import resolve
from ...bucket.watch import wait_for_run
from ...core import full
from ...core.errors import SchemaMismatch
from ..names import model_name
from .supervise import become

log = logging.getLogger("deltawire")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a server is to follow, and how it is reached."""

    run: str = ""
    """Empty where only adapters are followed."""
    host: str = "127.0.0.1"
    port: int = 8000
    pin: int | None = None
    """Start at this version and stay there."""
    name: str | None = None
    """What clients call the model; the name of the run by default."""
    reference: str | Path | None = None
    """Folder or hub id of the checkpoint that the run starts from, if its own name does not work here."""
    poll: float = 1.0
    kv: str | None = None
    """DELTAWIRE_KV, where it is not to be what the environment or the default says."""
    token: str | None = None
    address: str = ""
    """host:port for clients, in the heartbeat; by default where it listens."""
    version_wait: float | None = None
    """Seconds that a request waits for a version it accepts."""
    max_model_len: int | None = None
    logprobs_mode: str | None = None
    """`raw_logprobs` or `processed_logprobs`; the engine's own default if it is None."""
    adapters: str = ""
    """DELTAWIRE_ADAPTERS: runs of adapters, NAME=RUN, NAME=RUN."""
    extra: Sequence[str] = ()
    """More of the engine's own flags."""

    @property
    def listen(self) -> list[str]:
        """Flags that engines have in common."""
        name = self.name or model_name(self.run)
        return ["--host", self.host, "--port", str(self.port), *(["--served-model-name", name] if name else [])]

    def variables(self) -> dict[str, str]:
        """What the plugin reads (settings.py), the token included: every process can read a command line."""
        chosen = {
            "DELTAWIRE_KV": self.kv,
            "DELTAWIRE_PIN": self.pin,
            "DELTAWIRE_REFERENCE": self.reference or None,
            "DELTAWIRE_TOKEN": self.token or None,
            "DELTAWIRE_ADDRESS": self.address or None,
            "DELTAWIRE_VERSION_WAIT": self.version_wait,
            "DELTAWIRE_ADAPTERS": self.adapters or None,
        }
        return {
            "DELTAWIRE_RUN": self.run,
            "DELTAWIRE_FOLLOW": "1",
            "DELTAWIRE_POLL": str(self.poll),
            **{name: str(value) for name, value in chosen.items() if value is not None},
        }


class Launcher(Protocol):
    """How an engine's own server is started: a module `launch` of an engine."""

    def find(self) -> Sequence[str]:
        """The command that starts a server. Raises MissingExtra if the engine is not installed."""

    def prepare(
        self, options: Options, model: str | Path, command: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """The command line and environment of a server that follows a run."""


def launch(
    engine: Launcher, options: Options, model: str | Path | None = None, folder_for_weights: str | Path | None = None
) -> NoReturn:
    """Replace this process by one that runs a server which follows a run, once the run has a version (supervise.py).

    model                 a hub id or folder to start from, instead of the run's newest version
    folder_for_weights    where that version is written; kept, and used again where it still is the version wanted.
                          Without it, they lie in a temporary folder while the server runs
    """
    command, made = engine.find(), ""
    try:
        if model is None:
            wait_for_run(options.run, options.poll)
            if not folder_for_weights:
                made = tempfile.mkdtemp(prefix="deltawire-model-")
            model = Path(folder_for_weights or f"{made}/m")
            write_version(options.run, options.pin, model, reference=options.reference)
        line, environment = engine.prepare(options, model, command, os.environ)
        sys.stdout.flush()
        become(line, environment, made)
    except BaseException:
        if made:
            shutil.rmtree(made, ignore_errors=True)
        raise


def tokenizer_flags(
    options: Options, model: str | Path, flags: Sequence[str], *, otherwise: str, requests: str
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


def write_version(run: str, version: int | None, place: Path, *, reference: str | Path | None = None) -> int:
    """A version of a run as a checkpoint folder (the newest by default), unless that is what `place` holds already."""
    opened = Run.open(run)
    want = resolve(opened, version)
    if place.is_dir() and any(place.iterdir()):
        if not (place / "config.json").is_file():
            raise SchemaMismatch(f"{place} is not empty and not a checkpoint folder: name another folder")
        if str(full.digest_of(full.Checkpoint(place))) == opened.manifest(want).digest:
            return want
    with checkpoint_folder.scratch(place) as made:
        checkpoint_folder.fill_for_engine(made, opened, want, resolver(reference or None))
        checkpoint_folder.move_into(made, place, replace=True)
    return want
