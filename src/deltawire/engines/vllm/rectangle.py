"""Rectangles of tensors, as the processes of a server name them to each other."""

from __future__ import annotations

import msgspec

from ...core.change import Region


class Rectangle(msgspec.Struct, frozen=True, array_like=True):
    """Some rows and columns of a tensor, on the wire between processes."""

    tensor: str
    row: int
    rows: int
    column: int
    columns: int

    def meet(self, other: Rectangle) -> Rectangle | None:
        """What both cover."""
        if self.tensor != other.tensor:
            return None
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Rectangle(self.tensor, row, rows, column, columns) if rows > 0 and columns > 0 else None

    def within(self, other: Rectangle) -> tuple[slice, slice]:
        """Where this lies in a rectangle around it."""
        row, column = self.row - other.row, self.column - other.column
        return slice(row, row + self.rows), slice(column, column + self.columns)


def rectangle(region: Region) -> Rectangle:
    """A region without its tensor's dtype and shape, which both sides know."""
    return Rectangle(region.tensor.name, region.row, region.rows, region.column, region.columns)
