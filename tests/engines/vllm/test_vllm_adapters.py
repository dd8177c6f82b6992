"""What a vLLM server with adapters refuses at its start. The rest needs vLLM: live_adapters.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from deltawire.core.errors import Misconfigured
from deltawire.engines.vllm.adapters import VllmAdapters, require_room


def test_a_server_without_room_names_the_flags() -> None:
    with pytest.raises(Misconfigured, match="takes no adapters: add --enable-lora --max-loras 3 --max-cpu-loras 5"):
        require_room(None, 2, 1)
    for loras, memory in ((2, 5), (3, 4)):
        with pytest.raises(Misconfigured, match=f"need --max-loras 3 --max-cpu-loras 5; .* {loras} and {memory}"):
            require_room(SimpleNamespace(max_loras=loras, max_cpu_loras=memory), 2, 1)
    require_room(SimpleNamespace(max_loras=3, max_cpu_loras=5), 2, 1)


def test_a_name_that_is_taken_is_refused() -> None:
    room = SimpleNamespace(vllm_config=SimpleNamespace(lora_config=SimpleNamespace(max_loras=9, max_cpu_loras=9)))
    models = SimpleNamespace(is_base_model=lambda name: name == "chat", lora_requests={"static": None})
    for name in ("chat", "static"):
        with pytest.raises(Misconfigured, match=f"names '{name}', which this server already has"):
            VllmAdapters(room, models, {name: "s3://runs/lora"})
