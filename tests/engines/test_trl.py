"""What deltawire adds to a trainer of transformers, without TRL: publishing, metrics, and which sync a version was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import deltawire as dw
from deltawire.bucket.run import Run
from deltawire.core.errors import Misconfigured, PublishFailed, SchemaMismatch, StoreUnavailable, WriterConflict
from deltawire.core.full import digest_of
from deltawire.engines.trl import BucketTransfer, DeltaSyncCallback, Sent, Syncs, versions_in
from deltawire.models import ModelView
from deltawire.replica import Replica
from deltawire.store import ObjectStore, Store
from deltawire.trainer import Published, PublishHandle, adapter
from support import HookedStore


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(x)[:, 0] - labels).square().mean()}


def trained(
    folder: Path,
    callbacks: list[Any],
    steps: int = 6,
    model: torch.nn.Module | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    **attached: Any,
) -> Trainer:
    data = [{"x": torch.randn(8), "labels": torch.tensor(1.0)} for _ in range(32)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=0.01, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True, **{"save_strategy": "no", **options},
    )  # fmt: skip
    trainer = Trainer(
        model=model or Regression(), args=arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks
    )
    for callback in attached.values():
        callback.attach(trainer)
    trainer.train()
    return trainer


def tensor_bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {n: t.detach().to(torch.bfloat16).view(torch.int16).numpy().tobytes() for n, t in tensors.items()}


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    return tensor_bits(model.state_dict())


def newest(store: Store) -> dict[str, bytes]:
    schema = Run.open(store).schema
    live = {t.name: torch.zeros(t.shape, dtype=torch.bfloat16) for t in schema.tensors}
    Replica(store, heartbeat=0).sync(live)
    return {name: tensor.view(torch.int16).numpy().tobytes() for name, tensor in live.items()}


class Unhurried(TrainerCallback):
    """Lets a publisher finish each version before training goes on, since publishes that wait are merged."""

    def __init__(self, callback: DeltaSyncCallback) -> None:
        self._callback = callback

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._flush()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._flush()

    def _flush(self) -> None:
        assert self._callback._publisher is not None
        self._callback._publisher.flush(60)


@pytest.mark.parametrize("every, expected", [(1, [0, 1, 2, 3, 4, 5, 6]), (4, [0, 4, 6])])
def test_a_trainer_publishes_its_steps(store: Store, tmp_path: Path, every: int, expected: list[int]) -> None:
    callback = DeltaSyncCallback(store, every=every)
    trainer = trained(tmp_path, [callback, Unhurried(callback)])
    assert newest(store) == bits(trainer.model)
    assert [Run.open(store).manifest(v).step for v in Run.open(store).listed()] == expected


def test_the_best_weights_are_published_where_the_trainer_ends_with_them(store: Store, tmp_path: Path) -> None:
    class Best(TrainerCallback):
        """The first evaluation is the best one."""

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
            metrics["eval_loss"] = float(state.global_step)

    options = {
        "save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False,
    }  # fmt: skip
    trainer = trained(tmp_path / "out", [DeltaSyncCallback(store), Best()], options=options)
    assert trainer.state.best_global_step == 2
    assert newest(store) == bits(trainer.model)


def test_the_tokenizer_of_the_trainer_is_published(store: Store, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )  # fmt: skip
    data = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 2
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(
        LlamaForCausalLM(config), arguments, default_data_collator, train_dataset=data, processing_class=tokenizer
    )
    DeltaSyncCallback(store).attach(trainer)
    trainer.train()
    found = {file.name for file in Run.open(store).manifest(0).files}
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= found


def test_metrics_are_in_the_log_of_the_trainer(store: Store, tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Reporter(DeltaSyncCallback):
        """Stands where a reporter does: after the callbacks that were there before."""

        def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
            seen.append(dict(logs or {}))

    reporter = Reporter(ObjectStore.from_url("memory://reporter"))
    trainer = trained(tmp_path, [reporter], ours=DeltaSyncCallback(store))
    last = trainer.state.log_history[-1]
    assert last["deltawire/version"] >= 1
    assert last["deltawire/bytes"] > 0
    assert "deltawire/held_ms" in last
    assert "deltawire/version" in seen[-1], "reporters see it too"


@pytest.mark.parametrize("what", ["merged", "adapter"])
def test_of_a_peft_model_the_merged_weights_or_the_adapter_are_published(
    store: Store, tmp_path: Path, what: str
) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(Regression(), peft.LoraConfig(r=2, target_modules=["linear"]))
    trained(tmp_path, [DeltaSyncCallback(store, peft=what)], model=model)
    expected = peft.get_peft_model_state_dict(model) if what == "adapter" else None
    assert newest(store) == (tensor_bits(expected) if expected is not None else bits(model.merge_and_unload()))
    for sync in (DeltaSyncCallback, BucketTransfer):
        with pytest.raises(ValueError, match="'adapter' or 'merged'"):
            sync(store, peft="both")


def test_an_adapter_that_servers_cannot_take_alone_is_logged(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["linear"], use_dora=True)
    trained(tmp_path, [DeltaSyncCallback(store)], model=peft.get_peft_model(Regression(), config))
    assert ["has DoRA;" in message for message in caplog.messages if "cannot serve" in message] == [True]


def test_a_name_that_no_server_takes_is_refused(store: Store) -> None:
    with pytest.raises(Misconfigured, match="'pol@1'"):
        BucketTransfer(store, adapter_name="pol@1")


def test_a_sync_of_an_adapter_leaves_the_base_model_alone(store: Store) -> None:
    """What `attach` puts in place of TRL's sync, which merges the adapter into the base model and takes it out."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(Regression(), peft.LoraConfig(r=2, target_modules=["linear"]))
    base = {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora" not in name}
    transfer, versions = BucketTransfer(store), list[int]()
    transfer._adapter = adapter(model)
    trainer = SimpleNamespace(model_version=0, rollout_worker=SimpleNamespace(update_model_version=versions.append))
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * parameter.requires_grad
        transfer._sync_adapter(trainer, 0.0)
    transfer.destroy()
    assert versions == [1, 2, 3]
    assert newest(store) == tensor_bits(peft.get_peft_model_state_dict(model))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in base.items())
    found = Run.open(store).info.base
    assert found is not None
    assert found.fits(str(digest_of(ModelView(Regression()))))


