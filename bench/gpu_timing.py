"""Times of GPU work by CUDA graph replays and events, the copy bandwidth that they are held against, and the card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Launch = Callable[[], None]


def median_microseconds(launch: Launch, repeats: int = 30, warm_up: int = 5) -> float:
    """Of one call, timed with events."""
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


def graph_microseconds(launches: Sequence[Launch], repeats: int = 30) -> float:
    """Of one of `launches`, replayed as one CUDA graph: the better of two medians over `repeats`."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return min(median_microseconds(graph.replay, repeats) for _ in range(2)) / len(launches)


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy of 1 GB, bytes read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_microseconds(lambda: target.copy_(source)) / 1e6


def card() -> dict[str, Any]:
    """The GPU and what drives it."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "gib": round(properties.total_memory / 2**30),
        "cuda": torch.version.cuda,
    }
