"""Mixtures of experts with random rows and weights, and what their kernels must make of them, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.arithmetic.plain import ACTIVATION_FUNCTIONS
from runner_svc.interface.products.expert_launchers import ExpertPlan
from runner_svc.model.families.experts_config import ClampedGate, ExpertsConfig, RouterConfig, Scoring

QWEN = ExpertsConfig(16, 4, 64, RouterConfig(normalize=True), activation="silu")
TINY = ExpertsConfig(5, 2, 64, RouterConfig(), activation="gelu")
GPT_OSS = ExpertsConfig(
    8, 3, 128, RouterConfig(Scoring.SOFTMAX_OF_CHOSEN), activation="silu", bias=True, clamp=ClampedGate(1.702, 2.0)
)
ERNIE = ExpertsConfig(
    24,
    4,
    64,
    RouterConfig(normalize=True, least_sum=0.3, is_corrected=True),
    activation="silu",
    shared_width=64,
    shared_gate=False,
)
GROUPED = ExpertsConfig(
    40,
    5,
    64,
    RouterConfig(Scoring.SIGMOID, normalize=True, scale=2.5, is_corrected=True, groups=8, top_groups=3),
    activation="silu",
    shared_width=64,
    shared_gate=False,
)


@dataclass(frozen=True)
class ExpertCase:
    """Rows that are routed by random logits; `skew` of them favours the first experts."""

    config: ExpertsConfig
    rows: int
    hidden: int = 128
    skew: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    extra_logits: int = 0
    """Columns of the logits behind the experts'."""


