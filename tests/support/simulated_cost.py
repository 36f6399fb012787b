"""A cost model with round numbers, for tests."""

from __future__ import annotations

from scheduler_svc.simulator.cost_model import CostModel, RunnerShape


def round_cost(**coefficients: float) -> CostModel:
    """Returns 10 ms per step and 0.1 ms per position unless given otherwise; 8 slots, 4,096 tokens of KV."""
    values: dict[str, float] = {"fixed_s": 0.01, "token_s": 0.0001, **coefficients}
    shape = RunnerShape(slots=8, kv_tokens=4096, block_size=16, step_tokens=256, vocab_size=32_000)
    return CostModel(name="round", runner=shape, **values)  # type: ignore[arg-type]
