"""PEFT models: the adapter as a run of its own, and the base weights with the adapter merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

from deltawire import Publisher, Replica  # noqa: E402
from deltawire.bucket.checkpoint_folder import fill_for_engine  # noqa: E402
from deltawire.bucket.references import resolver  # noqa: E402
from deltawire.bucket.run import Run  # noqa: E402
from deltawire.cli import app  # noqa: E402
from deltawire.core.errors import Misconfigured, SchemaMismatch, UnsupportedTensor  # noqa: E402
from deltawire.core.full import Checkpoint, digest_of  # noqa: E402
from deltawire.core.manifest import Base  # noqa: E402
from deltawire.derive.deriver import Deriver  # noqa: E402
from deltawire.models import ModelView  # noqa: E402
from deltawire.store import Store  # noqa: E402
from deltawire.trainer import DeltaAdamW, adapter, merged_weights  # noqa: E402
from deltawire.trainer.adapters import BaseWeights  # noqa: E402

WAIT = 60
KINDS = {
    "lora": peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]),
    "dora": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "with a module of its own": peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"]),
    "on the embedding": peft.LoraConfig(r=4, target_modules=["embed_tokens"]),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def base_model(tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def peft_model(kind: str = "lora") -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(base_model(tied=kind != "on the embedding"), copy.deepcopy(KINDS[kind]))


def train(model: Any, optimizer: Any) -> None:
    ids = torch.randint(0, 97, (2, 12))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: Any, make: Any = torch.optim.AdamW) -> Any:
    return make([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def bits(tensor: Any) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def state_of(model: Any) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def newest(store: Store) -> dict[str, bytes]:
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    live = {t.name: torch.zeros(t.shape, dtype=kinds[t.dtype]) for t in Run.open(store).schema.tensors}
    Replica(store, heartbeat=0).sync(live)
    return {name: bits(tensor) for name, tensor in live.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_is_what_peft_merges_and_the_model_is_left_alone(kind: str, store: Store) -> None:
    model = peft_model(kind)
    optimizer = optimizer_of(model)
    with Publisher(store) as publisher:
        for _ in range(3):
            train(model, optimizer)
            before = state_of(model)
            publisher.publish(merged_weights(model)).result(WAIT)
            assert state_of(model) == before
            expected = copy.deepcopy(model).merge_and_unload().state_dict()
            names = set(base_model(tied=kind != "on the embedding").state_dict())
            assert set(expected) == names
            found = newest(store)
            assert found == {name: bits(expected[name].to(torch.bfloat16)) for name in found}
            assert names - set(found) <= {"lm_head.weight"}, "tied, so it travels once"


@pytest.mark.parametrize("kind, wire", [*((kind, None) for kind in KINDS), ("lora", "auto")])
def test_an_adapter_run_gives_a_folder_that_peft_loads(kind: str, wire: str | None, tmp_path: Path) -> None:
    model = peft_model(kind)
    optimizer = optimizer_of(model)
    weights = adapter(model)
    with Publisher(tmp_path / "run", wire_dtype=wire) as publisher:
        for _ in range(3):
            train(model, optimizer)
            publisher.publish(weights).result(WAIT)
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    theirs = peft.load_peft_weights(str(tmp_path / "theirs"), device="cpu")
    folder = tmp_path / "ours"
    result = CliRunner().invoke(app, ["checkout", str(tmp_path / "run"), "-o", str(folder)])
    assert result.exit_code == 0, result.output
    ours = peft.load_peft_weights(str(folder), device="cpu")
    dtype = torch.float32 if wire is None else torch.bfloat16
    assert {n: bits(t) for n, t in ours.items()} == {n: bits(t.to(dtype)) for n, t in theirs.items()}
    config = [json.loads((path / "adapter_config.json").read_text()) for path in (folder, tmp_path / "theirs")]
    assert config[0] == config[1]
    loaded = peft.PeftModel.from_pretrained(base_model(tied=kind != "on the embedding"), str(folder))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        found, expected = loaded.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits
    if wire is None:
        assert torch.equal(found, expected)
    else:
        assert torch.allclose(found, expected, atol=0.05)


def test_an_adapter_follows_into_a_live_model(store: Store) -> None:
    model, follower = peft_model(), peft_model()
    optimizer = optimizer_of(model)
    replica = Replica(store, heartbeat=0)
    with Publisher(store, wire_dtype=None) as publisher:
        for _ in range(3):
            train(model, optimizer)
            publisher.publish(adapter(model)).result(WAIT)
            replica.sync(adapter(follower))
            assert state_of(follower) == state_of(model)


def test_copies_that_are_for_publishing_are_not_synced(store: Store) -> None:
    with Publisher(store) as publisher:
        publisher.publish(merged_weights(peft_model()))
    follower = peft_model()
    before = state_of(follower)
    with pytest.raises(UnsupportedTensor, match=r"is a copy .* merged_weights\(model\) is for publishing; sync"):
        Replica(store, heartbeat=0).sync(merged_weights(follower))
    assert state_of(follower) == before
    unloaded = follower.merge_and_unload()
    Replica(store, heartbeat=0).sync(unloaded)
    assert newest(store) == {n: bits(unloaded.state_dict()[n].bfloat16()) for n in newest(store)}


def test_an_adapter_that_peft_computes_is_not_synced(store: Store) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model, follower = (peft.get_peft_model(base_model(), copy.deepcopy(config)) for _ in range(2))
    with Publisher(store) as publisher:
        publisher.publish(adapter(model))
    with pytest.raises(UnsupportedTensor, match="'prompt_embeddings' of this Adapter is a copy"):
        Replica(store, heartbeat=0).sync(adapter(follower))


def test_an_adapter_is_small_and_the_optimizer_that_steps_it_can_tell_what_changed(store: Store) -> None:
    model = peft_model()
    optimizer = optimizer_of(model, DeltaAdamW)
    with Publisher(store, detector=optimizer) as publisher:
        for _ in range(4):
            train(model, optimizer)
            publisher.publish(adapter(model)).result(WAIT)
            expected = {n: bits(t.to(torch.bfloat16)) for n, t in adapter(model).state_dict().items()}
            assert newest(store) == expected
    assert Run.open(store).schema.elements == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_wrappers_do_not_matter_and_one_of_several_adapters_can_be_named(store: Store) -> None:
    model = peft_model()
    model.add_adapter("other", copy.deepcopy(KINDS["dora"]))
    wrapped = torch.compile(torch.nn.DataParallel(model), backend="eager")
    assert set(adapter(wrapped).state_dict()) == set(adapter(model, "default").state_dict())
    assert any("magnitude" in name for name in adapter(model, "other").state_dict())
    assert set(merged_weights(wrapped).state_dict()) == set(base_model().state_dict())


def test_what_cannot_be_published_is_refused_with_the_next_step(store: Store) -> None:
    model = peft_model()
    prompted = peft.get_peft_model(base_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    publisher = Publisher(store)
    with pytest.raises(SchemaMismatch, match=r"adapter\(model\) or merged_weights\(model\)"):
        publisher.publish(model)
    with pytest.raises(SchemaMismatch, match="cannot be merged"):
        merged_weights(prompted)
    with pytest.raises(SchemaMismatch, match="is tied to another weight"):
        merged_weights(peft.get_peft_model(base_model(), copy.deepcopy(KINDS["on the embedding"])))
    with pytest.raises(SchemaMismatch, match="no PeftModel"):
        adapter(base_model())
    with pytest.raises(SchemaMismatch, match="'default'"):
        adapter(model, "unknown")
    publisher.publish(merged_weights(model)).result(WAIT)
    with pytest.raises(SchemaMismatch, match="only"):
        publisher.publish(adapter(model))
    publisher.close()


# ── the base model of an adapter ─────────────────────────────────────────────────────────────────────────────────────


def loaded(folder: Path, saved: Any = torch.float32, dtype: Any = None, kind: str = "lora") -> Any:
    """An adapter on a base model that was saved to a folder and loaded from there."""
    base_model(tied=kind != "on the embedding").to(saved).save_pretrained(folder)
    base = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype or saved)
    return peft.get_peft_model(base, copy.deepcopy(KINDS[kind]))


def base_of(where: Store | Path) -> Base:
    found = Run.open(where if isinstance(where, Store) else str(where)).info.base
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_adapters_names_its_base_by_the_digest_of_the_checkpoint(
    kind: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tmp_path / "base", kind=kind)
    optimizer = optimizer_of(model)
    read: list[BaseWeights] = []
    plain = BaseWeights.state_dict
    monkeypatch.setattr(BaseWeights, "state_dict", lambda self: (read.append(self), plain(self))[1])
    with Publisher(store) as publisher:
        publisher.publish(adapter(model)).result(WAIT)
        first = len(read)
        for _ in range(2):
            train(model, optimizer)
            publisher.publish(adapter(model)).result(WAIT)
    assert len(read) == first > 0, "only the first publish reads the base model"
    base = base_of(store)
    assert base.model == str(tmp_path / "base")
    assert base.digests[0] == str(digest_of(Checkpoint(tmp_path / "base")))


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, None], ids=["loaded as fp32", "loaded as it is"])
def test_a_base_that_was_loaded_in_a_wider_dtype_is_recognised(
    saved: Any, dtype: Any, store: Store, tmp_path: Path
) -> None:
    model = loaded(tmp_path / "base", saved, dtype)
    with Publisher(store) as publisher:
        publisher.publish(adapter(model))
    base = base_of(store)
    assert base.fits(str(digest_of(Checkpoint(tmp_path / "base"))))
    assert len(base.digests) == (3 if model.dtype == torch.float32 else 1)
    # a run of the base model, as a server may follow it
    with Publisher(tmp_path / "run") as publisher:
        version = publisher.publish(model.get_base_model().__class__.from_pretrained(tmp_path / "base")).result(WAIT)
    assert base.fits(version.digest)


def test_an_adapter_of_another_base_is_refused(store: Store, tmp_path: Path) -> None:
    model = loaded(tmp_path / "base")
    with Publisher(store) as publisher:
        publisher.publish(adapter(model))
    other = loaded(tmp_path / "base")
    with torch.no_grad():
        # one bit, in a layer without an adapter
        other.get_base_model().model.layers[0].mlp.up_proj.weight.view(torch.int32)[3, 5] ^= 1
    for attempt in ("publish", "resume"):
        with Publisher(store) as publisher, pytest.raises(SchemaMismatch, match=r"has adapters of .* of its own"):
            getattr(publisher, attempt)(adapter(other))
    assert Run.open(store).newest() == 0
    before, replica = state_of(other), Replica(store, heartbeat=0)
    with pytest.raises(SchemaMismatch, match="load the base model") as refused:
        replica.sync(adapter(other))
    assert base_of(store).digests[0] in str(refused.value)
    assert str(digest_of(ModelView(BaseWeights(other)))) in str(refused.value)
    assert state_of(other) == before
    # once it has the right bits
    other.get_base_model().model.layers[0].mlp.up_proj.weight.data.view(torch.int32)[3, 5] ^= 1
    assert replica.sync(adapter(other)) == 0
    with Publisher(store) as publisher:
        publisher.publish(adapter(loaded(tmp_path / "base", dtype=torch.bfloat16)), wait=True)


def test_a_replica_reads_the_base_of_a_model_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, follower = loaded(tmp_path / "base"), loaded(tmp_path / "base", dtype=torch.bfloat16)
    optimizer = optimizer_of(model)
    read: list[BaseWeights] = []
    with Publisher(store) as publisher:
        publisher.publish(adapter(model)).result(WAIT)
        plain = BaseWeights.state_dict
        monkeypatch.setattr(BaseWeights, "state_dict", lambda self: (read.append(self), plain(self))[1])
        replica = Replica(store, heartbeat=0)
        replica.sync(adapter(follower))
        first = len(read)
        train(model, optimizer)
        publisher.publish(adapter(model)).result(WAIT)
        assert replica.sync(adapter(follower)) == 1
    assert len(read) == first > 0
    # what it has been loaded from is unknown, so nothing is checked
    quantised(follower)
    assert Replica(store, heartbeat=0).sync(adapter(follower)) == 1
    other = loaded(tmp_path / "base")
    train_a_norm(other)
    assert Replica(store, heartbeat=0).sync(adapter(other)) == 1


def test_adapters_and_full_weights_are_told_apart(store: Store, tmp_path: Path) -> None:
    model = loaded(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    full = tmp_path / "full"
    with Publisher(full) as publisher:
        publisher.publish(merged_weights(model))
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish(adapter(model))
    said = r"run has adapters of .*, and these are full weights"
    with Publisher(tmp_path / "run") as publisher, pytest.raises(SchemaMismatch, match=said):
        publisher.publish(merged_weights(model))
    with pytest.raises(SchemaMismatch, match=said):
        Replica(tmp_path / "run", heartbeat=0).sync(base_model())
    said = "full has full weights, and this is an adapter"
    with Publisher(full) as publisher, pytest.raises(SchemaMismatch, match=said):
        publisher.publish(adapter(model))
    with pytest.raises(SchemaMismatch, match=said):
        Replica(full, heartbeat=0).sync(adapter(model))
    for folder, run, said in (("base", "run", "has adapters of"), ("adapter", "full", "has full weights")):
        result = CliRunner().invoke(app, ["publish", str(tmp_path / folder), str(tmp_path / run)])
        assert result.exit_code != 0
        assert said in f"{result.output} {result.exception}"


def test_adapters_have_no_view(tmp_path: Path) -> None:
    model = loaded(tmp_path / "base")
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish(adapter(model))
    said = "a run of adapters has no fp8-block view; serve it as it is"
    with Publisher(tmp_path / "fp8", view="fp8-block") as publisher, pytest.raises(Misconfigured, match=said):
        publisher.publish(adapter(model))
    with pytest.raises(Misconfigured, match=said):
        Deriver(Run.open(str(tmp_path / "run")), str(tmp_path / "fp8"), "fp8-block")
    assert not (tmp_path / "fp8" / "run.json").exists()


def test_a_base_without_a_name_is_described(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = peft_model()
    assert not model.peft_config["default"].base_model_name_or_path
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish(adapter(model))
    assert str(base_of(tmp_path / "run")).startswith("a base model that adapter_config.json does not name (")
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    assert CliRunner().invoke(app, ["publish", str(tmp_path / "adapter"), str(tmp_path / "other")]).exit_code == 0
    assert "adapter_config.json names no base model (base_model_name_or_path)" in caplog.text


def quantised(model: Any) -> None:
    model.get_base_model().is_quantized = True


def quantised_layer(model: Any) -> None:
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(torch.zeros(layer.weight.shape, dtype=torch.int8), requires_grad=False)


def merge(model: Any) -> None:
    model.merge_adapter()


def train_a_norm(model: Any) -> None:
    model.get_base_model().model.norm.weight.requires_grad_(True)


@pytest.mark.parametrize(
    "how, why",
    [
        (quantised, "it is quantised"),
        (quantised_layer, "it is quantised"),
        (merge, "an adapter is merged into"),
        (train_a_norm, "are trained: 'model.norm.weight'"),
    ],
)
def test_a_base_whose_checkpoint_is_not_in_memory_has_no_digest(
    how: Any, why: str, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(tmp_path / "base")
    with Publisher(store) as publisher:
        how(model)
        publisher.publish(adapter(model)).result(WAIT)
    base = base_of(store)
    assert base == Base(str(tmp_path / "base"))
    assert base.fits("0" * 32) is None
    assert [why in message for message in caplog.messages if "cannot check" in message] == [True]


def test_the_commands_name_the_base_and_publish_an_adapter_folder(tmp_path: Path) -> None:
    model = loaded(tmp_path / "base")
    run, digest = tmp_path / "run", str(digest_of(Checkpoint(tmp_path / "base")))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    cli = CliRunner()
    assert cli.invoke(app, ["publish", str(tmp_path / "adapter"), str(run)]).exit_code == 0
    assert base_of(run) == Base(str(tmp_path / "base"), (digest,))
    for command in ("show", "log", "verify"):
        said = cli.invoke(app, [command, str(run)])
        assert said.exit_code == 0, said.output
        assert f"{tmp_path / 'base'} ({digest})" in said.output, command
        found = json.loads(cli.invoke(app, [command, str(run), "--json"]).output)
        assert found["base_model"] == {"model": str(tmp_path / "base"), "digests": [digest]}
    with pytest.raises(SchemaMismatch, match=r"--adapter policy=file://.*, or publish merged_weights\(model\)"):
        fill_for_engine(tmp_path / "folder", Run.open(str(run)), 0, resolver(None))
    # the base model may be gone by now
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    assert cli.invoke(app, ["publish", str(tmp_path / "adapter"), str(run)]).exit_code == 0
