"""The CUDA graphs of a backend's steps, captured at start-up: which there are, and which variant each takes.

Variants of a decode step are timed as it will run: with as many rows as it is for, each of which attends to the keys
of a short prompt in blocks of its own. What a kernel costs depends on its neighbours, and on what they leave of the
memory's bandwidth, so that neither a product alone nor a step without attention tells.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from runner_svc.decoder.fusions import Fusions
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.fusion_choice import FusionChoice, timed_positions
from runner_svc.gpu.graphs import StepGraphs, bucket_sizes, token_sizes
from runner_svc.gpu.profiling_batch import TIMED_CONTEXT, decode_batch, largest_batch
from runner_svc.gpu.step_buffers import PackedStep
from runner_svc.gpu.steps import CudaSteps
from runner_svc.interface.device import Device
from runner_svc.interface.progress import Progress

# Of the mixed steps that are timed.
_POSITIONS_A_ROW = 16


def capture_decode_steps(
    steps: CudaSteps, slots: DeviceSlots, device: Device, context_length: int, progress: Progress
) -> StepGraphs:
    """Graphs of whole decode passes, by rows. Writes into any block of the cache and leaves the slots empty."""
    graphs = StepGraphs(bucket_sizes(steps.num_slots))
    prepare = partial(prepare_decode, steps, context_length)
    _fill(slots, steps, TIMED_CONTEXT)
    variants = partial(steps.decode_variants, device.current_stream)
    graphs.capture(variants, device.capture, prepare, device.seconds, progress)
    graphs.drop_slow(prepare, device.seconds)
    slots.words.zero_()
    steps.packed.zero_()
    return graphs


def _fill(slots: DeviceSlots, steps: CudaSteps, num_positions: int) -> None:
    """Gives each slot blocks and tokens: were all rows alike, products would take less power, and other ones win."""
    slots.spread(num_positions, steps.cache)
    slots.tokens.random_(steps.logits.shape[1])


def prepare_mixed(steps: CudaSteps, context_length: int, bucket: int) -> None:
    """Puts the input of a mixed step in place that fills `bucket` positions: rows that decode, and chunks."""
    step = PackedStep(steps.layout, np.zeros(steps.layout.words, np.int32))
    rows = min(steps.num_slots, -(-bucket // _POSITIONS_A_ROW))
    steps.pack_mixed(step, largest_batch(rows, bucket, context_length), bucket)
    steps.packed.copy_(torch.from_numpy(step.words))


def prepare_decode(steps: CudaSteps, context_length: int, bucket: int, rows: int) -> None:
    """Puts the input of a decode step of so many rows in place, padded to `bucket` rows."""
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
) -> StepGraphs:
    """Graphs of the layers of mixed steps, by positions, up to where launching them takes little of the GPU's time.

    Finds out first what products do beside multiplying in mixed steps, and compiles that for steps of all sizes.
    """

    def run(bucket: int, fusions: Fusions | None = None) -> None:
        steps.forward_mixed(device.current_stream(), bucket, fusions)

    progress("timing mixed steps", 0.0)
    timed: dict[int, dict[Fusions, float]] = {}
    for size in timed_positions(max_step_tokens):
        _fill(slots, steps, size)
        prepare_mixed(steps, context_length, size)
        replays = {fusions: device.capture(partial(run, size, fusions)) for fusions in steps.mixed_fusions()}
        for _ in range(2):  # of which the second round counts: the first takes the GPU to its power limit
            timed[size] = {fusions: device.seconds(replay) for fusions, replay in replays.items()}
    steps.fusions = FusionChoice(timed)
    steps.compile_products(max_step_tokens)
    slots.words.zero_()
    steps.packed.zero_()
    graphs = StepGraphs(token_sizes(max_step_tokens))
    graphs.capture_small(run, device.capture, device.is_late, progress)
    return graphs
