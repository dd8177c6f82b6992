"""Against a real SGLang: `make test-sglang`. Not collected by the everyday run, whose environment has none."""

from __future__ import annotations

from types import MappingProxyType

from sglang_live import Server

from tests.engines.live.live_tests import LiveTests


class TestSglang(LiveTests):
    server = Server
    cells = MappingProxyType({("qwen3", 1): 50, ("llama", 1): 20, ("qwen3", 2): 20})
