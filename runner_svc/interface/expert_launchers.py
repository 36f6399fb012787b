"""Launches the kernels of mixtures of experts: interfaces, implemented by `runner_svc.cuda.experts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runner_svc.interface.expert_plan import ExpertPlan, RowNorm

FEW_ROWS = 8
"""Up to this number, rows are not sorted by expert: a job multiplies all of them at the cost of its own."""


class ActivationLauncher(Protocol):
    """As `runner_svc.cuda.activation.ActivationMul`."""

    def __call__(self, stream: int, gate_up: Tensor, out: Tensor) -> None: ...


class RoutingLauncher(Protocol):
    """As `runner_svc.cuda.experts.expert_routing.ExpertRouting`."""

    def __call__(
        self,
        stream: int,
        logits: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        job_rows: int,
        norm: RowNorm | None = None,
    ) -> None: ...


class ExpertRowsLauncher(Protocol):
    """As `runner_svc.cuda.experts.expert_rows.ExpertRows`."""

    def gather(self, stream: int, x: Tensor, plan: ExpertPlan, out: Tensor) -> None: ...

    def activate(self, stream: int, gate_up: Tensor, bias: Tensor | None, plan: ExpertPlan, out: Tensor) -> None: ...

    def combine(
        self,
        stream: int,
        y: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        out: Tensor,
        *,
        adds: bool,
        shared: Tensor | None = None,
        gates: Tensor | None = None,
    ) -> None: ...

    def combine_norm(
        self,
        stream: int,
        y: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        eps: float,
    ) -> None: ...


class ExpertProductLauncher(Protocol):
    """As `runner_svc.cuda.experts.expert_product.ExpertProducts`."""

    name: str
    job_rows: int

    def fits(self, weight: Tensor) -> bool: ...

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
    ) -> None: ...

    def store(self, stream: int, x: Tensor, weight: Tensor, plan: ExpertPlan, out: Tensor) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLaunchers:
    """The kernels of the experts of one model."""

    routing: RoutingLauncher
    rows: ExpertRowsLauncher
    # Variants of the products, by ascending rows of a job.
    products: Sequence[ExpertProductLauncher]
    # Whether torch's grouped products can be captured.
    has_grouped: bool
    # Of an expert that computes every row.
    shared_activation: ActivationLauncher | None = None
