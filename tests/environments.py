"""Other environments for tests against packages that do not belong into ours; made once per set of pins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "deltawire-tests"
TRL, DEEPSPEED = "1.16.0", "0.19.8"
"""The releases that the tests have."""


def environment(name: str, *steps: Sequence[str], beside: str = "") -> Path:
    """The Python of an environment in which each step's packages were installed, one step after the other.

    It also has the packages in the folder `beside`, without copies of them.
    """
    key = sha256(json.dumps([steps, sys.version_info[:2], *filter(None, [beside])]).encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{key}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        if beside:
            site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
            (site / "beside.pth").write_text(f"import site; site.addsitedir({beside!r})\n")
        for packages in steps:
            install(python, *packages)
        (folder / "ready").touch()
    return python


def trl(extras: str = "trl") -> Path:
    """The Python of an environment with this deltawire and its extras, which bring TRL and all that it needs; peft.
    If the tests run where TRL is, that one."""
    if _is_here("trl"):
        return Path(sys.executable)
    constraints = ["-c", str(ROOT / "constraints.txt")]
    python = environment(extras.replace(",", "-"), [*constraints, "torch==2.13.0"], [*constraints, "hatchling"])
    install(python, *constraints, "--no-build-isolation", "-e", f"{ROOT}[{extras}]", f"trl=={TRL}", "peft")
    return python


def deepspeed(version: str = DEEPSPEED) -> Path:
    """The Python of an environment with a real DeepSpeed beside everything that is in ours, torch included. If the
    tests run where DeepSpeed is, that one."""
    if _is_here("deepspeed"):
        return Path(sys.executable)
    # built from source, with a setuptools that can make a wheel: that of an older Python cannot
    setuptools = ["-c", str(ROOT / "constraints.txt"), "setuptools"]
    # of its dependencies we have the rest
    needs = ["einops==0.8.2", "hjson==3.1.0", "msgpack==1.2.4", "ninja==1.13.2", "py-cpuinfo==9.0.0"]
    packages = ["--no-deps", "--no-build-isolation", f"deepspeed=={version}", *needs]
    return environment("deepspeed", setuptools, packages, beside=sysconfig.get_path("purelib"))


def engine(name: str) -> Path:
    """The Python of the environment of `make test-vllm` or `make test-sglang`: that engine for CPUs, this deltawire."""
    script = ROOT / "tests" / "engines" / name / "environment.sh"
    place = subprocess.run([str(script), sys.executable], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    python = Path(place) / "bin" / "python"
    install(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    return python


def python_files(package: str, version: str, platform: str, python: str) -> Path:
    """The folder with the Python files of a wheel for another platform or Python, without its libraries."""
    folder = CACHE / f"{package}-{version}-files"
    if not (folder / "ready").exists():
        with tempfile.TemporaryDirectory() as downloads:
            wanted = ["--no-deps", "--only-binary=:all:", "--platform", platform, "--python-version", python]
            pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, *wanted, "-d", downloads, f"{package}=={version}"], check=True)
            (wheel,) = Path(downloads).iterdir()
            with ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.endswith(".py") or ".dist-info/" in name:
                        archive.extract(name, folder)
        (folder / "ready").touch()
    return folder


VLLM_ON_A_CPU = {
    # the plugin keeps vLLM from AMX, which some virtual machines advertise and then trap on
    "PYTHONPATH": str(ROOT / "tests" / "engines" / "vllm" / "plugin"),
    "VLLM_PLUGINS": "vllm_test_plugin",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
}
"""What a vLLM server under test has in its environment."""


def _is_here(package: str) -> bool:
    """Not by an import: tests/engines/trl is a package of that name where tests beside it run."""
    return any(found.name == package for found in distributions())


def install(python: Path, *arguments: str) -> None:
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    done.check_returncode()
