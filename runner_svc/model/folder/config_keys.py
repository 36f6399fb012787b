"""What becomes of each key of a config.json: it is used, it is harmless, or the model is refused by its name.

A new architecture needs a row in `class_fields`, which lists the keys of transformers' class for it. Those are used,
but for the harmless ones. A key that only another architecture's class declares is harmless too, since transformers'
class for this one does not read it; `FIXED` has those that would mean another computation. Any other key is refused.

Keys that are absent take the default of their class, as in transformers, except `eos_token_id`: `generate` ends at the
ids that a file names, and at no default.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cache
from typing import Any

from runner_svc.model.folder.class_fields import BASE_FIELDS, ClassFields, Field, class_fields
from runner_svc.model.folder.class_rows import DECLARED
from runner_svc.model.folder.errors import BrokenModel, UnsupportedModel
from runner_svc.model.folder.harmless_keys import FIXED, FOREIGN, HARMLESS, OWN_FIXED, REPEATED
from runner_svc.model.folder.key_values import DTYPES, check_range, check_type, shortened
from runner_svc.model.folder.layer_keys import LAYER_KEYS, layer_values
from runner_svc.model.folder.rope_keys import ROPE_KEYS, layered_rope_parameters, rope_parameters

QUANTIZATION_KEYS = ("quantization", "compression_config")
"""Refused; `quantization_config` is read by `runner_svc.model.quantization`."""
# Read wherever they are, whether the class declares them or not; the second ones by classes that have RoPE.
_ALWAYS_USED = ("model_type", "architectures", "dtype", "torch_dtype", "eos_token_id", "quantization_config")
_USED_WITH_ROPE = ("head_dim", *ROPE_KEYS)


# Of a head, the share that rotates unless a key says otherwise, for classes that read one.
_SHARES = {"Phi3ForCausalLM": 1.0, "GlmForCausalLM": 0.5, "Glm4ForCausalLM": 0.5, "Glm4MoeForCausalLM": 0.5}
_DEFAULT_ROPES: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
}
"""RoPE parameters of classes that have some where a configuration has none."""
_WHOLE_HEADS = ("LlamaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
"""Classes that refuse a `hidden_size` that is not a multiple of the heads, even where `head_dim` is given."""
COMPLETED = frozenset(
    f"{family}ForCausalLM"
    for family in (
        *("Llama", "Mistral", "Ministral", "Phi3", "Qwen2", "Qwen3", "SmolLM3"),
        *("Gemma", "Gemma2", "Gemma3", "Granite", "Olmo2", "Glm", "Glm4", "Cohere", "Cohere2"),
        *("Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss", "Glm4Moe", "Dots1", "Ernie4_5_Moe"),
    )
)
"""Architectures whose derived values are computed here; readers of the others derive their own."""
_READ_BESIDE: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {"sliding_window_pattern": 6, "rope_local_base_freq": 10_000.0},
    "Cohere2ForCausalLM": {"sliding_window_pattern": 4},
}
"""Keys that a class reads without declaring them, with their defaults."""


def used_keys(architecture: str) -> frozenset[str]:
    """Returns the keys that decide what a model of this architecture answers."""
    declared, beside = class_fields(architecture).fields, _READ_BESIDE.get(architecture, {})
    with_rope = _USED_WITH_ROPE if "rope_parameters" in declared else ()
    return frozenset((*declared, *beside, *with_rope, *_ALWAYS_USED)) - HARMLESS.keys()


@cache
def harmless_keys(architecture: str) -> Mapping[str, str]:
    """Returns the reason of each key that changes no answer of this architecture, beside the keys of `FIXED`."""
    unread = f"transformers' class for {architecture} does not read it."
    foreign = {key for other in DECLARED for key in class_fields(other).fields}
    reasons = {**FOREIGN, **dict.fromkeys((*foreign, *LAYER_KEYS, *_USED_WITH_ROPE), unread), **HARMLESS}
    return {key: reason for key, reason in reasons.items() if key not in used_keys(architecture)}


def checked_config(raw: Mapping[str, Any], supported: Container[str]) -> tuple[str, dict[str, Any]]:
    """Returns the name of a configuration's architecture, one of `supported`, and the values of the keys that it uses.

    Absent keys have their class's defaults. For the architectures of `COMPLETED`, sizes, `layer_types` and
    `rope_parameters` are as transformers completes them. Raises UnsupportedModel for another architecture, and for any
    key that is unknown or has a value that can't be used.
    """
    name = _architecture(raw, [name for name in DECLARED if name in supported])
    used, harmless = used_keys(name), harmless_keys(name)
    for key in raw:
        _check_key(key, raw[key], name, used, harmless)
    declared = class_fields(name)
    other_names = declared.other_names
    values = {key: field.default for key, field in declared.fields.items() if key in used and key not in other_names}
    values["eos_token_id"] = None
    for key, value in raw.items():
        if key == "sliding_window" and value == 0 and raw.get("use_sliding_window") is False:
            value = None  # as transformers writes it for some classes
        if key in used:
            if (field := declared.fields.get(key) or _FIELDS.get(key)) is not None:
                check_type(key, value, field.kinds)
            if not (key == "sliding_window" and value == 0 and _ignores_window(raw, declared)):
                check_range(key, value)
            _check_agreement(key, raw, other_names)
            values[other_names.get(key, key)] = value
        elif key in BASE_FIELDS or key in declared.fields:
            check_type(key, value, (declared.fields.get(key) or BASE_FIELDS[key]).kinds)
    _check_dtype(raw)
    values["eos_token_id"] = _end_ids(values["eos_token_id"], values["vocab_size"])
    if name in COMPLETED:
        _complete(name, raw, values)
    for key in raw:
        if _is_repeated(key, used):
            _check_repeated(key, raw[key], name, values)
    return name, values


def _is_repeated(key: str, used: frozenset[str]) -> bool:
    return key not in used and REPEATED.get(key) in used


def _check_repeated(key: str, value: Any, name: str, values: Mapping[str, Any]) -> None:
    """Refuses a key that says something else than the key that it repeats, whose value the class computes with."""
    other = REPEATED[key]
    found = (values, values.get("rope_parameters") or {}, _READ_BESIDE.get(name, {}))
    own = next((place[other] for place in found if place.get(other) is not None), None)
    if name == "GemmaForCausalLM" and own == "gelu":  # as transformers reads it
        own = "gelu_pytorch_tanh"
    if value is None or value == own or value in FIXED.get(key, ((),))[0]:
        return
    raise UnsupportedModel(
        f"The model's config.json has {key!r} {shortened(value)} and {other!r} {shortened(own)}, of which {name} reads "
        f"the second in transformers: correct the wrong one, or delete {key!r}."
    )


def _ignores_window(raw: Mapping[str, Any], declared: ClassFields) -> bool:
    """Whether the class has a switch for its window, which is off: classes then write a window of 0."""
    return "use_sliding_window" in declared.fields and raw.get("use_sliding_window", False) is False


def _check_agreement(key: str, raw: Mapping[str, Any], other_names: Mapping[str, str]) -> None:
    """The class takes whichever of two names it happens to read last."""
    name = other_names.get(key)
    if name == "num_local_experts" and name in raw and raw[name] != raw[key]:
        raise BrokenModel(
            f"The model's config.json has {key!r} {shortened(raw[key])} and {name!r} {shortened(raw[name])}, which "
            "mean the same: correct the wrong one."
        )


def _complete(name: str, raw: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Adds what transformers' class derives from other keys."""
    _fill_sizes(name, values)
    declared = class_fields(name)
    positions, head_dim = values["max_position_embeddings"], values["head_dim"]
    if name == "Gemma3ForCausalLM":
        parameters = layered_rope_parameters(raw, positions, head_dim)
    else:
        is_phi3 = declared.model_type == "phi3"
        share = _SHARES.get(name)
        if raw.get("rope_parameters") is None and name in _DEFAULT_ROPES:
            raw = {**raw, "rope_parameters": _DEFAULT_ROPES[name]}
        if is_phi3:  # which has it beside the parameters, with a default of its own
            raw = {"original_max_position_embeddings": values["original_max_position_embeddings"], **raw}
        parameters = rope_parameters(raw, declared.default_theta, positions, head_dim, share=share, is_phi3=is_phi3)
    values.update(layer_values(name, raw, values))
    for key in ROPE_KEYS:
        values.pop(key, None)
    values["rope_parameters"] = parameters


