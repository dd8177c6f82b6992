"""Runs of other systems: their directories of weight deltas, read and published as versions of a run."""

from .importer import Imported, Importer

__all__ = ["Imported", "Importer"]
