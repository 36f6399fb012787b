"""Launches the kernels of mixtures of experts: interfaces, implemented by `runner_svc.cuda.experts`; and their plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

FEW_ROWS = 8
"""Up to this number, rows are not sorted by expert: a job multiplies all of them at the cost of its own."""

ROUTED_AT_ONCE = 32
"""Up to this number, one block routes all rows and completes the plan."""
JOB_WORDS = 4
"""int32 words of a job, and of what lies before the first."""


def max_jobs(num_experts: int, num_pairs: int, job_rows: int) -> int:
    """Returns the most jobs, of up to `job_rows` pairs each, that `num_pairs` pairs make."""
    return min(num_experts, num_pairs) + num_pairs // job_rows


@dataclass(frozen=True, slots=True, eq=False)
class RowNorm:
    """What is known of the RMSNorm of a pass's rows before they are divided by their RMS."""

    squares: Tensor  # float32 [n, 128]: a column's sum is the row's sum of squares
    width: int  # of a row
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class LoneRow:
    """What the products need to route a pass of one row themselves."""

    logits: Tensor  # float32 [n, num_experts]: they add up to those of the row before it is divided by its RMS
    bias: Tensor | None  # float32 [num_experts]
    norm: RowNorm | None  # None where the row is divided already


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPlan:
    """The routing of T rows to k experts each, as kernels/expert_routing.cu leaves it."""

    experts: Tensor  # int32 [T, k], the most likely first
    weights: Tensor  # float32 [T, k]
    places: Tensor  # int32 [T, k]: where each pair of row and expert lies among the sorted ones
    pairs: Tensor  # int32 [T * k]: row * k + rank of each sorted pair
    indexes: Tensor  # int32 [T, k]: of more than ROUTED_AT_ONCE rows, where each pair lies among those of its expert
    members: Tensor  # int32 [num_experts, max_rows]: each expert's pairs
    counts: Tensor  # int32 [num_experts], zero between launches
    ends: Tensor  # int32 [num_experts]: where each expert's pairs end
    # int32: the number of jobs, three unused words; then of each: expert, first pair, pairs, the expert's pairs before.
    jobs: Tensor
    arrived: Tensor  # int32 [1], zero between launches
    scales: Tensor  # float32 [T]: 1 / rms of each row, where the rows still lack it

    @classmethod
    def allocate(
        cls, num_experts: int, top_k: int, max_rows: int, least_job_rows: int, device: torch.device
    ) -> ExpertPlan:
        """Room for up to `max_rows` rows, and for jobs of `least_job_rows` pairs or more."""

        def words(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        pairs = max_rows * top_k
        return cls(
            experts=words(max_rows, top_k),
            weights=torch.zeros(max_rows, top_k, dtype=torch.float32, device=device),
            places=words(max_rows, top_k),
            pairs=words(pairs),
            indexes=words(max_rows, top_k),
            members=words(num_experts, max_rows),
            counts=words(num_experts),
            ends=words(num_experts),
            jobs=words(JOB_WORDS * (1 + max_jobs(num_experts, pairs, least_job_rows))),
            arrived=words(1),
            scales=torch.zeros(max_rows, dtype=torch.float32, device=device),
        )

    def rows(self, count: int) -> ExpertPlan:
        """Returns the part of a step of `count` rows."""
        return ExpertPlan(
            self.experts[:count],
            self.weights[:count],
            self.places[:count],
            self.pairs[: count * self.experts.shape[1]],
            self.indexes[:count],
            self.members,
            self.counts,
            self.ends,
            self.jobs,
            self.arrived,
            self.scales[:count],
        )


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


class EntryLauncher(Protocol):
    """As `runner_svc.cuda.experts.expert_entry.ExpertEntry`."""

    def fits(self, rows: int) -> bool: ...

    def __call__(
        self,
        stream: int,
        product: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        router: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        gate_up: Tensor,
        eps: float,
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
    # Whether rows are never sorted: gated products read them where they are, and fill the plan's places.
    gathers: bool

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
        lone: LoneRow | None = None,
    ) -> None: ...

    def store(
        self, stream: int, x: Tensor, weight: Tensor, plan: ExpertPlan, out: Tensor, lone: LoneRow | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLaunchers:
    """The kernels of the experts of one model."""

    routing: RoutingLauncher
    rows: ExpertRowsLauncher
    # Variants of the products at the rate of memory, by ascending rows of a job.
    products: Sequence[ExpertProductLauncher]
    # Those at the rate of the tensor cores, of sorted rows, and of rows that the gated products gather.
    tiles: ExpertProductLauncher
    gathering: ExpertProductLauncher
    # Whether torch's grouped products can be captured.
    has_grouped: bool
    # Of an expert that computes every row.
    shared_activation: ActivationLauncher | None = None
    # What adds, norms and routes some hundred rows, and the products that gather them then; None where it lacks the
    # model's sizes.
    entry: EntryLauncher | None = None
    entering: ExpertProductLauncher | None = None
