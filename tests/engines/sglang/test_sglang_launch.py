"""How an SGLang server that follows a run is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltawire.engines.options import ServerOptions
from deltawire.engines.sglang.launch import prepare

SGLANG = ["python", "-m", "sglang.launch_server"]


def test_the_server_is_told_what_to_follow() -> None:
    options = ServerOptions(
        run="s3://runs/chat", port=9, pin=41, token="t", max_model_len=64, logprobs_mode="raw_logprobs",
        extra=["--tp-size", "2"],
    )  # fmt: skip
    command, environment = prepare(options, "/models/chat", SGLANG, {"HOME": "/root"}, accelerated=True)
    assert command == [
        *SGLANG, "--model-path", "/models/chat", "--host", "127.0.0.1", "--port", "9", "--served-model-name", "chat",
        "--context-length", "64", "--tp-size", "2",
    ]  # fmt: skip
    assert environment["HOME"] == "/root"
    assert environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "true"
    assert not {"SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE"} & environment.keys()
    found = ServerOptions.read(environment)
    assert (found.run, found.pin, found.follow, found.token) == ("s3://runs/chat", "41", True, "t")


def test_a_list_of_plugins_gets_ours() -> None:
    options = ServerOptions(run="run")
    for given, expected in (("mine", "mine,deltawire"), ("deltawire,mine", "deltawire,mine")):
        assert (
            prepare(options, "m", SGLANG, {"SGLANG_PLUGINS": given}, accelerated=True)[1]["SGLANG_PLUGINS"] == expected
        )


def test_without_an_accelerator_it_computes_on_the_cpu() -> None:
    options = ServerOptions(run="run", extra=["--attention-backend=intel_amx"])
    command, environment = prepare(options, "m", SGLANG, {}, accelerated=False)
    assert command[command.index("--device") + 1] == "cpu"
    assert "torch_native" not in command
    assert command[-1] == "--attention-backend=intel_amx"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"


def test_room_for_adapters() -> None:
    adapters = {"policy": "s3://runs/lora", "judge": "s3://runs/judge"}
    options = ServerOptions(adapters=adapters, extra=["--max-lora-rank", "64"])
    command, environment = prepare(options, "m", SGLANG, {}, accelerated=True)
    room = ["--enable-lora", "--max-loras-per-batch", "4", "--max-lora-rank", "16", "--lora-target-modules", "all"]
    at = command.index("--enable-lora")
    assert command[at : at + 7] == room
    # SGLang takes the last of a flag
    assert command[-2:] == ["--max-lora-rank", "64"]
    assert ServerOptions.read(environment).adapters == adapters


def test_a_model_without_a_tokenizer_is_served_without_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang would end with an IndexError once the model is loaded."""

    def chosen(*extra: str) -> list[str]:
        caplog.clear()
        return prepare(ServerOptions(run="run", extra=extra), tmp_path, SGLANG, {}, accelerated=True)[0]

    assert "--skip-tokenizer-init" in chosen()
    assert "only /generate answers" in caplog.text
    assert "--skip-tokenizer-init" not in chosen("--tokenizer-path", "Qwen/Qwen3-0.6B")
    assert not caplog.text
    (tmp_path / "tokenizer.model").touch()
    assert "--skip-tokenizer-init" not in chosen()
