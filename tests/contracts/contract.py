"""What the contracts share: short checks of what an adapter calls of another package, which say what changed."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any


class Changed(Exception):
    """Something that an adapter calls is not there any more, or takes other arguments."""


def find(path: str) -> Any:
    """What a path such as `trl.experimental.async_grpo:AsyncGRPOTrainer._sync_weight` names."""
    module, _, names = path.partition(":")
    try:
        found = import_module(module)
    except ImportError as error:
        raise Changed(f"{module} cannot be imported: {error}") from error
    for name in names.split(".") if names else ():
        if not hasattr(found, name):
            raise Changed(f"{path} is not there")
        found = getattr(found, name)
    return found


def takes(path: str, *names: str) -> None:
    """Check that a function takes these arguments, whatever else it takes."""
    parameters = inspect.signature(find(path)).parameters
    missing = [name for name in names if name not in parameters]
    if missing and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        raise Changed(f"{path} takes no {', '.join(missing)}, but {', '.join(parameters)}")


def calls_only(path: str, adapter: type) -> None:
    """Check that a protocol asks of an adapter only what it has, with arguments that it takes."""
    protocol = find(path)
    for name, method in inspect.getmembers(protocol, inspect.isfunction):
        if name.startswith("_"):
            continue
        if not hasattr(adapter, name):
            raise Changed(f"{path} asks for {name}, which {adapter.__name__} has not")
        asked, given = (len(inspect.signature(each).parameters) for each in (method, getattr(adapter, name)))
        if asked != given:
            raise Changed(f"{path}.{name} takes {inspect.signature(method)}")
