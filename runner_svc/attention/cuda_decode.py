"""A compiled variant of the decode kernel (kernels/paged_decode.cu) with its planners by batch size."""

from __future__ import annotations

from collections.abc import Sequence

from runner_svc.attention.cuda_kernels import DecodeVariant
from runner_svc.attention.decode_plan import DecodePlanner
from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import load, num_multiprocessors


class DecodeKernel:
    """Decode kernel of one variant; launch `kernel` on `grid` blocks."""

    def __init__(self, variant: DecodeVariant, windows: Sequence[int | None]) -> None:
        self.variant = variant
        self.grid = num_multiprocessors() * variant.blocks // variant.cluster * variant.cluster
        self.kernel = Kernel(
            load("paged_decode", variant.defines),
            "paged_decode",
            # queries, stride, output, stride, keys, values, tables, stride, plan, batch, cache scales, scale, cap,
            # sinks, workspace
            "PqPqPPPiPiPffPPPP",
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
                DecodePlanner(batch, self.grid, variant.min_cost, variant.units, variant.end_cost, window)
                for window in self._windows
            ]
            self._planners[batch] = planners
        return planners

    def words(self, batch: int) -> int:
        """Returns the int32 words of a plan for all windows."""
        return sum(planner.words for planner in self.planners(batch))
