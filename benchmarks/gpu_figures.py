"""All figures of servers and publishers on a GPU, on one machine: servers start side by side, are measured one by one.

    DEVICE=cuda python benchmarks/gpu_figures.py FOLDER                # half an hour; FOLDER gets results and logs
    DEVICE=cuda python benchmarks/gpu_figures.py FOLDER --only 0.6B lora
    DEVICE=cuda python benchmarks/gpu_figures.py FOLDER --only 30B-A3B # alone: ten minutes, 70 GB in /dev/shm
    python benchmarks/gpu_figures.py FOLDER --small                    # a try on a CPU, with tiny models

A server takes two minutes to start, which would be most of the time if each were measured before the next is started.
Here all of them start at once, each with memory for keys and values of a fixed size; while one is measured, the others
are idle. Every program saves its figures as it goes, so what is stopped early (`--minutes`, Ctrl-C) keeps what it has.
What fails is named at the end, and does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from deltawire.cli.ui import ended_by_sigterm

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Server:
    """A benchmark that starts a server, and waits for its turn before each phase."""

    name: str
    command: str
    small: str
    """Flags that replace those of `command` in a try on a CPU."""


SERVERS = [
    Server(
        "0.6B",
        "pause_server.py --shape 0.6B --phases control context packed throughput rivals --syncs 50 --control 25"
        " --seconds 120 --rivals 6 --profile --flags '--gpu-memory-utilization 0.3 --kv-cache-memory-bytes 24G'",
        "pause_server.py --shape tiny --phases control context packed --syncs 4 --control 4 --streams 2 --tokens 100",
    ),
    Server(
        "0.6B-fp8",
        "pause_server.py --shape 0.6B --view fp8-block-ue8m0 --phases control packed equal --syncs 25 --tokens 1000"
        " --flags '--gpu-memory-utilization 0.15 --kv-cache-memory-bytes 14G --max-num-batched-tokens 2048'",
        "",
    ),
    Server(
        "lora",
        "lora_server.py --shape 0.6B --streams 32 --rank 32 --versions 100 --seconds 260 --profile"
        " --flags '--gpu-memory-utilization 0.2 --kv-cache-memory-bytes 16G'",
        "lora_server.py --shape tiny --versions 6 --seconds 60",
    ),
    Server(
        "8B",
        "pause_server.py --shape 8B --phases control context packed --syncs 16 --control 12 --tokens 1000 --profile"
        " --flags '--gpu-memory-utilization 0.4 --kv-cache-memory-bytes 24G'",
        "",
    ),
]
TURNS = [
    ("0.6B", "control"), ("0.6B", "context"), ("0.6B", "packed"), ("0.6B-fp8", "control"), ("0.6B-fp8", "packed"),
    ("lora", "versions"), ("8B", "control"), ("8B", "context"), ("8B", "packed"), ("0.6B", "throughput"),
    ("0.6B", "rivals"), ("0.6B-fp8", "equal"),
]  # fmt: skip
"""Server and phase, in the order of measurement: each control phase directly before what it is compared with."""
PROGRAMS = [("held", "held.py --step 0.3 --publishes 5 --repeats 10 --only snapshot,adamw --out FOLDER")]
"""Measured when all servers have ended."""
_MOE = (
    "pause_server.py --shape 30B-A3B --alone /dev/shm --scratch /dev/shm --phases memory packed equal"
    " --syncs 8 --tokens 600 --settle 5 --flags '--gpu-memory-utilization 0.5 --kv-cache-memory-bytes 8G'"
)
ALONE = [
    ("30B-A3B", f"{_MOE} --out FOLDER/30B-A3B.json"),
    ("30B-A3B-fp8", f"{_MOE} --view fp8-block-ue8m0 --out FOLDER/30B-A3B-fp8.json"),
    ("portions", "portions.py --out FOLDER/portions.json"),
    ("startup", "startup.py --shape 0.6B --minutes 6.5 --out FOLDER/startup.json --log FOLDER/startup"),
]
"""These need all of the device and most of the host's memory, or its time: measured only if they are named."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for results (NAME.json) and logs (NAME.log)")
    parser.add_argument("--only", nargs="+", choices=[*(s.name for s in SERVERS), *dict(PROGRAMS + ALONE)])
    parser.add_argument("--minutes", type=float, default=45.0, help="stop after this time")
    parser.add_argument("--small", action="store_true", help="tiny models, few versions: a try of the script itself")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    chosen = {s.name for s in SERVERS if not options.small or s.small} if options.only is None else {*options.only}
    commands = {s.name: s.small if options.small else s.command for s in SERVERS if s.name in chosen}
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: list[str] = []

    def start(name: str, command: str) -> None:
        script, *flags = (part.replace("FOLDER", str(options.folder)) for part in shlex.split(command))
        with open(options.folder / f"{name}.log", "wb") as log:
            running[name] = subprocess.Popen(
                [sys.executable, str(HERE / script), *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(name: str, path: Path) -> bool:
        """Wait for a file. False if the program has ended without it."""
        while not path.exists():
            if running[name].poll() is not None:
                return path.exists()
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(name, 60 * options.minutes)
            time.sleep(0.2)
        return True

    def finish(name: str) -> None:
        if running[name].wait(max(1.0, end - time.monotonic())):
            failed.append(name)

    try:
        for name, command in commands.items():
            shutil.rmtree(options.folder / f"{name}.turns", ignore_errors=True)
            (options.folder / f"{name}.turns").mkdir()
            start(name, f"{command} --turns FOLDER/{name}.turns --out FOLDER/{name}.json")
        for name, phase in TURNS:
            if phase in commands.get(name, ""):
                turns = options.folder / f"{name}.turns"
                if wait_for(name, turns / f"{phase}.ready"):
                    print(f"{time.strftime('%H:%M:%S')} {name}: {phase}", flush=True)
                    (turns / phase).touch()
                    wait_for(name, turns / f"{phase}.done")
        for name in commands:
            finish(name)
        named = PROGRAMS if options.only is None else [each for each in PROGRAMS + ALONE if each[0] in options.only]
        for name, command in [] if options.small else named:
            print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
            start(name, command)
            finish(name)
    except subprocess.TimeoutExpired:
        failed.append(f"stopped after {options.minutes:g} minutes")
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)
    print("\n".join(["failed:", *failed]) if failed else "all figures are there")
    sys.exit(bool(failed))


if __name__ == "__main__":
    with ended_by_sigterm():
        main()
