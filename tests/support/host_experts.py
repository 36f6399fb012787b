"""The launchers of mixtures of experts in plain torch on the CPU, for `host_device`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.decoder.mlp import gate_function, route
from runner_svc.decoder.norm import Norm
from runner_svc.interface.products.expert_launchers import (
    ActivationLauncher,
    ExpertLaunchers,
    ExpertPlan,
    LoneRow,
    RowNorm,
)
from runner_svc.model.families.description import NormKind
from runner_svc.model.families.experts_config import ExpertsConfig
from tests.support.expert_cases import equal_jobs


class HostRouting:
    def __init__(self, config: ExpertsConfig) -> None:
        self._config = config

    def __call__(
        self,
        stream: int,
        logits: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        job_rows: int,
        norm: RowNorm | None = None,
    ) -> None:
        config = self._config
        if norm is not None:
            plan.scales.copy_(torch.rsqrt(norm.squares[:, : len(logits)].sum(dim=0) / norm.width + norm.eps))
        if config.router.is_corrected:
            experts, weights = route(logits, config, bias)
        else:
            experts, weights = route(logits if bias is None else logits + bias, config)
        plan.experts.copy_(experts)
        plan.weights.copy_(weights)
        order = experts.flatten().argsort(stable=True)
        plan.pairs.copy_(order)
        plan.places.view(-1)[order] = torch.arange(len(order), dtype=torch.int32)
        counts = torch.bincount(experts.flatten(), minlength=config.num_experts)
        plan.ends.copy_(counts.cumsum(0))
        jobs = []
        for expert, (end, count) in enumerate(zip(plan.ends.tolist(), counts.tolist(), strict=True)):
            start = end - count
            plan.members[expert, :count] = plan.pairs[start:end]
            jobs += [(expert, first, rows, first - start) for first, rows in equal_jobs(start, count, job_rows)]
        plan.jobs[0] = len(jobs)
        plan.jobs[4 : 4 + 4 * len(jobs)].view(-1, 4)[:] = torch.tensor(jobs, dtype=torch.int32)


class HostEntry:
    def __init__(self, config: ExpertsConfig) -> None:
        self._routing = HostRouting(config)

    def fits(self, rows: int) -> bool:
        return 32 < rows <= 512

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
    ) -> None:
        residual.add_(product)
        out.copy_(Norm(NormKind.RMS, norm_weight.float(), eps)(residual.float()))
        self._routing(stream, functional.linear(out.float(), router.float()), bias, plan, 160)


class HostExpertRows:
    def __init__(self, config: ExpertsConfig) -> None:
        self._config = config
        self._gate = gate_function(config)

    def gather(self, stream: int, x: Tensor, plan: ExpertPlan, out: Tensor) -> None:
        out.copy_(x[plan.pairs.long() // self._config.top_k])

    def activate(self, stream: int, gate_up: Tensor, bias: Tensor | None, plan: ExpertPlan, out: Tensor) -> None:
        gate_up = gate_up.float()
        if bias is not None:
            gate_up = gate_up + bias[plan.experts.view(-1)[plan.pairs.long()].long()]
        out.copy_(self._gate(*gate_up.chunk(2, dim=-1)))

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
    ) -> None:
        total = torch.zeros(out.shape)
        for rank in range(self._config.top_k):
            part = y[plan.places[:, rank].long()].float()
            if bias is not None:
                part = part + bias[plan.experts[:, rank].long()]
            total += plan.weights[:, rank : rank + 1] * part
        if shared is not None:
            total += shared if gates is None else gates.sigmoid() * shared
        out.copy_(out + total if adds else total)

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
    ) -> None:
        self.combine(stream, y, bias, plan, residual, adds=True)
        out.copy_(Norm(NormKind.RMS, norm_weight.float(), eps)(residual.float()))


class HostExpertProducts:
    def __init__(self, config: ExpertsConfig, job_rows: int, *, gathers: bool = False) -> None:
        self.name = f"of {job_rows} rows"
        self.job_rows = job_rows
        self.gathers = gathers
        self._config = config
        self._gate = gate_function(config)

    def fits(self, weight: Tensor) -> bool:
        return True

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
    ) -> None:
        if lone is not None:
            logits = lone.logits.sum(dim=0, keepdim=True)
            if lone.norm is not None:
                logits = logits * torch.rsqrt(lone.norm.squares[:, :1].sum() / lone.norm.width + lone.norm.eps)
            HostRouting(self._config)(stream, logits, lone.bias, plan, self.job_rows, lone.norm)
            ranks = torch.arange(self._config.top_k, dtype=torch.int32)
            plan.places.copy_(ranks.unsqueeze(0))
            plan.pairs.copy_(ranks)
            jobs = plan.jobs[4 : 4 + 4 * len(ranks)].view(-1, 4)
            jobs[:, 0], jobs[:, 1], jobs[:, 2] = plan.experts[0], ranks, 1
        for expert, first, rows in self._jobs(plan):
            own = slice(first, first + rows)
            inputs = x[own] if is_sorted else x[plan.pairs[own].long() // self._config.top_k]
            product = functional.linear(inputs.float(), weight[expert].float())
            if scaled:
                product *= plan.scales[plan.pairs[own].long() // self._config.top_k].unsqueeze(1)
            if bias is not None:
                product += bias[expert].float()
            out[own] = self._gate(*product.chunk(2, dim=-1)).to(out.dtype)

    def store(
        self, stream: int, x: Tensor, weight: Tensor, plan: ExpertPlan, out: Tensor, lone: LoneRow | None = None
    ) -> None:
        for expert, first, rows in self._jobs(plan):
            out[first : first + rows] = (x[first : first + rows].float() @ weight[expert].float().t()).to(out.dtype)

    def _jobs(self, plan: ExpertPlan) -> list[list[int]]:
        found: list[list[int]] = plan.jobs[4 : 4 + 4 * int(plan.jobs[0])].view(-1, 4)[:, :3].tolist()
        return found


def host_experts(config: ExpertsConfig, shared_activation: ActivationLauncher | None = None) -> ExpertLaunchers:
    return ExpertLaunchers(
        HostRouting(config),
        HostExpertRows(config),
        [HostExpertProducts(config, job_rows) for job_rows in (8, 32)],
        HostExpertProducts(config, 160),
        HostExpertProducts(config, 160, gathers=True),
        has_grouped=True,
        shared_activation=shared_activation,
        entry=HostEntry(config),
        entering=HostExpertProducts(config, 160, gathers=True),
    )
