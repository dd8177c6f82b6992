"""An exception at each line of the code under test in turn, as a signal handler raises it there.

    def operation(interrupted):
        publisher = Publisher(store)
        interrupted(lambda: publisher.publish(weights))
        publisher.publish(weights, wait=True)       # the program goes on, and its weights must be right
        assert …

    raising_at_each_line([captures, Pipeline.publish], operation)

Signals arrive in the main thread, so only the thread that calls `interrupted` is interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

Interrupted = Callable[[Callable[[], object]], bool]
"""Calls its argument with an exception at the line whose turn it is. Returns whether that line was reached."""


class Place(NamedTuple):
    """Where an exception was raised: before a line, or when a function had done its work but not returned yet."""

    code: CodeType
    event: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.code.co_filename).name}:{self.line} in {self.code.co_name} ({self.event})"


class Interrupt(KeyboardInterrupt):
    """The exception of this file, so that an operation cannot take another one for it."""


class NoRest(AssertionError):
    """The lines have no end: the operation does something else each time."""


def raising_at_each_line(
    where: Iterable[Any],
    operation: Callable[[Interrupted], object],
    *,
    handler: Callable[[], object] | None = None,
    most: int = 2000,
) -> list[Place]:
    """Run `operation` again and again, each time with an exception at another line of the functions, classes and
    modules in `where`, until all lines that it reaches had one. Returns them.

    A line gets the exception when it is reached for the first time. So does every end of a function, whose result is
    lost then. Lines that undo something are reached if the operation fails by itself: errors inside `interrupted` are
    swallowed, those outside end the test with the place as their cause.

    With a `handler`, that is called at each line instead, as one that returns.
    """
    modules = {each.__file__ for each in where if isinstance(each, ModuleType)}
    codes = {code for each in where if not isinstance(each, ModuleType) for code in _codes(each)}
    done: list[Place] = []
    tried: set[Place] = set()
    while True:
        if len(tried) == most:
            raise NoRest(f"{most} places were tried, the last one was {done[-1]}")
        raised: list[Place] = []

        def trace(frame: FrameType, event: str, _: object, raised: list[Place] = raised) -> Any:
            code = frame.f_code
            if raised or (code.co_filename not in modules and code not in codes):
                return None
            place = Place(code, event, frame.f_lineno)
            if event in ("line", "return") and place not in tried:
                tried.add(place)
                raised.append(place)
                if handler is None:
                    # tracing ends with this exception
                    raise Interrupt(str(place))
                handler()
            return trace

        def interrupted(call: Callable[[], object], trace: Any = trace, raised: list[Place] = raised) -> bool:
            if raised:
                call()
                return False
            outer = sys.gettrace()
            try:
                sys.settrace(trace)
                try:
                    call()
                finally:
                    sys.settrace(outer)
            except BaseException as found:
                if not raised and not isinstance(found, Exception):
                    raise
            return bool(raised)

        try:
            operation(interrupted)
        except BaseException as found:
            if raised and not isinstance(found, Interrupt):
                raise AssertionError(f"after an exception at {raised[0]}: {found!r}") from found
            raise
        if not raised:
            return done
        done += raised


def _codes(what: Any) -> Iterable[CodeType]:
    """The code of a function, of what is defined in it, or of all methods of a class."""
    if isinstance(what, type):
        for member in vars(what).values():
            yield from _codes(member)
    elif isinstance(what, property):
        for function in (what.fget, what.fset):
            yield from _codes(function)
    elif isinstance(what, CodeType):
        yield what
        for constant in what.co_consts:
            if isinstance(constant, CodeType):
                yield from _codes(constant)
    else:
        function = getattr(what, "__func__", what)
        function = getattr(function, "__wrapped__", function)
        if code := getattr(function, "__code__", None):
            yield from _codes(code)
