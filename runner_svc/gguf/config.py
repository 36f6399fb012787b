"""Converts the keys of a GGUF file to a Hugging Face configuration, which leaves nothing to the defaults of a class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runner_svc.gguf.architectures import WINDOWED_LLAMA, Family, family_of
from runner_svc.gguf.family_config import default_window, own_config
from runner_svc.gguf.keys import Keys
from runner_svc.gguf.parts import Model
from runner_svc.gguf.rope import rope_parameters

# Keys of layers with a sliding window, which have no effect in models without such layers.
_OF_WINDOWS = (
    ".attention.sliding_window_pattern",
    ".rope.freq_base_swa",
    ".rope.dimension_count_swa",
    ".attention.key_length_swa",
    ".attention.value_length_swa",
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the tensors of a model."""

    layers: int
    vocab: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head: int

    @property
    def q(self) -> int:
        """Returns the rows of the queries."""
        return self.heads * self.head

    @property
    def kv(self) -> int:
        """Returns the rows of the keys, or of the values."""
        return self.kv_heads * self.head

    @property
    def qkv(self) -> int:
        """Returns the rows of queries, keys and values together."""
        return self.q + 2 * self.kv

    @property
    def gate_up(self) -> int:
        """Returns the rows of the two projections of an MLP together."""
        return 2 * self.ffn

    @classmethod
    def read(cls, keys: Keys, vocab_size: int) -> Sizes:
        """Reads the keys. Raises GgufError for sizes that are absent or inconsistent."""
        hidden, heads = keys.integer(".embedding_length"), keys.integer(".attention.head_count")
        kv_heads = keys.integer(".attention.head_count_kv", heads)
        if heads % kv_heads:
            raise keys.refuse(".attention.head_count_kv", f"which {heads} heads can't share evenly")
        if ".attention.key_length" not in keys and hidden % heads:
            raise keys.refuse(".attention.head_count", f"which doesn't divide its embedding_length {hidden}")
        head = keys.integer(".attention.key_length", hidden // heads)
        if keys.integer(".attention.value_length", head) != head:
            raise keys.refuse(".attention.value_length", f"but its keys have {head}; both must be alike")
        if keys.integer(".vocab_size", vocab_size) != vocab_size:
            raise keys.refuse(".vocab_size", f"but its tokenizer has {vocab_size} tokens")
        return cls(
            layers=keys.integer(".block_count"),
            vocab=vocab_size,
            hidden=hidden,
            ffn=keys.integer(".feed_forward_length"),
            heads=heads,
            kv_heads=kv_heads,
            head=head,
        )


def read_config(keys: Keys, model: Model, sizes: Sizes) -> tuple[Family, dict[str, Any]]:
    """Returns the family and the configuration, without what the tensors and the tokenizer determine.

    Raises GgufError for a key that the family does not support.
    """
    family = family_of(keys.architecture)
    window = keys.integer(".attention.sliding_window", default_window(family), least=0) or None
    if window and family.model == "LlamaForCausalLM":
        family = WINDOWED_LLAMA
    if window and not family.has_window:
        raise keys.refuse(".attention.sliding_window", f"which the architecture {keys.architecture!r} does not have")
    if window is None:
        for key in _OF_WINDOWS:
            keys.ignore(key)
    context = keys.integer(".context_length")
    config = {
        "architectures": [family.model],
        "model_type": family.model_type,
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head,
        "max_position_embeddings": context,
        "rms_norm_eps": keys.number(".attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(keys, model, sizes.head, context, family),
    }
    return family, config | own_config(keys, family, config, window)
