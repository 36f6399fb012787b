"""Compiled kernels in the canonical order, with the planners and the workspace of decode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runner_svc.attention.canonical_gpu.decode_plan import CanonicalDecodePlanner
from runner_svc.attention.canonical_gpu.variants import (
    SEGMENT,
    CanonicalDecodeVariant,
    CanonicalHopperVariant,
    CanonicalPrefillVariant,
)
from runner_svc.attention.cuda_decode import DecodeKernel, DecodeKernels
from runner_svc.attention.cuda_kernels import AttentionShape, SharedMemory
from runner_svc.attention.cuda_prefill import HopperPrefill, PortablePrefill

_WORKSPACE_BYTES = 2**26
"""Of stored segments' sums, unless one row needs more."""


class CanonicalPortablePrefill(PortablePrefill):
    """The kernel of kernels/canonical_prefill.cu, for any GPU."""

    source = "canonical_prefill"
    variant_of = CanonicalPrefillVariant


class CanonicalHopperPrefill(HopperPrefill):
    """The kernel of kernels/paged_prefill_hopper.cu with CANONICAL, after decode instead of beside it."""

    runs_beside_decode = False
    variant_of = CanonicalHopperVariant


class CanonicalDecodeKernel(DecodeKernel):
    """The kernel of kernels/canonical_decode.cu, with planners for a workspace of `slots` segments."""

    source = "canonical_decode"

    def __init__(self, variant: CanonicalDecodeVariant, windows: Sequence[int | None], capacity: int) -> None:
        """`capacity`: positions for which a row of the block tables has room."""
        super().__init__(variant, windows)
        segments = -(-capacity // SEGMENT)
        slot_bytes = variant.unit_queries * variant.shape.head_dim * 4
        self.slots = min(self.grid * segments, max(_WORKSPACE_BYTES // slot_bytes, variant.units * segments))

    def _planner(self, batch: int, window: int | None) -> CanonicalDecodePlanner:
        variant = self.variant
        return CanonicalDecodePlanner(
            batch, self.grid, variant.min_cost, variant.units, variant.end_cost, window, slots=self.slots
        )


class CanonicalDecodeKernels(DecodeKernels):
    """The kernel for rows of `positions` positions (0: decode) and any batch, with its workspace."""

    def __init__(
        self,
        shape: AttentionShape,
        shared: SharedMemory,
        windows: Sequence[int | None],
        max_batch: int,
        device: torch.device,
        capacity: int,
        *,
        positions: int = 0,
        beside: bool = False,
    ) -> None:
        """Compiles the kernel; none runs beside prefill. Raises ValueError if the GPU has too little shared memory."""
        variant = CanonicalDecodeVariant.choose(shape, shared, positions)
        kernel = CanonicalDecodeKernel(variant, windows, capacity)
        self._small = self._large = kernel
        self.beside = None
        self._max_batch = max_batch
        self._allocate(shape.head_dim, kernel.slots, device)
