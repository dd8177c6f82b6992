"""A real server of an engine, tiny models for it, a trainer that publishes versions of them, and clients."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx
import numpy as np

from deltawire.core.change import regions
from deltawire.core.full import Checkpoint
from deltawire.trainer import Publisher
from deltawire_wordle.processes import free_port

BIN = Path(sys.executable).parent
START_S = 400
ON_GPU = os.environ.get("DEVICE", "cpu") == "cuda"
"""With DEVICE=cuda: the GPU build of the engine, in the environment that runs the tests."""
S = TypeVar("S", bound="Server")


def make_model(folder: Path, kind: str, *, tokenizer: bool = True, **sizes: int) -> Path:
    """A tiny random model, by default with its tokenizer, as a bf16 checkpoint folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    family, _, variant = kind.partition("-")
    shape: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
        "tie_word_embeddings": variant == "tied", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **sizes,
    }  # fmt: skip
    if family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
        shape = {**experts, **shape}
    if family == "mixtral":
        shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if family == "deepseek_v3":
        # the ranks of the real one, which are the only ones that vLLM's kernels for latent attention know
        shape |= {
            "kv_lora_rank": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
            "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
            "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            "topk_method": "noaux_tc",
        }  # fmt: skip
        del shape["head_dim"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
    # larger than a usual start, so that greedy tokens differ between versions
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.08)
    model.to(torch.bfloat16).save_pretrained(folder)
    if not tokenizer:
        return folder
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(shape["vocab_size"])}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="t1", eos_token="t2", pad_token="t0", unk_token="t3"
    ).save_pretrained(folder)
    return folder


class Trainer:
    """Weights as bits, moved a little for every version."""

    def __init__(self, folder: Path, run: Path, **options: Any) -> None:
        source = Checkpoint(folder)
        self.weights = {
            t.name: np.concatenate([source.region(r) for r in regions(t)]).reshape(t.shape).copy()
            for t in source.schema.tensors
        }
        self.run = run
        self.publisher = Publisher(run, files=folder, **{"encoding": "context", "anchor_ratio": 100.0, **options})
        self._rng = np.random.default_rng(1)

    def publish(self, density: float = 0.02) -> int:
        return self.publisher.publish(self.weights).result(600).version if density == 0 else self._step(density)

    def _step(self, density: float) -> int:
        for bits in self.weights.values():
            flat = bits.reshape(-1)
            where = np.unique(self._rng.integers(0, flat.size, max(1, round(density * flat.size))))
            # a few steps up or down, sometimes far enough to matter
            flat[where] += self._rng.choice(np.array([1, 65535, 40, 65496], np.uint16), where.size)
        return self.publisher.publish(self.weights).result(600).version

    def close(self) -> None:
        self.publisher.close()


def environment(**more: str | None) -> dict[str, str]:
    """What the processes of a server under test see; None leaves a variable out."""
    made = {
        **{k: v for k, v in os.environ.items() if not k.startswith("DELTAWIRE_")},
        "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "DELTAWIRE_POLL": "0.1", "DELTAWIRE_HEARTBEAT": "1", **more,
    }  # fmt: skip
    return {name: value for name, value in made.items() if value is not None}


