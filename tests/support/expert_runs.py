"""Runs the experts' launchers over a case, poisoned outputs and all, and compares each part with plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.interface.products.expert_launchers import (
    FEW_ROWS,
    EntryLauncher,
    ExpertPlan,
    ExpertProductLauncher,
    ExpertRowsLauncher,
    LoneRow,
    RoutingLauncher,
    RowNorm,
)
from runner_svc.interface.products.skinny_launchers import MAX_ROWS
from tests.support.expert_cases import ExpertTensors, check_plan, spread_router

TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}
"""Of bfloat16 outputs of about unit size, whose sums are float32."""
EPS = 1e-5


def run(
    tensors: ExpertTensors,
    routing: RoutingLauncher,
    rows: ExpertRowsLauncher,
    product: ExpertProductLauncher,
    stream: int = 0,
    *,
    plain: bool = True,
) -> Tensor:
    """Fails where a part differs from torch; returns the rows' outputs, [rows, hidden].

    Without `plain`, gate-up products are only tried with the rows' scales, of which there must be up to `MAX_ROWS`.
    """
    case, config = tensors.case, tensors.case.config
    pairs = case.rows * config.top_k
    plan = tensors.plan(product.job_rows)
    norm = None
    if case.rows <= MAX_ROWS:
        norm = RowNorm(torch.rand(3, MAX_ROWS, device=tensors.device) * case.hidden, case.hidden, EPS)
    for _ in range(2):  # the second launch finds what the first left
        routing(stream, tensors.logits, tensors.router_bias, plan, product.job_rows, norm)

    def poisoned(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=case.dtype, device=tensors.device)

    x, is_sorted = tensors.x, case.rows > FEW_ROWS
    if is_sorted:
        x = poisoned(pairs, case.hidden)
        for _ in range(2):
            rows.gather(stream, tensors.x, plan, x)
        assert torch.equal(x, tensors.x[plan.pairs.long() // config.top_k])
    check_plan(tensors, plan, product.job_rows)
    if product.gathers:
        x, is_sorted = tensors.x, False
    places = plan.places.clone()
    experts = plan.experts.long()

    def gated(scales: Tensor | None) -> Tensor:
        out, bias = poisoned(pairs, config.width), tensors.gate_up_bias
        if product.gathers:
            plan.places.fill_(-1)
        product.gated(stream, x, tensors.gate_up, bias, plan, out, is_sorted=is_sorted, scaled=scales is not None)
        assert torch.equal(plan.places, places)
        torch.testing.assert_close(out.float(), tensors.activated(plan.pairs, experts, scales), **TOLERANCE)
        return out

    if norm is not None:
        scales = torch.rsqrt(norm.squares.sum(dim=0)[: case.rows] / case.hidden + EPS)
        torch.testing.assert_close(plan.scales, scales, rtol=1e-4, atol=1e-5)
        if not product.gathers:
            activated = gated(scales)
    if plain or product.gathers:
        activated = gated(None)
    y = poisoned(pairs, case.hidden)
    product.store(stream, activated, tensors.down, plan, y)
    torch.testing.assert_close(y.float(), tensors.lowered(activated, plan.pairs, experts), **TOLERANCE)
    if case.rows == 1:
        _run_alone(tensors, product, stream, plan, norm, activated, y)
    out = poisoned(case.rows, case.hidden)
    rows.combine(stream, y, tensors.down_bias, plan, out, adds=False)
    expected = tensors.combined(y, plan.places, experts, plan.weights)
    torch.testing.assert_close(out.float(), expected, **TOLERANCE)
    shared, gates = torch.randn_like(out), torch.randn(case.rows, 3, device=tensors.device)[:, 1:2]
    total = torch.ones_like(out)
    rows.combine(stream, y, tensors.down_bias, plan, total, adds=True, shared=shared, gates=gates)
    torch.testing.assert_close(total.float(), expected + 1 + gates.sigmoid() * shared.float(), **TOLERANCE)
    rows.combine(stream, y, tensors.down_bias, plan, out, adds=False, shared=shared)
    torch.testing.assert_close(out.float(), expected + shared.float(), **TOLERANCE)
    rows.combine(stream, y, tensors.down_bias, plan, out, adds=False)
    residual = torch.randn_like(out)
    carried, norm_weight = residual.float(), torch.rand(case.hidden, device=tensors.device).to(case.dtype) + 0.5
    normed = poisoned(case.rows, case.hidden)
    rows.combine_norm(stream, y, tensors.down_bias, plan, residual, norm_weight, normed, EPS)
    torch.testing.assert_close(residual.float(), carried + expected, **TOLERANCE)
    wanted = functional.rms_norm(residual.float(), (case.hidden,), norm_weight.float(), EPS)
    torch.testing.assert_close(normed.float(), wanted, **TOLERANCE)
    gate_up = torch.randn(pairs, 2 * config.width, device=tensors.device).to(case.dtype)
    rows.activate(stream, gate_up, tensors.gate_up_bias, plan, activated)
    bias = 0 if tensors.gate_up_bias is None else tensors.gate_up_bias[experts.flatten()[plan.pairs.long()]].float()
    torch.testing.assert_close(activated.float(), tensors.gate(gate_up.float() + bias), **TOLERANCE)
    return out


def run_entry(
    tensors: ExpertTensors, entry: EntryLauncher, rows: ExpertRowsLauncher, job_rows: int, stream: int = 0
) -> tuple[Tensor, Tensor, ExpertPlan]:
    """Fails where the entry differs from torch's sum, norm, product and routing.

    Returns the residual stream, the normed rows and the plan.
    """
    case, config = tensors.case, tensors.case.config
    product, carried = tensors.x, tensors.x.flip(0) * 2
    norm_weight = (torch.rand(case.hidden, device=tensors.device) + 0.5).to(case.dtype)
    total = product + carried
    wanted = functional.rms_norm(total.float(), (case.hidden,), norm_weight.float(), EPS)
    router = spread_router(tensors, wanted.to(case.dtype))
    plan, out = tensors.plan(job_rows), torch.full_like(product, torch.nan)
    for _ in range(2):  # the second launch finds what the first left
        residual = carried.clone()
        entry(stream, product, residual, norm_weight, out, router, tensors.router_bias, plan, tensors.gate_up, EPS)
    assert torch.equal(residual, total)
    torch.testing.assert_close(out.float(), wanted, **TOLERANCE)
    tensors.logits = (out.double() @ router.double().t()).float()
    gathered = torch.full((case.rows * config.top_k, case.hidden), torch.nan, dtype=case.dtype, device=tensors.device)
    rows.gather(stream, out, plan, gathered)
    assert torch.equal(gathered, out[plan.pairs.long() // config.top_k])
    check_plan(tensors, plan, job_rows, rtol=1e-4)
    return residual, out, plan


def _run_alone(
    tensors: ExpertTensors,
    product: ExpertProductLauncher,
    stream: int,
    plan: ExpertPlan,
    norm: RowNorm | None,
    activated: Tensor,
    y: Tensor,
) -> None:
    """Lets the products route one row themselves: each expert's outputs have the bits that they have with a plan."""
    places, alone = plan.places.long().flatten(), tensors.plan(product.job_rows)
    # Parts of the logits, which add up to them times the row's RMS.
    parts = torch.rand(3, 1, device=tensors.device)
    logits = tensors.logits / plan.scales * (parts / parts.sum())
    lone = LoneRow(logits, tensors.router_bias, norm)

    def gated(of: ExpertPlan, scaled: bool, lone: LoneRow | None) -> Tensor:
        out, bias = torch.full_like(activated, torch.nan), tensors.gate_up_bias
        product.gated(stream, tensors.x, tensors.gate_up, bias, of, out, is_sorted=False, scaled=scaled, lone=lone)
        return out

    assert torch.equal(gated(alone, True, lone), gated(plan, True, None)[places])
    experts, weights = tensors.routed()
    assert torch.equal(alone.experts.long(), experts)
    torch.testing.assert_close(alone.weights, weights, rtol=1e-5, atol=1e-7)
    assert alone.places.flatten().tolist() == list(range(len(places)))
    out, lowered = gated(alone, False, lone), torch.full_like(y, torch.nan)
    assert torch.equal(out, activated[places])
    product.store(stream, out, tensors.down, alone, lowered, lone)
    assert torch.equal(lowered, y[places])
