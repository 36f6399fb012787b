"""The experts' kernels, their very sources, on a CPU: against float32 torch."""

from __future__ import annotations

import random
import shutil
from functools import partial

import pytest
import torch

from runner_svc.cuda import tensor_map
from runner_svc.cuda.experts import expert_entry, expert_product, expert_routing, expert_rows
from runner_svc.cuda.experts.expert_entry import ExpertEntry
from runner_svc.cuda.experts.expert_product import ExpertProducts
from runner_svc.cuda.experts.expert_routing import ExpertRouting
from runner_svc.cuda.experts.expert_rows import ExpertRows
from runner_svc.cuda.experts.expert_variant import ExpertVariant, TilesVariant, Variant
from runner_svc.interface.products.expert_launchers import ROUTED_AT_ONCE
from runner_svc.model.families.experts_config import ExpertsConfig
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule, MapEncoder
from tests.support.expert_cases import ERNIE, GPT_OSS, GROUPED, QWEN, TINY, ExpertCase, ExpertTensors, check_plan
from tests.support.expert_runs import run, run_entry
from tests.support.thoroughness import choice

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MapEncoder()
    monkeypatch.setattr(tensor_map, "_driver", lambda: encoder)
    for module in (expert_entry, expert_product, expert_routing, expert_rows):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
        monkeypatch.setattr(module, "load", partial(EmulatedModule, arch="sm_90a"))
        if hasattr(module, "num_multiprocessors"):
            monkeypatch.setattr(module, "num_multiprocessors", lambda: 1)


@pytest.fixture
def seed() -> int:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    EmulatedKernel.orders.seed(seed)
    return seed


CASES: dict[str, tuple[ExpertCase, Variant | int]] = {
    "tiny": (ExpertCase(TINY, 11, hidden=64, extra_logits=1), 8),
    "one-row": (ExpertCase(QWEN, 1, hidden=64), 8),
    "one-row-of-groups": (ExpertCase(GROUPED, 1, hidden=64), 8),
    "one-row-corrected": (ExpertCase(ERNIE, 1, hidden=64), 8),
    "few-rows": (ExpertCase(QWEN, 5, hidden=64, extra_logits=1), 8),
    "some-rows": (ExpertCase(QWEN, 40), 32),
    "one-expert": (ExpertCase(QWEN, 33, skew=100.0), 16),
    "tiles": (ExpertCase(QWEN, 70, skew=0.5), TilesVariant(160)),
    "tiles-of-one-expert": (ExpertCase(TINY, 170, hidden=192, skew=100.0, dtype=torch.float16), TilesVariant(64)),
    "tiles-biases": (ExpertCase(GPT_OSS, 67, hidden=192, skew=1.0), TilesVariant(160)),
    "claims": (ExpertCase(QWEN, 90, skew=0.7), TilesVariant(64, claims=True)),
    "claims-one-expert": (ExpertCase(TINY, 170, hidden=192, skew=100.0), TilesVariant(64, claims=True)),
    "claims-biases": (ExpertCase(GPT_OSS, 67, hidden=192, skew=1.0), TilesVariant(160, claims=True)),
    "claims-gathering": (ExpertCase(QWEN, 90, skew=0.7), TilesVariant(64, gathers=True, claims=True)),
    "gathering": (ExpertCase(QWEN, 70, skew=0.5), TilesVariant(160, gathers=True)),
    "gathering-one-expert": (
        ExpertCase(TINY, 170, hidden=192, skew=100.0, dtype=torch.float16),
        TilesVariant(32, True),
    ),
    "gathering-biases": (ExpertCase(GPT_OSS, 20, hidden=192, skew=1.0), TilesVariant(160, gathers=True)),
    "biases": (ExpertCase(GPT_OSS, 5, hidden=192), 16),
    "biases-sorted": (ExpertCase(GPT_OSS, 21, hidden=192, dtype=torch.float16), 16),
}


@pytest.mark.parametrize(
    ("config", "rows"),
    choice([(GROUPED, 71), (ERNIE, 29)], in_ci=[(GROUPED, 71)]),
    ids=lambda value: getattr(getattr(value, "router", None), "scoring", value),
)
def test_routing(config: ExpertsConfig, rows: int, seed: int) -> None:
    """By one block, and by several, whose plan the gather completes."""
    case = ExpertCase(config, rows, extra_logits=1)
    tensors = ExpertTensors(case, torch.device("cpu"), seed)
    plan = tensors.plan(8)
    ExpertRouting(config)(0, tensors.logits, tensors.router_bias, plan, 8)
    if rows > ROUTED_AT_ONCE:
        out = torch.full((rows * config.top_k, case.hidden), torch.nan, dtype=case.dtype)
        ExpertRows(config, case.hidden, case.dtype).gather(0, tensors.x, plan, out)
        assert torch.equal(out, tensors.x[plan.pairs.long() // config.top_k])
    check_plan(tensors, plan, 8)


@pytest.mark.parametrize(
    "case",
    choice(
        [
            ExpertCase(QWEN, 37, hidden=64),
            ExpertCase(TINY, 53, hidden=144, dtype=torch.float16),
            ExpertCase(ERNIE, 33, hidden=32),
            ExpertCase(TINY, 33, hidden=64),
        ],
        in_ci=[ExpertCase(TINY, 33, hidden=64)],  # whose gather is compiled for `test_experts` too
    ),
    ids=lambda case: f"{case.config.num_experts}-experts",
)
def test_entry(case: ExpertCase, seed: int) -> None:
    """By blocks that are alone in their clusters, which are not emulated."""
    entry = ExpertEntry(case.config, case.hidden, case.dtype, TilesVariant(160, gathers=True), split=1)
    rows = ExpertRows(case.config, case.hidden, case.dtype)
    run_entry(ExpertTensors(case, torch.device("cpu"), seed), entry, rows, 160)


@pytest.mark.parametrize("name", choice(list(CASES), in_ci=["tiny"]))
def test_experts(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, variant = CASES[name]
    if name.startswith("claims"):
        monkeypatch.setattr(expert_product, "num_multiprocessors", lambda: 3)  # the first claims all but others' first
    config = case.config
    if isinstance(variant, int):
        variant = ExpertVariant(variant, 2)
    run(
        ExpertTensors(case, torch.device("cpu"), seed),
        ExpertRouting(config),
        ExpertRows(config, case.hidden, case.dtype),
        ExpertProducts(config, case.dtype, variant),
        plain=name != "tiny",  # compiling one more kernel takes seconds
    )
