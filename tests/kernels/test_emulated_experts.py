"""The experts' kernels, their very sources, on a CPU: against float32 torch."""

from __future__ import annotations

import random
import shutil
from functools import partial

import pytest
import torch

from runner_svc.cuda import tensor_map
from runner_svc.cuda.experts import expert_product, expert_routing, expert_rows
from runner_svc.cuda.experts.expert_product import ExpertProducts
from runner_svc.cuda.experts.expert_routing import ExpertRouting
from runner_svc.cuda.experts.expert_rows import ExpertRows
from runner_svc.cuda.experts.expert_variant import ExpertVariant
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule, MapEncoder
from tests.support.expert_cases import GPT_OSS, QWEN, ExpertCase, ExpertTensors, check_plan

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MapEncoder()
    monkeypatch.setattr(tensor_map, "_driver", lambda: encoder)
    for module in (expert_product, expert_routing, expert_rows):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
        monkeypatch.setattr(module, "load", partial(EmulatedModule, arch="sm_90a"))
        if hasattr(module, "num_multiprocessors"):
            monkeypatch.setattr(module, "num_multiprocessors", lambda: 2)


@pytest.fixture
def seed() -> int:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    EmulatedKernel.orders.seed(seed)
    return seed


CASES = {
    "one-row": (ExpertCase(QWEN, 1), 8),
    "few-rows": (ExpertCase(QWEN, 7, extra_logits=1), 8),
    "some-rows": (ExpertCase(QWEN, 40), 32),
    "one-expert": (ExpertCase(QWEN, 33, skew=100.0), 16),
    "biases": (ExpertCase(GPT_OSS, 5, hidden=192), 16),
    "biases-sorted": (ExpertCase(GPT_OSS, 21, hidden=192, dtype=torch.float16), 16),
}


@pytest.mark.parametrize("name", CASES)
def test_experts(name: str, seed: int) -> None:
    case, job_rows = CASES[name]
    config, tensors = case.config, ExpertTensors(case, CPU, seed)
    plan = tensors.plan(job_rows)
    for _ in range(2):  # the second launch finds what the first left
        ExpertRouting(config)(0, tensors.logits, tensors.router_bias, plan, job_rows)
    check_plan(tensors, plan, job_rows)
    rows, products = ExpertRows(config, case.hidden, case.dtype), ExpertProducts(config, case.dtype)
    variant, pairs = ExpertVariant(job_rows, 2), case.rows * config.top_k

    def poisoned(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=case.dtype)

    x, is_sorted = tensors.x, case.rows > expert_product.FEW_ROWS
    if is_sorted:
        x = poisoned(pairs, case.hidden)
        rows.gather(0, tensors.x, plan, x)
        assert torch.equal(x, tensors.x[plan.pairs.long() // config.top_k])
    activated = poisoned(pairs, config.intermediate_size)
    products.gated(0, x, tensors.gate_up, tensors.gate_up_bias, plan, variant, activated, is_sorted=is_sorted)
    tolerance = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(activated.float(), tensors.activated(plan.pairs, plan.experts.long()), **tolerance)
    y = poisoned(pairs, case.hidden)
    products.store(0, activated, tensors.down, plan, variant, y)
    torch.testing.assert_close(y.float(), tensors.lowered(activated, plan.pairs, plan.experts.long()), **tolerance)
    out = poisoned(case.rows, case.hidden)
    rows.combine(0, y, tensors.down_bias, plan, out, adds=False)
    expected = tensors.combined(y, plan.places, plan.experts, plan.weights)
    torch.testing.assert_close(out.float(), expected, **tolerance)
    before = torch.ones_like(out)
    rows.combine(0, y, tensors.down_bias, plan, before, adds=True)
    torch.testing.assert_close(before.float(), expected + 1, **tolerance)
