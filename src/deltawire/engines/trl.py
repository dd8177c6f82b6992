"""Weight sync for the trainers of transformers and TRL, through a bucket.

    transfer = BucketTransfer("hf://buckets/me/wordle")
    trainer = AsyncGRPOTrainer(..., weight_transfer=transfer)
    transfer.attach(trainer)           # true staleness, and our metrics in the trainer's log

    callback = DeltaSyncCallback("s3://runs/wordle")
    trainer = GRPOTrainer(..., callbacks=[callback])      # publishes its processing_class too

The rollout servers follow the run by themselves. Nothing here waits for them, pauses them or knows where they are.

A sync of TRL has a number (its `model_version`); a version of the run has another, since a slow bucket merges syncs.
The server says which version made a sample, and `BucketTransfer` knows which sync that was.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import Published, Publisher, PublishHandle, adapter, merged_weights
from ..errors import BadURL, Misconfigured, MissingExtra, ObjectNotFound, PublishFailed, StoreError
from .live import names

if TYPE_CHECKING:
    import torch

try:
    from transformers import TrainerCallback
except ImportError as error:  # pragma: no cover - only where the extra is absent
    raise MissingExtra("deltawire.trl needs transformers", "trl") from error

log = logging.getLogger("deltawire")

KEPT_SYNCS = 1024
"""Syncs whose versions are remembered: many more than a staleness limit lets a sample be old."""

_OF_PEFT: dict[str, Callable[[Any], Any]] = {"adapter": adapter, "merged": merged_weights}


def _check_peft(peft: str) -> Callable[[Any], Any]:
    """The function that makes the weights to publish from a PEFT model."""
    if peft not in _OF_PEFT:
        raise ValueError(f"of a PEFT model either {' or '.join(map(repr, _OF_PEFT))} is published, not {peft!r}")
    return _OF_PEFT[peft]


class BucketTransfer:
    """The `weight_transfer` of TRL's AsyncGRPOTrainer: every sync becomes a version of a run.

    `options` are those of `Publisher`. fp32 weights are published as bf16 unless `wire_dtype` is set.

    Call `attach(trainer)` before `train`: it publishes the first version, with the model's config and tokenizer, so
    that a server can start from the run.

    With TRL's `peft_config` it publishes only the adapter, which the server calls `adapter_name`
    (`deltawire serve --engine vllm MODEL --adapter policy=RUN`), or with `peft="merged"` the whole model with the
    adapter merged.
    """

    def __init__(self, run: str, *, peft: str = "adapter", adapter_name: str = "policy", **options: Any) -> None:
        self._run, self._options = run, options
        self._of_peft, self._adapter_name = _check_peft(peft), adapter_name
        if not names.ADAPTER_NAME.fullmatch(adapter_name):
            raise Misconfigured(
                f"no server takes {adapter_name!r:.120} as the name of an adapter: it begins with a letter or digit, "
                "and has up to 100 of these and . _ / -"
            )
        self._publisher: Publisher | None = None
        self._model: Any = None
        """The trainer's model, once it is attached."""
        self._adapter: Any = None
        """The model that is published instead of what the trainer sends."""
        self._trainer: Any = None
        self._first: PublishHandle | None = None
        """The version that `attach` published."""
        self._wait: Callable[[], None] | None = None
        self._syncs = Syncs()

    # ── called by the trainer ────────────────────────────────────────────────────────────────────────────────────────

    def init_weight_transfer(self) -> None:
        """Open the run, so that a wrong address is an error now. Attached: wait for the server, as TRL's own does."""
        self._open()
        if self._wait is not None:
            self._wait()

    def pause(self) -> None:
        """Do nothing: a replica pauses itself for the milliseconds in which it patches its weights."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish weights; returns once the changes are captured.

        The iterator is always consumed to its end, since every rank of a sharded trainer takes part in it. If the
        bucket is unavailable, training continues and a later sync includes these changes.
        """
        if self._trainer is not None:
            # not before: a trainer that continues from a checkpoint reads its count there when it begins
            self._syncs.begin(self._trainer.model_version, self._first)
            self._trainer = None
        self._syncs.add(self._publish(iterator, step=self._syncs.count + 1))

    def resume(self) -> None:
        """Do nothing; see `pause`."""

    def destroy(self) -> None:
        """Wait until everything is in the bucket, and close the publisher."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    # ── additions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def attach(self, trainer: Any) -> None:
        """Mark samples with the version that the server reports, and add our metrics to the trainer's log.

        The stock worker marks a sample with the trainer's own count, which is ahead of what the servers have. This also
        publishes the first version: the trainer waits for its servers before its first sync, and they wait for one.
        Call it on every process, before `train`.
        """
        from .trl_worker import TrueVersions, require_servable, wait_for_server

        self._options.setdefault("tokenizer", trainer.processing_class)
        self._trainer = trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        name = None
        if (peft_model := _peft_model(model)) is not None and self._of_peft is adapter:
            require_servable(model)
            self._adapter, name = adapter(model), self._adapter_name
            # TRL's own would merge the adapter and take it out again, which leaves other bits in the base model
            trainer._sync_weight_merged = partial(self._sync_adapter, trainer)
            self._first = self._publish((), step=0)
        if trainer.rollout_worker is not None:  # on the main process alone
            trainer.rollout_queue = TrueVersions.over(
                trainer.rollout_worker, self._syncs, getattr(trainer.args, "max_staleness", None), name
            )
            if self._adapter is None:
                self._model = model if peft_model is None else peft_model.get_base_model()
                self._first = self._publish(trainer._streaming_iter(), step=0)
            client = trainer.vllm_client
            client.wait_for_server_ready = self._wait = partial(
                wait_for_server, client.server_url, client.server_timeout, self._open(), adapter_name=name
            )
        trainer.callback_handler.callbacks.insert(0, MetricsCallback(self.metrics, self.destroy))

    def _sync_adapter(self, trainer: Any, began: float) -> tuple[float, float, float]:
        """Publish the adapter: a sync of TRL's trainer, on every process. Returns when its phases ended."""
        self.send_weights(())
        if trainer.rollout_worker is not None:
            trainer.model_version += 1
            trainer.rollout_worker.update_model_version(trainer.model_version)
        return began, began, time.time()

    def metrics(self) -> dict[str, float]:
        """Return the figures of the newest sync that is in the bucket."""
        return self._syncs.metrics()

    def _publish(self, named: Iterable[tuple[str, torch.Tensor]], step: int) -> PublishHandle | None:
        sent = self._adapter or Sent({name: tensor.detach() for name, tensor in named}, self._model)
        return publish(self._open(), sent, step)

    def _open(self) -> Publisher:
        if self._publisher is None:
            # full tensors are sent by one process, whatever the others hold; all publish their part of an adapter
            group = None if self._adapter is None else "auto"
            self._publisher = Publisher(self._run, **{"group": group, **self._options})
        return self._publisher


