"""Where slices of a tensor lie in a file: in runs of adjacent elements, all of one length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Runs:
    """The elements of slices of a tensor of `whole` shape, in the order of the result."""

    whole: tuple[int, ...]
    starts: tuple[int, ...]
    """Of the slice of each dimension."""
    shape: tuple[int, ...]
    """Of the result."""
    depth: int
    """Dimensions that number the runs; a run is the rest, beginning with a slice of the last sliced one."""

    @classmethod
    def of(cls, whole: Sequence[int], places: Sequence[slice]) -> Runs:
        """Returns the runs of slices of the first dimensions; a slice without ends is all of one."""
        bounds = [
            each.indices(size)[:2] for size, each in zip(whole, (*places, *[slice(None)] * len(whole)), strict=False)
        ]
        sliced = [index for index, size in enumerate(whole) if bounds[index] != (0, size)]
        starts, shape = tuple(begin for begin, _ in bounds), tuple(end - begin for begin, end in bounds)
        return cls(tuple(whole), starts, shape, sliced[-1] if sliced else 0)

    def places(self, begin: int, end: int, itemsize: int) -> Iterator[tuple[int, int, int]]:
        """Yields the parts of the bytes from `begin` to `end` of the result: both ends, and the place in the tensor."""
        length = math.prod(self.shape[self.depth :]) * itemsize
        while begin < end:
            run, inside = divmod(begin, length)
            last = min(begin + length - inside, end)
            yield begin, last, self._start(run) * itemsize + inside
            begin = last

    def _start(self, run: int) -> int:
        """Returns the tensor's element that a run begins with."""
        place, stride = 0, 1
        for index in reversed(range(len(self.whole))):
            own = self.starts[index]
            if index < self.depth:
                run, step = divmod(run, self.shape[index])
                own += step
            place, stride = place + own * stride, stride * self.whole[index]
        return place
