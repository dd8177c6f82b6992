"""The plugin where it is installed beside a vLLM that it does not know, or none."""

from __future__ import annotations

import sys

import pytest

import deltawire.engines.vllm
from deltawire.engines.live import ahead
from deltawire.engines.vllm import register

SETTINGS = ("VLLM_PLUGINS", "DELTAWIRE_RUN", "DELTAWIRE_ADAPTERS")


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)


def test_merely_installed_it_ends_no_server() -> None:
    register()


def test_kernels_are_compiled_while_vllm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of vLLM is imported, which takes seconds."""
    started: list[str] = []
    monkeypatch.setattr(ahead, "start", started.append)
    monkeypatch.setattr(deltawire.engines.vllm, "_make_folder", lambda: None)
    monkeypatch.setenv("VLLM_PLUGINS", "deltawire")
    monkeypatch.setenv("DELTAWIRE_RUN", "s3://runs/chat")
    with pytest.raises(ModuleNotFoundError):
        register()
    assert started == ["s3://runs/chat"]


def test_a_server_that_was_told_to_follow_a_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAWIRE_RUN", "s3://runs/chat")
    with pytest.raises(ModuleNotFoundError):
        register()
