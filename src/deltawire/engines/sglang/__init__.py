"""An SGLang server that follows a run: the adapter of ../live. SGLang is imported by what runs inside it, never here.

core        in the scheduler of each rank: its `Rank`, the swap between two steps, salts of its cache
engine      SGLang as a target sees it
endpoint    the HTTP server: the follower, routes and metrics; versions of tokens
adapters    followed adapters, named in the HTTP server; adapter_worker: read and registered by every rank
hooks       layers that process their weights after loading
guard       what makes patching wrong in SGLang
launch      `deltawire serve --engine sglang`
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import secrets
from collections.abc import Callable
from typing import Any

NAME = "deltawire"

SECRET = "DELTAWIRE_SECRET"
"""Environment variable: what the HTTP server of a server shows to its schedulers, so that no client can call them."""

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_SERVER = "sglang.srt.entrypoints.http_server"


def register() -> None:
    """Entry point `sglang.srt.plugins`: called in every process of a server. Other servers on this machine, which were
    not told to follow a run, are left as they are."""
    if not following():
        return
    from ..live import ahead

    try:
        _hook()
        ahead.start_in_plugin()
    except Exception as error:
        # SGLang only logs an exception here, and would serve the weights it started with forever
        raise SystemExit(f"deltawire: this SGLang cannot follow a run: {type(error).__name__}: {error}") from error


def following() -> bool:
    """Whether this server was told to follow a run, or to wait for one to be named."""
    told = any(os.environ.get(name) for name in ("DELTAWIRE_RUN", "DELTAWIRE_ADAPTERS"))
    return told or NAME in map(str.strip, os.environ.get("SGLANG_PLUGINS", "").split(","))


def _hook() -> None:
    """Hook what this process may run. One that SGLang started has a name for it; any other may be the HTTP server, and
    may run schedulers too."""
    runs = getattr(getattr(multiprocessing.current_process(), "_target", None), "__name__", "")
    if runs.startswith(("run_detokenizer", "run_multi_detokenizer", "run_data_parallel")):
        return
    if not runs.startswith("run_scheduler"):
        _hook_server()
    _hook_scheduler()


def _hook_server() -> None:
    from . import guard

    # its first request waits until the weights are a version; by default SGLang ends the server after ten minutes
    os.environ.setdefault("SGLANG_WARMUP_TIMEOUT", "86400")
    os.environ[SECRET] = os.environ.get(SECRET) or secrets.token_hex(16)
    _add(f"{_SERVER}.launch_server", guard.check_server, "before")
    _add(f"{_SERVER}._setup_and_run_http_server", _attach, "before")


def _attach(server_args: object, tokenizer_manager: object, *args: object, **kwargs: object) -> None:
    # only now: SGLang sets up its metrics before anything imports prometheus_client
    from sglang.srt.entrypoints.http_server import app

    from .endpoint import SGLangServer
    from .guard import check_server

    check_server(server_args)
    SGLangServer(tokenizer_manager).attach(app)


def _hook_scheduler() -> None:
    from ..live import ServerOptions
    from . import core, hooks

    chosen = ServerOptions.read()
    _add(f"{_SCHEDULER}.handle_dumper_control", core.handle, "around")
    _add(f"{_SCHEDULER}.process_batch_result", core.process, "around")
    if chosen.plugin_kv != "keep":
        _add(f"{_SCHEDULER}._add_request_to_queue", core.salt, "before")
    if chosen.run:
        _add(f"{_SCHEDULER}.init_running_status", core.hold, "after")
    _add("sglang.srt.model_loader.loader.DefaultModelLoader.postprocess_weights", hooks.note, "before")


def _add(target: str, hook: Callable[..., Any], kind: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # SGLang only logs that it found no such function
    pkgutil.resolve_name(target)
    HookRegistry.register(target, hook, HookType(kind))
