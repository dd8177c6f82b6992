"""A vLLM server that follows a run. vLLM is imported by what runs inside it, never here.

placement   checkpoint coordinates → views of runtime storage, traced through the model's own loader
shard       one rank's weights through that map: read, write, take back, prove (device, _rows: on a GPU)
decode      a delta as seen from one rank
layout      all ranks together
guard       what makes patching wrong although bytes look right
rank        what one rank does, when told to
worker      the weight-transfer back end: a rank in each worker
workers     all ranks as one: stage, pause, apply, prove, or take back
follower    the one who decides, in the API server
endpoint    routes; metrics; samples: versions on completions; settings: the environment
launch      `deltawire serve --engine vllm`
"""

from __future__ import annotations

import os
from typing import Any

NAME = "deltawire"


def register() -> None:
    """Entry point `vllm.general_plugins`: called in every process of a server, perhaps more than once."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.v1.worker.worker_base import WorkerBase

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, "deltawire.engines.vllm.worker", "DeltawireEngine")
    WorkerBase.deltawire = _call
    # other servers on this machine keep their packed weights: only those that were told to follow give them up
    if NAME in os.environ.get("VLLM_PLUGINS", "").split(","):
        _keep_weights_plain()


def _call(worker: Any, operation: str, **arguments: Any) -> dict[str, Any]:
    """The method that the endpoint plugin reaches through `collective_rpc("deltawire", …)`."""
    rank = getattr(worker.weight_transfer_engine, "rank", None)
    if rank is None:
        return {"error": 'start the server with --weight-transfer-config \'{"backend": "deltawire"}\''}
    return rank.call(operation, **arguments)  # type: ignore[no-any-return]


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
