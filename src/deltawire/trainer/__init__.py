"""The trainer side: capture, encode in the background, commit."""

from .publisher import Publisher, PublishHandle
from .writer import Published

__all__ = ["PublishHandle", "Published", "Publisher"]
