"""From the start of a server to its first completion: `deltawire serve --engine vllm` beside plain `vllm serve`.

    DEVICE=cuda python benchmarks/startup.py --shape 0.6B              # eight minutes on an H200
    VLLM_ENVIRONMENT/bin/python benchmarks/startup.py --small          # on the CPU (tests/engines/vllm/environment.sh)

Both start from the same checkpoint folder, one after the other and nothing beside them: `cold` with empty caches (of
vLLM, Triton, inductor, numba and CUDA, in folders of their own), `warm` with what the cold start left there. The files
of vLLM, torch and the model are in memory for all of them: they are read once before. A completion is asked for again
and again until there is one; that ends the start.

Phases are seconds from the start to the first line of the log that ends one. `excess` is what deltawire's start took
longer than vLLM's with the same caches.

Then the last server follows fifty versions of changing density, an anchor among them, with one completion under each.
vLLM's monitor of kernels that are compiled after the start raises in it (--jit-monitor-mode error), and logs each in
the cold start; `late` names what it found. vLLM has no monitor on a CPU.

    DEVICE=cuda python benchmarks/startup.py --folder F --arms cold-plain cold-deltawire --versions 0   # in two halves
    DEVICE=cuda python benchmarks/startup.py --folder F --arms warm-plain warm-deltawire
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import pause_server
from _report import about, print_about, write_json
from deltawire.cli.ui import ended_by_sigterm
from deltawire_wordle.processes import free_port
from pause_server import SHAPES

ROOT = Path(__file__).parents[1]
PHASES = {
    "first line": r"",
    "arguments read": r"non-default args",
    "engine begun": r"Initializing a V1 LLM engine",
    "model begun": r"Starting to load model",
    "model loaded": r"Model loading took|Loading weights took",
    "kernels ready": r"kernels for \S+ are ready",
    "model compiled": r"torch\.compile (took|and initial|takes)",
    "memory measured": r"(GPU|CPU) KV cache size",
    "graphs captured": r"Graph capturing finished",
    "engine ready": r"init engine .* took",
    "plugin loaded": r"Loaded endpoint plugin deltawire",
    "listening": r"Application startup complete",
    "weights located": r"located \d+ tensors",
    "layout checked": r"weights can be patched|deltas are refused",
    "version known": r"the weights are version",
}
LATE = re.compile(r"(?:kernel )?JIT compilation during inference: (\w+)|Autotuning kernel (\w+)")
VERSIONS = 50
START_S = {"cuda": 280.0, "cpu": 900.0}
"""A start that takes longer has failed."""
FOLLOW_S = 120.0
"""For the versions, even where the time is over."""
VERSION_S = 60.0
CACHES = {
    "XDG_CACHE_HOME": "xdg", "VLLM_CACHE_ROOT": "vllm", "TRITON_HOME": "triton", "NUMBA_CACHE_DIR": "numba",
    "CUDA_CACHE_PATH": "cuda", "TORCH_EXTENSIONS_DIR": "extensions", "DG_JIT_CACHE_DIR": "deep_gemm",
}  # fmt: skip


class Arm:
    """A server from its start to its first completion."""

    def __init__(
        self, options: argparse.Namespace, name: str, cache: Path, model: Path, run: Path, monitor: str
    ) -> None:
        self.port, self.marks, self.late, self.name = free_port(), {}, [], name
        self._log: list[str] = []
        self.limit = START_S[options.device]
        own = ["--port", str(self.port), "--host", "127.0.0.1", "--served-model-name", "m"]
        flags = _flags(options, monitor)
        binaries = Path(sys.executable).parent
        if name == "plain":
            command = [str(binaries / "vllm"), "serve", str(model), *own, *flags]
        else:
            command = [sys.executable, "-m", "deltawire", "serve", "--engine", "vllm", str(model), "--run", str(run),
                       *own, "--", *flags]  # fmt: skip
        given = {k: v for k, v in os.environ.items() if not k.startswith("DELTAWIRE_") and k != "TRITON_CACHE_DIR"}
        self.environment = {
            **given, **{variable: str(cache / folder) for variable, folder in CACHES.items()},
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "DELTAWIRE_POLL": "0.2", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            line, at = raw.decode(errors="replace"), time.monotonic() - self.began
            self._log.append(f"{at:8.2f} {line}")
            for phase, pattern in PHASES.items():
                if phase not in self.marks and re.search(pattern, line):
                    self.marks[phase] = round(at, 2)
            if found := LATE.search(line):
                self.late.append(found[1] or found[2])

    def start(self) -> float:
        """Wait for the first completion; seconds from the start to it."""
        while time.monotonic() - self.began < self.limit:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server has ended:\n{self.tail()}")
            with suppress(httpx.HTTPError):
                self.complete(self.limit)
                seconds = time.monotonic() - self.began
                self.marks["first completion"] = round(seconds, 2)
                return seconds
            time.sleep(0.05)
        raise RuntimeError(f"no completion after {self.limit:.0f} s:\n{self.tail()}")

    def complete(self, limit: float = VERSION_S) -> dict[str, Any]:
        body = {"model": "m", "prompt": [5, 6, 7, 8], "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body, timeout=limit)
        return answer.raise_for_status().json()  # type: ignore[no-any-return]

    def status(self) -> dict[str, Any]:
        return httpx.get(f"http://127.0.0.1:{self.port}/deltawire/status", timeout=30).json()  # type: ignore[no-any-return]

    def wait_for(self, version: int) -> None:
        end = time.monotonic() + VERSION_S
        while (found := self.status())["version"] != version:
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"version {version} is not served: {found}\n{self.tail()}")
            time.sleep(0.02)

    def tail(self, lines: int = 40) -> str:
        return "".join(self._log[-lines:])

    def stop(self, log: Path | None) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)
        if log:
            log.write_text("".join(self._log))


def _flags(options: argparse.Namespace, monitor: str) -> list[str]:
    common, given = ["--max-model-len", "512", "--max-num-seqs", "64"], shlex.split(options.flags)
    if options.device == "cpu":
        return [*common, "--dtype", "bfloat16", "--enforce-eager", *given]
    verbose = ["--jit-monitor-verbose"] if monitor == "warn" else []
    return [*common, "--gpu-memory-utilization", "0.4", "--jit-monitor-mode", monitor, *verbose, *given]


def measure(options: argparse.Namespace, report: dict[str, Any]) -> None:
    end = time.monotonic() + 60 * options.minutes
    with ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltawire-startup-")))
        model = folder / "model"
        if not model.exists():
            pause_server.make_model(model, SHAPES[options.shape], options.device)
        shutil.rmtree(folder / "run", ignore_errors=True)
        versions = stack.enter_context(_Versions(model, folder / "run", options))
        _read_once(model)
        for number, name in enumerate(options.arms):
            heat, program = name.split("-")
            last = number == len(options.arms) - 1 and program == "deltawire" and options.versions > 0
            monitor = "error" if last else "warn"
            if time.monotonic() > end:
                print(f"{name}: no time left", flush=True)
                continue
            cache = folder / program
            if heat == "cold":
                shutil.rmtree(cache, ignore_errors=True)
            arm = Arm(options, program, cache, model, folder / "run", monitor)
            try:
                seconds = arm.start()
                print(f"{name}: {seconds:.1f} s  {arm.marks}", flush=True)
                entry = report["starts"].setdefault(name, {"seconds": [], "phases": [], "late": []})
                entry["seconds"].append(round(seconds, 2))
                entry["phases"].append(dict(sorted(arm.marks.items(), key=lambda mark: mark[1])))
                # a list that the rest of its life adds to
                entry["late"].append(arm.late)
                _save(options, report)
                if last:
                    report["followed"] = versions.follow(arm, max(end, time.monotonic() + FOLLOW_S), monitor)
            except Exception as error:
                report.setdefault("failed", {})[name] = str(error)[-6000:]
                print(f"{name} failed: {error}", flush=True)
            finally:
                arm.stop(options.log and options.log.with_name(f"{options.log.name}-{number}-{name}.log"))
            _save(options, report)


class _Versions:
    """A run that begins at the checkpoint, and its next versions."""

    def __init__(self, model: Path, run: Path, options: argparse.Namespace) -> None:
        from safetensors.torch import load_file

        self._run, self._reference, self._count = run, model, options.versions
        self._weights = load_file(model / "model.safetensors", device=options.device)
        self._device = options.device
        self._open("context", first=True)
        self._publisher.publish(self._weights).result(600)

    def __enter__(self) -> _Versions:
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.close()

    def _open(self, encoding: str, *, first: bool = False, **anchors: Any) -> None:
        from deltawire.trainer import Publisher

        if not first:
            self._publisher.close()
        given = {"anchor_ratio": 100.0, **anchors, **({"reference": self._reference} if first else {})}
        self._publisher: Any = Publisher(self._run, encoding=encoding, **given)
        if not first:
            self._publisher.resume(self._weights)

    def follow(self, arm: Arm, end: float, monitor: str) -> dict[str, Any]:
        """Publish versions, each of another density, and wait until each is served."""
        import torch

        generator = torch.Generator(self._device).manual_seed(1)
        rng, found = np.random.default_rng(1), []
        encodings = ["context", "packed", "context", "raw", "context"]
        anchor = self._count // 2
        for number in range(self._count):
            if number == anchor:
                self._open(encodings[0], anchor_every=1)
            elif number in (anchor + 1, *range(10, self._count, 10)):
                self._open(encodings[number // 10 % len(encodings)])
            if time.monotonic() > end:
                break
            density = 10.0 ** -float(rng.uniform(1 if number != anchor else 2, 5))
            # now and then only some tensors change
            some = [*self._weights] if number % 3 else [*rng.choice([*self._weights], 5, replace=False)]
            for name in some:
                pause_server._move(self._weights[name], density, generator)
            clock = time.perf_counter()
            if number == anchor:
                version, kind = self._publish_anchor(arm), "anchor"
            else:
                version, kind = self._publisher.publish(self._weights).result(600).version, "delta"
            arm.wait_for(version)
            answer = arm.complete()
            seconds = round(time.perf_counter() - clock, 3)
            found.append(
                {"version": version, "density": density, "tensors": len(some), "kind": kind, "seconds": seconds}
            )
            assert answer["choices"], answer
        status = arm.status()
        print(
            f"{len(found)} versions followed, guard {status['guard']}, compiled late: {arm.late or 'nothing'}",
            flush=True,
        )
        return {
            "versions": len(found), "anchors": sum(it["kind"] == "anchor" for it in found), "monitor": monitor,
            "late": arm.late, "guard": status["guard"], "state": status["state"], "each": found,
        }  # fmt: skip

    def _publish_anchor(self, arm: Arm) -> int:
        """A version that the server must take as full weights: it is held until the delta beside them is gone."""
        pin = f"http://127.0.0.1:{arm.port}/deltawire/pin"
        httpx.post(pin, json={"version": arm.status()["version"]}, timeout=60).raise_for_status()
        version = self._publisher.publish(self._weights).result(600).version
        for path in (self._run / "deltas").glob(f"*{version:06d}.*"):
            path.unlink()
        if not [*(self._run / "anchors").glob(f"*{version:06d}.*")]:
            raise RuntimeError(f"version {version} has no anchor")
        httpx.post(pin, json={"version": None}, timeout=60).raise_for_status()
        return version  # type: ignore[no-any-return]


def _read_once(model: Path) -> None:
    """Have files in memory that all starts read, so that the first one does not pay for all of them."""
    for name in ("torch", "vllm", "triton", "numba", "llvmlite", "transformers"):
        with suppress(ImportError):
            spec = importlib.util.find_spec(name)
            for place in (spec.submodule_search_locations or []) if spec else []:
                for path in Path(place).rglob("*"):
                    if path.is_file() and path.suffix in (".py", ".pyc", ".so", ".json"):
                        path.read_bytes()
    (model / "model.safetensors").read_bytes()


def _save(options: argparse.Namespace, report: dict[str, Any]) -> None:
    starts = {name: min(entry["seconds"]) for name, entry in report["starts"].items() if entry["seconds"]}
    report["excess"] = {
        heat: round(starts[f"{heat}-deltawire"] - starts[f"{heat}-plain"], 2)
        for heat in ("cold", "warm")
        if {f"{heat}-deltawire", f"{heat}-plain"} <= starts.keys()
    }
    write_json(options.out, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--small", action="store_true", help="a tiny model and few versions")
    parser.add_argument(
        "--arms", nargs="+", default=["cold-plain", "cold-deltawire", "warm-plain", "warm-deltawire"],
        help="(cold|warm)-(plain|deltawire), in the order of measurement; versions are followed in the last one",
    )  # fmt: skip
    parser.add_argument("--versions", type=int, default=VERSIONS)
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing after this time")
    parser.add_argument("--flags", default="", help="more flags of vLLM, for all arms")
    parser.add_argument(
        "--folder", type=Path, default=None, help="keep the model and the caches here, for a later call with other arms"
    )
    parser.add_argument("--log", type=Path, default=None, help="keep logs as this-NUMBER-ARM.log")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    options.device = os.environ.get("DEVICE", "cpu")
    if options.small:
        options.shape, options.versions = "tiny", min(options.versions, 4)
    options.out = options.out or ROOT / "benchmarks/results" / f"startup-{options.device}.json"
    report: dict[str, Any] = about()
    with suppress(metadata.PackageNotFoundError):
        report["versions"]["vllm"] = metadata.version("vllm")
    if options.device == "cuda":
        import torch

        report["device"] = torch.cuda.get_device_name()
    print_about(report)
    report |= {"shape": options.shape, "starts": {}}
    if options.folder and options.out.exists():
        # of an earlier call
        report["starts"] = json.loads(options.out.read_text())["starts"]
    measure(options, report)


if __name__ == "__main__":
    with ended_by_sigterm():
        main()
