"""Matrices of every format in sizes that a GPU's kernels have, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runner_svc.weights.activation_rounding import (
    E4M3,
    GroupRounding,
    NoRounding,
    Rounding,
    StaticRounding,
    TokenRounding,
)
from runner_svc.weights.fp8_matrix import Fp8Matrix, to_fp8, to_fp8_blocks
from runner_svc.weights.int4_matrix import Int4Matrix, to_int4
from runner_svc.weights.int4_packing import pack_pairs
from runner_svc.weights.matrix import Matrix, joined
from runner_svc.weights.plain_matrix import PlainMatrix

Make = Callable[[int, int, str], Matrix]
"""Makes a matrix [out, in] on a device."""


def fp8(out: int, width: int, device: str, rounding: Rounding, block: tuple[int, int] | None = None) -> Fp8Matrix:
    """Returns codes of all magnitudes, with a row of zeros, and scales of which some are denormal."""
    codes = torch.randn(out, width).mul_(torch.logspace(-2, 2, width)).clamp_(-448, 448).to(E4M3)
    codes.view(torch.uint8)[out // 2] = 0
    scales = torch.rand((out, 1) if block is None else (-(-out // block[0]), -(-width // block[1]))) * 1e-3 + 1e-4
    scales[-1] = 1e-40
    return Fp8Matrix(codes.to(device), scales.to(device), rounding, block)


def int4(
    out: int, width: int, device: str, group: int, *, zeros: bool = True, order: bool = False, half: bool = True
) -> Int4Matrix:
    """Returns random codes, scales and zeros."""
    groups = -(-width // group)
    return Int4Matrix(
        pack_pairs(torch.randint(0, 16, (out, width), dtype=torch.uint8)).to(device),
        torch.randn(out, groups).mul_(0.02).to(torch.float16 if half else torch.bfloat16).to(device),
        torch.randint(0, 16, (out, groups), dtype=torch.uint8).to(device) if zeros else None,
        group,
        width,
        torch.randperm(width).to(device) if order else None,
    )


def plain(out: int, width: int, device: str) -> PlainMatrix:
    """Returns random numbers in bfloat16."""
    return PlainMatrix((torch.randn(out, width) * 0.05).bfloat16().to(device))


FORMATS: dict[str, Make] = {
    "plain": plain,
    "fp8-token": lambda out, width, device: fp8(out, width, device, TokenRounding()),
    "fp8-bounded": lambda out, width, device: fp8(out, width, device, TokenRounding(1.5)),
    "fp8-static": lambda out, width, device: fp8(out, width, device, StaticRounding(0.02)),
    "fp8-weights": lambda out, width, device: fp8(out, width, device, NoRounding()),
    "fp8-blocks": lambda out, width, device: fp8(out, width, device, GroupRounding(128), (128, 128)),
    "int4-128": lambda out, width, device: int4(out, width, device, 128),
    "int4-64-symmetric": lambda out, width, device: int4(out, width, device, 64, zeros=False, half=False),
    "int4-32": lambda out, width, device: int4(out, width, device, 32),
    "int4-32-reordered": lambda out, width, device: int4(out, width, device, 32, order=True),
    "int4-whole-columns": lambda out, width, device: int4(out, width, device, width, zeros=False),
    "to-fp8": lambda out, width, device: to_fp8(torch.randn(out, width, device=device)),
    "to-fp8-blocks": lambda out, width, device: to_fp8_blocks(torch.randn(out, width, device=device)),
    "to-int4": lambda out, width, device: to_int4(torch.randn(out, width, device=device), 128),
    "joined": lambda out, width, device: joined(
        [
            fp8(out // 2, width, device, StaticRounding(0.01)),
            int4(out // 4, width, device, 64),
            plain(out - out // 2 - out // 4, width, device),
        ]
    ),
}
