"""The names of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a layer's modules, the first that the checkpoint has; defaults are those of Qwen's."""

    blocks: tuple[str, ...] = ("mlp",)
    """What the others' names begin with."""
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    corrections: tuple[str, ...] = ("gate.e_score_correction_bias",)
    """Of a router, the first that the checkpoint has: [experts]."""
    has_wide_corrections: bool = False
    """They are [1, experts]."""
    interleaved: bool = False
    """Tensors of all experts are [experts, in, out], and rows of gate and up take turns (gpt-oss)."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of modules, whose tensors are NAME.weight and NAME.bias; the defaults are Llama's.

    Several names of one product are merged in this order. Names but that of the head are below `base`, or one of
    `other_bases` in checkpoints that were saved otherwise, as without the head.
    """

    base: str = "model"
    other_bases: tuple[str, ...] = ("",)
    # What the names of tensors begin with that belong to other parts of a model, as for images; they are not read.
    other_parts: tuple[str, ...] = ()
    # Of the layer behind the last one, which predicts a further token and is not read: a product that others lack.
    predictor: str | None = None
    head: str = "lm_head"
    embeddings: str = "embed_tokens"
    positions: str = "embed_positions"
    norm: str = "norm"
    layers: str = "layers"
    # Of a layer:
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    # Of layers with experts, below the layer as well.
    experts: ExpertNames = ExpertNames()
    sinks: str = "self_attn.sinks"
    # Whether layer norms have biases.
    norm_bias: bool = True
    # Whether a layer's matrices are stored [in, out].
    transposed: bool = False
    # Whether the dimensions 2i and 2i + 1 of a head rotate together, in place of i and i + rotary_dim / 2.
    interleaved: bool = False

    def start(self, contains: Callable[[str], bool]) -> str:
        """Returns what names begin with: the base, and a dot, below which a checkpoint `contains` embeddings."""
        starts = [f"{base}." if base else "" for base in (self.base, *self.other_bases)]
        return next((start for start in starts if contains(f"{start}{self.embeddings}.weight")), starts[0])
