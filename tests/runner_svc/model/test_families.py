"""Families beyond Llama's: configurations as the hub has them, against what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from runner_svc.model.checkpoint.expected_tensors import check_tensors, expected_tensors
from runner_svc.model.checkpoint.layer_reader import LayerReader
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families.description import MlpDescription, NormKind, QkNorm
from runner_svc.model.families.experts_config import ExpertsConfig, RouterConfig, Scoring
from runner_svc.model.families.registry import ARCHITECTURES
from runner_svc.model.folder.safetensors_header import StoredTensor

GLM4_5_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
ERNIE_21B: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "eos_token_id": 2,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5_moe",
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000,
    "tie_word_embeddings": True,
    "use_bias": False,
    "use_rmsnorm": True,
    "vocab_size": 103424,
}
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GLM4_9B: dict[str, Any] = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "vocab_size": 151552,
}
COMMAND_R: dict[str, Any] = {
    "architectures": ["CohereForCausalLM"],
    "eos_token_id": 255001,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "model_type": "cohere",
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "num_key_value_heads": 64,
    "rope_theta": 8000000.0,
    "vocab_size": 256000,
}
DEFAULTS = [
    (transformers.GemmaConfig, "GemmaForCausalLM"),
    (transformers.Gemma2Config, "Gemma2ForCausalLM"),
    (transformers.Gemma3TextConfig, "Gemma3ForCausalLM"),
    (transformers.GraniteConfig, "GraniteForCausalLM"),
    (transformers.Olmo2Config, "Olmo2ForCausalLM"),
    (transformers.GlmConfig, "GlmForCausalLM"),
    (transformers.Glm4Config, "Glm4ForCausalLM"),
    (transformers.CohereConfig, "CohereForCausalLM"),
    (transformers.Cohere2Config, "Cohere2ForCausalLM"),
    (transformers.GPT2Config, "GPT2LMHeadModel"),
    (transformers.OPTConfig, "OPTForCausalLM"),
    (transformers.Ernie4_5_MoeConfig, "Ernie4_5_MoeForCausalLM"),
]


@pytest.mark.parametrize(("config_class", "architecture"), DEFAULTS)
def test_absent_keys_take_the_defaults_of_their_class(config_class: Any, architecture: str) -> None:
    raw = {"architectures": [architecture], "model_type": config_class.model_type, "eos_token_id": 2}
    written = {**config_class(eos_token_id=2).to_dict(), "architectures": [architecture]}
    assert ModelConfig.from_hugging_face(raw) == ModelConfig.from_hugging_face(written)


@pytest.mark.parametrize(
    ("config_class", "raw"),
    [
        (transformers.Gemma3TextConfig, GEMMA3_1B),
        (transformers.Glm4Config, GLM4_9B),
        (transformers.CohereConfig, COMMAND_R),
        (transformers.Glm4MoeConfig, GLM4_5_AIR),
        (transformers.Ernie4_5_MoeConfig, ERNIE_21B),
    ],
)
def test_configurations_of_the_hub_read_as_transformers_writes_them(config_class: Any, raw: dict[str, Any]) -> None:
    copy = {key: value.copy() if isinstance(value, dict) else value for key, value in raw.items()}
    written = {**config_class(**copy).to_dict(), "architectures": raw["architectures"]}
    assert ModelConfig.from_hugging_face(raw) == ModelConfig.from_hugging_face(written)


def test_glm_4_5_air() -> None:
    config = ModelConfig.from_hugging_face(GLM4_5_AIR)
    assert (config.ropes[0].rotary_dim, config.context_length) == (64, 131072)
    dense, mixture = config.layers[:2]
    assert isinstance(dense.mlp, MlpDescription) and (dense.mlp.width, dense.qkv_bias) == (10944, True)
    assert isinstance(mixture.mlp, ExpertsConfig) and not mixture.is_plain
    assert mixture.mlp.router == RouterConfig(Scoring.SIGMOID, normalize=True, is_corrected=True, is_exact=True)
    assert (mixture.mlp.top_k, mixture.mlp.shared_width, mixture.mlp.shared_gate) == (8, 1408, False)


def test_the_layer_that_predicts_a_further_token_is_not_read() -> None:
    config = ModelConfig.from_hugging_face({**GLM4_5_AIR, "num_hidden_layers": 1, "vocab_size": 8})
    tensors = {name: StoredTensor(Path(), "BF16", shape) for name, shape in expected_tensors(config, "model.", ())}
    for name in ("weight", "weight_packed"):
        check_tensors({**tensors, f"model.layers.1.eh_proj.{name}": StoredTensor(Path(), "BF16", (4,))}, config)
    for other in ("model.layers.2.eh_proj.weight", "model.layers.1.input_layernorm.weight"):
        with pytest.raises(UnsupportedModel, match=other.replace(".", r"\.")):
            check_tensors({**tensors, other: StoredTensor(Path(), "BF16", (4,))}, config)


def test_gemma_3_has_two_rotary_embeddings() -> None:
    config = ModelConfig.from_hugging_face(GEMMA3_1B)
    assert [(rope.theta, rope.factor) for rope in config.ropes] == [(1_000_000.0, 8.0), (10_000.0, 1.0)]
    assert [layer.rope for layer in config.layers[:7]] == [1, 1, 1, 1, 1, 0, 1]
    assert [layer.window for layer in config.layers[4:7]] == [512, None, 512]
    assert config.context_length == 32768  # the scaled context
    assert config.norm is NormKind.RMS_PLUS_ONE and config.layers[0].qk_norm is QkNorm.HEAD


def test_a_null_is_no_default() -> None:
    raw = {"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": None, "attn_logit_softcapping": None}
    config = ModelConfig.from_hugging_face({**raw, "model_type": "gemma2"})
    assert config.model.logits_soft_cap is None and config.layers[0].soft_cap is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["OPTForCausalLM"], "model_type": "opt", "word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        (
            {"architectures": ["OPTForCausalLM"], "model_type": "opt", "do_layer_norm_before": False},
            "layer_norm_before",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "add_cross_attention": True},
            "add_cross_attention",
        ),
        ({**GEMMA3_1B, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA3_1B, "rope_parameters": {"full_attention": 10.0}}, "rope_parameters"),
        ({**GEMMA3_1B, "layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_what_a_family_lacks_is_refused_by_its_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.from_hugging_face(changes)


def test_neighbours_that_rotate_together_become_halves() -> None:
    """Query and key heads are reordered in the dimensions that rotate; values are not."""
    config = ModelConfig.from_hugging_face(
        {**GLM4_9B, "hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    )

    def read(name: str) -> torch.Tensor:
        heads = 2 if "q_proj" in name else 1
        return torch.arange(8).repeat(heads).unsqueeze(1).expand(-1, 4).float()

    rows = LayerReader(config, "model.", read, ()).layer(0).qkv.weight[:, 0].view(4, 8)
    assert rows[:3].tolist() == [[0, 2, 1, 3, 4, 5, 6, 7]] * 3
    assert rows[3].tolist() == list(range(8))


def test_of_a_model_for_images_the_text_part_is_read() -> None:
    text = {key: value for key, value in GEMMA3_1B.items() if key not in ("architectures", "eos_token_id")}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    assert ModelConfig.from_hugging_face(whole) == ModelConfig.from_hugging_face(GEMMA3_1B)
    said: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128}
    whole["text_config"] = {**text, "quantization_config": said}
    found = ModelConfig.from_hugging_face({**whole, "quantization_config": said}).quantization
    assert found is not None and found == ModelConfig.from_hugging_face(whole).quantization
    with pytest.raises(UnsupportedModel, match="another one in its 'text_config'"):
        ModelConfig.from_hugging_face({**whole, "quantization_config": {**said, "group_size": 64}})


@pytest.mark.parametrize(
    ("architecture", "name", "start"),
    [
        ("LlamaForCausalLM", "model.embed_tokens.weight", "model."),
        ("LlamaForCausalLM", "embed_tokens.weight", ""),
        ("GPT2LMHeadModel", "wte.weight", ""),
        ("OPTForCausalLM", "decoder.embed_tokens.weight", "decoder."),
        ("Gemma3ForCausalLM", "language_model.model.embed_tokens.weight", "language_model.model."),
        ("Gemma3ForCausalLM", "model.language_model.embed_tokens.weight", "model.language_model."),
    ],
)
def test_names_of_checkpoints_that_were_saved_otherwise(architecture: str, name: str, start: str) -> None:
    assert ARCHITECTURES[architecture].names.start({name}.__contains__) == start
