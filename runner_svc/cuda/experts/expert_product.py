"""Launches kernels/expert_product.cu and expert_tiles.cu, the products of rows with the matrices of their experts.

Only for Hopper. The first is as fast as weights can be read, the second as fast as tensor cores multiply. Both read
the work from the plan that kernels/expert_routing.cu left, and give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.experts.expert_routing import routing_defines
from runner_svc.cuda.experts.expert_rows import gating_defines
from runner_svc.cuda.experts.expert_variant import STEP, Variant, num_tiles
from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.cuda.tensor_map import PLANE, heads_map
from runner_svc.interface.products.expert_launchers import ExpertPlan, LoneRow, max_jobs
from runner_svc.model.families.experts_config import ExpertsConfig

# Maps of a model's weights, and of a decoder's workspace for every number of rows.
_MAX_MAPS = 16384


@dataclass(frozen=True, slots=True)
class _Kind:
    """The macros of a product."""

    gated: bool
    early: bool
    scaled: bool = False
    routes: bool = False


class ExpertProducts:
    """One variant of the products of one model. Weights are [num_experts, out, in], contiguous."""

    def __init__(
        self,
        config: ExpertsConfig,
        dtype: torch.dtype,
        variant: Variant,
        *,
        overlap: bool = False,
        canonical: bool = False,
    ) -> None:
        """`canonical`: nothing is contracted, so that all variants round alike: docs/determinism.md."""
        self.name = f"{variant.kernel}, {variant.job_rows} x {variant.blocks}"
        self.job_rows = variant.job_rows
        self.gathers = variant.gathers
        self._config = config
        self._dtype = dtype
        self._variant = variant
        self._overlap = overlap
        self._canonical = canonical
        self._kernel = lru_cache(None)(self._compile)
        self._map = lru_cache(_MAX_MAPS)(matrix_map)

    def fits(self, weight: Tensor) -> bool:
        """Whether the kernel has products with these matrices."""
        return weight.dtype is self._dtype and weight.is_contiguous() and weight.shape[2] % STEP == 0

    def gated(
        self,
        stream: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        out: Tensor,
        *,
        is_sorted: bool,
        scaled: bool = False,
        lone: LoneRow | None = None,
    ) -> None:
        """`out` [T * k, inner], sorted, from `x` and `weight` [num_experts, 2 * inner, width], gate above up.

        `x` is [T * k, width] where it `is_sorted`; else [T, width], and T is at most `expert_launchers.FEW_ROWS` unless
        the kernel gathers, which it does with all rows. Those that gather also fill the plan's places.
        `bias` is [num_experts, 2 * inner]. Where the products are `scaled`, they are multiplied by the plan's scales.
        A `lone` row needs no routing: the plan gets its experts, weights and places, and nothing else of it is used.
        """
        variant = self._variant
        if len(plan.experts) == 1:  # whose jobs are known here
            variant = variant.balanced(self._config.top_k, out.shape[1], num_multiprocessors())
        all_rows = 0 if is_sorted else len(x)
        kind = _Kind(True, is_sorted, scaled, lone is not None)
        self._launch(stream, variant, kind, x, weight, bias, plan, out, all_rows, lone)

    def store(
        self, stream: int, x: Tensor, weight: Tensor, plan: ExpertPlan, out: Tensor, lone: LoneRow | None = None
    ) -> None:
        """`out` [T * k, n], sorted, from `x` [T * k, width], sorted, and `weight` [num_experts, n, width].

        A `lone` row is that of the gated products before.
        """
        kind = _Kind(False, True, False, lone is not None)
        self._launch(stream, self._variant, kind, x, weight, None, plan, out, 0, lone)

    def prepare(self) -> None:
        """Compiles the kernels."""
        for gated, early in ((True, False), (True, True), (False, True)):
            self._kernel(self._variant, _Kind(gated, early))

    def _launch(
        self,
        stream: int,
        variant: Variant,
        kind: _Kind,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        out: Tensor,
        all_rows: int,
        lone: LoneRow | None,
    ) -> None:
        gated = kind.gated
        num_experts, num_rows, width = weight.shape
        pairs, outputs = out.shape
        tiles = num_tiles(outputs, variant.outputs(gated))
        most = max_jobs(num_experts, pairs, self.job_rows) * tiles
        gathers = gated and variant.gathers
        self._kernel(variant, kind)(
            stream,
            min(most, variant.blocks * num_multiprocessors()),
            self._map(weight.data_ptr(), num_experts * num_rows, width, variant.copied_rows(gated)),
            *(
                (x.data_ptr(), plan.places.data_ptr())
                if gathers
                else (self._map(x.data_ptr(), len(x), width, variant.box_rows),)
            ),
            plan.jobs.data_ptr(),
            plan.members.data_ptr() if gathers else plan.pairs.data_ptr(),
            address_of(bias),
            plan.scales.data_ptr(),
            out.data_ptr(),
            self._config.top_k,
            plan.members.shape[1] if gathers else all_rows,
            width // STEP,
            tiles,
            outputs,
            int(2 * pairs <= num_experts * self.job_rows),  # few experts have several jobs
            *((*_lone_arguments(lone), *_choice(plan)) if lone is not None else ()),
        )

    def _compile(self, variant: Variant, kind: _Kind) -> Kernel:
        defines = product_defines(
            self._config,
            variant,
            self._dtype,
            gated=kind.gated,
            early=kind.early,
            scaled=kind.scaled,
            routes=kind.routes,
        ) | ({"CANONICAL": 1} if self._canonical else {})
        return Kernel(
            load(variant.kernel, defines),
            variant.kernel,
            # map of weights; map of x, or x and places where it gathers; jobs, pairs, bias, scales, out; k, number of
            # few rows or distance of experts' pairs, steps, tiles, outputs, whether weights are read once; where it
            # routes: those of a lone row; experts, weights, places
            ("128sPP" if kind.gated and variant.gathers else "128s128s")
            + "PPPPPiiiiii"
            + ("PiPPiffPPP" if kind.routes else ""),
            variant.threads,
            shared_bytes=variant.shared_bytes,
            overlap=self._overlap,
        )


def product_defines(
    config: ExpertsConfig,
    variant: Variant,
    dtype: torch.dtype,
    *,
    gated: bool,
    early: bool,
    scaled: bool = False,
    routes: bool = False,
) -> dict[str, int | str]:
    """The source's macros."""
    defines = variant.defines | {
        "SCALAR": DTYPE_DEFINES[dtype],
        "GATED": int(gated),
        "BIAS": int(gated and config.bias),
        "SCALED": int(scaled),
        "EARLY": int(early),
        "ROUTES": int(routes),
        "GATHERS": int(gated and variant.gathers),
    }
    if routes:
        defines |= routing_defines(config)
    return defines | gating_defines(config) if gated else defines


def _lone_arguments(lone: LoneRow) -> tuple[int | float, ...]:
    """Returns the arguments that are a `LoneRow` of kernels/lone_row.cuh."""
    norm = lone.norm
    return (
        lone.logits.data_ptr(),
        len(lone.logits),
        address_of(lone.bias),
        norm.squares.data_ptr() if norm is not None else 0,
        len(norm.squares) if norm is not None else 0,
        1.0 / norm.width if norm is not None else 0.0,
        norm.eps if norm is not None else 0.0,
    )


def _choice(plan: ExpertPlan) -> tuple[int, ...]:
    return plan.experts.data_ptr(), plan.weights.data_ptr(), plan.places.data_ptr()


def matrix_map(address: int, rows: int, width: int, box_rows: int) -> bytes:
    """Returns the map of 16-bit [rows, width], contiguous; one copy reads 64 columns of `box_rows` rows."""
    return heads_map(address, width // PLANE, PLANE, rows, width, (box_rows, 1), read_once=True)
