"""Times the ways to launch a step that verifies: `python -m bench.steps.verify_ways --shapes 64x4 64x6`.

`ROWSxPLACES`: rows, and positions a row, the last known token included. Every way is a captured graph; they are
replayed in turns, each for some `--round-s` seconds, by default so long that the card is at its power limit, as it is
while it serves. Sequences have some 512 tokens, which repeat themselves, so that n-grams draft at every place; nothing
is sampled. `*` marks the way that a runner takes. `--profile` prints the fastest way's times by kernel.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common.gpu_timing import card, median_microseconds
from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from bench.common.random_model import ALL_SHAPES
from bench.steps.backend import DTYPE, backend_of, no_progress
from bench.steps.profile import PROFILED, print_profile, profiled
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.drafted_steps import VerifyShape
from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend
from runner_svc.gpu.profiling_batch import TIMED_CONTEXT, batch_of
from runner_svc.gpu.step_buffers import PackedStep
from runner_svc.interface.device import Replay
from runner_svc.model.checkpoint.random_weights import random_weights
from runner_svc.model.config import ModelConfig

ROUNDS = 3
WARM = 30  # replays before the profiled ones
PERIOD = 61  # tokens after which a sequence repeats itself


def prepare(backend: DraftingCudaBackend, shape: VerifyShape) -> None:
    """Sets the input of a verifying step of sequences with TIMED_CONTEXT tokens, whose n-grams all match."""
    steps, slots = backend._steps, backend._slots
    known = min(TIMED_CONTEXT, slots.tokens.shape[1] - shape.stride)
    blocks = -(-(known + shape.stride) // steps.cache.block_size)
    slots.spread(known + shape.stride, steps.cache)
    slots.num_blocks[: shape.rows] = blocks
    texts = torch.empty_like(slots.tokens[:, :PERIOD]).random_(steps.logits.shape[1])
    slots.tokens.copy_(texts.repeat(1, -(-slots.tokens.shape[1] // PERIOD))[:, : slots.tokens.shape[1]])
    for layer in steps.cache.data:
        layer.normal_()
    slots.counters.fill_(known)
    step = PackedStep(steps.layout, np.zeros(steps.layout.words, np.int32))
    batch = batch_of(np.full(shape.rows, -1, np.int32), np.full(shape.rows, shape.stride, np.int32))
    batch.lowest = batch.highest = np.full(shape.rows, known - 1, np.int32)
    steps.pack_verify(step, batch, shape)
    steps.packed.copy_(torch.from_numpy(step.words))


def milliseconds(replays: dict[str, Replay], round_s: float) -> dict[str, list[float]]:
    """Returns the milliseconds of a replay in each round of `round_s` seconds, by name."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    single = {name: median_microseconds(replay, repeats=3, warm_up=1) for name, replay in replays.items()}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            repeats = math.ceil(round_s * 1e6 / single[name])
            for _ in range(repeats // 3):
                replay()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeats):
                replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / repeats)
    return times


def measure(
    backend: DraftingCudaBackend, shapes: Sequence[VerifyShape], round_s: float, profile: bool
) -> list[dict[str, Any]]:
    """Times all ways of each shape; prints and returns them. `profile`: see `--profile`."""
    steps, device, records = backend._steps, backend._device, []
    for shape in shapes:
        prepare(backend, shape)
        taken = backend.verify_graphs.variant(shape).name
        ways = steps.verify_variants(device.current_stream, shape)
        replays = {way.name: device.capture(way.launch) for way in ways}
        found = milliseconds(replays, round_s)
        print(f"{shape.rows} rows x {shape.stride}:", flush=True)
        for name, times in sorted(found.items(), key=lambda item: statistics.median(item[1])):
            each = " ".join(f"{time:.3f}" for time in times)
            print(f"  {statistics.median(times):7.3f} ms ({each}) {name}{'*' * (name == taken)}", flush=True)
        if profile:
            fastest = min(found, key=lambda name: statistics.median(found[name]))
            print_profile(profiled(_replayed(replays[fastest]), WARM))
        records.append({"rows": shape.rows, "stride": shape.stride, "taken": taken, "milliseconds": found})
    return records


def _replayed(replay: Replay) -> Iterator[None]:
    for _ in range(WARM + PROFILED):
        replay()
        yield
    torch.cuda.synchronize()


def drafting(shape: str, rows: int, most: int) -> DraftingCudaBackend:
    """Returns a backend of the shape with random weights whose n-grams draft."""
    config = ModelConfig.from_hugging_face(ALL_SHAPES[shape])
    with torch.no_grad():
        weights = random_weights(config, DTYPE, torch.device("cuda"), no_progress)
        made = partial(DraftingCudaBackend, drafts=DraftOptions("ngram", most))
        backend = backend_of(shape, weights, largest=rows, make=made)
    assert isinstance(backend, DraftingCudaBackend)
    return backend


def shape_of(text: str) -> VerifyShape:
    """Reads "64x4"."""
    rows, _, stride = text.partition("x")
    return VerifyShape(int(rows), int(stride))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=[shape_of("64x4"), shape_of("64x6")])
    parser.add_argument("--round-s", type=float, default=0.3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    shapes: list[VerifyShape] = arguments.shapes
    backend = drafting(arguments.shape, max(shape.rows for shape in shapes), max(shape.stride for shape in shapes) - 1)
    print(f"{arguments.shape}, {card()}")
    with torch.inference_mode(), backend._device.stream():
        records = measure(backend, shapes, arguments.round_s, arguments.profile)
    if arguments.json:
        source = provenance("bench.steps.verify_ways", ["torch", "cupy"], card())
        write_results(arguments.json, source, {"shape": arguments.shape, "shapes": records})


if __name__ == "__main__":
    main()
