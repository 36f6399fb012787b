"""Deviation of 16-bit arithmetic from float32: GPU tests allow a few times the deviation measured here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.support.parity import BFLOAT16, FLOAT16, Parity, Precision, forced_logits
from tests.support.tested_backend import reference
from tests.support.tiny_models import KERNEL_SIZES, NUM_TOKENS, make_tiny_model

PLACES = 96


def logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Returns float32 [len(tokens), vocab_size]; the last product is in float32, as in Roster."""
    with torch.inference_mode():
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0]
        return hidden.float() @ model.lm_head.weight.float().t()


@pytest.mark.parametrize("family", ["llama-head-dim", "llama-yarn", "qwen3"])
def test_float16_deviates_by_half_of_the_tolerance(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / "tiny", 1, torch.float16, **KERNEL_SIZES[family])
    exact = reference(folder, FLOAT16)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    tokens = torch.randint(NUM_TOKENS, (PLACES,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted, actual = logits(exact, tokens), logits(rounded, tokens)
    rows = range(PLACES)
    lost = wanted.max(dim=1).values - wanted[rows, actual.argmax(dim=1)]
    assert all(float(gap) <= FLOAT16.allowed_gap(row) / 2 for gap, row in zip(lost, wanted, strict=True))
    assert 0 < float((wanted - actual).abs().max()) < FLOAT16.allowed_error(wanted)
    assert int((lost > 0).sum()) <= FLOAT16.allowed_ties(PLACES)


@pytest.mark.parametrize("precision", [FLOAT16, BFLOAT16])
def test_a_token_that_is_not_a_near_tie_is_found(precision: Precision, tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny")
    parity = Parity(reference(folder, precision), precision)
    prompt, tokens = [1, 2, 3], [7, 8, 9]
    first, second = forced_logits(parity.model, prompt, tokens)[0].topk(20).indices[[0, -1]].tolist()
    parity.check_forced(prompt, [first])
    assert (parity.places, parity.ties) == (1, 0)
    with pytest.raises(AssertionError):
        parity.check_forced(prompt, [second])


def test_ties_are_counted_after_the_first_one() -> None:
    """With a stand-in for a model, whose logits are all equal."""
    parity = Parity(None, FLOAT16)
    assert FLOAT16.allowed_ties(0) == 3
    parity.places, parity.ties = 10, 4
    with pytest.raises(AssertionError):
        parity.assert_few_ties()
