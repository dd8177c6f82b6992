"""Against a real SGLang: `make test-sglang`. Not collected by the everyday run, whose environment has none."""

from __future__ import annotations

from sglang_live import Server

from tests.engines.live.live_tests import LiveTests


class TestSglang(LiveTests):
    server = Server
    cells = {("llama", 1): 20, ("qwen3", 1): 20}  # noqa: RUF012
