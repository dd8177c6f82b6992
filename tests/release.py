"""`make release-check`: build sdist and wheel, and prove that each installs and runs in a clean environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

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


def build(folder: Path) -> list[Path]:
    """The sdist and the wheel of this tree."""
    run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT)
    return sorted(folder.glob("*.tar.gz")) + sorted(folder.glob("*.whl"))


def try_out(artifact: Path, folder: Path) -> None:
    """Install it as a user would, and use it: --version, doctor, publish twice, checkout, verify, a missing extra."""
    run([sys.executable, "-m", "venv", str(folder / "env")])
    python, deltawire = folder / "env" / "bin" / "python", folder / "env" / "bin" / "deltawire"
    constraints = ["-c", str(ROOT / "constraints.txt")]
    run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *constraints, str(artifact)])
    assert run([str(deltawire), "--version"], cwd=folder).startswith("deltawire ")
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
    run([str(python), "-c", "from deltawire_wordle.wordlists import load; assert len(load('toy')) == 64"], cwd=folder)
    # no torch here: the message must give a command that installs the extra from where this came from
    said = run([str(deltawire), "env", "wordle"], cwd=folder, status=2)
    assert f"pip install 'deltawire[rl] @ {artifact.as_uri()}'" in " ".join(said.split()), said


def run(command: list[str], *, cwd: Path | None = None, status: int = 0) -> str:
    """What it printed. Nothing of this tree is found by the programs: they run what was installed."""
    unset = ("PYTHONPATH", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in unset} | {"COLUMNS": "1000"}
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == status, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="deltawire-release-") as folder:
        for artifact in build(Path(folder) / "dist"):
            began = time.monotonic()
            place = Path(folder) / artifact.suffix.lstrip(".")
            place.mkdir()
            try_out(artifact, place)
            print(f"{artifact.name} installs and runs ({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
