"""Where a decode step's time goes, from torch's profiler: `python -m bench.profile_steps qwen3-0.6b 64`.

Prints each kernel's launches a step, its median time and the median gap before it. A kernel that starts while its
predecessor ends (programmatic launch) has a gap below zero and waits within its own time.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import numpy as np
import torch
from torch.autograd import DeviceType

from bench.random_model import SHAPES
from bench.step_backend import backend_of
from bench.steps import Decoding
from runner_svc.model.config import ModelConfig
from runner_svc.runner import Runner

_STEPS = 20


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("batches", type=int, nargs="+")
    arguments = parser.parse_args()
    runner = Runner(backend_of(arguments.shape))
    for batch in arguments.batches:
        print(f"{arguments.shape}, batch {batch}")
        print_profile(runner, batch, ModelConfig.from_hugging_face(SHAPES[arguments.shape]).vocab_size)


def print_profile(runner: Runner, batch: int, vocab_size: int) -> None:
    """Of some steps in the middle of a generation."""
    decoding = Decoding(runner, batch, vocab_size)
    decoding.prefill()
    for _ in decoding.decode(100):
        pass
    decoding = Decoding(runner, batch, vocab_size)
    decoding.prefill()
    results = decoding.decode(100 + _STEPS)
    for _ in range(100):
        next(results)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in results:
            pass
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
        total = (sum(times[name]) + sum(gaps[name])) / _STEPS
        each, gap = np.median(times[name]), np.median(gaps[name])
        print(f"{len(times[name]) / _STEPS:7.1f} {each:10.2f} {gap:12.2f} {total:11.1f}  {name[:90]}")
    whole, idle = (last_end - kernels[0][0]) / _STEPS, sum(map(sum, gaps.values())) / _STEPS
    print(f"whole: {whole:.1f} us a step, of which gaps {idle:.1f}")


if __name__ == "__main__":
    main()
