"""The shape of a decoder-only model, read from its Hugging Face configuration.

One `ModelConfig` covers every supported architecture: what tells them apart is a handful of fields (biases, QK-norm,
windows, RoPE), so the decoder never asks for an architecture's name. Works on plain dicts, because importing
transformers only to parse a small JSON file would cost seconds at each start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.config_keys import checked_config
from runner_svc.model.folder.layer_keys import SLIDING
from runner_svc.model.rope_config import RopeConfig

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an architecture fixes, as opposed to what its configuration says."""

    model_type: str
    # None: the configuration's `attention_bias` decides.
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    # A checkpoint that already holds merged qkv_proj and gate_up_proj.
    merged_weights: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama"),
    "MistralForCausalLM": Architecture("mistral", qkv_bias=False, output_bias=False),
    "MinistralForCausalLM": Architecture("ministral", qkv_bias=False, output_bias=False),
    "Phi3ForCausalLM": Architecture("phi3", qkv_bias=False, output_bias=False, merged_weights=True),
    "Qwen2ForCausalLM": Architecture("qwen2", qkv_bias=True, output_bias=False),
    "Qwen3ForCausalLM": Architecture("qwen3", qk_norm=True),
    "SmolLM3ForCausalLM": Architecture("smollm3"),
}
"""Supported architectures by the name in a configuration's `architectures`. SmolLM and SmolLM2 are Llama."""


class HuggingFaceConfig(Protocol):
    """A transformers `PretrainedConfig`, as far as it is needed here."""

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
    # Per layer: tokens that a query sees, itself included; None sees all.
    windows: tuple[int | None, ...]
    # Per layer: whether it rotates queries and keys (SmolLM3 leaves every fourth layer out).
    rotary_layers: tuple[bool, ...]
    # Most positions of one sequence.
    context_length: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_layer_weights(self) -> int:
        """Elements of the matrices of all layers (embeddings and head not counted)."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        return self.num_layers * (attention + 3 * self.intermediate_size * self.hidden_size)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """Attention of each layer."""
        return tuple(AttentionLayer(window) for window in self.windows)

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any] | HuggingFaceConfig) -> ModelConfig:
        """Reads a configuration: the contents of config.json, or a transformers configuration object.

        Raises UnsupportedModel for an architecture, RoPE type, activation or quantization that the decoder lacks, and
        for a configuration that misses a size.
        """
        name, raw = checked_config(dict(config) if isinstance(config, Mapping) else config.to_dict())
        architecture = ARCHITECTURES[name]
        num_layers = _size(raw, "num_hidden_layers")
        num_heads = _size(raw, "num_attention_heads")
        num_kv_heads = _size(raw, "num_key_value_heads") if "num_key_value_heads" in raw else num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModel(f"{num_heads} attention heads can't share {num_kv_heads} key-value heads evenly.")
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
            windows=_windows(raw, num_layers),
            rotary_layers=_rotary_layers(raw, num_layers),
            context_length=rope.context_length(max_positions),
            eos_token_ids=token_ids(raw.get("eos_token_id")),
        )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Token ids as configurations write them: one, several or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"The model's config.json needs a positive integer {key!r}, it has {value!r}.")
    return value


def _windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer: by `layer_types` where the class has them, else the same in all."""
    window = raw.get("sliding_window")
    kinds = raw.get("layer_types") or [SLIDING] * num_layers
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _rotary_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    return tuple(map(bool, raw.get("no_rope_layers") or (True,) * num_layers))
