"""Reads the `quantization_config` of AWQ and GPTQ checkpoints, also as auto-round writes them."""

from __future__ import annotations

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.quantization.config_reader import QuantizationKeys
from runner_svc.model.quantization.selection import EVERY, Left, Parts, Quantization, Rule, head
from runner_svc.model.quantization.stored_format import StoredFormat
from runner_svc.model.quantization.stored_int4 import StoredAwq, StoredGptq

GROUPS = (32, 64, 128)
_KERNELS = "It chooses a kernel of another program."
_CALIBRATION = "It says how the checkpoint was calibrated."

_HARMLESS_IN_AWQ = {
    **dict.fromkeys(("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"), _KERNELS)
}
_HARMLESS_IN_GPTQ = {
    **dict.fromkeys(("backend", "exllama_config", "use_exllama", "disable_exllama", "use_cuda_fp16"), _KERNELS),
    **dict.fromkeys(("max_input_length", "cache_block_outputs", "batch_size"), _KERNELS),
    **dict.fromkeys(("dataset", "tokenizer", "model_seqlen", "pad_token_id", "true_sequential"), _CALIBRATION),
    **dict.fromkeys(("damp_percent", "damp_auto_increment", "static_groups", "act_group_aware"), _CALIBRATION),
    **dict.fromkeys(("block_name_to_quantize", "module_name_preceding_first_block"), _CALIBRATION),
    **dict.fromkeys(("meta", "model_name_or_path", "model_file_base_name"), "It describes where the model comes from."),
}

_HARMLESS_IN_AUTO_ROUND = {
    **dict.fromkeys(("provider", "autoround_version"), "It names the program that wrote the checkpoint."),
    **dict.fromkeys(("amp", "batch_size", "dataset", "enable_minmax_tuning", "enable_norm_bias_tuning"), _CALIBRATION),
    **dict.fromkeys(("enable_quanted_input", "gradient_accumulate_steps", "iters", "lr", "minmax_lr"), _CALIBRATION),
    **dict.fromkeys(("low_gpu_mem_usage", "low_cpu_mem_usage", "nsamples", "seqlen", "train_bs"), _CALIBRATION),
    **dict.fromkeys(("quant_block_list", "to_quant_block_names", "supported_types"), "Tensors show what is quantized."),
    "scale_dtype": "Scales have the types of their tensors.",
    **dict.fromkeys(("act_data_type", "act_dynamic", "act_group_size", "act_sym"), "Activations are not rounded."),
    **dict.fromkeys(("static_kv_granularity", "static_attention_granularity"), "There are no such scales."),
}


def _check_auto_round(keys: QuantizationKeys) -> None:
    """Takes what auto-round says beside the keys of the method whose layout it writes."""
    keys.only("data_type", "int", default="int")
    keys.only("act_bits", 16, default=16)
    for key in ("super_bits", "super_group_size", "regex_config"):
        keys.absent(key, "groups or modules have settings of their own")
    for key in ("rotation_config", "rotation_configs"):
        keys.absent(key, "weights are rotated")
    for key in ("static_kv_dtype", "static_attention_dtype"):
        keys.absent(key, "attention is quantized")
    keys.harmless(_HARMLESS_IN_AUTO_ROUND)


def read_awq(keys: QuantizationKeys) -> Quantization:
    """AWQ in the gemm layout."""
    keys.only("bits", 4)
    keys.only("version", "gemm", "GEMM", default="gemm")
    keys.only("format", "gemm", default="gemm")
    group = _group(keys)
    symmetric = not keys.take("zero_point", bool, default=True)
    keys.only("sym", symmetric, default=symmetric)
    left = keys.names("modules_to_not_convert")
    keys.harmless(_HARMLESS_IN_AWQ)
    _check_auto_round(keys)
    keys.finish()
    rule = Rule(EVERY, StoredAwq(group, symmetric))
    return Quantization("awq", (rule,), (head(), Left(left)), perhaps_left=Parts(left))


def read_gptq(keys: QuantizationKeys) -> Quantization:
    """GPTQ in AutoGPTQ's layout, both versions."""
    keys.only("bits", 4)
    group = _group(keys)
    stored = StoredGptq(
        group,
        keys.take("sym", bool, default=True),
        version=_version(keys),
        reordered=keys.take("desc_act", bool, default=False),
    )
    keys.only("pack_dtype", "int32", default="int32")
    has_head = keys.take("lm_head", bool, default=False)
    keys.absent("is_marlin_format", "the weights are laid out for another program's kernels")
    keys.absent("dynamic", "modules have settings of their own")
    keys.absent("modules_in_block_to_quantize", "only some modules are quantized")
    keys.harmless(_HARMLESS_IN_GPTQ)
    _check_auto_round(keys)
    keys.finish()
    return Quantization("gptq", (Rule(EVERY, stored),), () if has_head else (head(),))


def read_auto_round(keys: QuantizationKeys) -> Quantization:
    """auto-round's own format: tensors are those of GPTQ or AWQ, as `packing_format` says."""
    keys.only("bits", 4)
    group, symmetric = _group(keys), keys.take("sym", bool, default=True)
    packing = keys.only("packing_format", "auto_round:auto_gptq", "auto_round:auto_awq")
    keys.absent("extra_config", "modules have settings of their own")
    keys.harmless({"block_name_to_quantize": "Tensors show what is quantized.", "backend": _KERNELS})
    _check_auto_round(keys)
    keys.finish()
    is_awq = packing == "auto_round:auto_awq"
    stored: StoredFormat = StoredAwq(group, symmetric) if is_awq else StoredGptq(group, symmetric)
    return Quantization("auto-round", (Rule(EVERY, stored),), (head(),))


def _version(keys: QuantizationKeys) -> int:
    named = {keys.only(key, "gptq", "gptq_v2", default=None) for key in ("checkpoint_format", "format")} - {None}
    if len(named) > 1:
        raise UnsupportedModel(
            f"The model's config.json has {keys.path('checkpoint_format')!r} and 'format', which differ: correct one."
        )
    return 2 if named == {"gptq_v2"} else 1


def _group(keys: QuantizationKeys) -> int | None:
    value = keys.only("group_size", -1, *GROUPS)
    return None if value == -1 else int(value)
