"""The shipped cost models can be fitted again from the results that the repository holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.fit_costs import RESULTS, fit, served_ratios, served_steps
from scheduler_svc.simulator.cost_model import load_cost_model, shipped_cost_models

STEPS, ATTENTION = max(RESULTS.glob("*-h200-steps.json")), max(RESULTS.glob("*-h200-attention-d128.json"))


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-0.6b"])
def test_models_fit_the_measured_steps(shape: str) -> None:
    served = served_steps(shape, RESULTS.glob("*-h200-serving-*.json"))
    model, error = fit(shape, STEPS, ATTENTION, served)
    print(model, error)
    assert model.name in shipped_cost_models()
    assert error.median < 0.05 and error.p90 < 0.15
    for kind, ratios in served_ratios(load_cost_model(model.name), served).items():
        assert np.median(ratios) == pytest.approx(1, abs=0.05), f"{model.name} as shipped is not that of {kind} steps"


def test_steps_of_the_service_are_read_by_shape_and_kind(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    loads = [{"sampled_steps": ["1024 9 20000 500000 22.500", "8 8 9000 0 4.400"]}, {"load": "of an older run"}]
    path.write_text(json.dumps({"shape": "llama-3.1-8b", "command": "", "loads": loads}))
    (mixed, decode) = served_steps("llama-3.1-8b", [path])
    assert (mixed.work.tokens, mixed.work.prefill_pairs, decode.work.sequences) == (1024, 500_000, 8)
    assert served_steps("qwen3-0.6b", [path]) == []
    model, _ = fit("llama-3.1-8b", STEPS, ATTENTION, [])
    assert sorted(served_ratios(model, [mixed, decode])) == ["decode", "mixed"]
