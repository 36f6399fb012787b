"""The architectures of GGUF files that are read: how their tensors are called there and in a Hugging Face model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runner_svc.gguf.errors import GgufError


@dataclass(frozen=True, slots=True)
class TensorRule:
    """How one tensor of a model, or one of each layer, is converted."""

    name: str
    """In the file, without "blk.N." and without ".weight"; as are `target` and the names in `merged`."""
    target: str
    shape: tuple[str, ...]
    """Names of `Sizes`' fields."""
    heads: str | None = None
    """The size that says how many heads' rows lie as pairs; None where rows lie as in Hugging Face's models."""
    bias: str | None = None
    """The group of biases that its bias belongs to: all are there (absent ones are zero), or none. None: no bias."""
    is_optional: bool = False
    parts: tuple[str, ...] = ()
    """Tensors that may be there in its place, to be put one below the other."""
    added: float = 0.0


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture."""

    model: str
    """Its class in transformers."""
    model_type: str
    layer: tuple[TensorRule, ...]
    has_partial_rotation: bool = False
    """Whether heads may be rotated in part."""
    has_window: bool = False
    """Whether transformers' class has a sliding window of all layers, in its configuration's `sliding_window`."""
    always_biased: tuple[str, ...] = ()
    """Groups of biases that the class has whatever the configuration says."""
    rope_factors: tuple[str, ...] = ()
    """Tensors of frequency factors."""
    norm_added: float = 0.0
    """To the weights of the last norm. Files of Gemma hold the factors, transformers' model what is added to one."""

    @property
    def around(self) -> tuple[TensorRule, ...]:
        """Tensors outside of the layers."""
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
        rope_factors=_LONG,
    ),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", _LLAMA, rope_factors=("rope_freqs",)),
    "granite": Family("GraniteForCausalLM", "granite", _LLAMA),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", _OLMO2),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", _GEMMA2, has_window=True, norm_added=-1.0),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        (*_GEMMA2, *(replace(rule, added=-1.0) for rule in _QK_NORMS)),
        has_window=True,
        norm_added=-1.0,
    ),
}
"""By `general.architecture`. Mistral's and SmolLM's files are of the architecture `llama`."""

WINDOWED_LLAMA = Family("MistralForCausalLM", "mistral", _LLAMA, has_window=True, rope_factors=("rope_freqs", *_LONG))
"""What a file of the architecture `llama` with a sliding window is: transformers' Llama has none, its Mistral has."""


def family_of(architecture: str) -> Family:
    """The family; raises GgufError for an architecture that is not read."""
    if architecture not in FAMILIES:
        raise GgufError(f"Its architecture is {architecture!r}, which is not read; read are {', '.join(FAMILIES)}.")
    return FAMILIES[architecture]
