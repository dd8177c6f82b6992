"""verl's checkpoint engine `deltawire`: each weight update becomes a version of a run, which rollout servers follow."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import verl

import deltawire as dw
from deltawire.errors import Misconfigured

from .servers import wait_for

NAME, TESTED = "deltawire", "0.9.1"
HOOK = {
    "prepare": ["self"],
    "build_topology": ["actor_wg_world_size", "rollout_world_size", "metadata"],
    "init_process_group": ["self", "kwargs"],
    "finalize": ["self"],
    "send_weights": ["self", "weights", "global_steps"],
    "receive_weights": ["self", "global_steps"],
}
"""What verl calls of a checkpoint engine, and with what."""
WAITS = ("servers", "bucket", "nothing")
CHANGED = (
    f"verl {verl.__version__} calls checkpoint engines in another way than verl {TESTED}, with which deltawire "
    f"{dw.__version__} was tested: install verl=={TESTED}, or a deltawire that was tested with yours"
)

try:
    import ray
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
    from verl.utils.ray_utils import auto_await
except ImportError as error:
    raise Misconfigured(f"{CHANGED} ({error})") from error


@CheckpointEngineRegistry.register(NAME)
class DeltawireEngine(CheckpointEngine):  # type: ignore[misc]
    """Publishes the weights of all ranks together. Rollout servers get them from the bucket, and nothing from here.

    run        address of the run
    wait       what an update waits for: "servers" (default, by `DeltawireManager`), "bucket" or "nothing"
    shards     True: each rank publishes its part and nothing is gathered (FSDP2, with `DeltawireManager`)
    timeout    seconds that `DeltawireManager` waits for a server
    options    of `Publisher`: files, anchor_every, … Weights are sent as bf16 unless wire_dtype is given.
    """

    wire_format = "delta_flush"  # of an empty stream in this format a server of verl takes the step, and nothing else

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        run: str = "",
        wait: str = "servers",
        shards: bool = False,
        timeout: float = 600,
        **options: Any,
    ) -> None:
        calls = {name: [*inspect.signature(getattr(CheckpointEngine, name, dict)).parameters] for name in HOOK}
        if calls != HOOK or CheckpointEngine.__abstractmethods__ != HOOK.keys():
            raise Misconfigured(CHANGED)
        if not run:
            raise Misconfigured(f"engine_kwargs.{NAME}.run is missing: the address of the run, s3://runs/policy")
        if wait not in WAITS:
            raise Misconfigured(f"engine_kwargs.{NAME}.wait is one of {', '.join(WAITS)}, not {wait!r}")
        self._run, self._waits, self._shards = run, wait != "nothing", shards
        self._options = {"wire_dtype": "bf16", **options, "on_version": self._note}
        self._publisher: dw.Publisher | None = None
        self._figures: dict[str, float] = {}

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        """Do nothing: trainer and servers share only the bucket."""

    def finalize(self) -> None:
        """Do nothing: the next update uses the same publisher."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish a generator of full tensors, or with `shards` the module of verl's engine. Returns figures of the
        newest version in the bucket."""
        if self._shards != hasattr(weights, "module"):
            raise Misconfigured(
                f"engine_kwargs.{NAME}.shards needs rollout.checkpoint_manager_class={__name__}.DeltawireManager, in a "
                "trainer of verl that reads it"
            )
        if self._publisher is None:
            self._publisher = dw.Publisher(self._run, **self._options)
        model = weights.module if self._shards else self._stored(weights)
        handle = self._publisher.publish(model, step=global_steps)
        return handle.result().report() if self._waits else self._figures

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Any]:
        """Yield nothing: a rollout server follows the run by itself."""
        return
        yield

    def _stored(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Leave out the head that is tied to the embedding: checkpoints do not have it."""
        folder = self._options.get("files")
        config = Path(folder, "config.json") if isinstance(folder, str | Path) else None
        tied = (
            config is not None
            and config.is_file()
            and json.loads(config.read_bytes()).get("tie_word_embeddings", False)
        )
        return ((name, tensor) for name, tensor in weights if not (tied and name == "lm_head.weight"))

    def _note(self, published: dw.Published) -> None:
        self._figures = published.report()


class DeltawireManager(CheckpointEngineManager):  # type: ignore[misc]
    """Publishes at each update of verl's trainer. With wait="servers" it returns when all rollout servers have the
    version. They go on generating: a server patches its weights between two steps."""

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        options = {"wait": "servers", "timeout": 600, "shards": False, **self.config.engine_kwargs[NAME]}
        # in this mode a worker of verl passes its model to the engine, instead of full tensors
        mode = "delta_sharded" if options["shards"] else self.backend
        updates = self.actor_wg.update_weights(global_steps=global_steps, mode=mode)
        figures: dict[str, float]
        figures, *_ = await asyncio.to_thread(ray.get, updates)
        if figures:
            run = await asyncio.to_thread(dw.Run.open, options["run"])
            needed = figures["deltawire/version"] if options["wait"] == "servers" else None
            servers = [f"http://{replica.server_address}" for replica in self.replicas]
            found = await asyncio.to_thread(wait_for, servers, needed, options["timeout"], run.store.url)
            for replica, status in zip(self.replicas, found, strict=True):
                if status["version"] is not None:
                    await self._label(replica, await asyncio.to_thread(run.manifest, status["version"]))
        return figures

    async def _label(self, replica: Any, manifest: dw.Manifest) -> None:
        """Tell a server the step of the version that it has, for its samples."""
        if manifest.step is not None:
            await asyncio.gather(*(server.set_global_steps.remote(manifest.step) for server in replica.servers))
