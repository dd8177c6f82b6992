"""vLLM's trainer engine `deltawire`: each `send_weights()` becomes a version of a run, which servers follow."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import vllm

import deltawire as dw
from deltawire.errors import Misconfigured

from .servers import wait_for

NAME, TESTED = "deltawire", "0.32.0 and 0.33.0"
HOOK = {"trainer_init": ["init_info", "client", "source"], "send_weights": ["self"]}
"""What vLLM calls of a trainer engine, and with what."""
WAITS = ("servers", "bucket", "nothing")
CHANGED = (
    f"vLLM {vllm.__version__} calls trainer engines in another way than vLLM {TESTED}, with which deltawire "
    f"{dw.__version__} was tested: install one of these, or a deltawire that was tested with yours"
)

try:
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
except ImportError as error:
    raise Misconfigured(f"{CHANGED} ({error})") from error


@dataclass
class DeltawireInit(TrainerInitInfo):  # type: ignore[misc]
    """Settings of the trainer engine `deltawire`, the same on every rank but for `rank`."""

    backend: ClassVar[str] = NAME

    run: str = ""
    """Address of the run."""
    wait: str = "servers"
    """What `send_weights` waits for: "servers" (default: until they have the version), "bucket" or "nothing"."""
    servers: Sequence[str] = ()
    """Addresses of the servers to wait for; by default that of vLLM's HTTP client."""
    timeout: float = 600
    """Seconds to wait for servers."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `Publisher`: files, anchor_every, … Weights are sent as bf16 unless `wire_dtype` is given."""


class DeltawireTrainer(TrainerWeightTransferEngine[DeltawireInit]):  # type: ignore[misc]
    """Publishes the weights of a `WeightSource`, on all ranks together. Servers get them from the bucket."""

    init_info_cls = DeltawireInit

    @classmethod
    def trainer_init(cls, init_info: DeltawireInit, *, client: Any, source: Any = None) -> DeltawireTrainer:
        """Open the run, so that a wrong address is an error now. No server is asked: one may start with the run."""
        require_hook()
        if not init_info.run:
            raise Misconfigured("DeltawireInit(run=…) is missing: the address of the run, s3://runs/policy")
        if init_info.wait not in WAITS:
            raise Misconfigured(f"DeltawireInit(wait=…) is one of {', '.join(WAITS)}, not {init_info.wait!r}")
        if source is None:
            raise Misconfigured("trainer_init needs source=ModuleSource(model), or another WeightSource")
        made = cls(client=client, source=source, is_sender=init_info.is_sender)
        made._settings = init_info
        made._servers = init_info.servers or [url for url in [getattr(client, "base_url", None)] if url]
        if init_info.wait == "servers" and not made._servers:
            raise Misconfigured(
                f"a {type(client).__name__} does not say where servers are: pass DeltawireInit(servers=[…]), or "
                'wait="bucket"'
            )
        made._publisher = dw.Publisher(init_info.run, **{"wire_dtype": "bf16", **init_info.options})
        return made

    def send_weights(self) -> None:
        """Publish the weights, and wait for what `wait` says. Every rank calls it."""
        handle = self._publisher.publish(_weights(self.source, self._settings.rank))
        if self._settings.wait == "nothing":
            return
        version = handle.result().version
        if self._settings.wait == "servers":  # each rank by itself: none goes on to sample from older weights
            wait_for(self._servers, version, self._settings.timeout)

    def shutdown(self) -> None:
        """Wait until everything is in the bucket, and close the publisher."""
        self._publisher.close()


WeightTransferTrainerFactory.register_engine(NAME, DeltawireTrainer)


def require_hook() -> None:
    """Raise Misconfigured if this vLLM calls trainer engines in another way than `HOOK`."""
    calls = {name: [*inspect.signature(getattr(TrainerWeightTransferEngine, name)).parameters] for name in HOOK}
    if calls != HOOK or TrainerWeightTransferEngine.__abstractmethods__ != HOOK.keys():
        raise Misconfigured(CHANGED)


def _weights(source: Any, rank: int) -> Any:
    """What a rank publishes of a source: full tensors as all ranks gather them, or the parts that it has."""
    if not hasattr(source, "iter_full"):  # vLLM 0.32 and before
        if source.held_names() is None:
            return iter(source)
        return [dw.Shard(name, tensor, tensor.shape) for name, tensor in source if tensor is not None]
    metas = {meta.name: meta for meta in source.metadata}
    # whole tensors on every rank, or on the only one, which may have no process group
    if source.implements_iter_full() and all(meta.owners is None for meta in metas.values()):
        return source.iter_full()
    if source.implements_iter_local():
        parts = source.iter_local()
        return [dw.Shard(name, part, metas[name].shape, _where(metas[name], rank)) for name, part in parts]
    return [dw.Shard(name, tensor, tensor.shape) for name, tensor in source.iter_full()]


def _where(meta: Any, rank: int) -> tuple[slice, ...]:
    """The rectangle that a rank has, cut as torch.chunk cuts: by the outer axis of the mesh first."""
    where = [slice(0, side) for side in meta.shape]
    if meta.placements is None:
        return tuple(where)
    at, below = meta.owners.index(rank), len(meta.owners)
    for placement, size in zip(meta.placements, meta.mesh_shape, strict=True):
        below //= size
        mine, at = divmod(at, below)
        if hasattr(placement, "dim"):
            first, end = where[placement.dim].start, where[placement.dim].stop
            step = -(-(end - first) // size)
            begin = min(end, first + mine * step)
            where[placement.dim] = slice(begin, min(end, begin + step))
    return tuple(where)
