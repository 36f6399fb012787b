"""Experts on the CPU against transformers' own modules, from checkpoints in both layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from runner_svc.decoder.mlp import ExpertMlp
from runner_svc.model.checkpoint.expert_reader import ExpertReader
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families import experts_config, mixtures
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.model.families.family import Family
from runner_svc.weights.expert_weights import ExpertWeights

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 3,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any], Family]] = {
    "qwen3": (transformers.Qwen3MoeConfig, {"num_experts": 8, "moe_intermediate_size": 24}, mixtures.QWEN3_MOE),
    "qwen3-normalized": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True},
        mixtures.QWEN3_MOE,
    ),
    "qwen2": (
        transformers.Qwen2MoeConfig,
        {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32},
        mixtures.QWEN3_MOE,
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 5}, mixtures.MIXTRAL),
    "gpt-oss": (
        transformers.GptOssConfig,
        {"num_local_experts": 7, "swiglu_limit": 1.0, "head_dim": 24},
        mixtures.GPT_OSS,
    ),
    "glm4-moe": (
        transformers.Glm4MoeConfig,
        {
            "n_routed_experts": 16,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 0,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        mixtures.GLM4_MOE,
    ),
    "dots1": (
        transformers.Dots1Config,
        {"n_routed_experts": 7, "moe_intermediate_size": 24, "n_shared_experts": 2},
        mixtures.DOTS1,
    ),
    "ernie": (
        transformers.Ernie4_5_MoeConfig,
        {
            "moe_num_experts": 9,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_layer_start_index": 0,
            "moe_norm_min": 0.4,
        },
        mixtures.ERNIE4_5_MOE,
    ),
}
QWEN_LIKE = ["qwen3", "qwen3-normalized", "qwen2", "mixtral", "gpt-oss"]
READERS = {
    "qwen2_moe": experts_config.qwen2_experts,
    "qwen3_moe": experts_config.qwen3_experts,
    "glm4_moe": experts_config.sigmoid_experts,
    "dots1": experts_config.sigmoid_experts,
    "ernie4_5_moe": experts_config.ernie_experts,
}


def described(raw: dict[str, Any]) -> ExpertsConfig:
    """Of a model's only layer, as its family reads it."""
    raw = {key: value for key, value in raw.items() if value is not None}
    kind = raw["model_type"]
    if kind == "mixtral":
        return experts_config.mixtral_experts(raw)
    if kind == "gpt_oss":
        return experts_config.gpt_oss_experts(raw)
    (layer,) = READERS[kind](raw, 1)
    assert layer is not None
    return layer


def random_model(name: str) -> Any:
    config_class, sizes, _ = FAMILIES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**SIZES, **sizes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.4)
    return model


def reader(name: str, config: ExpertsConfig, tensors: dict[str, torch.Tensor]) -> ExpertReader:
    return ExpertReader(config, SIZES["hidden_size"], FAMILIES[name][2].names.experts, tensors.__getitem__, tensors)


