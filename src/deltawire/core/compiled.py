"""Kernels that numba compiles, or loads from its cache, where no signal can interrupt that.

Numba and LLVM take locks while they load a kernel, and a signal handler that raises there leaves them taken: the next
call of any kernel would wait for ever. Handlers run in the main thread, so a kernel is loaded in another one.

A process that is forked meanwhile would have these locks taken by a thread that it does not have: a fork waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numba
import numpy.ma  # noqa: F401 - the first call of a kernel imports it, in the thread of the call
from numba.core import compiler_lock

from .parallel import Later

_lock: Any = compiler_lock.global_compiler_lock


def _end_fork() -> None:
    # not where a signal handler raised while the fork waited: Python forks all the same
    if _lock.is_locked():
        _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_end_fork, after_in_child=_end_fork)


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` for a kernel whose first call may be interrupted. Called again, it is there or still loading."""

    def decorate(function: Callable[..., Any]) -> Any:
        kernel = numba.njit(**options)(function)
        load = kernel._compile_for_args

        @wraps(load)
        def load_undisturbed(*arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return load(*arguments)
            loaded = Later[Any]()
            loaded.begin(partial(load, *arguments), "deltawire-kernel")
            return loaded.result()

        kernel._compile_for_args = load_undisturbed
        return kernel

    return decorate