class Sent:
    """The weights that TRL sends, as a module: trained parameters, without buffers and frozen weights.

    If the model is given, those are added, and the names become those of its checkpoint.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], model: Any = None) -> None:
        self._tensors = tensors
        if model is not None:
            self.checkpoint_of = model
            tensors.update((name, tensor) for name, tensor in _unsent(model) if name not in tensors)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._tensors


def _unsent(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that TRL may leave out. Distributed tensors are not: gathering one takes all ranks."""
    adapted = hasattr(model, "peft_config")
    buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in model.state_dict().items():
        # under PEFT every base weight is sent
        if not hasattr(tensor, "to_local") and (name in buffers or not adapted):
            yield name.replace(".base_layer.", "."), tensor


def _peft_model(model: Any) -> Any:
    """The PEFT model that a trainer's model is, or that DDP and the like are around; None if there is none."""
    while not hasattr(model, "peft_config") and hasattr(model, "module"):
        model = model.module
    return model if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else None


def _unservable(config: Any) -> str:
    """What of a PEFT adapter vLLM does not serve; empty if it serves it."""
    found = {
        f"the type {config.peft_type.value}": config.peft_type.value != "LORA",
        "DoRA": getattr(config, "use_dora", False),
        "modules_to_save": getattr(config, "modules_to_save", None),
        "trained biases": getattr(config, "bias", "none") != "none",
    }
    return ", ".join(what for what, has in found.items() if has)


