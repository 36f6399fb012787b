"""Products of sorted rows with their experts' matrices; see `kernels/expert_product.cu`. Only for Hopper."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.experts.expert_plan import ExpertPlan, max_jobs
from runner_svc.cuda.experts.expert_rows import gating_defines
from runner_svc.cuda.experts.expert_variant import BOX_ROWS, STEP, THREADS, TILE_ROWS, ExpertVariant, num_tiles
from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.cuda.tensor_map import PLANE, heads_map
from runner_svc.model.experts_config import ExpertsConfig

FEW_ROWS = BOX_ROWS
"""So many rows of x need not be sorted: every job multiplies all of them, which costs no more than its own."""
# Maps of a model's weights, and of a decoder's workspace for every number of rows.
_MAX_MAPS = 16384


class ExpertProducts:
    """The products of one model. Weights [num_experts, out, in], contiguous; jobs have up to a variant's rows."""

    def __init__(self, config: ExpertsConfig, dtype: torch.dtype, *, overlap: bool = False) -> None:
        self._config = config
        self._dtype = dtype
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
        variant: ExpertVariant,
        out: Tensor,
        *,
        is_sorted: bool,
    ) -> None:
        """`out` [T * k, inner], sorted, from `x` and `weight` [num_experts, 2 * inner, width], gate above up.

        `x` is [T * k, width] where it `is_sorted`; else [T, width], and T is at most FEW_ROWS and at most the variant's
        rows. `bias` is [num_experts, 2 * inner].
        """
        kernel = self._kernel(variant, True, is_sorted)
        self._launch(stream, kernel, x, weight, bias, plan, variant, out, 0 if is_sorted else len(x))

    def store(
        self, stream: int, x: Tensor, weight: Tensor, plan: ExpertPlan, variant: ExpertVariant, out: Tensor
    ) -> None:
        """`out` [T * k, n], sorted, from `x` [T * k, width], sorted, and `weight` [num_experts, n, width]."""
        self._launch(stream, self._kernel(variant, False, True), x, weight, None, plan, variant, out, 0)

    def prepare(self, variant: ExpertVariant) -> None:
        """Compiles a variant's kernels."""
        for gated, early in ((True, False), (True, True), (False, True)):
            self._kernel(variant, gated, early)

    def _launch(
        self,
        stream: int,
        kernel: Kernel,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        variant: ExpertVariant,
        out: Tensor,
        all_rows: int,
    ) -> None:
        num_experts, num_rows, width = weight.shape
        pairs, outputs = out.shape
        tiles = num_tiles(outputs, num_rows != outputs)
        most = max_jobs(num_experts, pairs, variant.job_rows) * tiles
        kernel(
            stream,
            min(most, variant.blocks * num_multiprocessors()),
            self._map(weight.data_ptr(), num_experts * num_rows, width, num_rows // outputs),
            self._map(x.data_ptr(), len(x), width, TILE_ROWS // BOX_ROWS),
            plan.jobs.data_ptr(),
            plan.pairs.data_ptr(),
            bias.data_ptr() if bias is not None else 0,
            out.data_ptr(),
            self._config.top_k,
            all_rows,
            width // STEP,
            tiles,
            outputs,
        )

    def _compile(self, variant: ExpertVariant, gated: bool, early: bool) -> Kernel:
        defines = product_defines(self._config, variant, self._dtype, gated=gated, early=early)
        return Kernel(
            load("expert_product", defines),
            "expert_product",
            # maps of weights and x; jobs, pairs, bias, out; k, rows of unsorted x, steps, tiles, outputs
            "128s128sPPPPiiiii",
            THREADS,
            shared_bytes=variant.shared_bytes,
            overlap=self._overlap,
        )


def product_defines(
    config: ExpertsConfig, variant: ExpertVariant, dtype: torch.dtype, *, gated: bool, early: bool
) -> dict[str, int | str]:
    """The source's macros."""
    defines = variant.defines | {
        "SCALAR": DTYPE_DEFINES[dtype],
        "GATED": int(gated),
        "BIAS": int(gated and config.bias),
        "EARLY": int(early),
    }
    return defines | gating_defines(config) if gated else defines


def _matrix_map(address: int, rows: int, width: int, parts: int) -> bytes:
    """Boxes of a tile's rows in so many parts."""
    return heads_map(address, width // PLANE, PLANE, rows, width, (TILE_ROWS // parts, 1))
