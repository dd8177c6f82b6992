"""A vLLM server that follows a run: the adapter of ../live. vLLM is imported by what runs inside it, never here.

hooks       layers that process their weights after loading
guard       what makes patching wrong in vLLM
worker      the weight-transfer back end: a rank in each worker
adapters    followed adapters, named in the API server; adapter_worker: read and registered by every rank
drafts      the draft model of speculative decoding
core        the swap of all ranks, between two steps of the engine; salts of its cache
engine      vLLM as a target sees it
relay       several API servers: one follows, the others pass on what concerns it
endpoint    the endpoint plugin, and versions of tokens
launch      `deltawire serve --engine vllm`
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import shutil
import tempfile
from functools import cache
from typing import Any

NAME = "deltawire"

SOCKETS = "DELTAWIRE_SOCKETS"
"""Environment variable: the folder in which the API servers of a server find each other."""

log = logging.getLogger("deltawire")


def register() -> None:
    """Entry point `vllm.general_plugins`: called in every process of a server, perhaps more than once."""
    log_to_vllm()
    if named():
        from ..live import ahead

        _make_folder()
        ahead.start_in_plugin()
        _prepare_core()
    elif (found := _asked_to_follow()) and multiprocessing.parent_process() is None:
        log.warning("%s is set, but nothing here follows it: %s", found, NEXT_STEP)
    try:
        _extend()
    except Exception:
        # merely installed, we end no server of a vLLM that we do not know
        if named() or _asked_to_follow():
            raise
        log.debug("this vLLM cannot follow a run", exc_info=True)


def _extend() -> None:
    """Add our weight-transfer back end to vLLM, and the calls that its workers answer."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.v1.worker.worker_base import WorkerBase

    from . import adapter_worker

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, "deltawire.engines.vllm.worker", "DeltawireTransferEngine")
    WorkerBase.deltawire = _call
    WorkerBase.deltawire_adapter = adapter_worker.call
    # other servers on this machine keep their packed weights: only those that were told to follow give them up
    if named():
        _keep_weights_plain()


@cache
def _make_folder() -> None:
    """Make a folder for sockets, in the process that starts the others: they find it in their environment. What this
    process itself found there is of another server."""
    if multiprocessing.parent_process() is None or SOCKETS not in os.environ:
        os.environ[SOCKETS] = folder = tempfile.mkdtemp(prefix="deltawire-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _prepare_core() -> None:
    """Add the swap to the engine core. Raises on wrong settings now, before a model is loaded."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    from ..live import ServerOptions
    from . import core

    core.attach(EngineCore, Scheduler, salts=ServerOptions.read().plugin_kv == "version")


NEXT_STEP = (
    "start the server with VLLM_PLUGINS=deltawire in its environment (vLLM loads routes of plugins only by name), or "
    "with `deltawire serve --engine vllm RUN`, which sets all of it"
)


BACKEND_FLAG = '--weight-transfer-config \'{"backend": "deltawire"}\''


def _asked_to_follow() -> str:
    """The setting that names a run; empty if none does."""
    return next((name for name in ("DELTAWIRE_RUN", "DELTAWIRE_ADAPTERS") if os.environ.get(name)), "")


def named() -> bool:
    """Whether vLLM loads the endpoint plugin too, without which no run is followed."""
    return NAME in os.environ.get("VLLM_PLUGINS", "").split(",")


def log_to_vllm() -> None:
    """Log through vLLM's handlers in this process, unless the logger is configured already."""
    if not log.hasHandlers():
        log.addHandler(_ToVllm())
        log.setLevel(logging.DEBUG)
        # a handler that the root logger gets later would write every line again
        log.propagate = False


class _ToVllm(logging.Handler):
    """Passes records to vLLM's current handlers, by its current level: vLLM configures both after plugins were loaded,
    and more than once."""

    def emit(self, record: logging.LogRecord) -> None:
        vllm = logging.getLogger("vllm")
        if vllm.isEnabledFor(record.levelno):
            vllm.handle(record)


def _call(worker: Any, text: str) -> dict[str, Any]:
    """The method that the endpoint plugin reaches through `collective_rpc("deltawire", …)`."""
    rank = getattr(worker.weight_transfer_engine, "rank", None)
    if rank is None:
        return {"error": f"start the server with {BACKEND_FLAG}"}
    from .drafts import draft_model, reload_draft
    from .guard import have_experts_moved, hold_experts

    rank.draft = draft_model(worker)
    rank.reload_draft = lambda folder: reload_draft(worker, folder)
    rank.reload = lambda folder: _reload(worker, folder)
    rank.has_moved = lambda: have_experts_moved(worker.model_runner)
    rank.on_layout = lambda: hold_experts(worker.model_runner)
    return rank.call(text)  # type: ignore[no-any-return]


def _reload(worker: Any, folder: str) -> None:
    from .guard import experts_in_first_places, pack_again

    pack_again(worker.weight_transfer_engine.model)
    with experts_in_first_places(worker.model_runner):
        worker.reload_weights(weights_path=folder)


def _keep_weights_plain() -> None:
    """On a CPU, vLLM packs the weights of linear layers for its kernels and drops or ignores the originals. Patched
    weights have to be those it computes with, so layers keep torch's own linear."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm

    def keep(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = linear
        else:
            packing(layer, remove_weight)

    if packing.__module__ != __name__:
        utils.dispatch_cpu_unquantized_gemm = keep
