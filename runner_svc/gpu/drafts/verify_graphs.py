"""CUDA graphs of verifying passes, by rows and places a row: some captured at start-up, others once used often.

A pass without a graph is padded to the next one with a graph: a capture holds up all sequences for some 20 ms.

Of few places, the fastest variant of a decode pass with as many positions is taken: the products, which the variants
differ in, are the same. From some 200 places on, the products take the card to its power limit, where others are the
fastest: so the variants are timed, in loops and in turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from runner_svc.gpu.drafts.drafted_steps import DraftedSteps, VerifyShape
from runner_svc.gpu.graphs import LARGEST_BUCKET, StepGraphs, Variant, bucket_sizes
from runner_svc.interface.device import Device, Replay
from runner_svc.interface.products.skinny_launchers import MAX_ROWS
from runner_svc.interface.progress import Progress
from runner_svc.timings.start_timings import SizeTimings, StartTimings

CAPTURED_AT = 64
"""A pass is captured at this use of its shape."""
TIMED_SIZES = (192, 256, 320, 384)
"""Places of the passes whose variants are timed; others have the choice of the next one. Beyond, it is that of mixed
passes."""
_ROUNDS = 3
ROWS_AT_START = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, LARGEST_BUCKET + 1, 32))
"""Rows of the passes that are captured at start-up, besides the most for each number of places."""


class VerifyGraphs:
    """Chooses the shape of each verifying pass, and launches it."""

    def __init__(self, steps: DraftedSteps, device: Device, decode: StepGraphs) -> None:
        """`decode`: the captured decode passes."""
        self._steps = steps
        self._device = device
        self._decode = decode
        self._strides = steps.strides
        self._most = {stride: min(steps.num_slots, steps.most_sampled // stride) for stride in steps.strides}
        self._sizes = bucket_sizes(steps.num_slots)
        self._rows_at_start = {
            stride: [*(rows for rows in ROWS_AT_START if rows < most), most] for stride, most in self._most.items()
        }
        self._timed: dict[int, dict[str, float]] = {}
        self._replays: dict[VerifyShape, Replay] = {}
        self._uses: Counter[VerifyShape] = Counter()

    @property
    def captured(self) -> Sequence[VerifyShape]:
        """The shapes with a graph."""
        return list(self._replays)

    def shape(self, num_rows: int, most_drafts: int) -> VerifyShape:
        """Returns the shape for this many rows, the longest with this many drafts; as many drafts as have logits.

        Counts as a use of it.
        """
        wanted = next((stride for stride in self._strides if stride > most_drafts), self._strides[-1])
        stride = max(stride for stride in self._strides if stride <= wanted and num_rows <= self._most[stride])
        size = next((size for size in self._sizes if size >= num_rows), num_rows)
        exact = VerifyShape(min(size, self._most[stride]), stride)
        if exact in self._replays:
            return exact
        self._uses[exact] += 1
        if self._uses[exact] >= CAPTURED_AT:
            return exact
        padded = (VerifyShape(rows, stride) for rows in self._rows_at_start[stride] if rows >= exact.rows)
        return next((shape for shape in padded if shape in self._replays), exact)

    def time(self, prepare: Callable[[VerifyShape], None], progress: Progress, timings: StartTimings) -> None:
        """Times the variants of the passes of `TIMED_SIZES`, or uses the times in `timings`.

        `prepare` sets the input of a step of a shape whose rows have random tokens and some context.
        """
        shapes: dict[int, VerifyShape] = {}
        for shape in sorted(self._shapes_at_start, key=lambda shape: shape.num_tokens):
            size = next((size for size in TIMED_SIZES if size >= shape.num_tokens > MAX_ROWS), None)
            if size is not None and shape.stride > 1:
                shapes[size] = shape
        stream = self._device.current_stream
        ways = {size: self._steps.given_variants(stream, shape) for size, shape in shapes.items()}
        names = {size: [way.name for way in each] for size, each in ways.items()}
        if timings.verify is not None and timings.verify.fits(names, shapes):
            self._timed = timings.verify.seconds
            return
        for done, (size, shape) in enumerate(shapes.items()):
            progress("timing verifying steps", done / len(shapes))
            prepare(shape)
            replays = {way.name: self._device.capture(way.launch) for way in ways[size]}
            rounds = [{name: self._device.seconds(replay) for name, replay in replays.items()} for _ in range(_ROUNDS)]
            # The first takes the GPU to its power limit.
            self._timed[size] = {name: sum(each[name] for each in rounds[1:]) / (_ROUNDS - 1) for name in replays}
        progress("timing verifying steps", 1.0)
        timings.verify = SizeTimings(self._timed, list(shapes))

    def capture(self, prepare: Callable[[VerifyShape], None], progress: Progress) -> None:
        """Captures the passes of `ROWS_AT_START`, the largest first, so that the others share its memory.

        `prepare` sets the input of a step of a shape.
        """
        shapes = sorted(self._shapes_at_start, key=lambda shape: (-shape.num_tokens, shape.stride))
        progress("capturing CUDA graphs of verifying steps", 0.0)
        for done, shape in enumerate(shapes, 1):
            prepare(shape)
            self._replays[shape] = self._device.capture(self.variant(shape).launch)
            progress("capturing CUDA graphs of verifying steps", done / len(shapes))

    @property
    def _shapes_at_start(self) -> list[VerifyShape]:
        return [VerifyShape(rows, stride) for stride in self._strides for rows in self._rows_at_start[stride] if rows]

    def launch(self, shape: VerifyShape) -> None:
        """Launches the pass that the steps' packed input describes, on the current stream."""
        replay = self._replays.get(shape)
        if replay is not None:
            replay()
            return
        launch = self.variant(shape).launch
        if self._uses[shape] >= CAPTURED_AT:
            launch = self._replays[shape] = self._device.capture(launch)
        launch()

    def variant(self, shape: VerifyShape) -> Variant:
        """Returns the way that is taken to launch a pass."""
        variants = {each.name: each for each in self._steps.verify_variants(self._device.current_stream, shape)}
        timed = next((size for size in self._timed if size >= shape.num_tokens > MAX_ROWS), None)
        size = self._decode.bucket(shape.num_tokens)
        if size is None and shape.num_tokens <= MAX_ROWS:
            size = self._decode.sizes[-1]
        if timed is not None:
            fastest = min(self._timed[timed], key=self._timed[timed].__getitem__)
        else:
            fastest = self._decode.variant(size) if size is not None else self._steps.fusions(shape.num_tokens).name
        return variants.get(fastest) or next(iter(variants.values()))
