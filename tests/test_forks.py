"""A program that is forked is one that was started, as far as it and whoever started it can tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import forks


@pytest.fixture(scope="module")
def address() -> Iterator[str | None]:
    """Of the process that forks: that of a parallel run, or one of our own."""
    if forks._address:
        yield forks._address
    else:
        with forks.started():
            yield forks._address


@pytest.fixture(params=["forked", "started"])
def python(
    request: pytest.FixtureRequest, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., forks.Popen]:
    def start(*words: str, **options: object) -> forks.Popen:
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return forks.Popen([sys.executable, *words], text=True, **streams, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(forks, "_address", address if request.param == "forked" else None)
    return start


CODE = "import os, sys; print(input(), sys.argv, os.getcwd(), os.environ.get('X')); print('bad', file=sys.stderr)"


def test_streams_arguments_folder_and_environment(python: Callable[..., forks.Popen], tmp_path: Path) -> None:
    with python("-c", CODE, "a", "b c", cwd=tmp_path, env={**os.environ, "X": "1"}) as process:
        assert process.communicate("hello\n", 60) == (f"hello ['-c', 'a', 'b c'] {tmp_path} 1\n", "bad\n")
    assert process.returncode == 0


def test_open_files_that_are_passed_on(python: Callable[..., forks.Popen], tmp_path: Path) -> None:
    code = "import os, sys; print(*(os.read(int(n), 9).decode() for n in sys.argv[1:]))"
    with open(tmp_path / "a", "w+") as first, open(tmp_path / "b", "w+") as second:
        for file, text in ((first, "one"), (second, "two")):
            file.write(text)
            file.seek(0)
        numbers = [first.fileno(), second.fileno()]
        with python("-c", code, *map(str, numbers), pass_fds=numbers) as process:
            assert process.communicate(timeout=60) == ("one two\n", "")


def test_modules_and_scripts(python: Callable[..., forks.Popen], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "script.py").write_text("import sys, beside; print(__name__, beside.VALUE, sys.argv[1:])\n")
    for words in ([str(tmp_path / "script.py")], ["-m", "script"]):
        with python(*words, "x", cwd=tmp_path) as process:
            assert process.communicate(timeout=60) == ("__main__ 7 ['x']\n", "")


@pytest.mark.parametrize(
    "code, expected, said",
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit; atexit.register(print, 'end', file=__import__('sys').stderr)", 0, "end\n"),
        ("import threading; threading.Thread(target=lambda: 1 / 0).start()", 0, "division by zero\n"),
        ("class A:\n    def __del__(self):\n        1 / 0\nA()", 0, "division by zero\n"),
    ],
)
def test_how_it_ends(python: Callable[..., forks.Popen], code: str, expected: int, said: str) -> None:
    with python("-c", code) as process:
        assert process.communicate(timeout=60)[1].endswith(said)
    assert process.returncode == expected
    assert process.poll() == expected


def test_it_is_signalled(python: Callable[..., forks.Popen]) -> None:
    for number, code in ((signal.SIGTERM, -15), (signal.SIGINT, -2)):
        with python("-X", "faulthandler", "-c", "print(1, flush=True); __import__('time').sleep(600)") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            assert process.poll() is None
            process.send_signal(number)
            assert process.wait(60) == code


def test_as_a_command_of_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_address", None)
    (tmp_path / "program.py").write_text("import sys, time; print(sys.argv[1:], flush=True); time.sleep(600)")
    with forks.started():
        command = forks.module("program")
        script = f"exec {command} 'a b'"
        with subprocess.Popen(script, shell=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "['a b']\n"
            process.terminate()
            assert process.wait(60) == -15
    assert forks.module("program") is None


def test_a_session_of_its_own(python: Callable[..., forks.Popen]) -> None:
    code = "import os; print(os.getsid(0) == os.getpid())"
    for own in (True, False):
        assert python("-c", code, start_new_session=own).communicate(timeout=60)[0] == f"{own}\n"
