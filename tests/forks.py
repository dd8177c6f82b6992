"""Programs that tests start as processes of their own: `Popen` and `run`, as in subprocess.

To start Python and to import what a command needs takes a second of CPU, with torch four. In a parallel run a process
that has imported everything is forked before the workers (`started`); it forks again for each `python -m MODULE`,
`python SCRIPT` or `python -c CODE`. Without it, and for anything else, programs are started as usual.
The fixture `forked_programs` has the product itself start its programs so.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, NoReturn

from tests import forked
from tests.jobs import leave

_address: str | None = None


@contextmanager
def started() -> Iterator[None]:
    """What this process and its forks start meanwhile is forked from what it has imported by now."""
    global _address
    if sys.platform != "linux":
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    lives, alive = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        _address = f"deltawire-{uuid.uuid4()}"
        listener.bind(f"\0{_address}")
        listener.listen()
        server = os.fork()
        if not server:
            os.close(alive)
            _serve(listener, lives)
    os.close(lives)
    try:
        yield
    finally:
        _address = None
        os.close(alive)
        os.waitpid(server, 0)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    _status: socket.socket | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _, pass_fds, cwd, env, _, _, shell, *pipes = rest
        stdin, _, _, stdout, _, stderr, _, _, _, _, _, session = pipes[:12]
        program = _program(args)
        if _address is None or program is None or preexec_fn or shell:
            super()._execute_child(args, executable, preexec_fn, *rest)
            return
        streams = [own if given == -1 else given for own, given in enumerate((stdin, stdout, stderr))]
        folder, environment = os.fspath(cwd or os.getcwd()), os.environ if env is None else env
        given = [*streams, *pass_fds]
        self.pid, self._status = forked.start(_address, program, folder, environment, bool(session), given)
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            return super()._try_wait(wait_flags)
        try:
            status = self._status.recv(64, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        self._status.close()
        return self.pid, int(status)

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*arguments, **options)
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


def run(command: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Both streams as text."""
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            said = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


def module(name: str) -> str | None:
    """A shell's command for a module of Python; None where nothing is forked."""
    return _address and f'"{sys.executable}" -SI "{forked.__file__}" {_address} {name}'


def _program(command: Any) -> dict[str, Any] | None:
    """How and what to run: the module, script or code, and its arguments."""
    if isinstance(command, str) or not command or command[0] != sys.executable:
        return None
    words = [*map(os.fspath, command[1:])]
    watched = words[:2] == ["-X", "faulthandler"]
    if watched:
        del words[:2]
    how = words.pop(0) if words[0] in ("-m", "-c") else "script"
    if words[0].startswith("-"):
        return None
    return {"how": how, "what": words[0], "arguments": words[1:], "watched": watched}


# ── in the process that forks ────────────────────────────────────────────────────────────────────────────────────────


def _serve(listener: socket.socket, lives: int) -> NoReturn:
    """Until the process that started it ends, which ends what is left."""
    code = 1
    try:
        ended, wake = os.pipe()
        os.set_blocking(ended, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        # Ctrl-C is for the process that shows results
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # nor need each program end what was imported: hundreds of things of torch
        for imported in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
            imported.atexit = False
        children: dict[int, socket.socket] = {}
        while lives not in (ready := select.select([listener, ended, lives], [], [])[0]):
            if listener in ready:
                client, _ = listener.accept()
                data, files, _, _ = socket.recv_fds(client, 1 << 20, 16)
                pid = os.fork()
                if not pid:
                    _become(json.loads(data), files)
                for file in files:
                    os.close(file)
                children[pid] = client
                client.send(str(pid).encode())
            if ended in ready:
                os.read(ended, 4096)
                for pid in [*children]:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        # whoever started it may not wait for it
                        with children.pop(pid) as client, suppress(OSError):
                            client.send(str(status).encode())
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def _become(task: dict[str, Any], files: list[int]) -> NoReturn:
    """Run a program as if this process had been started for it."""
    code: object = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.disable()
        # pytest's own keep what threads and destructors raise to themselves
        threading.excepthook, sys.unraisablehook = threading.__excepthook__, sys.__unraisablehook__
        if task["session"]:
            os.setsid()
        _take(files, task["files"])
        os.chdir(task["cwd"])
        os.environ.clear()
        os.environ.update(task["env"])
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        logging.root.handlers.clear()
        code = _play(**task["program"])
    except SystemExit as left:
        code = left.code
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        if isinstance(code, str):
            print(code, file=sys.stderr)
        threading._shutdown()  # type: ignore[attr-defined]
        leave(code if isinstance(code, int) else int(code is not None))


def _take(files: list[int], numbers: list[int]) -> None:
    """Have these open files under these numbers, and no others."""
    above = max(numbers) + 1
    # first out of the way of each other
    files = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for number, file in zip(numbers, files, strict=True):
        os.dup2(file, number)
    ends = [*sorted(numbers), os.sysconf("SC_OPEN_MAX")]
    for number, following in pairwise(ends):
        # an empty range may be taken for all files
        if following > number + 1:
            os.closerange(number + 1, following)


def _play(how: str, what: str, arguments: list[str], watched: bool) -> None:
    if watched:
        faulthandler.enable()
    path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    first = os.path.dirname(os.path.abspath(what)) if how == "script" else os.getcwd()
    sys.path[:0] = [first, *path]
    sys.argv = [what if how == "script" else how, *arguments]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif how == "script":
        runpy.run_path(what, run_name="__main__")
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
