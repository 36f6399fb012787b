"""Where a step's routing lies on the device. Plain tensors, no CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
class ExpertPlan:
    """The routing of T rows to k experts each, as kernels/expert_routing.cu leaves it."""

    experts: Tensor  # int32 [T, k], the most likely first
    weights: Tensor  # float32 [T, k]
    places: Tensor  # int32 [T, k]: where each pair of row and expert lies among the sorted ones
    pairs: Tensor  # int32 [T * k]: row * k + rank of each sorted pair
    ends: Tensor  # int32 [num_experts]: where each expert's pairs end
    # int32: the number of jobs, three unused words; then of each: expert, first pair, pairs, unused.
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
            self.ends,
            self.jobs,
            self.arrived,
            self.scales[:count],
        )
