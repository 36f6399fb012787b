"""Compiled variants of the decode kernel (kernels/paged_decode.cu), with their planners by batch size and workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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


class LaunchedVariant(Protocol):
    """What a launch needs to know of a variant; see `DecodeVariant`."""

    @property
    def blocks(self) -> int: ...
    @property
    def cluster(self) -> int: ...
    @property
    def positions(self) -> int: ...
    @property
    def unit_queries(self) -> int: ...
    @property
    def units(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def min_cost(self) -> int: ...
    @property
    def end_cost(self) -> int: ...
    @property
    def whole_limit(self) -> float: ...
    @property
    def defines(self) -> dict[str, int | str]: ...


class DecodeKernel:
    """Decode kernel of one variant; launch `kernel` on `grid` blocks."""

    source = "paged_decode"

    def __init__(self, variant: LaunchedVariant, windows: Sequence[int | None]) -> None:
        self.variant = variant
        self.grid = num_multiprocessors() * variant.blocks // variant.cluster * variant.cluster
        self.kernel = Kernel(
            load(self.source, variant.defines),
            self.source,
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
            planners = self._planners[batch] = [self._planner(batch, window) for window in self._windows]
        return planners

    def _planner(self, batch: int, window: int | None) -> DecodePlanner:
        variant = self.variant
        return DecodePlanner(
            batch, self.grid, variant.min_cost, variant.units, variant.end_cost, window, variant.whole_limit
        )

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
        self._allocate(shape.head_dim, 2 * max(self._small.grid, self._large.grid), device)

    def _allocate(self, head_dim: int, slots: int, device: torch.device) -> None:
        """Makes room for partial results in `slots`, and counters of arrivals."""
        variants = (self._small.variant, self._large.variant)
        queries = max(variant.unit_queries for variant in variants)
        arrivals = self._max_batch * max(variant.units for variant in variants)
        self._sums = torch.empty(slots * queries * head_dim, device=device)
        self._stats = torch.empty(slots * queries * 2, device=device)
        self._arrivals = torch.zeros(arrivals, dtype=torch.int32, device=device)
        self.workspace = (self._sums.data_ptr(), self._stats.data_ptr(), self._arrivals.data_ptr())

    def of(self, batch: int) -> DecodeKernel:
        """Returns the kernel for a batch size. Raises ValueError for one beyond the maximum."""
        if batch > self._max_batch:
            raise ValueError(f"a decode batch of {batch} rows exceeds max_batch, {self._max_batch}")
        return self._small if batch <= _SMALL_BATCH else self._large
