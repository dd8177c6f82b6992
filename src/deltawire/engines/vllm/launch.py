"""Start a vLLM server from nothing but a run: write its newest version to a folder, then become `vllm serve`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ...bucket import checkpoint_folder
from ...bucket.references import resolver
from ...bucket.run import Run
from ...bucket.versions import resolve
from ...bucket.watch import wait_for_run
from ...core import full
from ...core.errors import MissingExtra, SchemaMismatch
from ...core.extras import install_command
from ..names import model_name

BACKEND = '{"backend": "deltawire"}'


def launch(
    run: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    version: int | None = None,
    model: str | Path | None = None,
    name: str | None = None,
    folder_for_weights: str | Path | None = None,
    reference: str | None = None,
    poll: float = 1.0,
    kv: str | None = None,
    token: str | None = None,
    address: str = "",
    version_wait: float | None = None,
    extra: Sequence[str] = (),
) -> NoReturn:
    """Replace this process by a vLLM server that follows a run, once the run has a version.

    version               start at this one and stay there
    model                 a hub id or folder to start from, instead of the run's newest version
    name                  what clients call the model; the name of the run by default
    kv                    DELTAWIRE_KV, where it is not to be what the environment or the default says
    address               host:port for clients, in the heartbeat; by default where it listens
    version_wait          seconds that a request waits for a version it accepts
    folder_for_weights    where that version is written; kept, and used again where it still is the version wanted
    extra                 more of vLLM's own flags
    """
    vllm = find_vllm()
    if model is None:
        place = (
            Path(folder_for_weights) if folder_for_weights else Path(tempfile.mkdtemp(prefix="deltawire-model-")) / "m"
        )
        wait_for_run(run, poll)
        write_version(run, version, place, reference=reference)
        model = place
    command, environment = prepare(
        run, model, vllm=vllm, name=name, host=host, port=port, version=version, reference=reference, poll=poll,
        kv=kv, token=token, address=address, version_wait=version_wait, extra=extra,
    )  # fmt: skip
    sys.stdout.flush()
    os.execve(vllm, command, environment)


def find_vllm() -> str:
    """The `vllm` program beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if not found:
        raise MissingExtra(f"vLLM is not installed here: {install_command('vllm')}, or serve without --engine vllm")
    return found


def prepare(
    run: str,
    model: str | Path,
    *,
    vllm: str = "vllm",
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    version: int | None = None,
    reference: str | None = None,
    poll: float = 1.0,
    kv: str | None = None,
    token: str | None = None,
    address: str = "",
    version_wait: float | None = None,
    extra: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of a vLLM server that follows a run."""
    plugins = [name for name in environment.get("VLLM_PLUGINS", "").split(",") if name and name != "deltawire"]
    added = {
        "VLLM_PLUGINS": ",".join([*plugins, "deltawire"]),
        "DELTAWIRE_RUN": run,
        "DELTAWIRE_FOLLOW": "1",
        "DELTAWIRE_POLL": str(poll),
    }
    if kv:
        added["DELTAWIRE_KV"] = kv
    if version is not None:
        added["DELTAWIRE_PIN"] = str(version)
    if reference:
        added["DELTAWIRE_REFERENCE"] = str(reference)
    if token:
        added["DELTAWIRE_TOKEN"] = token
    if address:
        added["DELTAWIRE_ADDRESS"] = address
    if version_wait is not None:
        added["DELTAWIRE_VERSION_WAIT"] = str(version_wait)
    command = [
        vllm, "serve", str(model), "--host", host, "--port", str(port), "--served-model-name", name or model_name(run),
        "--weight-transfer-config", BACKEND, *extra,
    ]  # fmt: skip
    return command, {**environment, **added}


def write_version(run: str, version: int | None, place: Path, *, reference: str | None = None) -> int:
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