def flushed(transfer: BucketTransfer) -> None:
    assert transfer._publisher is not None
    transfer._publisher.flush(30)


def named(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_parameters())


def test_a_transfer_publishes_what_it_is_sent(store: Store) -> None:
    model, transfer = Regression(), BucketTransfer(store)
    transfer.init_weight_transfer()
    for step in range(3):
        with torch.no_grad():
            model.linear.weight += 0.1 * step
        transfer.pause()
        transfer.send_weights(iter(named(model)))
        transfer.resume()
    transfer.destroy()
    assert newest(store) == bits(model)


def test_of_tied_weights_the_one_that_save_pretrained_writes_is_stored(store: Store) -> None:
    """TRL sends the head; a checkpoint without embeddings is loaded by vLLM with whatever lies in their place."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, tie_word_embeddings=True))
    sent = dict(reversed(model.state_dict().items()))
    assert [*sent].index("lm_head.weight") < [*sent].index("model.embed_tokens.weight")
    with dw.Publisher(store) as publisher:
        publisher.publish(Sent(sent, model)).result()
    assert Run.open(store).schema.ties == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_bucket_that_is_away_does_not_stop_the_training(store: Store) -> None:
    """The iterator is consumed all the same: a rank that stops half-way would hang the others of a sharded trainer."""
    away = False

    def hook(moment: str, verb: str, key: str) -> None:
        if away and moment == "before":
            raise StoreUnavailable("away")

    model, transfer = Regression(), BucketTransfer(HookedStore(store, hook))
    transfer.send_weights(named(model))
    flushed(transfer)
    away = True
    for _ in range(3):
        with torch.no_grad():
            model.linear.weight += 1
        weights = iter(named(model))
        transfer.send_weights(weights)
        assert next(weights, None) is None
        with pytest.raises(PublishFailed):
            flushed(transfer)
    away = False
    transfer.send_weights(named(model))
    transfer.destroy()
    assert newest(store) == bits(model)


def test_another_model_stops_the_training(store: Store) -> None:
    transfer = BucketTransfer(store)
    transfer.send_weights(named(Regression()))
    with pytest.raises(SchemaMismatch):
        transfer.send_weights(named(torch.nn.Linear(3, 3)))
    transfer.destroy()


def handle(version: int | None) -> PublishHandle:
    made = PublishHandle()
    if version is None:
        made._version.fail(StoreUnavailable("away"))
    else:
        made._version.succeed(Published(version, "", 1, 2, ("delta",), {"held": 0.001}))
    return made


def test_which_sync_a_version_was() -> None:
    syncs = Syncs()
    # 1 → v0, 2 and 3 merged into v1, 4 failed and is part of v2 with 5
    for version in (0, 1, 1, None, 2):
        syncs.add(handle(version))
    assert [syncs.sync_of(version) for version in (-1, 0, 1, 2, 3)] == [Syncs.OLDER, 1, 3, 5, 5]
    assert [syncs.since(sync) for sync in (-3, 0, 1, 2, 4, 5, 6)] == [0, 0, 0, 1, 2, 2, 2]
    waiting = PublishHandle()
    syncs.add(waiting)
    assert syncs.sync_of(3) == 5, "not in the bucket yet, so no server has it"
    assert syncs.metrics()["deltawire/waiting"] == 1
    waiting._version.succeed(Published(3, "", 1, 2, ("delta",), {}))
    assert syncs.sync_of(3) == 6


def test_syncs_are_counted_on_by_a_trainer_that_continues() -> None:
    """Steps since its checkpoint are done again: what the servers had of them is staler than any limit."""
    syncs = Syncs()
    assert (syncs.since(42), syncs.sync_of(50)) == (0, Syncs.OLDER)
    # its checkpoint is of sync 46, and v50 was in the bucket when it was lost
    syncs.begin(46, handle(51))
    syncs.add(handle(52))
    assert syncs.count == 47
    assert [syncs.sync_of(version) for version in (0, 50, 51, 52)] == [Syncs.OLDER, Syncs.OLDER, 46, 47]
    assert [syncs.since(sync) for sync in (43, 46, 47)] == [51, 51, 52], "no server may answer with v50"


def test_another_writer_stops_the_training(store: Store) -> None:
    model, first = Regression(), BucketTransfer(store)
    first.send_weights(named(model))
    flushed(first)
    with torch.no_grad():
        model.linear.weight += 1
    second = BucketTransfer(store)
    second.send_weights(named(model))
    flushed(second)
    first.send_weights(named(model))
    with pytest.raises(WriterConflict):
        flushed(first)
    with pytest.raises(WriterConflict):
        first.send_weights(named(model))


def test_the_versions_of_a_completion() -> None:
    spans = [{"version": 41, "start": 0, "end": 17}, {"version": 42, "start": 17, "end": 22}]
    assert versions_in({"choices": [{"weight_versions": spans}, {"weight_versions": None}]}) == [41, 42]
    assert versions_in({"choices": [{"text": "a server that follows no run"}]}) == []