@dataclass(eq=False)
class ExpertTensors:
    """A case's tensors on a device."""

    case: ExpertCase
    device: torch.device
    seed: int
    x: Tensor = field(init=False)

    def __post_init__(self) -> None:
        config, case = self.case.config, self.case
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(self.device)

        experts, inner, hidden = config.num_experts, config.width, case.hidden
        self.x = normal(case.rows, hidden).to(case.dtype)
        wide = normal(case.rows, experts + case.extra_logits)
        self.logits = wide[:, :experts] - case.skew * torch.arange(experts, device=self.device)
        wide[:, :experts] = self.logits
        self.logits = wide[:, :experts]
        # Corrections, which are as large as scores differ, are passed as biases are.
        scale = 1.0 if config.bias else 0.2
        self.router_bias = normal(experts, scale=scale) if config.bias or config.router.is_corrected else None
        self.gate_up = normal(experts, 2 * inner, hidden, scale=hidden**-0.5).to(case.dtype)
        self.down = normal(experts, hidden, inner, scale=inner**-0.5).to(case.dtype)
        self.gate_up_bias = normal(experts, 2 * inner).to(case.dtype) if config.bias else None
        self.down_bias = normal(experts, hidden).to(case.dtype) if config.bias else None

    def plan(self, least_job_rows: int) -> ExpertPlan:
        """Poisoned room for the routing."""
        plan = ExpertPlan.allocate(
            self.case.config.num_experts, self.case.config.top_k, self.case.rows, least_job_rows, self.device
        )
        for tensor in (plan.experts, plan.places, plan.pairs, plan.ends, plan.jobs):
            tensor.fill_(-(2**30))
        plan.weights.fill_(torch.nan)
        plan.scales.fill_(torch.nan)
        return plan

    def routed(self) -> tuple[Tensor, Tensor]:
        """Experts int64 and weights float32, [rows, k], the likeliest first."""
        config, router, logits = self.case.config, self.case.config.router, self.logits
        if self.router_bias is not None and config.bias:
            logits = logits + self.router_bias
        if router.scoring is Scoring.SOFTMAX_OF_CHOSEN:
            values, experts = logits.topk(config.top_k)
            return experts, values.softmax(-1)
        scores = logits.sigmoid() if router.scoring is Scoring.SIGMOID else logits.softmax(-1)
        chosen = [self._chosen(row) for row in (scores + self.router_bias if router.is_corrected else logits).tolist()]
        experts = torch.tensor(chosen, device=self.device)
        weights = scores.gather(1, experts)
        if router.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=router.least_sum)
        return experts, weights * router.scale

    def _chosen(self, scores: list[float]) -> list[int]:
        """Of one row, with loops in place of masks."""
        config, router = self.case.config, self.case.config.router
        size = config.num_experts // router.groups
        groups = [range(begin, begin + size) for begin in range(0, size * router.groups, size)]
        if router.groups > 1:
            groups.sort(key=lambda group: -sum(sorted(scores[index] for index in group)[-2:]))
        of_groups = [index for group in groups[: router.top_groups] for index in group]
        if router.groups == 1:
            of_groups = list(range(config.num_experts))
        return sorted(of_groups, key=lambda index: -scores[index])[: config.top_k]

    def gate(self, gate_up: Tensor) -> Tensor:
        """float32 [..., inner] of float32 [..., 2 * inner]."""
        gate, up = gate_up.chunk(2, dim=-1)
        clamp = self.case.config.clamp
        if clamp is None:
            return ACTIVATION_FUNCTIONS[self.case.config.activation](gate) * up
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        return (up + 1) * gate * torch.sigmoid(gate * clamp.alpha)

    def activated(self, pairs: Tensor, experts: Tensor, scales: Tensor | None = None) -> Tensor:
        """float32 [rows * k, inner]: of each sorted pair, with each row's experts [rows, k] and scale [rows]."""
        x = self.x.float() if scales is None else self.x.float() * scales.unsqueeze(1)
        top_k = self.case.config.top_k
        rows = []
        for pair in pairs.tolist():
            expert = experts[pair // top_k, pair % top_k]
            bias = self.gate_up_bias[expert].float() if self.gate_up_bias is not None else None
            rows.append(functional.linear(x[pair // top_k], self.gate_up[expert].float(), bias))
        return self.gate(torch.stack(rows))

    def lowered(self, activated: Tensor, pairs: Tensor, experts: Tensor) -> Tensor:
        """float32 [rows * k, hidden]: down products of `activated` [rows * k, inner], without biases."""
        top_k = self.case.config.top_k
        rows = []
        for row, pair in zip(activated, pairs.tolist(), strict=True):
            rows.append(self.down[experts[pair // top_k, pair % top_k]].float() @ row.float())
        return torch.stack(rows)

    def combined(self, y: Tensor, places: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """float32 [rows, hidden] of sorted `y` [rows * k, hidden]."""
        parts = y[places.long()].float()
        if self.down_bias is not None:
            parts = parts + self.down_bias[experts.long()].float()
        return (weights.unsqueeze(-1) * parts).sum(dim=1)


def spread_router(tensors: ExpertTensors, rows: Tensor) -> Tensor:
    """A router [num_experts, hidden] for `rows` of unit size, such that no row has experts in a near tie.

    How a product rounds would decide between them.
    """
    case, router = tensors.case, tensors.case.config.router
    for seed in range(tensors.seed, tensors.seed + 1000):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(case.config.num_experts, case.hidden, generator=generator) * (4 / case.hidden**0.5)
        weight = weight.to(rows)
        logits = rows.double() @ weight.double().t()
        if tensors.router_bias is not None:
            scores = logits.sigmoid() if router.scoring is Scoring.SIGMOID else logits.softmax(-1)
            logits = (scores if router.is_corrected else logits) + tensors.router_bias
        if (logits.sort(-1).values.diff(dim=-1)[:, -case.config.top_k :] > 2e-5).all():
            return weight
    raise AssertionError("every router has near ties")


def equal_jobs(first: int, count: int, job_rows: int) -> Iterator[tuple[int, int]]:
    """Yields the first pair and the pairs of each job of an expert, of up to `job_rows` pairs each."""
    jobs = -(-count // job_rows)
    for begin in range(0, count, -(-count // jobs) if jobs else 1):
        yield first + begin, min(-(-count // jobs), count - begin)


def check_plan(tensors: ExpertTensors, plan: ExpertPlan, job_rows: int, rtol: float = 1e-5) -> None:
    """Fails where a plan is not a routing of the case's rows, whose weights may differ by `rtol`."""
    config = tensors.case.config
    experts, weights = tensors.routed()
    assert torch.equal(plan.experts.long(), experts)
    torch.testing.assert_close(plan.weights, weights, rtol=rtol, atol=1e-7)
    pairs, places = plan.pairs.long(), plan.places.long().flatten()
    assert torch.equal(pairs.sort().values, torch.arange(len(pairs), device=pairs.device))
    assert torch.equal(pairs[places], torch.arange(len(pairs), device=pairs.device))
    ordered = experts.flatten()[pairs]
    assert torch.equal(ordered, ordered.sort().values)
    counts = torch.bincount(ordered, minlength=config.num_experts)
    assert torch.equal(plan.ends.long(), counts.cumsum(0))
    expected = []
    for expert, (end, count) in enumerate(zip(counts.cumsum(0).tolist(), counts.tolist(), strict=True)):
        expected += [[expert, *job] for job in equal_jobs(end - count, count, job_rows)]
    assert int(plan.jobs[0]) == len(expected)
    starts = (counts.cumsum(0) - counts).tolist()
    jobs = plan.jobs[4 : 4 + 4 * len(expected)].view(-1, 4).tolist()
    assert jobs == [[*job, job[1] - starts[job[0]]] for job in expected]
    for expert, (start, count) in enumerate(zip(starts, counts.tolist(), strict=True)):
        assert plan.members[expert, :count].tolist() == pairs[start : start + count].tolist()
    assert not plan.counts.any()
    assert int(plan.arrived) == 0
