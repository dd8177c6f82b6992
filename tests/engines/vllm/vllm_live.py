"""A real vLLM server, on a CPU or a GPU, and what live_server.py has for all engines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.engines.live import live_server
from tests.engines.live.live_server import BIN, ON_GPU, Streams, Trainer, make_model, python_path

__all__ = ["ON_GPU", "NodeServer", "Server", "Streams", "Trainer", "environment", "make_model", "ranks", "serving"]

HERE = Path(__file__).parent


def ranks() -> int:
    """Tensor-parallel ranks that this machine has room for."""
    if not ON_GPU:
        return 2
    import torch

    return min(2, torch.cuda.device_count())


class Server(live_server.Server):
    """`vllm serve`."""

    engine = "vllm"

    @staticmethod
    def variables(tp: int) -> dict[str, str | None]:
        return {
            "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": python_path(HERE / "plugin", HERE.parent / "live" / "plugin"),
            # AMX is advertised but not usable on some virtual machines; nothing here needs it
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp))) if tp > 1 else "auto",
            # vLLM 0.33 gives each data-parallel rank a memory node of its own, and a machine may have only one
            "VLLM_CPU_SIM_MULTI_NUMA": "0",
            "VLLM_PLUGINS": "deltawire,vllm_test_plugin",
        }  # fmt: skip

    def program(self, model: Path) -> list[str]:
        return [str(BIN / "vllm"), "serve", str(model), "--weight-transfer-config", '{"backend": "deltawire"}']

    def options(self, tp: int) -> list[str]:
        # small models: other servers fit beside
        room = ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 30)] if ON_GPU else []
        return [
            *room, "--dtype", "bfloat16", "--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "8",
            "--tensor-parallel-size", str(tp),
        ]  # fmt: skip

    def checksums(self) -> dict[str, str]:
        answer = self.http.post("/weight_checker", json={"action": "checksum"}).raise_for_status()
        return answer.json()["checksums"]  # type: ignore[no-any-return]

    @classmethod
    def fresh_checksums(
        cls, folders: Sequence[Path], tp: int, flags: Sequence[str] = (), server: Any = None
    ) -> list[dict[str, str]]:
        from vllm_fresh import fresh_checksums

        return fresh_checksums(folders, tp, flags)

    def weight_version(self) -> str:
        return self.http.get("/weight_info").json()["weight_version"]  # type: ignore[no-any-return]

    def reused(self, prompt: list[int], salt: str = "") -> int:
        before = self._hits()
        self.complete(prompt, 2, **({"cache_salt": salt} if salt else {}))
        return self._hits() - before

    def _hits(self) -> int:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))

    def hold(self) -> None:
        self.http.post("/pause", params={"mode": "keep", "clear_cache": False}).raise_for_status()

    def resume(self) -> None:
        self.http.post("/resume").raise_for_status()


class NodeServer(Server):
    """The part of a server on one of its nodes: with a /dev/shm and a temporary folder that only its own processes see,
    and with one rank."""

    def __init__(self, model: Path, log: Path, node: int, **options: Any) -> None:
        # a short name: sockets lie in it, whose paths have a limit
        self._scratch = log.with_name(f"n{node}")
        self._scratch.mkdir()
        here = {"TMPDIR": str(self._scratch), "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        super().__init__(model, log, VLLM_CPU_OMP_THREADS_BIND=str(node), **here, **options)

    def program(self, model: Path) -> list[str]:
        mounts = " && ".join(f"mount -t tmpfs none {place}" for place in ("/dev/shm", self._scratch))
        alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
        return [*alone, *super().program(model)]


def environment(tp: int) -> dict[str, str]:
    return live_server.environment(**Server.variables(tp))


serving = partial(live_server.serving, Server)
