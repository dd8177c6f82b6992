"""A real SGLang server, on a CPU or a GPU, and what live_server.py has for all engines."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines.live import live_server
from tests.engines.live.live_server import ON_GPU, python_path, serving

HERE = Path(__file__).parent
FLAGS = os.environ.get("SGLANG_TEST_FLAGS", "").split()
"""More flags for all servers, where SGLang's choices for a GPU are not installed."""
BEARER = {"Authorization": "Bearer secret"}


class Server(live_server.Server):
    """`python -m sglang.launch_server`."""

    engine = "sglang"
    reloads = True

    @staticmethod
    def variables(tp: int) -> dict[str, str | None]:
        return {
            "SGLANG_USE_CPU_ENGINE": None if ON_GPU else "1",
            "SGLANG_PLUGINS": "deltawire,sglang_test_plugin",
            "PYTHONPATH": python_path(HERE / "plugin", HERE.parent / "live" / "plugin"),
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
            "OMP_NUM_THREADS": None if ON_GPU else "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp))) if tp > 1 else None,
        }

    def program(self, model: Path) -> list[str]:
        cpu = ["--device", "cpu", "--attention-backend", "torch_native"]
        return [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *([] if ON_GPU else cpu)
        ]  # fmt: skip

    def options(self, tp: int) -> list[str]:
        return [
            "--dtype", "bfloat16", "--context-length", "512", "--max-total-tokens", "4096",
            "--mem-fraction-static", "0.1", "--max-running-requests", "8", "--skip-server-warmup", "--enable-metrics",
            "--enable-cache-report", "--sleep-on-idle", "--tp-size", str(tp), *FLAGS,
        ]  # fmt: skip

    def checksums(self) -> dict[str, str]:
        answer = (
            self.http.post("/weights_checker", json={"action": "checksum"}, headers=BEARER).raise_for_status().json()
        )
        return answer  # type: ignore[no-any-return]

    @classmethod
    def fresh_checksums(
        cls, folders: Sequence[Path], tp: int, flags: Sequence[str] = (), server: Any = None
    ) -> list[dict[str, str]]:
        if server is None:
            with serving(cls, folders[0], folders[0].with_suffix(".log"), tp=tp, flags=flags) as made:
                return cls.fresh_checksums(folders, tp, flags, made)
        found = []
        for folder in folders:
            body = {"model_path": str(folder)}
            assert server.http.post("/update_weights_from_disk", json=body).raise_for_status().json()["success"]
            found.append(server.checksums())
        return found

    def weight_version(self) -> str:
        return self.http.get("/model_info").json()["weight_version"]  # type: ignore[no-any-return]

    def reused(self, prompt: list[int], salt: str = "") -> int:
        answer = self.complete(prompt, 2, **({"cache_salt": salt} if salt else {})).json()
        return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)  # type: ignore[no-any-return]

    def hold(self) -> None:
        self.http.post("/pause_generation", json={"mode": "in_place"}, headers=BEARER).raise_for_status()

    def resume(self) -> None:
        self.http.post("/continue_generation", json={}, headers=BEARER).raise_for_status()
