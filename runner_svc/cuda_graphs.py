"""CUDA graphs of decode steps, one for each bucket: a batch is padded to the next bucket and one graph is replayed.

Launching the two to three hundred kernels of a step one by one takes the host longer than a small model takes the GPU.
Sizes lie close together, as a padding row costs a row's work in every matrix product.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

Launch = Callable[[], None]
Replay = Callable[[], None]

# Most rows of a captured batch; larger steps are launched kernel by kernel, which then hides behind the GPU's work.
LARGEST_BUCKET = 512


def bucket_sizes(max_rows: int) -> list[int]:
    """Ascending rows of the captured batches: 1, 2, 4, then every 8th, 16th from 256 on; the last is the most rows."""
    largest = min(max_rows, LARGEST_BUCKET)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_BUCKET + 1, 16)]
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraphs:
    """The captured steps."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes  # ascending
        self._replays: dict[int, Replay] = {}

    def capture(
        self,
        passes: Callable[[int], Sequence[Launch]],
        capture: Callable[[Launch], Replay],
        seconds: Callable[[Replay], float],
        progress: Callable[[str, float], None],
    ) -> None:
        """Captures every size, the largest first: smaller graphs then share its memory.

        `passes(size)` are ways to launch the step, of which the fastest is kept; `capture` makes a graph of what one
        launches, `seconds` measures a replay.
        """
        for done, size in enumerate(reversed(self.sizes), 1):
            replays = [capture(launch) for launch in passes(size)]
            self._replays[size] = replays[0] if len(replays) == 1 else min(replays, key=seconds)
            progress("capturing CUDA graphs", done / len(self.sizes))

    def drop_slow(self, seconds: Callable[[Replay], float]) -> None:
        """Leaves out sizes that take longer than the next one; `seconds` measures a replay.

        cuBLAS has other kernels for one row than for eight, and they are not always the faster ones.
        """
        fastest = float("inf")
        for size in reversed(self.sizes):
            taken = seconds(self._replays[size])
            if taken > fastest:
                del self._replays[size]
            fastest = min(fastest, taken)
        self.sizes = sorted(self._replays)

    def bucket(self, num_rows: int) -> int | None:
        """The size that a batch of so many rows is padded to; None when no graph is large enough."""
        place = bisect_left(self.sizes, num_rows)
        return self.sizes[place] if place < len(self.sizes) else None

    def replay(self, size: int) -> None:
        """Launches the graph of a bucket on the current stream."""
        self._replays[size]()
