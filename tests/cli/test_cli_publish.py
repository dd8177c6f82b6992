"""publish: what it uploads, what it says, and which weights it compares with."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli_support import (
    Tensor,
    invoke,
    invoke_json,
    read_checkpoint,
    trained,
    weights,
    write_checkpoint,
)

from deltawire.bucket.run import Run
from deltawire.core.errors import WriterConflict
from deltawire.core.full import Checkpoint
from deltawire.store import Store
from deltawire.trainer import Publisher, claim
from deltawire_wordle.counting import CountingStore


def test_publish_says_what_it_did(tmp_path: Path, checkpoints: list[Path]) -> None:
    run = tmp_path / "run"
    first = invoke_json("publish", checkpoints[0], run)
    assert (first["version"], first["parent"], first["kinds"]) == (0, None, ["anchor"])
    assert first["changed"] == first["elements"]
    second = invoke_json("publish", checkpoints[1], run, "--step", 100, "--metric", "loss=1.5", "--metric", "kl=-0.1")
    assert (second["version"], second["parent"], second["kinds"]) == (1, 0, ["delta"])
    assert 0 < second["changed"] < second["elements"]
    assert second["times_smaller"] == round(second["full_bytes"] / second["bytes"], 2)
    manifest = Run.open(str(run)).manifest(1)
    assert (manifest.step, manifest.metrics) == (100, {"loss": 1.5, "kl": -0.1})
    assert manifest.digest == second["digest"]
    assert {file.name for file in manifest.files} == {"config.json", "tokenizer.json", "chat_template.jinja"}


def test_publish_for_people(tmp_path: Path, checkpoints: list[Path]) -> None:
    invoke("publish", checkpoints[0], tmp_path / "run")
    text = invoke("publish", checkpoints[1], tmp_path / "run").stdout
    assert text.startswith("v1 ← v0 (")
    assert text.splitlines()[0].endswith(f" uploaded to {(tmp_path / 'run').as_uri()}")
    assert "% changed" in text
    assert "smaller" in text
    assert "encode" in text


def test_publish_beside_a_trainer(tmp_path: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused while the trainer runs, and with --take-over it is the trainer that stops."""
    run = tmp_path / "run"
    monkeypatch.setenv("DELTAWIRE_WRITER_RENEWAL", "0.2")
    # as if the command ran in another process
    monkeypatch.setattr(claim, "_of_this_process", lambda mark: None)
    trainer = Publisher(run)
    trainer.publish(Checkpoint(checkpoints[0])).result(60)
    refused = invoke("publish", checkpoints[1], run, code=6)
    assert re.search(rf"\(process {os.getpid()}, for \d+ s\)", refused.stderr)
    assert "--take-over" in refused.stderr
    trainer.publish(Checkpoint(checkpoints[1])).result(60)
    assert invoke_json("publish", checkpoints[2], run, "--take-over")["version"] == 2
    with pytest.raises(WriterConflict):
        trainer.publish(Checkpoint(checkpoints[3])).result(60)


def test_anchors_and_encodings(tmp_path: Path, checkpoints: list[Path]) -> None:
    run = tmp_path / "run"
    invoke("publish", checkpoints[0], run)
    assert invoke_json("publish", checkpoints[1], run, "--anchor")["kinds"] == ["delta", "anchor"]
    assert invoke_json("publish", checkpoints[2], run, "--encoding", "raw")["kinds"] == ["delta"]
    assert invoke_json("publish", checkpoints[3], run, "--anchor-every", 2)["kinds"] == ["delta", "anchor"]
    opened = Run.open(str(run))
    assert [opened.manifest(v).links[0].encoding for v in range(4)] == ["", "packed", "raw", "packed"]


