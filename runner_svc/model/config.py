"""The shape of a decoder-only model, read from its Hugging Face configuration.

One `ModelConfig` covers every supported architecture. Architectures differ only in a few fields (biases, QK-norm,
windows, RoPE), so the decoder never checks an architecture's name. This module works on plain dicts, because importing
transformers to parse a small JSON file would add seconds to each start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.rope_config import RopeConfig

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties that an architecture fixes, as opposed to those that its configuration sets."""

    model_type: str
    # None: the configuration's `attention_bias` decides.
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    # The checkpoint has merged qkv_proj and gate_up_proj.
    merged_weights: bool = False
    # A window applies only if the configuration sets `use_sliding_window`.
    window_needs_flag: bool = False
    # Values of fields that older configurations omit.
    defaults: tuple[tuple[str, Any], ...] = ()


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama"),
    "MistralForCausalLM": Architecture("mistral", qkv_bias=False, output_bias=False),
    "MinistralForCausalLM": Architecture("ministral", qkv_bias=False, output_bias=False),
    "Phi3ForCausalLM": Architecture("phi3", qkv_bias=False, output_bias=False, merged_weights=True),
    "Qwen2ForCausalLM": Architecture("qwen2", qkv_bias=True, output_bias=False, window_needs_flag=True),
    "Qwen3ForCausalLM": Architecture("qwen3", qk_norm=True, window_needs_flag=True, defaults=(("head_dim", 128),)),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3", window_needs_flag=True, defaults=(("rope_theta", 2_000_000.0), ("tie_word_embeddings", True))
    ),
}
"""Supported architectures, by the name in a configuration's `architectures`. SmolLM and SmolLM2 are Llama models."""


class HuggingFaceConfig(Protocol):
    """The part of a transformers `PretrainedConfig` that is used here."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder; immutable."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: str
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    merged_weights: bool
    rope: RopeConfig
    # Per layer: number of tokens that a query attends to, itself included; None: all.
    windows: tuple[int | None, ...]
    # Per layer: whether it rotates queries and keys (SmolLM3 skips every fourth layer).
    rotary_layers: tuple[bool, ...]
    # Most positions of one sequence.
    context_length: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_layer_weights(self) -> int:
        """Number of elements in the matrices of all layers, without embeddings and head."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        return self.num_layers * (attention + 3 * self.intermediate_size * self.hidden_size)

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any] | HuggingFaceConfig) -> ModelConfig:
        """Reads a configuration: the contents of config.json, or a transformers configuration object.

        Raises UnsupportedModel for an unsupported architecture, RoPE type, activation or quantization, and for a
        configuration that lacks a size.
        """
        raw = dict(config) if isinstance(config, Mapping) else config.to_dict()
        name, architecture = _architecture(raw)
        raw = {**dict(architecture.defaults), **{key: value for key, value in raw.items() if value is not None}}
        if "quantization_config" in raw:
            raise UnsupportedModel(
                f"{name} is quantized; use a checkpoint in float32, float16 or bfloat16, or a GGUF file."
            )
        num_layers = _size(raw, "num_hidden_layers")
        num_heads = _size(raw, "num_attention_heads")
        num_kv_heads = _size(raw, "num_key_value_heads") if "num_key_value_heads" in raw else num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModel(f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads.")
        hidden_size = _size(raw, "hidden_size")
        head_dim = _size(raw, "head_dim") if "head_dim" in raw else hidden_size // num_heads
        activation = raw.get("hidden_act", "silu")
        if activation not in ACTIVATIONS:
            raise UnsupportedModel(f"Activation {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}.")
        attention_bias = bool(raw.get("attention_bias", False))
        max_positions = _size(raw, "max_position_embeddings")
        rope = RopeConfig.from_hugging_face(raw, head_dim, max_positions)
        return cls(
            architecture=name,
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            activation=activation,
            qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
            output_bias=attention_bias if architecture.output_bias is None else architecture.output_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=architecture.qk_norm,
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            merged_weights=architecture.merged_weights,
            rope=rope,
            windows=_windows(raw, architecture, num_layers),
            rotary_layers=_rotary_layers(raw, architecture, num_layers),
            context_length=rope.context_length(max_positions),
            eos_token_ids=token_ids(raw.get("eos_token_id")),
        )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns the token ids of a configuration's field, which has one id, several or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _architecture(raw: Mapping[str, Any]) -> tuple[str, Architecture]:
    names = raw.get("architectures") or [
        name for name, architecture in ARCHITECTURES.items() if architecture.model_type == raw.get("model_type")
    ]
    for name in names:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    asked = ", ".join(names) or raw.get("model_type") or "unnamed"
    raise UnsupportedModel(f"Architecture {asked} is not supported; supported: {', '.join(ARCHITECTURES)}.")


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{key!r} in the model's config.json must be a positive integer, but is {value!r}.")
    return value


def _windows(raw: Mapping[str, Any], architecture: Architecture, num_layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window: by `layer_types` if given, by `max_window_layers` for Qwen, otherwise in all."""
    window = raw.get("sliding_window")
    if window is None or (architecture.window_needs_flag and not raw.get("use_sliding_window", False)):
        return (None,) * num_layers
    if "layer_types" in raw:
        return tuple(window if kind == "sliding_attention" else None for kind in raw["layer_types"])
    if architecture.model_type == "smollm3":
        rotary = _rotary_layers(raw, architecture, num_layers)
        return tuple(None if rotates else window for rotates in rotary)
    first = raw.get("max_window_layers", 28) if architecture.window_needs_flag else 0
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _rotary_layers(raw: Mapping[str, Any], architecture: Architecture, num_layers: int) -> tuple[bool, ...]:
    if architecture.model_type != "smollm3":
        return (True,) * num_layers
    if "no_rope_layers" in raw:  # despite the name, 1 rotates and 0 does not
        return tuple(bool(rotates) for rotates in raw["no_rope_layers"][:num_layers])
    interval = raw.get("no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
