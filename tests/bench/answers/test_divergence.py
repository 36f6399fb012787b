"""The divergence of a model from itself is nothing, and the logits are those of transformers."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from bench.answers.divergence import Divergence, line, logits_of
from runner_svc.backends.decoder_loading import load_decoder
from runner_svc.weights.on_load import OnLoad
from tests.support.host_backend import no_progress
from tests.support.tiny_models import make_tiny_model


def test_divergence(tmp_path: Path) -> None:
    folder, tokens = make_tiny_model("llama", tmp_path / "tiny"), [1, 5, 3, 200, 7] * 5
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain, quantized = (
        logits_of(load_decoder(folder, "roster", no_progress, on_load), tokens) for on_load in (OnLoad(), OnLoad("fp8"))
    )
    with torch.inference_mode():
        torch.testing.assert_close(plain, model(torch.tensor([tokens])).logits[0], rtol=1e-3, atol=1e-3)
    same = Divergence.between("plain", [plain], [plain])
    assert (same.mean, same.largest, same.same) == (0.0, 0.0, 1.0)
    other = Divergence.between("fp8", [plain], [quantized])
    assert 0 < other.median <= other.largest and 0.5 < other.same <= 1
    assert line(same) == "| `plain` | 0.000 | 0.000 | 0.00 | 100% |"