_FIELDS = {
    **BASE_FIELDS,
    "model_type": Field(("str",), None),
    "torch_dtype": Field(("str", "null"), None),
    "head_dim": Field(("int",), None),
    "original_max_position_embeddings": Field(("int", "null"), None),
}
"""Of keys that are used and that an architecture's own class does not declare."""


def _architecture(raw: Mapping[str, Any], supported: Sequence[str]) -> str:
    """Returns the class that transformers takes, which `model_type` decides.

    Of `architectures`, which transformers does not read, one has to be supported: a model with another head is refused.
    """
    for key in ("model_type", "architectures"):
        if raw.get(key) is not None:
            check_type(key, raw[key], _FIELDS[key].kinds)
    asked = [name for name in raw.get("architectures") or () if name]
    model_type = raw.get("model_type")
    if model_type == "mistral" and "layer_types" in raw:
        model_type = "ministral"  # as transformers' AutoConfig, for files that were written before there was Ministral
    if model_type is None:
        found = [name for name in asked if name in supported]
    else:
        found = [name for name in supported if class_fields(name).model_type == model_type]
    if not found or (asked and not set(asked) & set(supported)):
        is_type = model_type is not None and (not asked or set(asked) & set(supported))
        unknown = f"of model_type {model_type!r}" if is_type else ", ".join(asked) or "unnamed"
        raise UnsupportedModel(f"Architecture {unknown} is not supported; supported: {', '.join(supported)}.")
    return found[0]


