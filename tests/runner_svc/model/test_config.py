"""Configurations in all their forms, compared with transformers' reading of them."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families.registry import ARCHITECTURES
from runner_svc.model.rope_config import RopeType

# As in a Llama 2 folder, which predates rope_parameters, head_dim and num_key_value_heads.
OLD_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def rotating(config: ModelConfig) -> tuple[bool, ...]:
    return tuple(layer.rope is not None for layer in config.layers)


def test_fields_that_old_configurations_omit() -> None:
    config = ModelConfig.from_hugging_face(OLD_LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.activation) == (4, 16, "silu")
    assert not config.tied_embeddings and config.is_plain
    (rope,) = config.ropes
    assert (rope.type, rope.theta, rope.rotary_dim) == (RopeType.DEFAULT, 10_000.0, 16)
    assert config.windows == (None,) * 6
    assert config.context_length == 2048
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_old_rope_scaling_reads_as_rope_parameters(spelling: str) -> None:
    old = {**OLD_LLAMA, "rope_theta": 5e5, "rope_scaling": {spelling: "linear", "factor": 4.0}}
    new = {**OLD_LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}
    assert ModelConfig.from_hugging_face(old) == ModelConfig.from_hugging_face(new)


@pytest.mark.parametrize(
    ("parameters", "context_length"),
    [
        ({"rope_type": "default"}, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 2048),
    ],
)
def test_context_length_counts_the_scaling(parameters: dict[str, Any], context_length: int) -> None:
    assert ModelConfig.from_hugging_face({**OLD_LLAMA, "rope_parameters": parameters}).context_length == context_length


@pytest.mark.parametrize("config_class", [transformers.Qwen2Config, transformers.Qwen3Config])
def test_qwen_windows_with_and_without_layer_types(config_class: Any) -> None:
    config = config_class(num_hidden_layers=5, use_sliding_window=True, sliding_window=32, max_window_layers=3)
    raw = config.to_dict()
    expected = (None, None, None, 32, 32)
    assert ModelConfig.from_hugging_face(config).windows == expected
    del raw["layer_types"]
    assert ModelConfig.from_hugging_face(raw).windows == expected
    assert ModelConfig.from_hugging_face({**raw, "use_sliding_window": False}).windows == (None,) * 5


def test_mistral_windows_cover_all_layers() -> None:
    config = transformers.MistralConfig(num_hidden_layers=3, sliding_window=64)
    assert ModelConfig.from_hugging_face(config).windows == (64, 64, 64)
    config.sliding_window = None
    assert ModelConfig.from_hugging_face(config).windows == (None, None, None)


def test_smollm3_skips_rope_where_transformers_does() -> None:
    config = transformers.SmolLM3Config(num_hidden_layers=10, no_rope_layer_interval=3)
    expected = tuple(map(bool, config.no_rope_layers))
    assert rotating(ModelConfig.from_hugging_face(config)) == expected
    raw = config.to_dict()
    del raw["no_rope_layers"]
    assert rotating(ModelConfig.from_hugging_face(raw)) == expected


def test_architecture_follows_from_the_model_type() -> None:
    raw = {key: value for key, value in OLD_LLAMA.items() if key != "architectures"}
    assert ModelConfig.from_hugging_face(raw).architecture == "LlamaForCausalLM"


def test_an_unsupported_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel) as raised:
        ModelConfig.from_hugging_face({**OLD_LLAMA, "architectures": ["MambaForCausalLM"]})
    assert "MambaForCausalLM" in str(raised.value)
    assert all(name in str(raised.value) for name in ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"hidden_act": "laplace"}, "'laplace'"),
        ({"hidden_size": None}, "'hidden_size'"),
        ({"vocab_size": 0}, "'vocab_size'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}}, "layer type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
    ],
)
def test_unsupported_features_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.from_hugging_face({**OLD_LLAMA, **changes})
