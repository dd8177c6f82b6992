"""Kernels that are interrupted while numba loads them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from numba import types

from deltawire.core.compiled import njit
from deltawire.core.simd import intrinsic


def counting(look: Callable[[], object]) -> Any:
    """A kernel that adds one; `look` is called while numba loads it, with numba's lock taken."""

    @intrinsic
    def one_more(typingctx: Any, number: Any) -> Any:
        look()
        return types.int64(types.int64), lambda context, builder, signature, args: builder.add(
            args[0], context.get_constant(types.int64, 1)
        )

    @njit(nogil=True)
    def kernel(number: Any) -> Any:
        return one_more(number)

    return kernel


def test_an_interrupt_leaves_no_lock_of_numba_taken() -> None:
    """The kernel goes on loading, and is there when it is called again: also in another thread."""
    interrupted, waits = threading.Event(), list[bool]()

    def look() -> None:
        if not interrupted.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            waits.append(interrupted.wait(60))

    kernel, found = counting(look), list[int]()
    with pytest.raises(KeyboardInterrupt):
        kernel(1)
    interrupted.set()
    thread = threading.Thread(target=lambda: found.append(kernel(2)), daemon=True)
    thread.start()
    thread.join(60)
    assert (waits, found, kernel(3)) == ([True], [3], 4)


@pytest.mark.parametrize("arguments", [("text",), (None,)])
def test_what_cannot_be_compiled_is_said_to_the_caller(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(Exception, match=r"No implementation|Failed in nopython"):
        counting(int)(*arguments)


def test_kernels_are_loaded_in_any_thread() -> None:
    loading = list[str]()
    kernel = counting(lambda: loading.append(threading.current_thread().name))
    thread = threading.Thread(target=partial(kernel, 1), name="own")
    thread.start()
    thread.join(60)
    assert {*loading} == {"own"}
    assert kernel(1) == 2


def test_a_process_that_is_forked_meanwhile_has_no_lock_of_numba_taken() -> None:
    """It waited for ever for a thread that it does not have."""
    loading, may_end = threading.Event(), threading.Event()

    def look() -> None:
        loading.set()
        may_end.wait(60)

    thread = threading.Thread(target=counting(look), args=(1,))
    thread.start()
    assert loading.wait(60)
    threading.Timer(0.3, may_end.set).start()
    child = os.fork()
    if not child:
        # by its default action: this process has the handlers of pytest
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        os._exit(0 if counting(lambda: None)(2) == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join(60)
    assert counting(lambda: None)(3) == 4
