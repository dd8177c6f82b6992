"""Tests that run in several processes are reported as if they had run in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
import os, pytest, jobs

@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    jobs.Run(session, 2)
    return True

@pytest.fixture(scope="session")
def shared():
    yield os.getpid()
    with open("ended", "a") as file:
        file.write(f"{os.getpid()}\\n")

@pytest.fixture(scope="module")
def of_file():
    return os.getpid()
"""

FILES = {
    "test_a.py": """
import os, warnings

def test_first(of_file, shared, tmp_path):
    assert of_file == shared == os.getpid()
    (tmp_path / "one").touch()

def test_second(of_file):
    warnings.warn("look here")
    assert of_file == os.getpid()
""",
    "test_b.py": """
import os, signal

def test_fails():
    print("what it said")
    assert [1, 2] == [1, 3]

def test_kills_its_worker():
    os.kill(os.getpid(), signal.SIGKILL)

def test_ends_its_worker():
    os._exit(0)

def test_after(of_file):
    assert of_file == os.getpid()
""",
    "test_c.py": "def test_other(shared): pass\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"conftest.py": CONFTEST, **FILES}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-rA", *options]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": f"--basetemp={folder / 'temp'}"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, check=False, timeout=240
    ).stdout


def test_all_tests_are_reported_whatever_becomes_of_their_worker(folder: Path) -> None:
    said = run(folder)
    assert "3 failed, 4 passed, 1 warning" in said, said
    assert "assert [1, 2] == [1, 3]" in said
    assert "what it said" in said
    assert "look here" in said
    assert "FAILED test_b.py::test_kills_its_worker - the worker was ended by signal 9" in said
    assert "FAILED test_b.py::test_ends_its_worker - the worker ended with exit code 0" in said
    assert "PASSED test_b.py::test_after" in said, "by another worker"
    assert (folder / "ended").read_text(), "what the session shares is taken down"


def test_it_stops_at_the_first_failure(folder: Path) -> None:
    said = run(folder, "-x")
    assert "stopping after 1 failures" in said, said
    assert "INTERNALERROR" not in said, said
    assert "test_after" not in said
