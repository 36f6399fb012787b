"""Products of sorted rows with their experts' matrices; see `kernels/expert_product.cu`. Only for Hopper."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.experts.expert_rows import gating_defines
from runner_svc.cuda.experts.expert_variant import BOX_ROWS, STEP, THREADS, TILE_ROWS, ExpertVariant, num_tiles
from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.cuda.tensor_map import PLANE, heads_map
from runner_svc.interface.expert_plan import ExpertPlan, max_jobs
from runner_svc.model.families.experts_config import ExpertsConfig

# Maps of a model's weights, and of a decoder's workspace for every number of rows.
_MAX_MAPS = 16384


class ExpertProducts:
    """One variant of the products of one model. Weights are [num_experts, out, in], contiguous."""

    def __init__(
        self, config: ExpertsConfig, dtype: torch.dtype, variant: ExpertVariant, *, overlap: bool = False
    ) -> None:
        self.name = f"{variant.job_rows} x {variant.blocks}"
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
        self._launch(
            stream,
            self._kernel(True, is_sorted, scaled),
            x,
            weight,
            bias,
            plan,
            out,
            all_rows=0 if is_sorted else len(x),
        )

    def store(self, stream: int, x: Tensor, weight: Tensor, plan: ExpertPlan, out: Tensor) -> None:
        """`out` [T * k, n], sorted, from `x` [T * k, width], sorted, and `weight` [num_experts, n, width]."""
        self._launch(stream, self._kernel(False, True, False), x, weight, None, plan, out, all_rows=0)

    def prepare(self) -> None:
        """Compiles the kernels."""
        for gated, early in ((True, False), (True, True), (False, True)):
            self._kernel(gated, early, False)

    def _launch(
        self,
        stream: int,
        kernel: Kernel,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        out: Tensor,
        *,
        all_rows: int,
    ) -> None:
        num_experts, num_rows, width = weight.shape
        pairs, outputs = out.shape
        tiles = num_tiles(outputs, num_rows != outputs)
        most = max_jobs(num_experts, pairs, self.job_rows) * tiles
        kernel(
            stream,
            min(most, self._variant.blocks * num_multiprocessors()),
            self._map(weight.data_ptr(), num_experts * num_rows, width, num_rows // outputs),
            self._map(x.data_ptr(), len(x), width, TILE_ROWS // BOX_ROWS),
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

    def _compile(self, gated: bool, early: bool, scaled: bool) -> Kernel:
        defines = product_defines(self._config, self._variant, self._dtype, gated=gated, early=early, scaled=scaled)
        return Kernel(
            load("expert_product", defines),
            "expert_product",
            # maps of weights and x; jobs, pairs, bias, scales, out; k, rows of unsorted x, steps, tiles, outputs
            "128s128sPPPPPiiiii",
            THREADS,
            shared_bytes=self._variant.shared_bytes,
            overlap=self._overlap,
        )


def product_defines(
    config: ExpertsConfig,
    variant: ExpertVariant,
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


def _matrix_map(address: int, rows: int, width: int, parts: int) -> bytes:
    """Returns the map of [rows, width], in boxes of a tile's rows or of one of its `parts`."""
    return heads_map(address, width // PLANE, PLANE, rows, width, (TILE_ROWS // parts, 1))
