"""Which rows and columns of a matrix a rank holds; needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """Adjacent rows and columns of a matrix, each with both ends; None: all."""

    rows: slice | None = None
    columns: slice | None = None

    def outward(self, units: tuple[int, int], size: tuple[int, int]) -> Region:
        """Returns the smallest region around it that begins at multiples of `units` and ends there, or at the end."""
        return Region(_outward(self.rows, units[0], size[0]), _outward(self.columns, units[1], size[1]))

    def within(self, outer: Region) -> Region:
        """Returns the same region as seen in a matrix that is `outer` alone, which contains it."""
        return Region(_moved(self.rows, outer.rows), _moved(self.columns, outer.columns))


ALL = Region()


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """Rows beneath each other, as those of queries, keys and values in a merged product, and their columns."""

    rows: tuple[slice, ...] | None = None
    """None: all."""
    columns: slice | None = None
    """None: all."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """One for each of `rows`."""
        return tuple(Region(rows, self.columns) for rows in (self.rows or (None,)))


WHOLE_MATRIX = MatrixPart()


def counted(places: slice | None, unit: int) -> slice | None:
    """Returns the places as numbers of units: those that contain some of them."""
    return None if places is None else slice(places.start // unit, -(-places.stop // unit))


def common_unit(unit: int, places: slice, whole: int) -> int:
    """Returns the largest divisor of `unit` at whose multiples the places begin and end; the end of all is free."""
    return math.gcd(unit, places.start, 0 if places.stop == whole else places.stop)


def _outward(places: slice | None, unit: int, whole: int) -> slice | None:
    if places is None:
        return None
    return slice(places.start // unit * unit, min(-(-places.stop // unit) * unit, whole))


def _moved(places: slice | None, outer: slice | None) -> slice | None:
    if places is None or outer is None:
        return places
    return slice(places.start - outer.start, places.stop - outer.start)