@pytest.mark.parametrize(
    "options, code",
    [
        (("--metric", "loss"), 2),
        (("--metric", "loss=high"), 2),
        (("--encoding", "morse"), 2),
        (("--anchor-every", "0"), 2),
        (("--reference", "no/such-model"), 4),
    ],
)
def test_bad_options_publish_nothing(
    tmp_path: Path, checkpoints: list[Path], options: tuple[str, ...], code: int
) -> None:
    invoke("publish", checkpoints[0], tmp_path / "run", *options, code=code)
    assert not list((tmp_path / "run").glob("versions/*"))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, run: Path) -> None:
    invoke("publish", tmp_path / "missing", run, code=2)
    (tmp_path / "empty").mkdir()
    assert "no *.safetensors" in invoke("publish", tmp_path / "empty", run, code=3).stderr
    other = write_checkpoint(tmp_path / "other", {"embed.weight": Tensor("BF16", (2,), b"1234")})
    assert "'embed.weight'" in invoke("publish", other, run, code=3).stderr


def test_a_reference_needs_no_upload(tmp_path: Path, checkpoints: list[Path]) -> None:
    run = tmp_path / "run"
    result = invoke_json("publish", checkpoints[1], run, "--reference", checkpoints[0])
    assert (result["version"], result["kinds"]) == (1, ["delta"])
    assert not (run / "anchors").exists()
    invoke("checkout", run, "-o", tmp_path / "out")
    assert read_checkpoint(tmp_path / "out") == read_checkpoint(checkpoints[1])
    # on another machine the checkpoint is elsewhere
    moved = checkpoints[0].rename(tmp_path / "elsewhere")
    assert "--reference" in invoke("checkout", run, "-o", tmp_path / "out2", code=4).stderr
    invoke("checkout", run, "-o", tmp_path / "out2", "--reference", moved)
    assert read_checkpoint(tmp_path / "out2") == read_checkpoint(checkpoints[1])
    invoke("publish", checkpoints[2], run, "--reference", moved)
    assert Run.open(str(run)).newest() == 2


def test_a_run_with_tied_weights_takes_a_folder(tmp_path: Path) -> None:
    shared = np.arange(12, dtype=np.uint16).reshape(3, 4)
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish({"embed": shared, "head": shared}).result(60)
    new = Tensor("BF16", (3, 4), bytes(range(24)))
    for spelled_out in (True, False):
        tensors = {"embed": new, "head": new} if spelled_out else {"embed": new}
        invoke("publish", write_checkpoint(tmp_path / f"checkpoint-{spelled_out}", tensors), tmp_path / "run")
    invoke("checkout", tmp_path / "run", "-o", tmp_path / "out")
    assert read_checkpoint(tmp_path / "out") == {"embed": new}


# ── a base that is here already ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    """A bucket that counts, at the address `any`."""
    counting = CountingStore(store)
    for place in ("bucket.run", "trainer.publisher", "store"):
        monkeypatch.setattr(f"deltawire.{place}.open_store", lambda *_, **__: counting)
    return counting


def test_the_folder_published_last_is_not_fetched_again(counted: CountingStore, tmp_path: Path) -> None:
    before = weights(rows=2000)
    invoke("publish", write_checkpoint(tmp_path / "0", before), "any")
    counted.reset()
    second = invoke_json("publish", write_checkpoint(tmp_path / "1", trained(before, 1)), "any")
    assert (second["kinds"], second["fetched_bytes"]) == (["delta"], 0)
    assert counted.bytes_in < second["full_bytes"] / 20
    invoke("checkout", "any@1", "-o", tmp_path / "out")
    assert read_checkpoint(tmp_path / "out") == trained(before, 1)


