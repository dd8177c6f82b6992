"""An SGLang server that follows a run: the adapter of ../live. SGLang is imported by what runs inside it, never here.

core        in the scheduler of each rank: its `Rank`, the swap between two steps, salts of its cache
engine      SGLang as a target sees it
endpoint    the HTTP server: the follower, routes and metrics; versions of tokens
hooks       layers that process their weights after loading
guard       what makes patching wrong in SGLang
launch      `deltawire serve --engine sglang`
"""

from __future__ import annotations

import multiprocessing
import os
import sys

NAME = "deltawire"

_SCHEDULER = "sglang.srt.managers.scheduler"
_SERVER = "sglang.srt.entrypoints.http_server"


def register() -> None:
    """Entry point `sglang.srt.plugins`: called in every process of a server. Other servers on this machine, which were
    not told to follow a run, are left as they are."""
    if not following():
        return
    if multiprocessing.parent_process() is None:
        _hook_server()
    elif _SCHEDULER in sys.modules:
        _hook_scheduler()


def following() -> bool:
    """Whether this server was told to follow a run, or to wait for one to be named."""
    told = any(os.environ.get(name) for name in ("DELTAWIRE_RUN", "DELTAWIRE_ADAPTERS"))
    return told or NAME in os.environ.get("SGLANG_PLUGINS", "").split(",")


def _hook_server() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import guard

    # its first request waits until the weights are a version; by default SGLang ends the server after ten minutes
    os.environ.setdefault("SGLANG_WARMUP_TIMEOUT", "86400")
    HookRegistry.register(f"{_SERVER}.launch_server", guard.check_server, HookType.BEFORE)
    HookRegistry.register(f"{_SERVER}._setup_and_run_http_server", _attach, HookType.BEFORE)


def _attach(server_args: object, tokenizer_manager: object, *args: object, **kwargs: object) -> None:
    # only now: SGLang sets up its metrics before anything imports prometheus_client
    from sglang.srt.entrypoints.http_server import app

    from .endpoint import Server

    Server(tokenizer_manager).attach(app)


def _hook_scheduler() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ..live import settings
    from . import core, hooks

    scheduler = f"{_SCHEDULER}.Scheduler"
    HookRegistry.register(f"{scheduler}.handle_dumper_control", core.handle, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.process_batch_result", core.process, HookType.AROUND)
    if settings.read().policy.kv == "version":
        HookRegistry.register(f"{scheduler}._add_request_to_queue", core.salt, HookType.BEFORE)
    HookRegistry.register(
        "sglang.srt.model_loader.loader.DefaultModelLoader.postprocess_weights", hooks.note, HookType.BEFORE
    )
