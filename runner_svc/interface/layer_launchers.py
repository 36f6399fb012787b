"""Interfaces of the launchers of a decoder layer's kernels, implemented by `runner_svc.cuda`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runner_svc.interface.products.expert_launchers import ActivationLauncher, ExpertLaunchers
from runner_svc.interface.products.linear_launchers import (
    GatedLauncher,
    LinearLauncher,
    QuantizedRows,
    Scaling,
    SplittingLauncher,
    Sums,
)
from runner_svc.weights.activation_rounding import Rounding
from runner_svc.weights.matrix import Matrix


class NormLauncher(Protocol):
    """Implemented by `runner_svc.cuda.norm.AddRmsNorm`."""

    def add(self, stream: int, hidden: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> None: ...

    def add_normed(
        self, stream: int, hidden: Tensor, residual: Tensor, post_weight: Tensor, weight: Tensor | None, out: Tensor
    ) -> None: ...

    def norm(self, stream: int, hidden: Tensor, weight: Tensor, out: Tensor) -> None: ...


class RoundingNormLauncher(Protocol):
    """A norm whose rows the next product takes quantized."""

    def rounds(self, rounding: Rounding) -> bool:
        """Returns whether it has this rounding."""

    def __call__(
        self, stream: int, hidden: Sums | None, residual: Tensor, weight: Tensor, rounding: Rounding
    ) -> QuantizedRows:
        """Computes residual += hidden, unless that is None, and returns norm(residual), rounded."""


class RopeKvLauncher(Protocol):
    """Implemented by `runner_svc.cuda.rope_kv.RopeKvWrite`."""

    @property
    def scales(self) -> bool:
        """Whether `qkv` may be sums that it scales."""

    def __call__(
        self,
        stream: int,
        qkv: Tensor,
        queries: Tensor,
        cache: Tensor,
        rotations: Tensor,
        rotation_rows: Tensor,
        slot_mapping: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        cache_scales: Tensor | None = None,
        scaling: Scaling | None = None,
    ) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLaunchers:
    """The kernels of a layer, compiled for one model."""

    norm: NormLauncher
    activation: ActivationLauncher
    # Of matrices as `prepare` returns them.
    linear: LinearLauncher
    # None: not available on this GPU.
    gated: GatedLauncher | None
    # By rotary embedding of the model.
    rotating: Sequence[RopeKvLauncher]
    # For layers without rotary embedding, as in SmolLM3.
    plain: RopeKvLauncher
    # As `linear`, with Roster's products of one to two hundred rows. None: not available on this GPU.
    splitting: SplittingLauncher | None = None
    # None for a model without experts.
    experts: ExpertLaunchers | None = None
    # None: norms write numbers.
    rounding_norm: RoundingNormLauncher | None = None
    # Returns a matrix in the layout that the kernels read; itself if it is in one.
    prepare: Callable[[Matrix], Matrix] = lambda matrix: matrix
