"""A package in which every name can be imported and nothing works, for what SGLang imports but does not need on a CPU.

environment.sh installs it as `sgl_kernel` and as `torchvision`. A name is a class without contents, so that it can be
a base class, a default, a key or a decorator of something that is never used. To call one fails and names it.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0"
__path__: list[str] = []


class _Nothing(type):
    def __getattr__(cls, name: str) -> Any:
        return _named(f"{cls.__qualname__}.{name}", name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{cls.__qualname__} is not in this environment: it computes on a CPU")


def _named(path: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Nothing(name, (), {"__qualname__": path})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _named(f"{self.__name__}.{name}", name)


class _Submodules(MetaPathFinder, Loader):
    """Any module below this package."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Submodules())


def __getattr__(name: str) -> Any:
    return _named(f"{__name__}.{name}", name)