def _check_key(key: str, value: Any, name: str, used: frozenset[str], harmless: Mapping[str, str]) -> None:
    if key in QUANTIZATION_KEYS:
        if value is not None:
            raise UnsupportedModel(
                f"{name} is quantized ({key!r}); use a checkpoint in float32, float16 or bfloat16, or a GGUF file."
            )
        return
    if key in used or _is_repeated(key, used):
        return
    if (allowed := OWN_FIXED.get(name, {}).get(key)) is not None:
        if not _is_any(value, (None, *allowed)):
            raise UnsupportedModel(
                f"The model's config.json has {key!r} {shortened(value)}, but {name} computes what "
                f"{' or '.join(map(repr, allowed))} says, and does not read the key in transformers: correct it."
            )
        return
    if key in FIXED:
        allowed, meaning = FIXED[key]
        if not _is_any(value, allowed):
            raise UnsupportedModel(
                f"The model's config.json has {key!r} {shortened(value)}, but {name} has no such key in transformers: "
                f"it would mean that {meaning}. Delete it to serve the model without."
            )
        return
    if key not in harmless:
        raise UnsupportedModel(
            f"The model's config.json has a key {key!r}, which is not known for {name}: delete it if it "
            "changes nothing."
        )


def _is_any(value: Any, allowed: Sequence[Any]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def _check_dtype(raw: Mapping[str, Any]) -> None:
    for key in ("dtype", "torch_dtype"):
        if (value := raw.get(key)) is not None and value not in DTYPES:
            raise UnsupportedModel(
                f"The model's config.json has {key!r} {shortened(value)}, which is not supported; supported: "
                f"{', '.join(DTYPES)}."
            )


def _fill_sizes(name: str, values: dict[str, Any]) -> None:
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if name == "Cohere2ForCausalLM":
        values["head_dim"] = None  # its class overwrites it
    if values.get("head_dim") is None:
        if name == "MinistralForCausalLM":
            raise UnsupportedModel("MinistralForCausalLM needs 'head_dim', which the model's config.json lacks.")
        values["head_dim"] = hidden // heads
    if name in _WHOLE_HEADS and hidden % heads:
        raise UnsupportedModel(f"The model's config.json has 'hidden_size' {hidden}, not a multiple of {heads} heads.")
    if values["head_dim"] < 1:
        raise UnsupportedModel(f"The model's config.json has more attention heads ({heads}) than 'hidden_size'.")


def _end_ids(value: int | list[int] | None, vocab_size: int) -> list[int]:
    """Without ids beyond the vocabulary, which are never drawn."""
    ids = [] if value is None else [value] if isinstance(value, int) else value
    if any(token < 0 for token in ids):
        raise BrokenModel(
            f"The model's config.json needs 'eos_token_id' to be token ids of at least 0, it has {shortened(value)}."
        )
    return [token for token in ids if token < vocab_size]
