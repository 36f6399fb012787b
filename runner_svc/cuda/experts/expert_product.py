"""Launches kernels/expert_product.cu and expert_tiles.cu, the products of rows with the matrices of their experts.

Only for Hopper. The first is as fast as weights can be read, the second as fast as tensor cores multiply. Both read
the work from the plan that kernels/expert_routing.cu left, and give the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.experts.expert_rows import gating_defines
from runner_svc.cuda.experts.expert_variant import STEP, Variant, num_tiles
from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.cuda.tensor_map import PLANE, heads_map
from runner_svc.interface.expert_launchers import ExpertPlan, max_jobs
from runner_svc.model.families.experts_config import ExpertsConfig

# Maps of a model's weights, and of a decoder's workspace for every number of rows.
_MAX_MAPS = 16384


class ExpertProducts:
    """One variant of the products of one model. Weights are [num_experts, out, in], contiguous."""

    def __init__(self, config: ExpertsConfig, dtype: torch.dtype, variant: Variant, *, overlap: bool = False) -> None:
        self.name = f"{variant.kernel}, {variant.job_rows} x {variant.blocks}"
        self.job_rows = variant.job_rows
        self._config = config
        self._dtype = dtype
        self._variant = variant
        self._overlap = overlap
        self._kernel = lru_cache(None)(self._compile)
        self._map = lru_cache(_MAX_MAPS)(_matrix_map)

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
    ) -> None:
        """`out` [T * k, inner], sorted, from `x` and `weight` [num_experts, 2 * inner, width], gate above up.

        `x` is [T * k, width] where it `is_sorted`; else [T, width], and T is at most `expert_launchers.FEW_ROWS`.
        `bias` is [num_experts, 2 * inner]. Where the products are `scaled`, they are multiplied by the plan's scales.
        """
        variant = self._variant
        if len(plan.experts) == 1:  # whose jobs are known here
            variant = variant.balanced(self._config.top_k, out.shape[1], num_multiprocessors())
        all_rows = 0 if is_sorted else len(x)
        self._launch(stream, variant, (True, is_sorted, scaled), x, weight, bias, plan, out, all_rows)

    def store(self, stream: int, x: Tensor, weight: Tensor, plan: ExpertPlan, out: Tensor) -> None:
        """`out` [T * k, n], sorted, from `x` [T * k, width], sorted, and `weight` [num_experts, n, width]."""
        self._launch(stream, self._variant, (False, True, False), x, weight, None, plan, out, 0)

    def prepare(self) -> None:
        """Compiles the kernels."""
        for kind in ((True, False, False), (True, True, False), (False, True, False)):
            self._kernel(self._variant, *kind)

    def _launch(
        self,
        stream: int,
        variant: Variant,
        kind: tuple[bool, bool, bool],  # whether it is gated, early, scaled
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        out: Tensor,
        all_rows: int,
    ) -> None:
        gated, *_ = kind
        num_experts, num_rows, width = weight.shape
        pairs, outputs = out.shape
        tiles = num_tiles(outputs, variant.outputs(gated))
        most = max_jobs(num_experts, pairs, self.job_rows) * tiles
        self._kernel(variant, *kind)(
            stream,
            min(most, variant.blocks * num_multiprocessors()),
            self._map(weight.data_ptr(), num_experts * num_rows, width, variant.copied_rows(gated)),
            self._map(x.data_ptr(), len(x), width, variant.box_rows),
            plan.jobs.data_ptr(),
            plan.pairs.data_ptr(),
            bias.data_ptr() if bias is not None else 0,
            plan.scales.data_ptr(),
            out.data_ptr(),
            self._config.top_k,
            all_rows,
            width // STEP,
            tiles,
            outputs,
        )

    def _compile(self, variant: Variant, gated: bool, early: bool, scaled: bool) -> Kernel:
        defines = product_defines(self._config, variant, self._dtype, gated=gated, early=early, scaled=scaled)
        return Kernel(
            load(variant.kernel, defines),
            variant.kernel,
            # maps of weights and x; jobs, pairs, bias, scales, out; k, rows of unsorted x, steps, tiles, outputs
            "128s128sPPPPPiiiii",
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
) -> dict[str, int | str]:
    """The source's macros."""
    defines = variant.defines | {
        "SCALAR": DTYPE_DEFINES[dtype],
        "GATED": int(gated),
        "BIAS": int(gated and config.bias),
        "SCALED": int(scaled),
        "EARLY": int(early),
    }
    return defines | gating_defines(config) if gated else defines


def _matrix_map(address: int, rows: int, width: int, box_rows: int) -> bytes:
    return heads_map(address, width // PLANE, PLANE, rows, width, (box_rows, 1), read_once=True)
