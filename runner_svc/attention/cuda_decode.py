"""Compiled variants of the decode kernel (kernels/paged_decode.cu), with their planners by batch size and workspace."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runner_svc.attention.cuda_kernels import AttentionShape, DecodeVariant, SharedMemory
from runner_svc.attention.decode_plan import DecodePlanner
from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import load, num_multiprocessors

# Batches up to this size use one large block per multiprocessor.
_SMALL_BATCH = 16
# queries, stride, output, stride, keys, values, tables, stride, plan, batch, cache scales, scale, cap, sinks, workspace
_ARGUMENTS = "PqPqPPPiPiPffPPPP"
# known, drafted, window
_COUNTERS = "PPi"


class DecodeKernel:
    """Decode kernel of one variant; launch `kernel` on `grid` blocks."""

    def __init__(self, variant: DecodeVariant, windows: Sequence[int | None]) -> None:
        self.variant = variant
        self.grid = num_multiprocessors() * variant.blocks // variant.cluster * variant.cluster
        self.kernel = Kernel(
            load("paged_decode", variant.defines),
            "paged_decode",
            _ARGUMENTS + (_COUNTERS if variant.positions else ""),
            variant.threads,
            shared_bytes=variant.shared_bytes,
            overlap=True,
        )
        self._windows = windows
        self._planners: dict[int, list[DecodePlanner]] = {}

    def planners(self, batch: int) -> list[DecodePlanner]:
        """Returns a planner per window, created at the first use of a batch size."""
        planners = self._planners.get(batch)
        if planners is None:
            variant = self.variant
            planners = [
                DecodePlanner(
                    batch, self.grid, variant.min_cost, variant.units, variant.end_cost, window, variant.whole_limit
                )
                for window in self._windows
            ]
            self._planners[batch] = planners
        return planners

    def words(self, batch: int) -> int:
        """Returns the int32 words of a plan for all windows."""
        return sum(planner.words for planner in self.planners(batch))


class DecodeKernels:
    """The kernels for rows of `positions` positions (0: decode), launched on one stream, with their workspace.

    `beside` runs beside prefill, if the GPU supports it.
    """

    def __init__(
        self,
        shape: AttentionShape,
        shared: SharedMemory,
        windows: Sequence[int | None],
        max_batch: int,
        device: torch.device,
        *,
        positions: int = 0,
        beside: bool = False,
    ) -> None:
        """Compiles the kernels. Raises ValueError if the GPU has too little shared memory."""
        choose = DecodeVariant.choose
        self._small = DecodeKernel(choose(shape, shared, True, positions), windows)
        self._large = DecodeKernel(choose(shape, shared, False, positions), windows)
        self.beside = (
            DecodeKernel(DecodeVariant.choose_beside_prefill(shape, shared, positions), windows) if beside else None
        )
        self._max_batch = max_batch
        variants = (self._small.variant, self._large.variant)
        slots = 2 * max(self._small.grid, self._large.grid)
        queries = max(variant.unit_queries for variant in variants)
        arrivals = max_batch * max(variant.units for variant in variants)
        self._sums = torch.empty(slots * queries * shape.head_dim, device=device)
        self._stats = torch.empty(slots * queries * 2, device=device)
        self._arrivals = torch.zeros(arrivals, dtype=torch.int32, device=device)
        self.workspace = (self._sums.data_ptr(), self._stats.data_ptr(), self._arrivals.data_ptr())

    def of(self, batch: int) -> DecodeKernel:
        """Returns the kernel for a batch size. Raises ValueError for one beyond the maximum."""
        if batch > self._max_batch:
            raise ValueError(f"a decode batch of {batch} rows exceeds max_batch, {self._max_batch}")
        return self._small if batch <= _SMALL_BATCH else self._large
