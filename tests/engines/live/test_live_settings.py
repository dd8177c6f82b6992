"""How a vLLM server reads what to follow."""

from __future__ import annotations

import json

import pytest

from deltawire.core.errors import Misconfigured
from deltawire.engines.live import settings
from deltawire.engines.vllm.launch import prepare


def test_the_server_is_told_what_to_follow() -> None:
    command, environment = prepare(
        "s3://runs/chat", "/models/chat", port=9, version=41, kv="keep", token="t", extra=["--max-model-len", "64"],
        environment={"VLLM_PLUGINS": "mine,deltawire", "HOME": "/root"},
    )  # fmt: skip
    assert command[:3] == ["vllm", "serve", "/models/chat"]
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "deltawire"}
    assert command[-2:] == ["--max-model-len", "64"]
    assert command[command.index("--served-model-name") + 1] == "chat"
    # the token is not on the command line, where every process could read it
    assert "t" not in command
    assert environment["VLLM_PLUGINS"] == "mine,deltawire"
    assert environment["HOME"] == "/root"
    read = settings.read(environment)
    assert (read.run, read.pin, read.follow, read.token) == ("s3://runs/chat", "41", True, "t")
    assert (read.policy.mode, read.policy.kv) == ("keep", "keep")


def test_without_a_choice_keys_and_values_are_kept_apart_by_version() -> None:
    assert settings.read(prepare("s3://runs/chat", "m", environment={})[1]).policy.kv == "version"
    chosen = prepare("s3://runs/chat", "m", environment={"DELTAWIRE_KV": "clear"})[1]
    assert settings.read(chosen).policy.kv == "clear"


def test_settings_have_defaults_and_refuse_nonsense() -> None:
    read = settings.read({})
    assert (read.run, read.poll, read.follow, read.pin, read.policy.kv) == ("", 1.0, True, "", "version")
    for name in ("DELTAWIRE_POLL", "DELTAWIRE_PAUSE", "DELTAWIRE_KV", "DELTAWIRE_FOLLOW"):
        with pytest.raises(Misconfigured, match=name):
            settings.read({name: "nonsense"})
