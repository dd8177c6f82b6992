from __future__ import annotations

from .core import errors as _errors
from .core.errors import *  # noqa: F403
from .core.errors import __all__ as __all__

__doc__ = _errors.__doc__
