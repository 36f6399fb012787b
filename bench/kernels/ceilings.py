"""Measured limits of the local GPU: copy, read and matrix product rates, and the cost of an empty launch."""

from __future__ import annotations

import torch

from bench.common.gpu_timing import copy_bandwidth, graph_microseconds, median_microseconds


def ceilings() -> dict[str, float]:
    """Returns TB/s of a copy and of a read, and TFLOP/s of a bfloat16 matrix product."""
    return {"copy": copy_bandwidth(), "read": read_bandwidth(), "matmul": matmul_rate()}


def read_bandwidth() -> float:
    """Returns TB/s of a reduction over 2 GB, which writes almost nothing."""
    source = torch.ones(1 << 29, device="cuda")
    result = torch.empty((), device="cuda")
    microseconds = median_microseconds(lambda: torch.sum(source, dim=0, out=result))
    return source.numel() * 4 / microseconds / 1e6


def matmul_rate(size: int = 8192) -> float:
    """Returns TFLOP/s of a product of random square matrices in bfloat16."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / median_microseconds(lambda: torch.mm(a, b, out=out)) / 1e6


def empty_node_microseconds() -> float:
    """Returns the time of one graph node, among many that do almost nothing."""
    word = torch.zeros(1, device="cuda")
    return graph_microseconds([lambda: word.zero_()] * 64)
