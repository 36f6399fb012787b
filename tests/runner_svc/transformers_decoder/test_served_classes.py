"""What a config.json alone rules out is refused with a sentence, before any weight is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from runner_svc.model.errors import UnsupportedModel
from runner_svc.transformers_decoder.served_classes import served_class, undeclared_keys
from tests.support.tiny_models import SIZES

HELIUM: dict[str, Any] = {**SIZES, "model_type": "helium", "architectures": ["HeliumForCausalLM"]}
BERT = {**SIZES, "model_type": "bert", "architectures": ["BertLMHeadModel"]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "remote code": ({**HELIUM, "auto_map": {"AutoModelForCausalLM": "m.M"}}, "trust_remote_code"),
    "quantized": ({**HELIUM, "quantization_config": {"quant_method": "gptq"}}, "quantized"),
    "unknown type": ({**HELIUM, "model_type": "zephyrine"}, "no model_type 'zephyrine'"),
    "no type": ({"architectures": ["X"]}, "no model_type None"),
    "not causal": ({"model_type": "clip", "architectures": ["CLIPModel"]}, "no causal language models"),
    "another head": (
        {**HELIUM, "architectures": ["HeliumForSequenceClassification"]},
        "HeliumForSequenceClassification",
    ),
    "its values": ({**HELIUM, "num_hidden_layers": "three"}, "refuses its config.json"),
    "layers": ({**HELIUM, "num_hidden_layers": 10**9}, "'num_hidden_layers' of at most 4096, it has 1000000000"),
    "layers of text": ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}, "of at most 4096"),
    "encoder": (BERT, "is_decoder false"),
    "cross-attention": ({**BERT, "is_decoder": True, "add_cross_attention": True}, "add_cross_attention"),
    "state": ({"model_type": "recurrent_gemma"}, "state other than keys and values"),
    "convolutions": ({"model_type": "lfm2", "layer_types": ["conv"] * 32}, "'conv': it keeps state"),
    "no interface": ({"model_type": "bloom"}, "does not let its attention be replaced"),
    "chunks": ({"model_type": "llama4_text"}, "chunked_attention"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_with_a_sentence(what: str) -> None:
    raw, says = REFUSED[what]
    with pytest.raises(UnsupportedModel) as caught:
        served_class(raw)
    assert says in str(caught.value) and str(caught.value).endswith((".", ")"))


def test_the_class_is_the_first_causal_one_that_is_asked_for() -> None:
    assert (
        served_class({**HELIUM, "architectures": ["HeliumModel", "HeliumForCausalLM"]}).__name__ == "HeliumForCausalLM"
    )
    assert served_class({key: value for key, value in HELIUM.items() if key != "architectures"}).__name__ == (
        "HeliumForCausalLM"
    )


def test_keys_that_a_class_does_not_know_are_found() -> None:
    for raw in (HELIUM, {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}):
        config = CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
        written = json.loads(config.to_json_string(use_diff=False))
        more = {"scale_depth": 1.4, "attn_scale": 2.0, "temperature": 0.6, "rope_theta": 5.0, "_commit": "x"}
        assert undeclared_keys(written, config) == []
        read = CONFIG_MAPPING[raw["model_type"]].from_dict({**written, **more})
        assert undeclared_keys({**written, **more}, read) == ["scale_depth", "attn_scale"]
    text = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "scale_depth": 1.4}}
    assert undeclared_keys(text, CONFIG_MAPPING["gemma3"].from_dict(dict(text))) == ["scale_depth"]
