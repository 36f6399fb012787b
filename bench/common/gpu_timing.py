"""Times GPU work with CUDA graph replays and events; measures the copy bandwidth and describes the card."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Launch = Callable[[], object]


def median_microseconds(launch: Launch, repeats: int = 30, warm_up: int = 5) -> float:
    """Returns the median time of one call, measured with events."""
    times = []
    for index in range(warm_up + repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launch()
        end.record()
        end.synchronize()
        if index >= warm_up:
            times.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(times))


def graph_microseconds(launches: Sequence[Launch], repeats: int = 30, rest: float = 0.0) -> float:
    """Returns the time of one of `launches`, replayed as one CUDA graph: the smaller of two medians over `repeats`.

    Each median follows a pause of `rest` seconds: matrix products at full rate reach the card's power limit within a
    second and slow down.
    """
    replay = captured(*launches)
    medians = []
    for _ in range(2):
        time.sleep(rest)
        medians.append(median_microseconds(replay, repeats))
    return min(medians) / len(launches)


def steady_microseconds(launch: Launch, warm_up: float = 0.1, measured: float = 0.08) -> float:
    """Returns the time of one call, replayed as a CUDA graph for `warm_up` seconds and then timed for `measured`
    seconds.

    Large products run into the card's power limit: for the first tens of milliseconds after a pause they are up to 15%
    faster than in steady state.
    """
    replay = captured(launch)
    single = median_microseconds(replay, repeats=3, warm_up=1)
    for _ in range(math.ceil(warm_up * 1e6 / single)):
        replay()
    repeats = math.ceil(measured * 1e6 / single)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / repeats


def captured(*launches: Launch) -> Launch:
    """Runs each launch once, captures all of them as one CUDA graph and returns its replay."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph.replay


def copy_bandwidth() -> float:
    """Returns TB/s of a device-to-device copy of 1 GB, counting bytes read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_microseconds(lambda: target.copy_(source)) / 1e6


def card() -> dict[str, Any]:
    """Returns the GPU's name, multiprocessors and memory, and the CUDA version."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "gib": round(properties.total_memory / 2**30),
        "cuda": torch.version.cuda,
    }
