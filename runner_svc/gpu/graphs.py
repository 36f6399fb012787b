"""CUDA graphs of steps, one per bucket: a step is padded to the next bucket and its graph is replayed.

For a small model, launching a step's two to three hundred kernels one by one takes the host longer than the GPU takes
to run them. The previous step's result waits for that, which delays first tokens by several milliseconds.
Buckets are numbers of rows for decode steps and numbers of positions for mixed steps. They are closely spaced, because
every matrix product also computes the padding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from runner_svc.interface.device import Launch, Replay
from runner_svc.timings.start_timings import SizeTimings

Prepare = Callable[[int, int], None]
"""Called with a size and a number of rows; sets the input of a step of these rows, padded to the size."""

# Maximum number of rows of a captured batch. Larger steps keep the GPU busy for longer than their launches take.
LARGEST_BUCKET = 512
# Variants within this factor of the fastest are timed again: the difference may be noise.
_CLOSE = 1.05


@dataclass(frozen=True, slots=True)
class Variant:
    """One of several ways to launch the same step."""

    name: str
    launch: Launch


def bucket_sizes(max_rows: int) -> list[int]:
    """Returns the captured numbers of rows: 1, 2, 4, multiples of 8, multiples of 16 from 256 on, and the maximum."""
    largest = min(max_rows, LARGEST_BUCKET)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_BUCKET + 1, 16)]
    return [size for size in sizes if size < largest] + [largest]


def token_sizes(max_tokens: int) -> list[int]:
    """Returns the captured numbers of positions: multiples of 64, of 128 from 512, of 256 from 2048; the maximum."""
    sizes = [*range(64, 512, 64), *range(512, 2048, 128), *range(2048, max_tokens, 256)]
    return [size for size in sizes if size < max_tokens] + [max_tokens]


class StepGraphs:
    """The captured steps of one kind."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes  # ascending
        self.seconds: dict[int, dict[str, float]] = {}
        """Time of each size by variant, where variants were timed."""
        self._replays: dict[int, Replay] = {}

    def capture(
        self,
        variants: Callable[[int], Sequence[Variant]],
        capture: Callable[[Launch], Replay],
        prepare: Prepare,
        seconds: Callable[[Replay], float],
        progress: Callable[[str, float], None],
    ) -> None:
        """Captures every size, the largest first, so that smaller graphs share its memory.

        Keeps the fastest of `variants(size)` at a full step. `capture` makes a graph of a launch; `seconds` times a
        replay.
        """
        progress("capturing CUDA graphs", 0.0)
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

    def capture_known(
        self,
        known: SizeTimings,
        variants: Callable[[int], Sequence[Variant]],
        capture: Callable[[Launch], Replay],
        prepare: Prepare,
        progress: Callable[[str, float], None],
    ) -> None:
        """Captures the fastest variant of the sizes that `known` kept, as `capture` and `drop_slow` would choose."""
        self.seconds, self.sizes = known.seconds, known.sizes
        progress("capturing CUDA graphs", 0.0)
        for done, size in enumerate(reversed(self.sizes), 1):
            prepare(size, size)
            launches = {variant.name: variant.launch for variant in variants(size)}
            self._replays[size] = capture(launches[self.variant(size)])
            progress("capturing CUDA graphs", done / len(self.sizes))

    def variant(self, size: int) -> str:
        """Returns the name of the fastest variant at this size."""
        times = self.seconds[size]
        return min(times, key=times.__getitem__)

    def capture_small(
        self,
        run: Callable[[int], None],
        capture: Callable[[Launch], Replay],
        is_worth_it: Callable[[Launch, Replay], bool],
        progress: Callable[[str, float], None],
    ) -> None:
        """Captures `run(size)` for ascending sizes until `is_worth_it` returns False."""
        progress("capturing CUDA graphs of mixed steps", 0.0)
        for done, size in enumerate(self.sizes, 1):
            launch = partial(run, size)
            replay = capture(launch)
            if not is_worth_it(launch, replay):
                progress("capturing CUDA graphs of mixed steps", 1.0)
                break
            self._replays[size] = replay
            progress("capturing CUDA graphs of mixed steps", done / len(self.sizes))
        self.sizes = sorted(self._replays)

    def drop_slow(self, prepare: Prepare, seconds: Callable[[Replay], float]) -> None:
        """Drops sizes whose full step is slower than the same step padded to the next larger size.

        cuBLAS uses different kernels for one row and for eight, and the kernel for one row is not always faster.
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
        """Returns the bucket for a step of this size, or None if no graph is large enough."""
        place = bisect_left(self.sizes, size)
        return self.sizes[place] if place < len(self.sizes) else None

    def replay(self, size: int) -> None:
        """Launches the graph of a bucket on the current stream."""
        self._replays[size]()
