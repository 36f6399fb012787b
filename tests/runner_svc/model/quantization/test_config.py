"""Every key of a `quantization_config` is used, harmless, or refused by its name; garbage gives one sentence."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.quantization.read import METHODS, read_quantization
from runner_svc.model.quantization.selection import Globs, Left, Targets
from runner_svc.model.quantization.stored_fp8 import Activations, Scales, StoredFp8
from runner_svc.model.quantization.stored_gguf import StoredGguf
from runner_svc.model.quantization.stored_int4 import StoredAwq, StoredGptq, StoredPacked
from runner_svc.model.quantization.stored_mxfp4 import StoredMxfp4

FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True, "observer": None}
TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "actorder": "weight", "zp_dtype": None}


def compressed(form: str, weights: Any, inputs: Any = None, **keys: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    groups = {"group_0": {**group, **keys.pop("group", {})}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
        **keys,
    }


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True, "damp_percent": 0.1}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM", "backend": "autoawq"}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AUTO = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": None}

AUTO_ROUND = {
    "data_type": "int",
    "autoround_version": "0.16.1",
    "provider": "auto-round",
    "batch_size": 4,
    "enable_minmax_tuning": True,
    "enable_quanted_input": True,
    "iters": 1000,
    "lr": 0.001,
    "nsamples": 512,
    "scale_dtype": "torch.float32",
    "static_kv_granularity": "tensor",
    "supported_types": ["Linear"],
}
"""What auto-round adds to the keys of the method whose layout it writes."""

ROUNDED = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
    "block_name_to_quantize": "model.layers",
    "enable_quanted_input": False,
}

GGUF = {
    "quant_method": "gguf-blocks",
    "version": 1,
    "modules": {"Q4_K": ["model.layers.0.mlp.up_proj"], "Q6_K": ["model.layers.3.mlp.up_proj"]},
}

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

READ: dict[str, tuple[dict[str, Any], Any]] = {
    "compressed, token": (compressed("float-quantized", FP8, TOKEN), StoredFp8(Scales.CHANNEL, Activations.TOKEN)),
    "compressed, static": (
        compressed("naive-quantized", TENSOR, TENSOR, version="0.9", sparsity_config={}, transform_config={}),
        StoredFp8(Scales.TENSOR, Activations.STATIC),
    ),
    "compressed, dense": (
        compressed(
            "float-quantized", FP8, TOKEN, sparsity_config={"format": "dense", "global_sparsity": 0.1, "ignore": []}
        ),
        StoredFp8(Scales.CHANNEL, Activations.TOKEN),
    ),
    "compressed, weights": (compressed("float-quantized", FP8), StoredFp8(Scales.CHANNEL, Activations.PLAIN)),
    "compressed, dynamic tensor": (
        compressed("float-quantized", FP8, {**TENSOR, "dynamic": True}),
        StoredFp8(Scales.CHANNEL, Activations.TOKEN),
    ),
    "packed": (compressed("pack-quantized", INT4), StoredPacked(128, True)),
    "packed, inferred": (
        compressed("pack-quantized", {"num_bits": 4, "type": "int", "group_size": -1, "symmetric": False}),
        StoredPacked(None, False),
    ),
    "mixed": (
        compressed("mixed-precision", FP8, TOKEN, group={"format": "float-quantized"}),
        StoredFp8(Scales.CHANNEL, Activations.TOKEN),
    ),
    "fbgemm": (FBGEMM, StoredFp8(Scales.CHANNEL, Activations.TOKEN, bound=1200.0)),
    "blocks": (BLOCKS, StoredFp8(Scales.BLOCK, Activations.GROUP, "weight_scale_inv", (128, 128))),
    "auto-fp8": (AUTO, StoredFp8(Scales.TENSOR, Activations.STATIC)),
    "modelopt": (MODELOPT, StoredFp8(Scales.TENSOR, Activations.STATIC)),
    "modelopt, repeated": (
        {**MODELOPT, "config_groups": {"g": {"targets": ["Linear"], "weights": TENSOR, "input_activations": TENSOR}}},
        StoredFp8(Scales.TENSOR, Activations.STATIC),
    ),
    "awq": (AWQ, StoredAwq(128, False)),
    "gptq": (GPTQ, StoredGptq(128, True, 1, True)),
    "awq of auto-round": ({**AWQ, **AUTO_ROUND, "sym": False}, StoredAwq(128, False)),
    "gptq of auto-round": ({**GPTQ, **AUTO_ROUND, "desc_act": False}, StoredGptq(128, True, 1, False)),
    "auto-round": (ROUNDED, StoredGptq(128, True)),
    "auto-round, asymmetric": (
        {**ROUNDED, "sym": False, "packing_format": "auto_round:auto_awq"},
        StoredAwq(128, False),
    ),
    "gguf": (GGUF, StoredGguf("Q6_K")),
    "gptq v2": (
        {**GPTQ, "group_size": -1, "checkpoint_format": "gptq_v2", "desc_act": False, "sym": False, "lm_head": False},
        StoredGptq(None, False, 2, False),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_the_layers_have_the_format_and_the_head_is_plain(name: str) -> None:
    raw, stored = READ[name]
    quantization = read_quantization(raw)
    assert quantization is not None
    assert quantization.format_of("model.layers.3.mlp.up_proj") == stored
    assert quantization.format_of("lm_head") is None
    assert bool(quantization.notes) == (name == "compressed, dynamic tensor")


def test_only_experts_are_in_mxfp4() -> None:
    quantization = read_quantization({**MXFP4, "modules_to_not_convert": ["model.layers.2.mlp.experts"]})
    assert quantization is not None
    for module, is_there in (
        ("model.layers.1.mlp.experts.gate_up_proj", True),
        ("model.layers.1.mlp.experts.down_proj", True),
        ("model.layers.2.mlp.experts.down_proj", False),
        ("model.layers.1.mlp.router", False),
        ("model.layers.1.self_attn.q_proj", False),
    ):
        assert quantization.format_of(module) == (StoredMxfp4() if is_there else None)


def test_scales_of_a_kv_cache() -> None:
    for raw, is_there in (
        (compressed("float-quantized", FP8, TOKEN, kv_cache_scheme=TENSOR), True),
        (compressed("float-quantized", FP8, TOKEN, kv_cache_scheme=None), False),
        ({**MODELOPT, "kv_cache_quant_algo": "FP8"}, True),
        ({**MODELOPT, "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, True),
        (MODELOPT, False),
    ):
        quantization = read_quantization(raw)
        assert quantization is not None and quantization.has_kv_scales == is_there


def test_no_quantization() -> None:
    assert read_quantization(None) is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "quant_method"),
    ({"quant_method": "bitsandbytes"}, "'bitsandbytes', which is not supported; supported: compressed-tensors"),
    ({**MODELOPT, "quant_algo": "NVFP4"}, "quant_algo' 'NVFP4'"),
    ({**MODELOPT, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme.type"),
    ({**MODELOPT, "kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo' 'INT8'"),
    ({**AUTO, "kv_cache_scheme": "static"}, "scales of the KV cache are read from checkpoints of compressed-tensors"),
    ({**MODELOPT, "config_groups": {"g": {"weights": FP8, "input_activations": TENSOR}}}, "config_groups.g.targets"),
    (
        {**MODELOPT, "config_groups": {"g": {"targets": ["Linear"], "weights": FP8, "input_activations": TENSOR}}},
        "config_groups.g.weights.strategy' 'channel'",
    ),
    ({**MXFP4, "dequantize": True}, "dequantize' True"),
    ({**GGUF, "version": 2}, "version' 2"),
    ({**GGUF, "modules": {"IQ1_S": []}}, "modules.IQ1_S"),
    ({**GGUF, "modules": {"Q4_K": [3]}}, "modules.Q4_K' to be a list of strings"),
    ({**GPTQ, "bits": 8}, "bits' 8"),
    ({**GPTQ, "bits": True}, "bits' True"),
    ({**GPTQ, "group_size": 16}, "group_size' 16"),
    ({**GPTQ, "dynamic": {"-:.*": {}}}, "dynamic"),
    ({**GPTQ, "lm_head": "yes"}, "lm_head.* to be of type bool"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "'marlin'"),
    ({**GPTQ, "checkpoint_format": "gptq", "format": "gptq_v2"}, "differ"),
    ({**GPTQ, "no such key": 1}, "'quantization_config.no such key'"),
    ({**AWQ, **AUTO_ROUND, "sym": True}, "sym' True, which is not supported; supported: False"),
    ({**ROUNDED, "packing_format": "auto_round:exllamav2"}, "packing_format' 'auto_round:exllamav2'"),
    ({**ROUNDED, "extra_config": {"lm_head": {"bits": 4}}}, "extra_config.* settings of their own"),
    ({**AWQ, **AUTO_ROUND, "act_bits": 8}, "act_bits' 8"),
    ({**GPTQ, **AUTO_ROUND, "data_type": "mx_fp"}, "data_type' 'mx_fp'"),
    ({**GPTQ, **AUTO_ROUND, "static_kv_dtype": "fp8"}, "static_kv_dtype' 'fp8'"),
    ({**GPTQ, **AUTO_ROUND, "rotation_configs": [{"a": 1}]}, "rotated"),
    ({**AWQ, "version": "gemv"}, "'gemv'"),
    ({**AWQ, "zero_point": "yes"}, "zero_point"),
    ({**FBGEMM, "activation_scale_ub": -1}, "activation_scale_ub"),
    ({**BLOCKS, "weight_block_size": [64, 64]}, r"\[64, 64\]"),
    ({**BLOCKS, "activation_scheme": "static"}, "together with 'weight_block_size'"),
    ({**BLOCKS, "scale_fmt": "ue8m0"}, "'ue8m0'"),
    ({**BLOCKS, "fmt": "e5m2"}, "'e5m2'"),
    (compressed("int-quantized", FP8), "'int-quantized'"),
    (
        compressed("float-quantized", FP8, sparsity_config={"format": "sparse-bitmask"}),
        "sparsity_config.format' 'sparse",
    ),
    (compressed("float-quantized", FP8, sparsity_config={"format": "dense", "n": 1}), "sparsity_config.n'"),
    (compressed("mixed-precision", FP8), "config_groups.group_0.format"),
    (compressed("pack-quantized", {**INT4, "num_bits": 8}), "weights.num_bits' 8"),
    (compressed("pack-quantized", INT4, TOKEN), "input_activations.num_bits' 8"),
    (compressed("pack-quantized", {**INT4, "actorder": "group"}), "actorder' 'group'"),
    (compressed("float-quantized", FP8, {**TOKEN, "symmetric": False}), "symmetric' False"),
    (compressed("float-quantized", FP8, {**TOKEN, "type": "int"}), "type' 'int'"),
    (compressed("float-quantized", {**FP8, "dynamic": True}), "weights.dynamic' True"),
    (
        compressed("float-quantized", FP8, TOKEN, kv_cache_scheme={"num_bits": 4, "type": "float"}),
        "kv_cache_scheme.num_bits' 4",
    ),
    (compressed("float-quantized", FP8, TOKEN, kv_cache_scheme={**TENSOR, "dynamic": True}), "kv_cache_scheme.dynamic"),
    (compressed("float-quantized", FP8, TOKEN, transform_config={"x": 1}), "rotated"),
    (compressed("float-quantized", FP8, TOKEN, group={"output_activations": TOKEN}), "output_activations"),
    (compressed("float-quantized", FP8, TOKEN, group={"zeros": 1}), "config_groups.group_0.zeros"),
    (compressed("float-quantized", FP8, {**TOKEN, "group_size": 128}), "input_activations.group_size' 128 together"),
    (compressed("float-quantized", {**FP8, "block_structure": [1, 128]}), "weights.block_structure.* together"),
    (compressed("pack-quantized", {**INT4, "strategy": "channel"}), "weights.group_size' 128 together"),
]


@pytest.mark.parametrize(("raw", "named"), REFUSED)
def test_what_is_not_known_is_refused_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_quantization(raw)


def test_garbage_is_read_or_refused_in_a_sentence() -> None:
    rng = random.Random(7)
    values: tuple[Any, ...] = (
        None,
        True,
        -1,
        0,
        2**70,
        1.5,
        float("nan"),
        "",
        "x",
        [],
        [1],
        ["re:("],
        {},
        {"a": {}},
        4,
    )

    def broken(raw: Any) -> Any:
        if isinstance(raw, dict) and raw and rng.random() < 0.8:
            key = rng.choice([*raw, "unknown"])
            return {**raw, key: broken(raw.get(key))}
        return rng.choice(values)

    for _ in range(400):
        raw = broken(rng.choice([raw for raw, _ in READ.values()]))
        try:
            quantization = read_quantization(raw)
            if quantization is not None:
                quantization.format_of("model.layers.0.mlp.up_proj")
        except UnsupportedModel as error:
            assert str(error).endswith((".", "quantized.")) and "\n" not in str(error)


def test_exact_names_come_before_patterns_and_classes() -> None:
    raw = compressed("float-quantized", FP8, TOKEN)
    raw["config_groups"] |= {
        "by_pattern": {"targets": ["re:.*down_proj$"], "weights": FP8},
        "by_name": {"targets": ["model.layers.0.mlp.down_proj"], "weights": TENSOR},
    }
    quantization = read_quantization(raw)
    assert quantization is not None
    assert [
        quantization.format_of(f"model.layers.{name}")
        for name in ("0.mlp.up_proj", "1.mlp.down_proj", "0.mlp.down_proj")
    ] == [
        StoredFp8(Scales.CHANNEL, Activations.TOKEN),
        StoredFp8(Scales.CHANNEL, Activations.PLAIN),
        StoredFp8(Scales.TENSOR, Activations.PLAIN),
    ]


def test_a_group_may_have_names_of_several_kinds() -> None:
    raw = compressed("float-quantized", FP8, TOKEN, group={"targets": ["Linear", "model.layers.0.mlp.down_proj"]})
    raw["config_groups"]["other"] = {"targets": ["re:.*down_proj$"], "weights": FP8}
    quantization = read_quantization(raw)
    assert quantization is not None
    found = [quantization.format_of(f"model.layers.{index}.mlp.down_proj") for index in (0, 1)]
    assert found == [StoredFp8(Scales.CHANNEL, Activations.TOKEN), StoredFp8(Scales.CHANNEL, Activations.PLAIN)]


def test_a_module_of_two_groups_is_refused() -> None:
    """Programs differ in which group counts."""
    for targets in (["re:.*down"], ["Linear"]):
        raw = compressed("float-quantized", FP8, TOKEN, group={"targets": targets})
        raw["config_groups"]["other"] = {"targets": [targets[0].replace("down", "down_proj$")], "weights": FP8}
        quantization = read_quantization(raw)
        assert quantization is not None
        with pytest.raises(UnsupportedModel, match=r"'model\.layers\.0\.mlp\.down_proj' has several formats"):
            quantization.format_of("model.layers.0.mlp.down_proj")


def test_names_of_modules() -> None:
    up = "model.layers.11.mlp.up_proj"
    for names, module, expected in (
        (Targets(("Linear",)), up, True),
        (Targets((up,)), up, True),
        (Targets(("mlp.up_proj",)), up, False),
        (Targets(("re:.*mlp",)), up, True),
        (Targets(("re:mlp",)), up, False),
        (Left(("model.layers.1",)), up, False),
        (Left(("model.layers.11",)), up, True),
        (Left(("up_proj",)), up, True),
        (Left(("model.layers.*.mlp.up",)), up, False),
        (Globs(("*mlp*",)), up, True),
        (Globs(("mlp*",)), up, False),
    ):
        assert (module in names) == expected, names


def test_every_method_is_tested() -> None:
    assert {raw["quant_method"] for raw in (MXFP4, *(raw for raw, _ in READ.values()))} == METHODS.keys()
