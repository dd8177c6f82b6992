"""`make release-check`: build sdist and wheel, and prove that they install and run in empty environments.

The wheel on every supported Python that is found here, the sdist on this one, and the trainer's extra beside the torch
that `make setup` pins. The commands are those of the documents (test_release.py compares them).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]

TRAINER = 'pip install "deltawire[trl] @ $DW"'
ENGINE = 'pip install "deltawire @ $DW"'
"""What the documents say to type in the environment of a trainer, and in that of vLLM or SGLang."""

TORCH = "2.13.0"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")

MAKE_CHECKPOINT = """
import sys, numpy as np
from safetensors.numpy import save_file
weights = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
weights[:4, 0] += int(sys.argv[2])
save_file({"weight": weights, "bias": np.ones(64, np.float16)}, sys.argv[1] + "/model.safetensors")
"""
SAME = """
import sys
from safetensors.numpy import load_file
one, two = (load_file(f"{folder}/model.safetensors") for folder in sys.argv[1:])
assert one.keys() == two.keys() and all(one[name].tobytes() == two[name].tobytes() for name in one)
"""
SYNC = """
import sys, numpy as np, deltawire as dw
weights = {"weight": np.random.default_rng(0).normal(size=(256, 64)).astype(np.float16)}
copy = {"weight": np.zeros_like(weights["weight"])}
with dw.Publisher(sys.argv[1]) as publisher, dw.Replica(sys.argv[1]) as replica:
    for version in range(3):
        weights["weight"][:, version] += 1
        assert publisher.publish(weights).result().version == replica.sync(copy) == version
        assert copy["weight"].tobytes() == weights["weight"].tobytes()
assert "torch" not in sys.modules
"""
TRAIN = """
import sys, torch, deltawire as dw
from deltawire.trl import BucketTransfer, DeltaSyncCallback
trained, copy = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)
optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
with dw.Publisher(sys.argv[1], wire_dtype=None) as publisher, dw.Replica(sys.argv[1]) as replica:
    for version in range(3):
        assert publisher.publish(trained).result().version == replica.sync(copy) == version
        assert all(map(torch.equal, trained.parameters(), copy.parameters()))
        trained(torch.ones(64)).sum().backward()
        optimizer.step()
"""


def interpreter(version: str) -> str | None:
    """The Python of this version on the PATH or of pyenv; None if there is none."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        # pyenv's own shim on the PATH fails where that version is not switched on
        if path and subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0:
            return str(path)
    return None


def build(folder: Path) -> list[Path]:
    """The sdist and the wheel of this tree."""
    run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT)
    return sorted(folder.glob("*.tar.gz")) + sorted(folder.glob("*.whl"))


def environment(folder: Path, python: str = sys.executable) -> Path:
    """The folder of the programs of a new, empty environment."""
    run([python, "-m", "venv", str(folder / "env")])
    return folder / "env" / "bin"


def install(command: str, artifact: Path, programs: Path) -> None:
    """Type a command of the documents, in the environment of these programs. Versions are those of our tests."""
    place = {"DW": artifact.as_uri(), "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    run(["bash", "-c", f"export PATH={shlex.quote(str(programs))}:$PATH; {command}"], extra=place)


def try_out(artifact: Path, folder: Path, python: str = sys.executable) -> None:
    """Install it as a user would, and use it: publish and sync, every command that needs no extra, a missing extra."""
    programs = environment(folder, python)
    install(ENGINE, artifact, programs)
    inside, deltawire = programs / "python", programs / "deltawire"
    assert run([str(deltawire), "--version"], cwd=folder).startswith("deltawire ")
    assert "checkout" in run([str(deltawire), "--help"], cwd=folder)
    run([str(inside), "-c", SYNC, str(folder / "numpy")], cwd=folder)
    bucket = folder / "bucket"
    bucket.mkdir()
    run([str(deltawire), "doctor", str(bucket)], cwd=folder)
    for version in range(2):
        checkpoint = folder / f"checkpoint-{version}"
        checkpoint.mkdir()
        run([sys.executable, "-c", MAKE_CHECKPOINT, str(checkpoint), str(version)], cwd=folder)
        run([str(deltawire), "publish", str(checkpoint), str(bucket / "run")], cwd=folder)
        run([str(deltawire), "checkout", str(bucket / "run"), "-o", str(folder / f"out-{version}")], cwd=folder)
        run([sys.executable, "-c", SAME, str(checkpoint), str(folder / f"out-{version}")], cwd=folder)
    run([str(deltawire), "verify", str(bucket / "run")], cwd=folder)
    # the page is made from files of the package
    run([str(deltawire), "dash", str(bucket / "run"), "--out", str(folder / "run.html")], cwd=folder)
    # the data files of the second package of the wheel
    run([str(inside), "-c", "from deltawire_wordle.wordlists import load; assert len(load('toy')) == 64"], cwd=folder)
    # no torch here: the message must give a command that installs the extra from where this came from
    said = run([str(deltawire), "env", "wordle"], cwd=folder, status=2)
    assert f"pip install 'deltawire[rl] @ {artifact.as_uri()}'" in " ".join(said.split()), said


def try_trainer(artifact: Path, folder: Path) -> None:
    """Install it beside a torch that is there, with the extra of a trainer, and train."""
    programs = environment(folder)
    run([str(programs / "pip"), "install", "-q", "-c", str(ROOT / "constraints.txt"), f"torch=={TORCH}"])
    install(TRAINER, artifact, programs)
    assert run([str(programs / "python"), "-c", "import torch; print(torch.__version__)"]).startswith(TORCH)
    run([str(programs / "python"), "-c", TRAIN, str(folder / "run")], cwd=folder)


def run(command: list[str], *, cwd: Path | None = None, status: int = 0, extra: Mapping[str, str] | None = None) -> str:
    """What it printed. Nothing of this tree is found by the programs: they run what was installed."""
    unset = ("PYTHONPATH", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in unset} | {"COLUMNS": "1000"} | (extra or {})
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == status, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def main(light: bool) -> None:
    """`light` leaves out other Pythons than this one, and torch."""
    with tempfile.TemporaryDirectory(prefix="deltawire-release-") as folder:
        sdist, wheel = build(Path(folder) / "dist")

        def check(what: str, work: Callable[[Path], None]) -> None:
            began, place = time.monotonic(), Path(tempfile.mkdtemp(dir=folder))
            work(place)
            shutil.rmtree(place)
            print(f"{what} installs and runs ({time.monotonic() - began:.0f} s)", flush=True)

        for version in PYTHONS if not light else [f"{sys.version_info.major}.{sys.version_info.minor}"]:
            if (python := interpreter(version)) is None:
                print(f"{wheel.name} was not tried on Python {version}: there is none here", flush=True)
                continue
            check(f"{wheel.name} on Python {version}", partial(try_out, wheel, python=python))
        check(sdist.name, partial(try_out, sdist))
        if light:
            return
        check(f"{wheel.name} with the extra trl", partial(try_trainer, wheel))


if __name__ == "__main__":
    main(light=sys.argv[1:] == ["light"])
