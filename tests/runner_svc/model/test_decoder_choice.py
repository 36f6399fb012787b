"""Which decoder computes a model is decided by its config.json and the setting."""

from __future__ import annotations

from typing import Any

import pytest

from runner_svc.model.decoder_choice import DecoderSetting, choose_decoder
from runner_svc.model.errors import UnsupportedModel
from tests.support.tiny_models import SIZES

LLAMA: dict[str, Any] = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
OTHER: dict[str, Any] = {**SIZES, "architectures": ["HeliumForCausalLM"], "model_type": "helium"}


def test_auto_takes_the_own_decoder_where_it_covers_the_configuration() -> None:
    config = choose_decoder(LLAMA, "auto").config
    assert config is not None and config.decoder == "roster"


@pytest.mark.parametrize(
    "raw", [OTHER, {**LLAMA, "hidden_act": "tanh"}, {**LLAMA, "rope_parameters": {"rope_type": "proportional"}}]
)
def test_auto_leaves_the_others_to_transformers(raw: dict[str, Any]) -> None:
    choice = choose_decoder(raw, "auto")
    assert choice.config is None and "not supported" in choice.why_not_own


def test_transformers_can_be_asked_for() -> None:
    assert choose_decoder(LLAMA, "transformers").config is None


def test_roster_refuses_what_it_lacks() -> None:
    with pytest.raises(UnsupportedModel, match=r"HeliumForCausalLM.*decoder is 'roster'"):
        choose_decoder(OTHER, "roster")


@pytest.mark.parametrize("asked", ["auto", "roster"])
def test_transformers_is_not_asked_for_quantized_models(asked: DecoderSetting) -> None:
    with pytest.raises(UnsupportedModel, match=r"'bitsandbytes', which is not supported; supported: [^.]*\.$"):
        choose_decoder({**LLAMA, "quantization_config": {"quant_method": "bitsandbytes"}}, asked)
