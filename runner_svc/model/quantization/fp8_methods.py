"""Reads the `quantization_config` of FP8 checkpoints: of fbgemm, `fp8` (in blocks, or AutoFP8's), and modelopt."""

from __future__ import annotations

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.folder.key_values import number
from runner_svc.model.quantization.config_reader import QuantizationKeys
from runner_svc.model.quantization.number_format import NumberFormat
from runner_svc.model.quantization.selection import EVERY, Globs, Left, Parts, Quantization, Rule, Targets, head
from runner_svc.model.quantization.stored_fp8 import Activations, Scales, StoredFp8

NO_KV_SCALES = (
    "scales of the KV cache are read from checkpoints of compressed-tensors and modelopt; delete the key and the "
    "tensors of these scales, and a KV cache in FP8 gets its own"
)
PER_TOKEN = (
    "the checkpoint asks for activations with one dynamic scale per tensor; each token has its own scale here, which "
    "is never coarser"
)


def read_fbgemm(keys: QuantizationKeys) -> Quantization:
    """fbgemm_fp8: a scale for each row of a matrix and for each token, the latter bounded."""
    bound = number(keys.path("activation_scale_ub"), keys.take("activation_scale_ub", int, float, default=1200.0))
    left = Left(keys.names("modules_to_not_convert"))
    keys.finish()
    stored = StoredFp8(Scales.CHANNEL, Activations.TOKEN, bound=bound)
    return Quantization("fbgemm_fp8", (Rule(EVERY, stored),), (head(), left))


def read_fp8(keys: QuantizationKeys) -> Quantization:
    """fp8: with `weight_block_size` as of DeepSeek and Qwen, without as of AutoFP8."""
    keys.only("fmt", "e4m3", default="e4m3")
    keys.only("scale_fmt", "float", default="float")
    keys.only("expert_dtype", "fp8", default="fp8")
    keys.only("dequantize", False, default=False)
    keys.absent("modules_to_convert", "it names modules beyond linear layers")
    keys.absent("kv_cache_scheme", NO_KV_SCALES)
    keys.absent("kv_cache_quant_method", NO_KV_SCALES)
    scheme = keys.only("activation_scheme", "dynamic", "static")
    block = _block(keys)
    left = Left(keys.names("modules_to_not_convert"))
    ignored = Targets(keys.names("ignored_layers"))
    keys.finish()
    notes: tuple[str, ...] = ()
    if block is not None:
        if scheme == "static":
            raise UnsupportedModel(
                f"The model's config.json has {keys.path('activation_scheme')!r} 'static' together with "
                "'weight_block_size', which is not supported; supported: dynamic."
            )
        stored = StoredFp8(Scales.BLOCK, Activations.GROUP, "weight_scale_inv", block)
    elif scheme == "static":
        stored = StoredFp8(Scales.TENSOR, Activations.STATIC)
    else:
        stored, notes = StoredFp8(Scales.TENSOR, Activations.TOKEN), (PER_TOKEN,)
    return Quantization("fp8", (Rule(EVERY, stored),), (head(), left, ignored), notes)


def _block(keys: QuantizationKeys) -> tuple[int, int] | None:
    value = keys.take("weight_block_size", list, default=None)
    if value is None:
        return None
    if value != [128, 128]:
        raise UnsupportedModel(
            f"The model's config.json has {keys.path('weight_block_size')!r} {value}, which is not supported; "
            "supported: [128, 128]."
        )
    return 128, 128


def read_modelopt(keys: QuantizationKeys) -> Quantization:
    """modelopt's FP8: one scale for a matrix, one for all its activations. Its other algorithms are refused."""
    keys.only("quant_algo", "FP8")
    has_kv_scales = keys.only("kv_cache_quant_algo", "FP8", default=None) is not None
    has_kv_scales |= read_kv_cache_scheme(keys)
    keys.harmless({"producer": "It names the program that wrote the checkpoint."})
    for name, group in keys.take("config_groups", dict, default={}).items():
        _check_repeated(QuantizationKeys(group, keys.path(f"config_groups.{name}")))
    left = (*keys.names("ignore"), *keys.names("exclude_modules"))
    keys.finish()
    rule = Rule(EVERY, StoredFp8(Scales.TENSOR, Activations.STATIC))
    return Quantization("modelopt", (rule,), (Globs(left),), perhaps_left=Parts(left), has_kv_scales=has_kv_scales)


def read_kv_cache_scheme(keys: QuantizationKeys) -> bool:
    """Returns whether the checkpoint has scales of the KV cache: static ones in FP8, one for a layer's keys or values.

    Raises UnsupportedModel for others.
    """
    scheme = keys.take("kv_cache_scheme", dict, default=None)
    if not scheme:
        return False
    numbers = NumberFormat.read(scheme, keys.path("kv_cache_scheme"))
    _require_static_tensors(numbers)
    return True


def _require_static_tensors(numbers: NumberFormat) -> None:
    """Raises UnsupportedModel unless numbers are FP8 with one stored scale for each tensor."""
    for key, value, expected in (
        ("num_bits", numbers.bits, 8),
        ("type", numbers.type, "float"),
        ("symmetric", numbers.symmetric, True),
        ("strategy", numbers.strategy, "tensor"),
        ("dynamic", numbers.dynamic, False),
    ):
        if value != expected:
            raise numbers.refuse(key, value)


def _check_repeated(keys: QuantizationKeys) -> None:
    """Refuses a group that says another thing than `quant_algo` FP8."""
    keys.only("targets", ["Linear"])
    for side in ("weights", "input_activations"):
        numbers = NumberFormat.read(keys.take(side, dict), keys.path(side))
        _require_static_tensors(numbers)
    keys.absent("output_activations", "outputs of products are quantized")
    keys.finish()
