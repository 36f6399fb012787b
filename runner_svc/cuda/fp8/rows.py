"""Launches kernels/fp8_rows.cu, which rounds rows to e4m3 for products that take them so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.activation import ACTIVATIONS
from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import load
from runner_svc.interface.products.linear_launchers import QuantizedRows, Sums
from runner_svc.interface.products.skinny_launchers import ScaledRows
from runner_svc.weights.activation_rounding import GroupRounding, Rounding, StaticRounding, TokenRounding

GROUP = 128
"""Columns with a scale of their own, if they have one."""
_CHUNK = 16
_MAX_THREADS = 512


@dataclass(frozen=True, slots=True)
class RoundingArguments:
    """The kernels' arguments for a rounding."""

    grouped: bool
    static: bool
    bound: float

    @classmethod
    def known(cls, rounding: Rounding) -> bool:
        """Returns whether the kernels have this rounding."""
        if isinstance(rounding, GroupRounding):
            return rounding.columns == GROUP
        return isinstance(rounding, StaticRounding | TokenRounding)

    @classmethod
    def of(cls, rounding: Rounding) -> RoundingArguments:
        """Returns those of a rounding. Raises ValueError for one that the kernels lack."""
        if not cls.known(rounding):
            raise ValueError(f"no kernel has {rounding.name}")
        if isinstance(rounding, StaticRounding):
            return cls(False, True, rounding.scale)
        bound = rounding.bound if isinstance(rounding, TokenRounding) else None
        return cls(isinstance(rounding, GroupRounding), False, math.inf if bound is None else bound)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedRows:
    """Rows of e4m3: a row's numbers are codes * scales of its groups * factor."""

    codes: Tensor  # float8_e4m3fn [rows, width]
    factors: Tensor  # float32 [rows]
    scales: Tensor  # float32 [ceil(width / GROUP), at least rows]; of no meaning without groups


class Fp8Rows:
    """The rounding of one model's rows."""

    def __init__(self, eps: float, activation: str = "silu", *, overlap: bool = False, canonical: bool = False) -> None:
        """`eps` is that of the norms that leave 1 / rms to their successors; KeyError for an unknown activation.

        `canonical`: roots are those of docs/determinism.md.
        """
        self._eps = eps
        self._canonical = canonical
        self._activation = ACTIVATIONS[activation]
        self._overlap = overlap
        self._kernel = lru_cache(None)(self._compile)

    def __call__(self, stream: int, x: ScaledRows, rounding: RoundingArguments, out: RoundedRows) -> None:
        """Fills `out` with x [T, width], bfloat16, contiguous; `width` is a multiple of 16."""
        self._launch(stream, x, None, rounding, out)

    def activated(self, stream: int, gate_up: Sums, rounding: RoundingArguments, out: RoundedRows) -> None:
        """Fills `out` with activation(gate) * up of `gate_up` [T, 2 * width], bfloat16, gate first."""
        self._launch(stream, ScaledRows(gate_up.sums, None), gate_up, rounding, out)

    def _launch(
        self, stream: int, x: ScaledRows, gate_up: Sums | None, rounding: RoundingArguments, out: RoundedRows
    ) -> None:
        rows, width = len(x.rows), out.codes.shape[1]
        scaling = gate_up.scaling if gate_up is not None else None
        gated = 0 if gate_up is None else 1 if scaling is not None else 2
        self._kernel(width, rounding.grouped, rounding.static, gated)(
            stream,
            rows,
            x.rows.data_ptr(),
            address_of(scaling.factors if scaling is not None else None),
            address_of(scaling.scales if scaling is not None else None),
            address_of(x.squares),
            len(x.squares) if x.squares is not None else 0,
            1.0 / width,
            self._eps,
            rounding.bound,
            out.codes.data_ptr(),
            out.factors.data_ptr(),
            out.scales.data_ptr(),
            out.scales.shape[1],
        )

    def _compile(self, width: int, grouped: bool, static: bool, gated: int) -> Kernel:
        sizes, threads = row_defines(width)
        defines: dict[str, int | str] = {
            **sizes,
            "GROUPED": int(grouped),
            "STATIC": int(static),
            "GATED": gated,
            **({"ACTIVATION": self._activation} if gated else {}),
            **({"CANONICAL": 1} if self._canonical else {}),
        }
        # x; factors and scales of sums; squares, number, 1 / width, eps, bound; codes, factors, scales, their pitch
        return Kernel(load("fp8_rows", defines), "fp8_rows", "PPPPifffPPPi", threads, overlap=self._overlap)


def row_defines(width: int) -> tuple[dict[str, int], int]:
    """Returns a row's macros and the threads of a block."""
    chunks = width // _CHUNK
    threads = min(_MAX_THREADS, -(-chunks // 32) * 32)
    return {"WIDTH": width, "VECTORS": -(-chunks // threads)}, threads


def rounded_rows(rows: int, width: int, device: torch.device) -> RoundedRows:
    """Returns space for `rows` rows."""
    return RoundedRows(
        torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(-(-width // GROUP), rows, dtype=torch.float32, device=device),
    )


def quantized(rows: RoundedRows, rounding: Rounding) -> QuantizedRows:
    """Returns what was rounded, as the next product takes it."""
    scales = rows.scales.t() if RoundingArguments.of(rounding).grouped else rows.factors.unsqueeze(1)
    return QuantizedRows(rows.codes, scales, rounding)