@pytest.mark.parametrize("stored", [True, False], ids=["as saved", "as in memory"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_those_of_transformers(name: str, stored: bool, tmp_path: Path) -> None:
    model = random_model(name)
    if stored:
        model.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
    else:
        tensors = dict(model.state_dict())
    config = described(model.config.to_dict())
    experts = ExpertMlp(config, reader(name, config, tensors).layer("model.layers.0"), keep_plain=False)
    x = torch.randn(29, SIZES["hidden_size"])
    with torch.inference_mode():
        expected = model.model.layers[0].mlp(x.unsqueeze(0))
        expected = expected[0] if isinstance(expected, tuple) else expected
        torch.testing.assert_close(experts(x), expected[0], rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    model = random_model("qwen3")
    config = described(model.config.to_dict())
    weights = reader("qwen3", config, dict(model.state_dict())).layer("model.layers.0")
    experts = ExpertMlp(config, weights, keep_plain=False)
    x = torch.randn(40, SIZES["hidden_size"])
    with torch.inference_mode():
        together = experts(x)
        for count in (1, 2, 3, 7):
            assert torch.equal(torch.cat([experts(rows) for rows in x.split(count)]), together)


def test_a_router_is_kept_in_float32_where_16_bits_would_round_it() -> None:
    model = random_model("glm4-moe")
    tensors, config = dict(model.state_dict()), described(model.config.to_dict())
    own = "model.layers.0.mlp.gate.weight"

    def read() -> ExpertWeights:
        names = FAMILIES["glm4-moe"][2].names.experts
        return ExpertReader(
            config, SIZES["hidden_size"], names, lambda name: tensors[name].bfloat16(), tensors, tensors.__getitem__
        ).layer("model.layers.0")

    weights = read()
    assert torch.equal(weights.router.weight, tensors[own]) and weights.down.weight.dtype is torch.bfloat16
    assert weights.corrections is not None
    assert torch.equal(weights.corrections, tensors["model.layers.0.mlp.gate.e_score_correction_bias"])
    tensors[own] = tensors[own].bfloat16().float()
    assert read().router.weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"n_group": 3}, "16 experts can't be in 3 equal groups"),
        ({"n_group": 4, "topk_group": 5}, "'topk_group' must be between 1 and 4"),
        ({"n_group": 4, "num_experts_per_tok": 5}, "'num_experts_per_tok' 5 is more than the 4 experts"),
        ({"n_shared_experts": None}, "needs a positive integer 'n_shared_experts'"),
        ({"routed_scaling_factor": -1.0}, "'routed_scaling_factor' must be a number of at least 0"),
    ],
)
def test_refuses_experts_that_can_not_be_chosen(raw: dict[str, Any], message: str) -> None:
    sizes = {"n_routed_experts": 16, "num_experts_per_tok": 3, "n_shared_experts": 1}
    with pytest.raises(ValueError, match=message):
        experts_config.sigmoid_experts({**sizes, **raw}, 2)


@pytest.mark.parametrize("name", QWEN_LIKE)
def test_absent_keys_have_the_class_s_values(name: str) -> None:
    config_class = FAMILIES[name][0]
    whole = config_class(num_hidden_layers=1).to_dict()
    assert described({"model_type": whole["model_type"]}) == described(whole)


def test_dense_layers_among_the_others() -> None:
    raw = {"mlp_only_layers": [3], "decoder_sparse_step": 2}
    layers = experts_config.qwen3_experts(raw, 6)
    assert [layer is not None for layer in layers] == [False, True, False, False, False, True]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"num_experts_per_tok": 9, "num_experts": 8}, "'num_experts_per_tok' must be between 1 and 8, not 9"),
        ({"num_experts": 0}, "'num_experts' must be a positive integer, not 0"),
        ({"num_experts": 8, "num_local_experts": 4}, "'num_experts' and 'num_local_experts' must agree"),
        ({"moe_intermediate_size": 1.5}, "'moe_intermediate_size' must be a positive integer, not 1.5"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' must be a positive integer, not 0"),
        ({"mlp_only_layers": "1"}, "'mlp_only_layers' must be a list of layers, not '1'"),
    ],
)
def test_refuses_a_configuration(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experts_config.qwen3_experts(raw, 2)


def test_refuses_a_clamp_that_is_none() -> None:
    with pytest.raises(ValueError, match="'swiglu_limit' must be a positive number, not 0"):
        experts_config.gpt_oss_experts({"swiglu_limit": 0})


@pytest.mark.parametrize("name", FAMILIES)
def test_refuses_a_tensor_of_another_shape(name: str) -> None:
    model = random_model(name)
    config = described(model.config.to_dict())
    for changed, tensor in model.state_dict().items():
        if ".mlp." not in changed:
            continue
        tensors = dict(model.state_dict()) | {changed: tensor[..., :-1].contiguous()}
        with pytest.raises(UnsupportedModel, match=f"{changed} is ".replace(".", r"\.")):
            reader(name, config, tensors).layer("model.layers.0")
