"""Prints a step's time by kernel, from torch's profiler: `python -m bench.steps.profile qwen3-0.6b 64`.

This example profiles a decode step of 64 rows. With `--chunk 992` it is a mixed step: `--decoding` rows and a chunk of
992 positions. `--format int4` quantizes the weights. Prints each kernel's launches per step, its median time and the
median gap before it. A kernel that starts while its predecessor ends (programmatic launch) has a negative gap and waits
within its own time.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from torch.autograd import DeviceType

from bench.common.on_gpu import require_gpu
from bench.common.random_model import ALL_SHAPES
from bench.steps.backend import DTYPE, backend_of, no_progress
from bench.steps.decoding import Decoding
from bench.steps.formats import format_of, graphs_of
from bench.steps.mixed import DECODING, Mixing
from runner_svc.execution.runner import Runner
from runner_svc.model.checkpoint.random_weights import random_weights
from runner_svc.model.config import ModelConfig

PROFILED = 20  # steps
# Steps before the profiled ones, which are then in the middle of a generation.
_DECODE_STEPS, _MIXED_STEPS = 100, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(ALL_SHAPES))
    parser.add_argument("batches", type=int, nargs="*", help="rows of decode steps")
    parser.add_argument("--chunk", type=int, nargs="*", default=[], help="positions of the chunks in mixed steps")
    parser.add_argument("--decoding", type=int, default=DECODING, help="decoding rows of mixed steps")
    parser.add_argument("--format", type=format_of, default="none", help="of weights and KV: fp8, int4, fp8+kv")
    arguments = parser.parse_args()
    require_gpu()
    config, chosen = ModelConfig.from_hugging_face(ALL_SHAPES[arguments.shape]), arguments.format
    with torch.no_grad():
        weights = random_weights(config, DTYPE, torch.device("cuda"), no_progress, on_load=chosen.on_load)
    with graphs_of(arguments.batches):
        runner = Runner(backend_of(arguments.shape, weights, fp8_cache=chosen.fp8_cache))
    vocab_size = config.vocab_size
    for batch in arguments.batches:
        print(f"{arguments.shape}, batch {batch}")
        for _ in range(2):
            decoding = Decoding(runner, batch, vocab_size)
            decoding.prefill()
            profiler = profiled(decoding.decode(_DECODE_STEPS + PROFILED), _DECODE_STEPS)
        print_profile(profiler)
    mixing = Mixing(runner, vocab_size, arguments.decoding)
    for chunk in arguments.chunk:
        print(f"{arguments.shape}, {arguments.decoding} decoding rows and a chunk of {chunk}")
        for _ in range(2):
            profiler = profiled(mixing.steps(chunk, _MIXED_STEPS + PROFILED), _MIXED_STEPS)
        print_profile(profiler)


def profiled(steps: Iterator[object], warm_up: int) -> torch.profiler.profile:
    """Profiles all steps except the first `warm_up`."""
    for _ in islice(steps, warm_up):
        pass
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in steps:
            pass
    return profiler


def print_profile(profiler: torch.profiler.profile, steps: int = PROFILED, in_order: int = 0) -> None:
    """Prints the profile of `steps` by kernel, and `in_order` launches in the middle of a step in their order."""
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    times, gaps = defaultdict(list), defaultdict(list)
    last_end = kernels[0][0]
    for begin, end, name in kernels:
        times[name].append(end - begin)
        gaps[name].append(begin - last_end)
        last_end = max(last_end, end)
    print(" a step    us each   gap before   us a step  kernel")
    for name in sorted(times, key=lambda name: -sum(times[name]) - sum(gaps[name])):
        total = (sum(times[name]) + sum(gaps[name])) / steps
        each, gap = np.median(times[name]), np.median(gaps[name])
        print(f"{len(times[name]) / steps:7.1f} {each:10.2f} {gap:12.2f} {total:11.1f}  {name[:90]}")
    launches = len(kernels) // steps
    for index in range(launches // 2, launches // 2 + in_order):
        begins, ends, names = zip(*kernels[index::launches][:steps], strict=True)
        print(f"{np.median(np.subtract(ends, begins)):10.2f} {begins[-1] - kernels[0][0]:10.1f}  {names[0][:60]}")
    whole, idle = (last_end - kernels[0][0]) / steps, sum(map(sum, gaps.values())) / steps
    print(f"whole: {whole:.1f} us per step, of which gaps {idle:.1f}")


if __name__ == "__main__":
    main()
