"""Live mixture-of-experts models travel as `save_pretrained` would write them, and are patched under those names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from deltawire import Publisher, Replica  # noqa: E402
from deltawire.cli import app  # noqa: E402
from deltawire.core.errors import UnsupportedTensor  # noqa: E402
from deltawire.engines.trl import BucketTransfer  # noqa: E402
from deltawire.models import tensors_of  # noqa: E402
from deltawire.trainer import DeltaAdamW, SnapshotDetector  # noqa: E402
from tests.trainer.moe_models import FAMILIES, make, step  # noqa: E402

WAIT = 60
families = pytest.mark.parametrize("family", FAMILIES)


def saved(model: Any, folder: Path) -> dict[str, Any]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def checked_out(run: Path, folder: Path) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["checkout", str(run), "-o", str(folder)])
    assert done.exit_code == 0, done.output
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """The same names, shapes, dtypes and bits."""
    return a.keys() == b.keys() and all(
        (a[n].dtype, a[n].shape) == (b[n].dtype, b[n].shape)
        and torch.equal(a[n].contiguous().view(torch.uint8), b[n].contiguous().view(torch.uint8))
        for n in a
    )


def in_bf16(model: Any, folder: Path) -> Any:
    """The same model as transformers loads it for training in bf16."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.bfloat16)


@families
def test_a_checkout_is_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = in_bf16(make(family), tmp_path / "start")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish(model)
        for _ in range(2):
            step(model, optimizer)
            publisher.publish(model).result(WAIT)
    expected = saved(model, tmp_path / "saved")
    assert any(".experts.3." in name for name in expected)
    assert same(checked_out(tmp_path / "run", tmp_path / "checkout"), expected)


@families
def test_fp32_weights_are_cut_before_they_are_cast(family: str, tmp_path: Path) -> None:
    model = make(family)
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish(model)
    # the bias of a router decides between experts by differences that bf16 does not have
    expected = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        for name, tensor in saved(model, tmp_path / "saved").items()
    }
    assert same(checked_out(tmp_path / "run", tmp_path / "checkout"), expected)


@families
def test_a_live_model_follows_under_the_names_of_the_checkpoint(family: str, store: Any, tmp_path: Path) -> None:
    trained = in_bf16(make(family), tmp_path / "start")
    served = in_bf16(make(family, seed=1), tmp_path / "other")
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    replica = Replica(store)
    with Publisher(store) as publisher:
        publisher.publish(trained).result(WAIT)
        replica.sync(served)
        step(trained, optimizer)
        publisher.publish(trained).result(WAIT)
        replica.sync(served)
    assert same(served.state_dict(), trained.state_dict())
    ids = torch.arange(8)[None]
    assert torch.equal(served(input_ids=ids).logits, trained(input_ids=ids).logits)


@families
def test_experts_are_views_of_the_live_weights(family: str) -> None:
    model = make(family)
    live = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    live |= {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    tensors = tensors_of(model)
    assert {t.untyped_storage().data_ptr() for t in tensors.values()} <= live
    assert all(tensor.is_contiguous() for tensor in tensors.values())


@pytest.mark.parametrize("kind", ["snapshot", "DeltaAdamW"])
def test_detectors_see_what_changes_in_experts(kind: str, store: Any) -> None:
    model = make("qwen3_moe")
    optimizer = DeltaAdamW(model.parameters(), lr=1e-4)
    with Publisher(store, detector=optimizer if kind == "DeltaAdamW" else SnapshotDetector()) as publisher:
        publisher.publish(model)
        for _ in range(3):
            step(model, optimizer)
            publisher.publish(model).result(WAIT)
    served = make("qwen3_moe", seed=1, dtype=torch.bfloat16)
    Replica(store).sync(served)
    assert same(served.state_dict(), {name: t.bfloat16() for name, t in model.state_dict().items()})


def test_a_wrapped_model_has_the_same_names() -> None:
    model = make("mixtral")
    assert tensors_of(torch.compile(model, backend="eager")).keys() == tensors_of(model).keys()


def test_a_conversion_that_rearranges_weights_is_published_and_not_patched(tmp_path: Path) -> None:
    config = transformers.HrmTextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    model = in_bf16(transformers.HrmTextForCausalLM(config), tmp_path / "start")
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish(model)
    expected = saved(model, tmp_path / "saved")
    assert any("gqkv_proj" in name for name in expected), "made of four tensors of the model"
    assert same(checked_out(tmp_path / "run", tmp_path / "checkout"), expected)
    with pytest.raises(UnsupportedTensor, match=r"is a copy .* check the version out and load that"):
        Replica(tmp_path / "run", heartbeat=0).sync(model)


@families
def test_experts_that_trl_sends_fused_arrive_as_save_pretrained_writes_them(family: str, tmp_path: Path) -> None:
    model = in_bf16(make(family), tmp_path / "start")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    transfer = BucketTransfer((tmp_path / "run").as_uri())
    # what `attach` finds out from the trainer
    transfer._model = model
    for _ in range(2):
        step(model, optimizer)
        transfer.send_weights((name, parameter.detach()) for name, parameter in model.named_parameters())
    transfer.destroy()
    assert same(checked_out(tmp_path / "run", tmp_path / "checkout"), saved(model, tmp_path / "saved"))
