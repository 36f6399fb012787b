"""The shipped cost models can be reproduced from the measurements in the repository."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.simulator.fit_costs import ATTENTION, SERVING, fit, main, served_ratios, served_steps
from scheduler_svc.simulator.cost_model import load_cost_model, shipped_cost_models

RESULTS = Path(__file__).parents[3] / "bench" / "results"
STEPS = max(RESULTS.glob("*-h200-steps.json"))
"""Newer than the fitted ones; the models should fit these too."""
NEWER = sorted(RESULTS.glob("*-h200-serving-*.json"))


def test_the_bare_command_fits_the_shipped_models(tmp_path: Path) -> None:
    main(["--output", str(tmp_path)])
    written = sorted(tmp_path.glob("*.json"))
    assert [path.stem for path in written] == ["h200-llama-3.1-8b", "h200-qwen3-0.6b"]
    for path in written:
        fitted, shipped = load_cost_model(str(path)), load_cost_model(path.stem)
        for name, value in shipped.model_dump(exclude={"runner"}).items():
            wanted = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            assert getattr(fitted, name) == wanted, name
        assert fitted.runner == shipped.runner


def test_results_of_several_versions_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"--output={tmp_path}", "--serving", *map(str, SERVING), *map(str, NEWER)])
    assert "several versions of the code" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-0.6b"])
def test_models_fit_the_measured_steps(shape: str) -> None:
    served = served_steps(shape, [*SERVING, *NEWER])
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
