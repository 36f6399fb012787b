"""Llama and what differs from it in biases, QK-norm, windows and layers without rotation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner_svc.model.families.description import LayerDescription, MlpDescription
from runner_svc.model.families.family import Config, Family, qk_norm_of, size
from runner_svc.model.families.tensor_names import TensorNames


@dataclass(frozen=True, slots=True)
class LlamaLayers:
    """What an architecture fixes, as opposed to what its configuration says."""

    # None: the configuration's `attention_bias` decides.
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    # The configuration's `use_sliding_window` must be set for a window to count.
    window_needs_flag: bool = False
    # Some layers do not rotate queries and keys, and only those have the window.
    some_rotate: bool = False

    def __call__(self, config: Config, num_layers: int) -> Sequence[LayerDescription]:
        """Returns the layers."""
        attention_bias = bool(config.get("attention_bias", False))
        mlp = MlpDescription(
            width=size(config, "intermediate_size"),
            activation=config.get("hidden_act", "silu"),
            bias=bool(config.get("mlp_bias", False)),
        )
        rotating = _rotating(config, num_layers) if self.some_rotate else (True,) * num_layers
        return [
            LayerDescription(
                mlp,
                qkv_bias=attention_bias if self.qkv_bias is None else self.qkv_bias,
                output_bias=attention_bias if self.output_bias is None else self.output_bias,
                qk_norm=qk_norm_of(self.qk_norm),
                rope=0 if rotates else None,
                window=window,
            )
            for window, rotates in zip(self._windows(config, rotating), rotating, strict=True)
        ]

    def _windows(self, config: Config, rotating: Sequence[bool]) -> Sequence[int | None]:
        """By `layer_types` where given, else by `max_window_layers` (Qwen), else in all layers."""
        window, num_layers = config.get("sliding_window"), len(rotating)
        if window is None or (self.window_needs_flag and not config.get("use_sliding_window", False)):
            return (None,) * num_layers
        if "layer_types" in config:
            return tuple(window if kind == "sliding_attention" else None for kind in config["layer_types"])
        if self.some_rotate:
            return tuple(None if rotates else window for rotates in rotating)
        first = config.get("max_window_layers", 28) if self.window_needs_flag else 0
        return tuple(window if layer >= first else None for layer in range(num_layers))


def _rotating(config: Config, num_layers: int) -> Sequence[bool]:
    if "no_rope_layers" in config:  # named after its zeros: 1 rotates, 0 does not
        return tuple(bool(rotates) for rotates in config["no_rope_layers"][:num_layers])
    interval = config.get("no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


_WITHOUT_BIASES = LlamaLayers(qkv_bias=False, output_bias=False)
_MERGED = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))

LLAMA = Family("llama", LlamaLayers())
MISTRAL = Family("mistral", _WITHOUT_BIASES)
MINISTRAL = Family("ministral", _WITHOUT_BIASES)
PHI3 = Family("phi3", _WITHOUT_BIASES, names=_MERGED, recomputes_cache=True)
QWEN2 = Family("qwen2", LlamaLayers(qkv_bias=True, output_bias=False, window_needs_flag=True))
QWEN3 = Family("qwen3", LlamaLayers(qk_norm=True, window_needs_flag=True), defaults=(("head_dim", 128),))
SMOLLM3 = Family(
    "smollm3",
    LlamaLayers(window_needs_flag=True, some_rotate=True),
    defaults=(("rope_theta", 2_000_000.0), ("tie_word_embeddings", True)),
)
