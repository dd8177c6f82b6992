from __future__ import annotations

from .core import errors as _errors
from .core.errors import *  # noqa: F403

__doc__ = _errors.__doc__
