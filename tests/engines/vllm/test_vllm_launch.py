"""How a vLLM server that follows a run is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deltawire.engines.options import ServerOptions
from deltawire.engines.vllm.launch import CPU_KV, kv_gib, prepare

VLLM = ["vllm", "serve"]


def test_the_server_is_told_what_to_follow() -> None:
    options = ServerOptions(run="s3://runs/chat", port=9, pin=41, kv="keep", token="t", extra=["--max-model-len", "64"])
    command, environment = prepare(options, "/models/chat", VLLM, {"VLLM_PLUGINS": "mine,deltawire", "HOME": "/root"})
    assert command[:3] == ["vllm", "serve", "/models/chat"]
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "deltawire"}
    assert command[-2:] == ["--max-model-len", "64"]
    assert command[command.index("--served-model-name") + 1] == "chat"
    # the token is not on the command line, where every process could read it
    assert "t" not in command
    assert environment["VLLM_PLUGINS"] == "mine,deltawire"
    assert environment["HOME"] == "/root"
    found = ServerOptions.read(environment)
    assert (found.run, found.pin, found.follow, found.token) == ("s3://runs/chat", "41", True, "t")
    assert (found.pause, found.plugin_kv) == ("keep", "keep")


def test_without_a_choice_keys_and_values_are_kept_apart_by_version() -> None:
    given = {"DELTAWIRE_KV": "clear"}
    # what the environment says is in the options already
    assert ServerOptions.read(prepare(ServerOptions(run="s3://runs/chat"), "m", VLLM, given)[1]).plugin_kv == "version"
    assert ServerOptions.read(prepare(ServerOptions.read(given), "m", VLLM, given)[1]).plugin_kv == "clear"


def test_a_server_of_adapters_alone_has_room_for_them() -> None:
    options = ServerOptions(adapters={"policy": "/runs/a", "judge": "/runs/b"})
    command, environment = prepare(options, "a/base", VLLM, {})
    assert command[:3] == ["vllm", "serve", "a/base"]
    assert command[-5:] == ["--enable-lora", "--max-loras", "5", "--max-cpu-loras", "5"]
    assert not {"--weight-transfer-config", "--served-model-name"} & {*command}
    assert ServerOptions.read(environment).adapters == options.adapters
    both, _ = prepare(
        ServerOptions(run="s3://runs/chat", adapters={"policy": "/runs/a"}, adapters_keep=0), "m", VLLM, {}
    )
    assert both[-5:] == ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2"]
    assert "--weight-transfer-config" in both


def test_a_model_without_a_tokenizer_is_served_without_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM would make up an empty one, and answer with the text "" for ever."""
    (tmp_path / "config.json").write_text("{}")

    def chosen(*extra: str, model: str | Path = tmp_path) -> bool:
        command = prepare(ServerOptions(run="s3://runs/chat", extra=extra), model, VLLM, {})[0]
        assert ("--return-tokens-as-token-ids" in command) == ("s3://runs/chat has no tokenizer" in caplog.text)
        caplog.clear()
        return "--skip-tokenizer-init" in command

    assert chosen()
    assert chosen("--tokenizer-mode", "auto")
    for own in (["--tokenizer", "Qwen/Qwen3-0.6B"], ["--tokenizer=Qwen/Qwen3-0.6B"]):
        assert not chosen(*own)
    assert not chosen(model="Qwen/Qwen3-0.6B")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not chosen()


def test_a_choice_of_no_tokenizer_is_left_as_it_is(tmp_path: Path) -> None:
    command, _ = prepare(ServerOptions(run="run", extra=["--skip_tokenizer_init"]), tmp_path, VLLM, {})
    assert not {"--skip-tokenizer-init", "--return-tokens-as-token-ids"} & {*command}


def test_on_a_cpu_it_leaves_memory_to_others(tmp_path: Path) -> None:
    """vLLM by itself wants 92 % of all memory, and does not start without."""

    def chosen(*extra: str, **given: str) -> str | None:
        return prepare(ServerOptions(run="run", extra=extra), "m", VLLM, given)[1].get(CPU_KV)

    assert chosen() is not None
    assert chosen(VLLM_CPU_KVCACHE_SPACE="7") == "7"
    for flag in ("--gpu-memory-utilization=0.5", "--gpu_memory_utilization", "--kv-cache-memory-bytes"):
        assert chosen(flag) is None
    assert kv_gib(tmp_path) == 1
    for file, text, expected in (
        ("proc/meminfo", f"MemTotal:  {128 << 20} kB\nMemAvailable:   {64 << 20} kB\n", 32),
        ("sys/devices/system/node/node0/meminfo", "", 32),
        ("sys/devices/system/node/node1/meminfo", "", 16),
        ("sys/fs/cgroup/memory.max", "max\n", 16),
        ("sys/fs/cgroup/memory.max", f"{8 << 30}\n", 4),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
        assert kv_gib(tmp_path) == expected


def test_what_every_process_of_a_server_imports_is_light() -> None:
    """vLLM looks through all modules when a worker starts, and fails at some of what numba brings."""
    kit = "Answer, LoadingAdapter, ServerOptions, access, names, salted, undo_all, write_all"
    code = f"from deltawire.engines.live import {kit}; import sys; print({{'numba', 'torch'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
