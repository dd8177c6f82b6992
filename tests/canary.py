"""Do the newest releases of what deltawire builds on still fit? `make canary`.

    python tests/canary.py                     all of them, and a live test of each
    python tests/canary.py trl vllm            only these
    python tests/canary.py --contracts         no live tests: names and signatures of hooks alone
    python tests/canary.py --json              one JSON object per package

For each package the newest release is installed from PyPI into an environment outside the clone,
tests/contracts/NAME.py checks what deltawire calls of it, and a short live test runs. One line says that it works, or
what changed.

Ends with 0 if all work, with 1 if something changed, with 2 if nothing did but a package could not be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import environments
from environments import ROOT

WORKS, CHANGED, MISSING = "works", "changed", "could not be installed"
LIMIT_S = 1800
PIP = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    """Its name in commands, and that of its contract."""
    distribution: str
    """Its name on PyPI."""
    tested: str
    """The release that the tests pin."""
    make: Callable[[str], Path]
    """Makes an environment with a release, and returns its Python."""
    live: Sequence[str]
    """A short live test, as arguments of pytest."""


@dataclass(frozen=True, slots=True)
class Found:
    package: str
    newest: str
    tested: str
    result: str
    reason: str = ""

    def __str__(self) -> str:
        if self.result == MISSING:
            return f"{self.package} {self.newest}: {self.result}: {self.reason}".replace(" :", ":")
        known = "tested" if self.newest == self.tested else f"the tests have {self.tested}"
        return f"{self.package} {self.newest} ({known}): {self.result}" + (f": {self.reason}" if self.reason else "")


def beside(distribution: str, *more: str) -> Callable[[str], Path]:
    """An environment with a release beside everything that is in ours, torch included."""

    def make(version: str) -> Path:
        # no other torch: a build for GPUs is several GB
        packages = ["-c", str(ROOT / "tests" / "contracts" / "constraints.txt"), f"{distribution}=={version}", *more]
        return environments.environment(f"canary-{distribution}", packages, beside=sysconfig.get_path("purelib"))

    return make


def deepspeed(version: str) -> Path:
    return environments.deepspeed(version)


def script(*parts: str) -> Callable[[str], Path]:
    """The environment of `make test-vllm` and the like, with a release instead of the pinned one."""

    def make(version: str) -> Path:
        path, *first = parts
        command = [str(ROOT / "tests" / path / "environment.sh"), *first, sys.executable, version]
        place = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        python = Path(place.strip()) / "bin" / "python"
        environments.install(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT))
        return python

    return make


def pinned(file: str, distribution: str) -> str:
    """The release that a file of pins has."""
    lines = (ROOT / file).read_text().splitlines()
    found = [line for line in lines if line.lower().replace("_", "-").startswith(f"{distribution}==")]
    return found[0].partition("==")[2].partition(";")[0].strip()


PACKAGES = {
    package.name: package
    for package in (
        Package(
            "trl", "trl", environments.TRL, beside("trl", "aiohttp", "requests", "datasets"),
            ["tests/engines/test_trl_worker.py", "-k", "get_shorter and builtin and steady"],
        ),
        Package(
            "transformers", "transformers", pinned("constraints.txt", "transformers"), beside("transformers"),
            ["tests/engines/test_trl.py", "tests/test_huggingface.py"],
        ),
        Package(
            "vllm", "vllm", pinned("tests/engines/vllm/requirements.txt", "vllm"), script("engines/vllm"),
            ["tests/engines/vllm/older.py"],
        ),
        Package(
            "sglang", "sglang", pinned("tests/engines/sglang/requirements.txt", "sglang"), script("engines/sglang"),
            ["tests/engines/sglang/live.py", "-k", "token_ids"],
        ),
        Package(
            "verl", "verl", pinned("tests/frameworks/verl/requirements.txt", "verl"), script("frameworks", "verl"),
            ["tests/frameworks/verl/live.py", "-k", "proven and full"],
        ),
        Package("deepspeed", "deepspeed", environments.DEEPSPEED, deepspeed, ["tests/trainer/test_zero.py"]),
        Package(
            "swift", "ms-swift", pinned("tests/frameworks/swift/requirements.txt", "ms-swift"),
            script("frameworks", "swift"), ["tests/frameworks/swift/live.py", "-k", "full_training"],
        ),
    )
}  # fmt: skip


def newest(distribution: str) -> str:
    """The newest release on PyPI that this Python can install."""
    asked = [*PIP, "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", distribution]
    said = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    return str(json.loads(said.stdout)["install"][0]["metadata"]["version"])


def look_at(package: Package, live: bool) -> Found:
    """Install the newest release of a package, and try it."""
    version = ""
    try:
        version = newest(package.distribution)
        python = package.make(version)
    except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        return Found(package.name, version, package.tested, MISSING, last_line(error))
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT))), "CUDA_VISIBLE_DEVICES": ""}
    commands = [[str(python), "-m", f"tests.contracts.{package.name}"]]
    if live:
        test = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "--timeout", "900", *package.live]
        commands.append([str(python), *test])
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, env=settings, cwd=ROOT, timeout=LIMIT_S)
        except subprocess.SubprocessError as error:
            return Found(package.name, version, package.tested, CHANGED, last_line(error))
    return Found(package.name, version, package.tested, WORKS)


def last_line(error: Exception) -> str:
    """What a program said last of what went wrong: pytest's line about a test, or the last one of a traceback."""
    output = getattr(error, "stdout", None) or "", getattr(error, "stderr", None) or ""
    lines = [line for text in output for line in str(text).splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return (
        (failed[-1:] or lines[-1:] or [f"{type(error).__name__}: {error}"])[0].strip().rpartition("Changed: ")[2][:500]
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=", ".join(PACKAGES))
    parser.add_argument("--contracts", action="store_true", help="names and signatures alone, no live tests")
    parser.add_argument("--json", action="store_true", help="one JSON object per package")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.packages if name not in PACKAGES]
    if unknown:
        parser.error(f"no such package: {', '.join(unknown)}; there are {', '.join(PACKAGES)}")

    def each() -> Iterator[Found]:
        for name in options.packages or PACKAGES:
            found = look_at(PACKAGES[name], live=not options.contracts)
            print(json.dumps(asdict(found)) if options.json else found, flush=True)
            yield found

    results = {found.result for found in each()}
    return 1 if CHANGED in results else 2 if MISSING in results else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
