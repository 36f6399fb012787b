"""Captures the CUDA graphs of a backend's steps at start-up and chooses the variant of each.

Variants of a decode step are timed under real conditions: with a full bucket of rows, each attending to the keys of a
short prompt in its own blocks. A kernel's time depends on its neighbours and on the memory bandwidth that they leave,
so timing a product alone or a step without attention would mislead. Times of an earlier start are used where there are
any (`runner_svc.timings`): then only what they chose is captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import structlog
import torch

from runner_svc.decoder.fusions import Fusions
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.fusion_choice import FusionChoice, timed_positions
from runner_svc.gpu.graphs import StepGraphs, bucket_sizes, token_sizes
from runner_svc.gpu.profiling_batch import TIMED_CONTEXT, decode_batch, largest_batch
from runner_svc.gpu.step_buffers import PackedStep
from runner_svc.gpu.steps import CudaSteps
from runner_svc.interface.device import Device, Launch, Replay
from runner_svc.interface.progress import Progress
from runner_svc.timings.start_timings import SizeTimings, StartTimings

log = structlog.get_logger()

# Positions per row of the mixed steps that are timed.
_POSITIONS_A_ROW = 16


class OtherVariants(ValueError):
    """Times are missing, or of other variants of steps than this decoder has."""


def capture_decode_steps(
    steps: CudaSteps,
    slots: DeviceSlots,
    device: Device,
    context_length: int,
    progress: Progress,
    timings: StartTimings,
    *,
    measures: bool = True,
) -> StepGraphs:
    """Captures whole decode passes, by number of rows. May write to any cache block; leaves the slots empty.

    Uses the times in `timings`, or adds those that it measures. Raises OtherVariants if it may not measure but would.
    """
    graphs = StepGraphs(bucket_sizes(steps.num_slots))
    prepare = partial(prepare_decode, steps, context_length)
    _fill(slots, steps, TIMED_CONTEXT)
    variants = partial(steps.decode_variants, device.current_stream)
    names = {size: [variant.name for variant in variants(size)] for size in graphs.sizes}
    known = _fitting(timings.decode, names, graphs.sizes, measures)
    if known is not None:
        graphs.capture_known(known, variants, device.capture, prepare, progress)
    else:
        graphs.capture(variants, device.capture, prepare, device.seconds, progress)
        graphs.drop_slow(prepare, device.seconds)
        timings.decode = SizeTimings(graphs.seconds, graphs.sizes)
    slots.words.zero_()
    steps.packed.zero_()
    return graphs


def _fitting(
    timed: SizeTimings | None, names: Mapping[int, Iterable[str]], sizes: Sequence[int], measures: bool
) -> SizeTimings | None:
    """Returns times if they are of these variants, otherwise None. Raises OtherVariants if nothing is measured then."""
    if timed is not None and timed.fits(names, sizes):
        return timed
    if not measures:
        raise OtherVariants("there are no times of this decoder's variants of steps, and none may be taken now")
    return None


def _fill(slots: DeviceSlots, steps: CudaSteps, num_positions: int) -> None:
    """Gives each slot its own blocks and random tokens.

    With identical rows the GPU would draw less power, and the timing would favour other variants of the products.
    """
    slots.spread(num_positions, steps.cache)
    slots.tokens.random_(steps.logits.shape[1])
    slots.counters.fill_(1)  # of rows of mixed steps that begin at 0


def prepare_mixed(steps: CudaSteps, context_length: int, bucket: int) -> None:
    """Sets the input of a mixed step, of decode rows and chunks, that fills `bucket` positions."""
    step = PackedStep(steps.layout, np.zeros(steps.layout.words, np.int32))
    rows = min(steps.num_slots, -(-bucket // _POSITIONS_A_ROW))
    steps.pack_mixed(step, largest_batch(rows, bucket, context_length), bucket)
    steps.packed.copy_(torch.from_numpy(step.words))


def prepare_decode(steps: CudaSteps, context_length: int, bucket: int, rows: int) -> None:
    """Sets the input of a decode step of `rows` rows, padded to `bucket` rows."""
    step = PackedStep(steps.layout, np.zeros(steps.layout.words, np.int32))
    steps.pack_decode(step, decode_batch(context_length, rows), bucket)
    steps.packed.copy_(torch.from_numpy(step.words))


def capture_mixed_steps(
    steps: CudaSteps,
    slots: DeviceSlots,
    device: Device,
    context_length: int,
    max_step_tokens: int,
    progress: Progress,
    timings: StartTimings,
    *,
    measures: bool = True,
) -> StepGraphs:
    """Captures the layers of mixed steps, by positions, up to the size from which a graph saves little GPU time.

    First times the fusions of products in mixed steps, and compiles the chosen ones for steps of all sizes. Uses the
    times in `timings`, or adds those that it measures. Raises OtherVariants if it may not measure but would.
    """

    def run(bucket: int) -> None:
        steps.forward_mixed(device.current_stream(), bucket)

    sizes = timed_positions(max_step_tokens, steps.has_experts)
    names = {size: {each.name: each for each in steps.mixed_fusions(size)} for size in sizes}
    graphs = StepGraphs(token_sizes(max_step_tokens))
    known = _fitting(timings.mixed, names, graphs.sizes, measures)
    timed = (
        known.seconds if known is not None else _timed_fusions(steps, slots, device, context_length, names, progress)
    )
    steps.fusions = FusionChoice(
        {size: {names[size][name]: taken for name, taken in times.items()} for size, times in timed.items()}
    )
    log.info("chose the products of steps with prompts", **{f"from_{size}": steps.fusions(size).name for size in timed})
    progress("compiling products", 0.0)
    steps.compile_products(max_step_tokens)
    progress("compiling products", 1.0)
    slots.words.zero_()
    steps.packed.zero_()
    # Launches that allocate, as those of FP8, then find memory for all sizes: cached memory is not freed in a capture.
    run(graphs.sizes[-1])
    if known is not None:
        graphs.sizes = list(known.sizes)
        graphs.capture_small(run, device.capture, lambda launch, replay: True, progress)
    else:

        def is_worth_it(launch: Launch, replay: Replay) -> bool:
            return device.has_room() and device.is_late(launch, replay)

        graphs.capture_small(run, device.capture, is_worth_it, progress)
        timings.mixed = SizeTimings(timed, list(graphs.sizes))
    return graphs


def _timed_fusions(
    steps: CudaSteps,
    slots: DeviceSlots,
    device: Device,
    context_length: int,
    fusions: Mapping[int, Mapping[str, Fusions]],
    progress: Progress,
) -> dict[int, dict[str, float]]:
    """Returns the times of mixed steps, by positions and name of the fusions."""

    def run(size: int, chosen: Fusions) -> None:
        steps.forward_mixed(device.current_stream(), size, chosen)

    progress("timing mixed steps", 0.0)
    timed: dict[int, dict[str, float]] = {}
    for size, named in fusions.items():
        _fill(slots, steps, size)
        prepare_mixed(steps, context_length, size)
        replays = {name: device.capture(partial(run, size, chosen)) for name, chosen in named.items()}
        for _ in range(2):  # only the second round counts: the first takes the GPU to its power limit
            timed[size] = {name: device.seconds(replay) for name, replay in replays.items()}
        progress("timing mixed steps", len(timed) / len(fusions))
    return timed