def test_a_base_of_an_older_version_saves_the_anchor(
    counted: CountingStore, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for checkpoint in checkpoints[:3]:
        invoke("publish", checkpoint, "any")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-machine"))
    value = invoke_json("publish", checkpoints[3], "any", "--base", checkpoints[1])
    opened = Run.open(counted)
    assert value["fetched_bytes"] == opened.manifest(2).links[0].bytes
    assert value["digest"] == opened.manifest(3).digest
    text = invoke("publish", checkpoints[0], "any", "--base", checkpoints[3]).stdout
    assert "fetched" not in text


@pytest.mark.parametrize("damage", ["other weights", "other model", "no checkpoint"])
def test_a_wrong_base_is_ignored_and_logged(
    counted: CountingStore, checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    for checkpoint in checkpoints[:2]:
        invoke("publish", checkpoint, "any")
    wrong = tmp_path / "wrong"
    if damage == "other weights":
        write_checkpoint(wrong, trained(read_checkpoint(checkpoints[1]), 99))
    elif damage == "other model":
        write_checkpoint(wrong, {"w": Tensor("BF16", (2,), b"1234")})
    else:
        wrong.mkdir()
    result = invoke("publish", checkpoints[2], "any", "--base", wrong)
    assert str(wrong) in result.stderr
    assert "not used" in result.stderr
    assert "fetched" in result.stdout
    invoke("checkout", "any@2", "-o", tmp_path / "out")
    assert read_checkpoint(tmp_path / "out") == read_checkpoint(checkpoints[2])


def test_a_folder_that_is_overwritten_between_publishes(counted: CountingStore, tmp_path: Path) -> None:
    before = weights()
    for step in range(3):
        invoke("publish", write_checkpoint(tmp_path / "latest", trained(before, step)), "any")
    invoke("checkout", "any", "-o", tmp_path / "out")
    assert read_checkpoint(tmp_path / "out") == trained(before, 2)


def test_what_is_noted_of_a_publish_is_only_a_hint(counted: CountingStore, checkpoints: list[Path]) -> None:
    invoke("publish", checkpoints[0], "any")
    notes = Path(os.environ["XDG_CACHE_HOME"], "deltawire", "published")
    for nonsense in (b"", b"[]", b'{"folder": 3}', b'{"folder": "/nowhere"}', b"\xff"):
        for note in notes.iterdir():
            note.write_bytes(nonsense)
        assert invoke("publish", checkpoints[1], "any").stderr == ""


# ── a run that is there already ──────────────────────────────────────────────────────────────────────────────────────


def test_a_new_run_where_there_is_one(tmp_path: Path, run: Path, checkpoints: list[Path]) -> None:
    assert "at version 3" in invoke("publish", checkpoints[0], run, "--new", code=6).stderr
    assert Run.open(str(run)).newest() == 3
    invoke("publish", checkpoints[0], tmp_path / "fresh", "--new")
    assert " ← v0 (" in invoke("publish", checkpoints[1], tmp_path / "fresh").stdout


def test_a_bad_encoding_names_those_that_can_be_chosen(run: Path, checkpoints: list[Path]) -> None:
    said = invoke("publish", checkpoints[0], run, "--encoding", "morse", code=2).stderr
    assert "'packed', 'context', 'auto', 'raw'" in " ".join(said.split())
    assert "planes" not in said


def test_code_is_not_published_and_this_is_logged(tmp_path: Path, checkpoints: list[Path]) -> None:
    folder, run = tmp_path / "step", tmp_path / "run"
    shutil.copytree(checkpoints[0], folder)
    (folder / "modeling_own.py").write_text("import os")
    assert "left out: modeling_own.py (code never travels)" in invoke("publish", folder, run).stdout
    assert invoke_json("publish", folder, run)["left_out"] == {"modeling_own.py": "code never travels"}
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (folder / "notes.json").symlink_to(secret)
    assert "outside the folder" in invoke("publish", folder, run, code=3).stderr


def test_a_folder_without_a_config_is_published_with_a_line_about_what_will_not_work(tmp_path: Path) -> None:
    bare = write_checkpoint(tmp_path / "bare", weights(), files={"notes.txt": "hello"})
    line = "no config.json in the folder: `deltawire serve RUN` and from_pretrained of a checkout need one"
    assert line in invoke("publish", bare, tmp_path / "run", columns=80).stdout
    whole = write_checkpoint(tmp_path / "whole", weights(), files={"config.json": "{}"})
    assert "config.json" not in invoke("publish", whole, tmp_path / "run").stdout


def test_arguments_that_are_mixed_up(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path / "first", weights())
    invoke("publish", first, tmp_path / "run")
    assert "is a run: the checkpoint folder comes" in invoke("publish", tmp_path / "run", first, code=2).output
    other = write_checkpoint(tmp_path / "other", {**weights(), "more": weights()["layer.bias"]})
    assert "needs an address of its own" in invoke("publish", other, tmp_path / "run", code=3).output
    assert "is not NAME=VALUE" in invoke("publish", first, tmp_path / "run", "--metric", "=3", code=2).output