def python_path(*folders: Path) -> str:
    """PYTHONPATH with folders before what is in it."""
    return os.pathsep.join([*map(str, folders), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


class Server(ABC):
    """A server in a process group of its own; without a model, `deltawire serve --engine …`."""

    engine: ClassVar[str]
    reloads: ClassVar[bool] = False
    """Whether `fresh_checksums` loads folders into a running server."""

    def __init__(
        self,
        model: Path | None,
        log: Path,
        *,
        tp: int = 1,
        run: Path | None = None,
        flags: Sequence[str] = (),
        **more: str | None,
    ) -> None:
        self.port = free_port()
        self.log = log
        # `deltawire serve` has clients call the model by the name of its run
        self.name = "m" if run is None or model is not None else run.name
        listen = ["--host", "127.0.0.1", "--port", str(self.port)]
        options = [*self.options(tp), *flags]
        if model is None:
            weights = ["--folder", str(log.with_suffix(".weights"))]
            ours = [str(BIN / "deltawire"), "serve", "--engine", self.engine, str(run), *weights, *listen]
            self.command = [*ours, "--", *options]
        else:
            self.command = [*self.program(model), *listen, "--served-model-name", self.name, *options]
        with open(log, "wb") as out:
            self.process = subprocess.Popen(
                self.command,
                env=environment(**{**self.variables(tp), **({"DELTAWIRE_RUN": str(run)} if run else {}), **more}),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # servers close connections that were idle for five seconds: a client that does the same at that moment would
        # send a request to a closed one
        limits = httpx.Limits(keepalive_expiry=2)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120, limits=limits)

    @staticmethod
    @abstractmethod
    def variables(tp: int) -> dict[str, str | None]:
        """Environment variables of this engine."""

    @abstractmethod
    def program(self, model: Path) -> list[str]:
        """The engine's own command to serve a model."""

    @abstractmethod
    def options(self, tp: int) -> list[str]:
        """Flags for a small model on this machine."""

    @abstractmethod
    def checksums(self) -> dict[str, str]:
        """Checksums of the live weights of all ranks, computed by the engine itself."""

    @classmethod
    @abstractmethod
    def fresh_checksums(
        cls, folders: Sequence[Path], tp: int, flags: Sequence[str] = (), server: Any = None
    ) -> list[dict[str, str]]:
        """The checksums of each folder, all of them versions of one model, as the engine's own loader loads it. An
        engine that reloads does so in `server`, which follows nothing, or in a new one."""

    @abstractmethod
    def weight_version(self) -> str:
        """The version of the weights that the engine itself reports."""

    @abstractmethod
    def reused(self, prompt: list[int], salt: str = "") -> int:
        """Number of prompt tokens whose keys and values a new request found in the cache."""

    @abstractmethod
    def hold(self) -> None:
        """Stop between two steps. Requests wait, and the cache stays as it is."""

    @abstractmethod
    def resume(self) -> None:
        """The end of `hold`."""

    def wait(self: S, path: str = "/health", limit: float = START_S) -> S:
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.tail()}")
            with contextlib.suppress(httpx.TransportError):
                if self.http.get(path).status_code == 200:
                    return self
            time.sleep(0.2)
        raise AssertionError(f"the server did not come up:\n{self.tail()}")

    def status(self) -> dict[str, Any]:
        return self.http.get("/deltawire/status").raise_for_status().json()  # type: ignore[no-any-return]

    def until(self, limit: float = 180, **expected: Any) -> dict[str, Any]:
        end = time.monotonic() + limit
        while True:
            status = self.status()
            if all(status[key] == value for key, value in expected.items()):
                return status
            assert time.monotonic() < end, f"wanted {expected}, found {status}\n{self.tail()}"
            time.sleep(0.05)

    def complete(self, prompt: list[int], tokens: int = 24, **more: Any) -> httpx.Response:
        body = {
            "model": self.name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **more,
        }  # fmt: skip
        return self.http.post("/v1/completions", json=body).raise_for_status()

    def greedy(self, prompt: list[int], tokens: int = 24) -> list[int]:
        return self.complete(prompt, tokens).json()["choices"][0]["token_ids"]  # type: ignore[no-any-return]

    def ended(self, limit: float = START_S) -> str:
        """Wait until the server has ended by itself; what it said."""
        assert self.process.wait(limit) != 0
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """All of it at once, as the machine's power supply would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def stop(self) -> None:
        self.http.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        # workers may outlive the server by a moment
        self.kill()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


@contextlib.contextmanager
def serving(engine: type[S], model: Path | None, log: Path, **options: Any) -> Iterator[S]:
    server = engine(model, log, **options)
    try:
        yield server.wait()
    except BaseException:
        # its log is gone with the machine
        print(server.tail())
        raise
    finally:
        server.stop()


class Streams:
    """Clients that read completions token by token, for as long as the `with` lasts, and note what they saw."""

    def __init__(self, server: Server, count: int = 2, tokens: int = 60) -> None:
        self.completions: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.gaps: list[float] = []
        self._server, self._tokens = server, tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(i,), daemon=True) for i in range(count)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _read(self, number: int) -> None:
        with httpx.Client(base_url=self._server.http.base_url, timeout=120) as http:
            while not self._stop.is_set():
                try:
                    # of different lengths, so that they do not end together
                    self.completions.append(self._one(http, [5 + number, 9, 11], self._tokens + 7 * number))
                except Exception as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                    return

    def _one(self, http: httpx.Client, prompt: list[int], length: int) -> dict[str, Any]:
        body = {
            "model": self._server.name, "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        tokens: list[int] = []
        spans: list[dict[str, Any]] = []
        last = 0.0
        with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                if last:
                    self.gaps.append(now - last)
                last = now
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                tokens += choice.get("token_ids") or []
                spans = choice.get("weight_versions") or spans
        assert len(tokens) == length, f"{len(tokens)} tokens of {length}"
        return {"prompt": prompt, "tokens": tokens, "spans": spans}
