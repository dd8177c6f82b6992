"""The tree in the docstring is the tree of the classes."""

from __future__ import annotations

import inspect
import re

import deltawire as dw
from deltawire.core import errors
from deltawire.core.errors import DeltawireError


def test_the_docstring_is_the_tree() -> None:
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"([│ ├└─]*)([A-Z]\w+)", line)
        if not found or found[2] not in vars(errors):
            continue
        depth = len(found[1]) // 4
        path[depth:] = [found[2]]
        drawn[found[2]] = path[depth - 1] if depth else "Exception"
    real = {
        name: cls.__bases__[0].__name__
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and issubclass(cls, DeltawireError)
    }
    assert drawn == real


def test_exit_codes_leave_0_and_shell_codes_alone() -> None:
    classes = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, DeltawireError)]
    assert all(0 < cls.exit_code < 64 for cls in classes)


def test_the_public_module_has_every_error_and_each_says_what_it_means() -> None:
    assert dw.errors.__doc__ == errors.__doc__
    classes = {n for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, DeltawireError)}
    assert set(dw.errors.__all__) == classes | {"DAMAGE"}
    for name, cls in vars(errors).items():
        if inspect.isclass(cls) and issubclass(cls, DeltawireError):
            assert getattr(dw.errors, name) is cls
            assert (vars(cls)["__doc__"] or "").split("\n")[0].endswith(".")
