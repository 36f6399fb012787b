"""The supported architectures of GGUF files: names of their tensors there and in a Hugging Face model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runner_svc.gguf.errors import GgufError


@dataclass(frozen=True, slots=True)
class TensorRule:
    """The conversion of one tensor of a model, or of each layer."""

    name: str
    """The name in the file, without "blk.N." and ".weight"."""
    target: str
    """The name in the Hugging Face model, without "model.layers.N." and ".weight"."""
    shape: tuple[str, ...]
    """Names of fields of `Sizes`."""
    heads: str | None = None
    """The field of `Sizes` with the number of heads whose rows are stored as pairs; None: as halves."""
    bias: str | None = None
    """The group of its bias. If a file has one bias of a group, absent ones count as zero. None: no bias."""
    is_optional: bool = False
    parts: tuple[str, ...] = ()
    """Tensors that a file may have instead, to be stacked."""
    added: float = 0.0
    """What is added to each number."""


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture."""

    model: str
    """The class in transformers."""
    model_type: str
    layer: tuple[TensorRule, ...]
    has_partial_rotation: bool = False
    """Whether a part of each head may be rotated."""
    has_window: bool = False
    """Whether the class has a sliding window."""
    always_biased: tuple[str, ...] = ()
    """Groups of biases that the class always has."""
    rope_factors: tuple[str, ...] = ()
    """Tensors of frequency factors."""
    has_scaling: bool = True
    """Whether the class has linear scaling and YaRN."""
    norm_added: float = 0.0
    """What is added to the weights of the last norm: files of Gemma have factors, transformers has factors - 1."""

    @property
    def around(self) -> tuple[TensorRule, ...]:
        """Returns the rules of the tensors outside of the layers."""
        return (
            TensorRule("token_embd", "model.embed_tokens", ("vocab", "hidden")),
            TensorRule("output_norm", "model.norm", ("hidden",), added=self.norm_added),
            TensorRule("output", "lm_head", ("vocab", "hidden"), is_optional=True),
        )


_NORMS = (
    TensorRule("attn_norm", "input_layernorm", ("hidden",)),
    TensorRule("ffn_norm", "post_attention_layernorm", ("hidden",)),
)


def _attention(bias: str | None, output_bias: str | None, are_pairs: bool) -> tuple[TensorRule, ...]:
    return (
        TensorRule("attn_q", "self_attn.q_proj", ("q", "hidden"), "heads" if are_pairs else None, bias),
        TensorRule("attn_k", "self_attn.k_proj", ("kv", "hidden"), "kv_heads" if are_pairs else None, bias),
        TensorRule("attn_v", "self_attn.v_proj", ("kv", "hidden"), None, bias),
        TensorRule("attn_output", "self_attn.o_proj", ("hidden", "q"), None, output_bias),
    )


def _mlp(bias: str | None) -> tuple[TensorRule, ...]:
    return (
        TensorRule("ffn_gate", "mlp.gate_proj", ("ffn", "hidden"), None, bias),
        TensorRule("ffn_up", "mlp.up_proj", ("ffn", "hidden"), None, bias),
        TensorRule("ffn_down", "mlp.down_proj", ("hidden", "ffn"), None, bias),
    )


_QK_NORMS = (
    TensorRule("attn_q_norm", "self_attn.q_norm", ("head",)),
    TensorRule("attn_k_norm", "self_attn.k_norm", ("head",)),
)
_MERGED = (
    TensorRule("attn_qkv", "self_attn.qkv_proj", ("qkv", "hidden"), parts=("attn_q", "attn_k", "attn_v")),
    TensorRule("attn_output", "self_attn.o_proj", ("hidden", "q")),
    TensorRule("ffn_up", "mlp.gate_up_proj", ("gate_up", "hidden")),
    TensorRule("ffn_down", "mlp.down_proj", ("hidden", "ffn")),
)
_LLAMA = (*_NORMS, *_attention("attention_bias", "attention_bias", are_pairs=True), *_mlp("mlp_bias"))
_LONG = ("rope_factors_long", "rope_factors_short")

_AROUND = (
    TensorRule("attn_norm", "input_layernorm", ("hidden",), added=-1.0),
    TensorRule("post_attention_norm", "post_attention_layernorm", ("hidden",), added=-1.0),
    TensorRule("ffn_norm", "pre_feedforward_layernorm", ("hidden",), added=-1.0),
    TensorRule("post_ffw_norm", "post_feedforward_layernorm", ("hidden",), added=-1.0),
)
_GEMMA2 = (*_AROUND, *_attention(None, None, are_pairs=False), *_mlp(None))
_OLMO2 = (
    *_attention("attention_bias", "attention_bias", are_pairs=False),
    TensorRule("attn_q_norm", "self_attn.q_norm", ("q",)),
    TensorRule("attn_k_norm", "self_attn.k_norm", ("kv",)),
    TensorRule("post_attention_norm", "post_attention_layernorm", ("hidden",)),
    *_mlp(None),
    TensorRule("post_ffw_norm", "post_feedforward_layernorm", ("hidden",)),
)

FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", _LLAMA, rope_factors=("rope_freqs", *_LONG)),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "qwen2",
        (*_NORMS, *_attention("qkv_bias", None, are_pairs=False), *_mlp(None)),
        has_window=True,
        always_biased=("qkv_bias",),
        rope_factors=("rope_freqs",),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "qwen3",
        (*_NORMS, *_attention("attention_bias", "attention_bias", are_pairs=False), *_QK_NORMS, *_mlp(None)),
        has_window=True,
        rope_factors=("rope_freqs",),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "phi3",
        (*_NORMS, *_MERGED),
        has_partial_rotation=True,
        has_window=True,
        has_scaling=False,
        rope_factors=_LONG,
    ),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", _LLAMA, rope_factors=("rope_freqs",)),
    "granite": Family("GraniteForCausalLM", "granite", _LLAMA),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", _OLMO2),
    "gemma": Family(
        "GemmaForCausalLM",
        "gemma",
        (*(replace(rule, added=-1.0) for rule in _NORMS), *_attention(None, None, are_pairs=False), *_mlp(None)),
        norm_added=-1.0,
    ),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", _GEMMA2, has_window=True, norm_added=-1.0),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        (*_GEMMA2, *(replace(rule, added=-1.0) for rule in _QK_NORMS)),
        has_window=True,
        norm_added=-1.0,
    ),
}
"""Families by `general.architecture`. Files of Mistral and SmolLM have the architecture `llama`."""

WINDOWED_LLAMA = Family("MistralForCausalLM", "mistral", _LLAMA, has_window=True, rope_factors=("rope_freqs", *_LONG))
"""The family of a file of architecture `llama` with a sliding window, which Mistral has and Llama has not."""


def family_of(architecture: str) -> Family:
    """Returns the family. Raises GgufError for an architecture that is not supported."""
    if architecture not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise GgufError(f"Its architecture {architecture!r} is not supported; supported: {supported}.")
    return FAMILIES[architecture]
