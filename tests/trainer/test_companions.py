"""The files that go with the weights of a model of transformers, so that a checkout of a run is a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from deltawire import Publisher, Replica  # noqa: E402
from deltawire.bucket.run import Run  # noqa: E402
from deltawire.cli import app  # noqa: E402
from deltawire.core.errors import Misconfigured, SchemaMismatch  # noqa: E402
from deltawire.core.manifest import File  # noqa: E402
from deltawire.store import Store  # noqa: E402
from deltawire.trainer import adapter, merged_weights  # noqa: E402
from deltawire.trainer.companions import Companions  # noqa: E402
from deltawire_wordle.counting import CountingStore  # noqa: E402

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
WAIT = 60


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    made = transformers.Qwen3ForCausalLM(config)
    made.generation_config.temperature = 0.5
    made.generation_config.do_sample = True
    return made


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[UNK]", "a", "b", "c"])}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


def files(store: Store) -> dict[str, File]:
    run = Run.open(store)
    newest = run.newest()
    assert newest is not None
    return {file.name: file for file in run.manifest(newest).files}


def content(store: Store, name: str) -> dict[str, Any]:
    return json.loads(store.get(files(store)[name].key).data)


def test_a_checkout_is_a_checkpoint(tmp_path: Path) -> None:
    trained = model()
    with Publisher(tmp_path / "run", tokenizer=tokenizer()) as publisher:
        publisher.publish(trained)
    done = CliRunner().invoke(app, ["checkout", str(tmp_path / "run"), "-o", str(tmp_path / "folder")])
    assert done.exit_code == 0, done.output
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert type(loaded) is type(trained)
    assert loaded.dtype == torch.bfloat16, "what travels, not what the trainer has"
    assert loaded.generation_config.temperature == 0.5
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16())
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert words("a b")["input_ids"] == [1, 2]
    assert words.chat_template == TEMPLATE
    # and the trainer's model is as it was
    assert trained.config.dtype != torch.bfloat16


@pytest.mark.parametrize(
    "wire, dtype, expected",
    [
        ("auto", torch.float32, "bfloat16"),
        ("auto", torch.float16, "float16"),
        ("fp16", torch.float32, "float16"),
        (None, torch.float32, "float32"),
    ],
)
def test_the_dtype_in_the_config_is_what_travels(store: Store, wire: str | None, dtype: Any, expected: str) -> None:
    with Publisher(store, wire_dtype=wire) as publisher:
        publisher.publish(model().to(dtype))
    assert content(store, "config.json")["dtype"] == expected
    assert content(store, "config.json")["architectures"] == ["Qwen3ForCausalLM"]


def test_a_tokenizer_is_no_name(store: Store) -> None:
    with pytest.raises(TypeError, match="load it with AutoTokenizer"), Publisher(store, tokenizer="m") as publisher:
        publisher.publish(model())


def test_another_dtype_needs_another_address(store: Store) -> None:
    with Publisher(store) as publisher:
        publisher.publish(model())
    with pytest.raises(SchemaMismatch, match="an address of its own"), Publisher(store, wire_dtype="fp16") as publisher:
        publisher.publish(model())


def test_files_are_uploaded_once_and_what_the_run_has_stays(store: Store) -> None:
    trained = model()
    with Publisher(store, tokenizer=tokenizer()) as publisher:
        publisher.publish(trained).result(WAIT)
    first = files(store)
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= first.keys()
    counting = CountingStore(store)
    # without a tokenizer, as after a restart by somebody in a hurry
    with Publisher(counting) as publisher:
        for _ in range(2):
            trained.model.embed_tokens.weight.data += 0.1
            publisher.publish(trained).result(WAIT)
    assert files(store) == first
    trained.generation_config.temperature = 0.7
    with Publisher(store) as publisher:
        publisher.publish(trained).result(WAIT)
    now = files(store)
    assert {name for name in now if now[name] != first.get(name)} == {"generation_config.json"}


def loaded(folder: Path, *, words: bool = True) -> Any:
    """A model that was loaded from a checkpoint folder, by default with a tokenizer."""
    model().save_pretrained(folder)
    if words:
        tokenizer().save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


NO_TOKENIZER = "has no tokenizer, so its servers take and give token ids only: pass tokenizer= to Publisher"


def test_a_run_without_a_tokenizer_is_warned_of_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    trained = model()
    for _ in range(2):
        with Publisher(store) as publisher:
            for _ in range(2):
                publisher.publish(trained).result(WAIT)
                trained.model.embed_tokens.weight.data += 0.1
    # once for each publisher
    assert [NO_TOKENIZER in record.message for record in caplog.records].count(True) == 2
    caplog.clear()
    with Publisher(store, tokenizer=tokenizer()) as publisher:
        publisher.publish(trained).result(WAIT)
    with Publisher(store) as publisher:
        publisher.publish(trained).result(WAIT)
    assert NO_TOKENIZER not in caplog.text


def test_what_is_no_model_of_transformers_needs_no_tokenizer(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with Publisher(store) as publisher:
        publisher.publish(torch.nn.Linear(2, 2)).result(WAIT)
    assert NO_TOKENIZER not in caplog.text


def test_a_model_brings_the_tokenizer_of_its_folder(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    trained = loaded(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.py").write_text("code")
    (tmp_path / "model" / "notes.txt").write_text("of another")
    with Publisher(store) as publisher:
        publisher.publish(trained).result(WAIT)
        trained.model.embed_tokens.weight.data += 0.1
        publisher.publish(trained).result(WAIT)
    expected = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert files(store).keys() == expected | {"chat_template.jinja"}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert store.get(files(store)[name].key).data == (tmp_path / "model" / name).read_bytes()
    assert NO_TOKENIZER not in caplog.text


def test_a_model_brings_the_tokenizer_of_the_hubs_cache(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    revision, place = "a" * 40, tmp_path / "hub" / "models--me--small"
    loaded(place / "blobs")
    (place / "snapshots" / revision).mkdir(parents=True)
    for file in (place / "blobs").iterdir():
        (place / "snapshots" / revision / file.name).symlink_to(file)
    trained = model()
    trained.name_or_path, trained.config._commit_hash = "me/small", revision
    with Publisher(store) as publisher:
        publisher.publish(trained).result(WAIT)
    assert store.get(files(store)["tokenizer.json"].key).data == (place / "blobs" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["me/absent", "no name / of a model", "/no/folder"])
def test_a_model_from_a_place_that_is_gone_has_no_tokenizer(
    store: Store, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained = model()
    trained.name_or_path = name
    with Publisher(store) as publisher:
        publisher.publish(trained).result(WAIT)
    assert files(store).keys() == {"config.json", "generation_config.json"}
    assert NO_TOKENIZER in caplog.text


def test_a_tokenizer_that_is_given_goes_before_that_of_the_folder(tmp_path: Path, store: Store) -> None:
    trained = loaded(tmp_path / "model")
    config = (tmp_path / "model" / "tokenizer_config.json").read_bytes()
    (tmp_path / "model" / "merges.txt").write_text("of the folder")
    given = {"tokenizer.json": b"{}"}
    for options in ({"tokenizer": tokenizer()}, {}, {"files": given}):
        with Publisher(store, **options) as publisher:
            publisher.publish(trained).result(WAIT)
            assert "merges.txt" not in files(store)
            trained.model.embed_tokens.weight.data += 0.1
            publisher.publish(trained).result(WAIT)
        if "files" not in options:
            assert store.get(files(store)["tokenizer_config.json"].key).data == config
    assert files(store).keys() == {"config.json", "generation_config.json", "tokenizer.json"}


def test_a_tokenizer_that_is_a_symlink_out_of_its_folder_is_not_published(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    trained = loaded(tmp_path / "model")
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    (tmp_path / "model" / "tokenizer_config.json").symlink_to(tmp_path / "secret")
    with Publisher(store) as publisher:
        publisher.publish(trained).result(WAIT)
    assert files(store).keys() == {"config.json", "generation_config.json"}
    assert "is not published" in caplog.text
    assert "is a symlink to" in caplog.text
    assert NO_TOKENIZER in caplog.text


def test_files_that_are_given_go_before_those_of_the_model(store: Store) -> None:
    with Publisher(store, files={"config.json": b'{"mine": true}'}) as publisher:
        publisher.publish(model()).result(WAIT)
    assert content(store, "config.json") == {"mine": True}
    assert "generation_config.json" in files(store)


def test_a_wrapped_and_an_adapted_model_bring_the_files_of_the_model_inside(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    with Publisher(tmp_path / "compiled") as publisher:
        publisher.publish(torch.compile(model(), backend="eager"))
    adapted = peft.get_peft_model(model(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for name, view in (("merged", merged_weights(adapted)), ("adapter", adapter(adapted))):
        with Publisher(tmp_path / name) as publisher:
            publisher.publish(view)
    found = {name: files(Run.open(tmp_path / name).store) for name in ("compiled", "merged", "adapter")}
    assert found["compiled"].keys() == found["merged"].keys() == {"config.json", "generation_config.json"}
    assert found["adapter"].keys() == {"adapter_config.json"}


def test_a_model_that_is_not_of_transformers_brings_none(store: Store) -> None:
    with Publisher(store) as publisher:
        publisher.publish(torch.nn.Linear(2, 2)).result(WAIT)
    assert files(store) == {}
    live = torch.nn.Linear(2, 2).bfloat16()
    assert Replica(store, heartbeat=0).sync(live) == 0


@pytest.mark.parametrize("option", ["files", "base"])
def test_a_folder_that_is_mistyped_is_named_at_once(store: Store, tmp_path: Path, option: str) -> None:
    (tmp_path / "a file").touch()
    for wrong, what in (("typo", "does not exist"), ("a file", "is not a folder")):
        with pytest.raises(Misconfigured, match=f"{option}='.*{wrong}' {what}: name a checkpoint folder"):
            Publisher(store, **{option: tmp_path / wrong})


def test_a_run_is_called_by_the_class_of_its_model(tmp_path: Path) -> None:
    config = {"config.json": b'{"architectures": ["LlamaForCausalLM"]}'}
    with Publisher(tmp_path / "run", files=config) as publisher:
        publisher.publish({"w": np.zeros(8, np.uint16)}, wait=True)
    assert Run.open(tmp_path / "run").info.model == "LlamaForCausalLM"
    for odd in (b"{}", b"[]", b'{"architectures": null}', b'{"architectures": []}', b"\xff"):
        assert Companions({"config.json": odd}).model_name == ""
