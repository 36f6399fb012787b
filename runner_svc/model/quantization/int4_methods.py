"""Reads the `quantization_config` of AWQ and GPTQ checkpoints."""

from __future__ import annotations

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.quantization.config_reader import QuantizationKeys
from runner_svc.model.quantization.selection import EVERY, Left, Parts, Quantization, Rule, head
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


def read_awq(keys: QuantizationKeys) -> Quantization:
    """AWQ in the gemm layout."""
    keys.only("bits", 4)
    keys.only("version", "gemm", "GEMM", default="gemm")
    keys.only("format", "gemm", default="gemm")
    group = _group(keys)
    symmetric = not keys.take("zero_point", bool, default=True)
    left = keys.names("modules_to_not_convert")
    keys.harmless(_HARMLESS_IN_AWQ)
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
    keys.finish()
    return Quantization("gptq", (Rule(EVERY, stored),), () if has_head else (head(),))


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