class DeltaSyncCallback(TrainerCallback):
    """Publishes the model of any transformers or TRL trainer: at the start, then after every `every` optimizer steps.

    For a PEFT model it publishes only the adapter, or with `peft="merged"` the merged weights, which every server can
    load. The model's config and the trainer's tokenizer (`processing_class`) are published too. `options` are those of
    `Publisher`.

    Use `attach(trainer)` rather than `callbacks=[…]`, so that the trainer's reporters include our metrics.
    """

    def __init__(self, run: str, *, every: int = 1, peft: str = "adapter", **options: Any) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._open = lambda tokenizer: Publisher(run, **{"tokenizer": tokenizer, **options})
        self._every, self._of_peft = every, _check_peft(peft)
        self._publisher: Publisher | None = None
        self._syncs = Syncs()

    def attach(self, trainer: Any) -> None:
        """Add this callback to a trainer, before its reporters."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **around: Any) -> None:
        # on every process: a model that several of them train is published by all of them together
        self._publisher = self._open(around.get("processing_class"))
        model = _peft_model(around["model"])
        alone = model is not None and self._of_peft is adapter and state.is_world_process_zero
        if alone and (special := _unservable(model.peft_config[model.active_adapter])):
            log.warning(
                'vLLM cannot serve this adapter beside its base model, since it has %s; pass peft="merged" where '
                "servers are to follow the run",
                special,
            )
        self._publish(self._publisher, around["model"], state)

    def on_step_end(self, args: Any, state: Any, control: Any, **around: Any) -> None:
        if self._publisher is not None and state.global_step % self._every == 0:
            self._publish(self._publisher, around["model"], state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        add_metrics(self._syncs.metrics(), state, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **around: Any) -> None:
        if self._publisher is None:
            return
        # the trainer has put the best weights back, of whichever step
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if best or state.global_step % self._every:
            self._publish(self._publisher, around["model"], state)
        self._publisher.close()
        self._publisher = None

    def metrics(self) -> dict[str, float]:
        """Return the figures of the newest version that is in the bucket."""
        return self._syncs.metrics()

    def _publish(self, publisher: Publisher, model: Any, state: Any) -> None:
        weights = model if _peft_model(model) is None else self._of_peft(model)
        self._syncs.add(publish(publisher, weights, step=state.global_step))


class MetricsCallback(TrainerCallback):
    """Adds metrics to the trainer's log, and closes what publishes at the end, on every process."""

    def __init__(self, metrics: Callable[[], dict[str, float]], close: Callable[[], None]) -> None:
        self._metrics, self._close = metrics, close

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._close()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        add_metrics(self._metrics(), state, logs)


class Syncs:
    """Records which version each sync of the trainer became. Syncs are counted from 1, as in TRL."""

    OLDER = -(1 << 30)
    """The sync of a version that none of them became: staler than any limit."""

    def __init__(self) -> None:
        self._handles: dict[int, PublishHandle] = {}
        self._versions: dict[int, int] = {}
        self._newest: Published | None = None
        self._lock = threading.Lock()
        self.count = 0

    def begin(self, count: int, handle: PublishHandle | None) -> None:
        """Count on from `count`, which a trainer has in its checkpoint. The version of `handle` has the weights it
        begins with; those in the bucket before it are of another training, or of steps that are done again."""
        with self._lock:
            self.count = count
            if handle is not None:
                self._handles[count] = handle

    def add(self, handle: PublishHandle | None) -> None:
        with self._lock:
            self.count += 1
            if handle is not None:
                self._handles[self.count] = handle
            self._settle()

    def sync_of(self, version: int) -> int:
        """Return the last sync that is part of this version; OLDER if the version is older than all that are known."""
        with self._lock:
            self._settle()
            syncs = sorted(self._versions)
            # versions rise with syncs; those merged into one version have the same
            at = bisect.bisect_right([self._versions[sync] for sync in syncs], version)
            return syncs[at - 1] if at else self.OLDER

    def since(self, sync: int) -> int:
        """Return the first version that a sync or a later one became; the newest known one if there is none yet.

        Never one that was in the bucket before.
        """
        with self._lock:
            self._settle()
            later = [version for known, version in self._versions.items() if known >= sync]
            return min(later) if later else max(self._versions.values(), default=0)

    def metrics(self) -> dict[str, float]:
        with self._lock:
            self._settle()
            newest = self._newest
            if newest is None:
                return {}
            return {**newest.report(), "deltawire/waiting": float(len(self._handles))}

    def _settle(self) -> None:
        for sync in [sync for sync, handle in self._handles.items() if handle.done()]:
            # one that failed is part of the next
            with suppress(Exception):
                self._newest = self._handles[sync].result()
                self._versions[sync] = self._newest.version
            del self._handles[sync]
        for sync in sorted(self._versions)[:-KEPT_SYNCS]:
            del self._versions[sync]


def versions_in(answer: Mapping[str, Any]) -> list[int]:
    """Return the versions that a completion was made with."""
    return [version for choice in answer.get("choices", ()) for version in names.versions_of(choice)]


def publish(publisher: Publisher, weights: Mapping[str, Any] | Any, step: int) -> PublishHandle | None:
    """Publish, or log why not. Only another writer on the run, or another model, stops training."""
    for _ in range(2):
        try:
            return publisher.publish(weights, step=step)
        except PublishFailed as error:
            # the error of an earlier publish, raised once; this one has not been tried yet
            log.warning("%s", error)
        except (BadURL, ObjectNotFound):
            # the bucket itself is gone: no later publish succeeds either
            raise
        except StoreError as error:
            log.warning("sync %d was not published, a later one carries it: %s", step, error)
            return None
    return None


def add_metrics(metrics: dict[str, float], state: Any, logs: dict[str, Any] | None) -> None:
    """Add metrics to the logs that reporters are about to read, and to the trainer's history."""
    if logs is not None:
        logs.update(metrics)
    if state.log_history:
        state.log_history[-1].update(metrics)
