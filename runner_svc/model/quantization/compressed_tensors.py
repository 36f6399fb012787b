"""Reads the `quantization_config` of compressed-tensors: FP8, and packed int4 weights."""

from __future__ import annotations

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.quantization.config_reader import QuantizationKeys
from runner_svc.model.quantization.fp8_methods import PER_TOKEN, read_kv_cache_scheme
from runner_svc.model.quantization.int4_methods import GROUPS
from runner_svc.model.quantization.number_format import NumberFormat
from runner_svc.model.quantization.selection import Quantization, Rule, Targets
from runner_svc.model.quantization.stored_format import StoredFormat
from runner_svc.model.quantization.stored_fp8 import Activations, Scales, StoredFp8
from runner_svc.model.quantization.stored_int4 import StoredPacked

_FLOAT_FORMATS = ("float-quantized", "naive-quantized")
_PACKED_FORMAT = "pack-quantized"
_MIXED_FORMAT = "mixed-precision"
_HARMLESS = {
    "global_compression_ratio": "It says how much smaller the files are.",
    "version": "It is that of the program that wrote the checkpoint.",
    "run_compressed": "It chooses how another program computes.",
    "use_optimized_inference": "It chooses how another program computes.",
}
_HARMLESS_IN_SPARSITY = dict.fromkeys(
    ("global_sparsity", "ignore", "registry_requires_subclass", "sparsity_structure", "targets"),
    "It says which zeros there are.",
)


def read_compressed_tensors(keys: QuantizationKeys) -> Quantization:
    """Returns a rule for each of `config_groups`."""
    whole = keys.only("format", *_FLOAT_FORMATS, _PACKED_FORMAT, _MIXED_FORMAT)
    keys.only("quantization_status", "compressed", "frozen", default="compressed")
    has_kv_scales = read_kv_cache_scheme(keys)
    _check_sparsity(keys)
    keys.absent("moe_sparsity_config", "experts are sparse")
    keys.absent("transform_config", "weights are rotated")
    keys.only("dequantize", False, default=False)
    groups = keys.take("config_groups", dict)
    left = Targets(keys.names("ignore"))
    keys.harmless(_HARMLESS)
    keys.finish()
    rules, notes = [], []
    for name, group in groups.items():
        path = f"quantization_config.config_groups.{name}"
        rule, is_coarser = _group(QuantizationKeys(group, path), whole)
        rules.append(rule)
        notes += [PER_TOKEN] * is_coarser
    return Quantization("compressed-tensors", tuple(rules), (left,), tuple(dict.fromkeys(notes)), has_kv_scales)


def _check_sparsity(keys: QuantizationKeys) -> None:
    """Refuses zeros that are left out. The format "dense" leaves out none, however many there are."""
    sparsity = keys.take("sparsity_config", dict, default=None)
    if sparsity:
        own = QuantizationKeys(sparsity, keys.path("sparsity_config"))
        own.only("format", "dense")
        own.harmless(_HARMLESS_IN_SPARSITY)
        own.finish()


def _group(keys: QuantizationKeys, whole: str) -> tuple[Rule, bool]:
    """Returns the rule of one group, and whether it asks for coarser activations than it gets."""
    own = keys.only("format", *_FLOAT_FORMATS, _PACKED_FORMAT, default=whole)
    if own == _MIXED_FORMAT:
        raise UnsupportedModel(f"The model is quantized, but its config.json lacks {keys.path('format')!r}.")
    targets = keys.names("targets")
    weights = NumberFormat.read(keys.take("weights", dict), keys.path("weights"))
    inputs = keys.take("input_activations", dict, default=None)
    keys.absent("output_activations", "outputs of products are quantized")
    activations = NumberFormat.read(inputs, keys.path("input_activations")) if inputs is not None else None
    keys.finish()
    if weights.dynamic:
        raise weights.refuse("dynamic", True)
    if own == _PACKED_FORMAT:
        return Rule(Targets(targets), _packed(weights, activations)), False
    return Rule(Targets(targets), _fp8(weights, activations)), _is_dynamic_tensor(activations)


def _packed(weights: NumberFormat, activations: NumberFormat | None) -> StoredFormat:
    if weights.type != "int":
        raise weights.refuse("type", weights.type)
    if weights.bits != 4:
        raise weights.refuse("num_bits", weights.bits)
    if activations is not None:
        raise activations.refuse("num_bits", activations.bits)
    if weights.strategy not in ("group", "channel"):
        raise weights.refuse("strategy", weights.strategy)
    if weights.strategy == "group" and weights.group not in GROUPS:
        raise weights.refuse("group_size", weights.group)
    return StoredPacked(weights.group if weights.strategy == "group" else None, weights.symmetric)


def _fp8(weights: NumberFormat, activations: NumberFormat | None) -> StoredFormat:
    for numbers in (weights, activations):
        if numbers is None:
            continue
        for key, value, allowed in (
            ("type", numbers.type, "float"),
            ("num_bits", numbers.bits, 8),
            ("symmetric", numbers.symmetric, True),
        ):
            if value != allowed:
                raise numbers.refuse(key, value)
    if weights.strategy == "block":
        if weights.block != (128, 128):
            raise weights.refuse("block_structure", weights.block)
        is_group = activations is not None and activations.strategy == "group" and activations.dynamic
        if activations is not None and not (is_group and activations.group == 128):
            raise activations.refuse("strategy", activations.strategy)
        kind = Activations.PLAIN if activations is None else Activations.GROUP
        return StoredFp8(Scales.BLOCK, kind, block=weights.block)
    if weights.strategy not in ("tensor", "channel"):
        raise weights.refuse("strategy", weights.strategy)
    return StoredFp8(Scales(weights.strategy), _activations(activations))


def _activations(numbers: NumberFormat | None) -> Activations:
    if numbers is None:
        return Activations.PLAIN
    if numbers.strategy == "tensor" and not numbers.dynamic:
        return Activations.STATIC
    if numbers.strategy in ("token", "tensor") and numbers.dynamic:
        return Activations.TOKEN
    raise numbers.refuse("strategy", numbers.strategy)


def _is_dynamic_tensor(numbers: NumberFormat | None) -> bool:
    return numbers is not None and numbers.dynamic and numbers.strategy == "tensor"
