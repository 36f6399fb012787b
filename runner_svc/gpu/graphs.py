"""CUDA graphs of steps, one for each bucket: a step is padded to the next bucket and one graph is replayed.

Launching the two to three hundred kernels of a step one by one takes the host longer than a small model takes the GPU,
and until it is done the result of the step before waits: first tokens come late by several milliseconds.
Buckets of decode steps are numbers of rows, those of mixed steps numbers of positions. They lie close together, as
padding costs its work in every matrix product.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from runner_svc.interface.device import Launch, Replay

Prepare = Callable[[int, int], None]
"""Puts the input of a step of so many rows in place, for the size and the rows."""

# Most rows of a captured batch; larger steps are launched kernel by kernel, which then hides behind the GPU's work.
LARGEST_BUCKET = 512
# Variants that took at most this many times as long as the fastest are timed again: that much may be noise.
_CLOSE = 1.05


@dataclass(frozen=True, slots=True)
class Variant:
    """One of several ways to launch the same step."""

    name: str
    launch: Launch


def bucket_sizes(max_rows: int) -> list[int]:
    """Ascending rows of the captured batches: 1, 2, 4, then every 8th, 16th from 256 on; the last is the most rows."""
    largest = min(max_rows, LARGEST_BUCKET)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_BUCKET + 1, 16)]
    return [size for size in sizes if size < largest] + [largest]


def token_sizes(max_tokens: int) -> list[int]:
    """Ascending positions of captured mixed steps: every 64th, 128th from 512 on, 256th from 2048 on; then all."""
    sizes = [*range(64, 512, 64), *range(512, 2048, 128), *range(2048, max_tokens, 256)]
    return [size for size in sizes if size < max_tokens] + [max_tokens]


class StepGraphs:
    """The captured steps of one kind."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes  # ascending
        self.seconds: dict[int, dict[str, float]] = {}
        """What each size took, by variant, where there was a choice."""
        self._replays: dict[int, Replay] = {}

    def capture(
        self,
        variants: Callable[[int], Sequence[Variant]],
        capture: Callable[[Launch], Replay],
        prepare: Prepare,
        seconds: Callable[[Replay], float],
        progress: Callable[[str, float], None],
    ) -> None:
        """Captures every size, the largest first: smaller graphs then share its memory.

        Of `variants(size)` the fastest is kept, at a full step; `capture` makes a graph of what one launches, `seconds`
        measures a replay.
        """
        for done, size in enumerate(reversed(self.sizes), 1):
            prepare(size, size)
            replays = {variant.name: capture(variant.launch) for variant in variants(size)}
            times = {name: seconds(replay) for name, replay in replays.items()}
            close = [name for name, taken in times.items() if taken <= _CLOSE * min(times.values())]
            if len(close) > 1:
                times |= {name: min(times[name], seconds(replays[name])) for name in close}
            self.seconds[size] = times
            self._replays[size] = replays[self.variant(size)]
            progress("capturing CUDA graphs", done / len(self.sizes))

    def variant(self, size: int) -> str:
        """Name of the variant that was the fastest at this size."""
        times = self.seconds[size]
        return min(times, key=times.__getitem__)

    def capture_small(
        self,
        run: Callable[[int], None],
        capture: Callable[[Launch], Replay],
        is_worth_it: Callable[[Launch, Replay], bool],
        progress: Callable[[str, float], None],
    ) -> None:
        """Captures `run(size)` of ascending sizes, up to the first where `is_worth_it` finds no gain."""
        for done, size in enumerate(self.sizes, 1):
            launch = partial(run, size)
            replay = capture(launch)
            if not is_worth_it(launch, replay):
                break
            self._replays[size] = replay
            progress("capturing CUDA graphs of mixed steps", done / len(self.sizes))
        self.sizes = sorted(self._replays)

    def drop_slow(self, prepare: Prepare, seconds: Callable[[Replay], float]) -> None:
        """Leaves out sizes whose full step the next larger one, padded, computes faster.

        cuBLAS has other kernels for one row than for eight, and they are not always the faster ones.
        """
        above: int | None = None  # the next larger size that is kept
        for size in reversed(self.sizes):
            if above is not None:
                prepare(above, size)
                if seconds(self._replays[above]) < min(self.seconds[size].values()):
                    del self._replays[size]
                    continue
            above = size
        self.sizes = sorted(self._replays)

    def bucket(self, size: int) -> int | None:
        """The size that a step of this size is padded to; None when no graph is large enough."""
        place = bisect_left(self.sizes, size)
        return self.sizes[place] if place < len(self.sizes) else None

    def replay(self, size: int) -> None:
        """Launches the graph of a bucket on the current stream."""
        self._replays[size]()
