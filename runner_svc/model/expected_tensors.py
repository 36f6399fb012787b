"""Which tensors a checkpoint of a configuration has, and their shapes; needs no torch.

Every tensor of a checkpoint is read, is harmless, or the model is refused by the tensor's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from runner_svc.model.config import ModelConfig
from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.folder.safetensors_header import ELEMENT_BYTES, StoredTensor

EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

HARMLESS_TENSORS: tuple[tuple[str, str], ...] = (
    (r"(.*\.)?rotary_emb\.(original_)?inv_freq", "The frequencies of RoPE are computed from config.json."),
    (r"(.*\.)?rotary_emb\.(cos|sin)_cached", "Angles of RoPE are computed from config.json."),
)
"""Patterns of names that transformers does not read either, each with the reason."""


def check_tensors(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> None:
    """Raises UnsupportedModel unless the tensors are those of the configuration, in types that can be read."""
    expected = dict(expected_tensors(config))
    if config.tied_embeddings:  # either of the two may be left out
        for absent, other in ((HEAD, EMBEDDINGS), (EMBEDDINGS, HEAD)):
            if absent not in tensors and other in tensors:
                del expected[absent]
    for name, shape in expected.items():
        if name not in tensors:
            raise UnsupportedModel(f"The checkpoint has no tensor {name!r}, which its config.json asks for.")
        if tensors[name].shape != shape:
            raise UnsupportedModel(
                f"The checkpoint's tensor {name!r} is {tensors[name].shape}, its config.json says {shape}."
            )
        if tensors[name].dtype not in ELEMENT_BYTES:
            raise UnsupportedModel(
                f"The checkpoint's tensor {name!r} has dtype {tensors[name].dtype}, which is not supported; supported: "
                f"{', '.join(ELEMENT_BYTES)}."
            )
    for name in tensors:
        if name not in expected and not _is_harmless(name):
            raise UnsupportedModel(
                f"The checkpoint has a tensor {name!r}, which {config.architecture} with its config.json lacks: "
                "correct config.json, or delete the tensor."
            )


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of each tensor, the head included; matrices are [out, in]."""
    hidden = config.hidden_size
    yield EMBEDDINGS, (config.vocab_size, hidden)
    yield HEAD, (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    for index in range(config.num_layers):
        for name, shape in _layer(config):
            yield f"model.layers.{index}.{name}", shape


def _layer(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    if config.merged_weights:
        qkv, gate_up = {"qkv_proj": heads + 2 * kv_heads}, {"gate_up_proj": 2 * inner}
    else:
        qkv = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        gate_up = {"gate_proj": inner, "up_proj": inner}
    products = [
        *((f"self_attn.{name}", rows, hidden, config.qkv_bias) for name, rows in qkv.items()),
        ("self_attn.o_proj", hidden, heads, config.output_bias),
        *((f"mlp.{name}", rows, hidden, config.mlp_bias) for name, rows in gate_up.items()),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ]
    for name, rows, columns, has_bias in products:
        yield f"{name}.weight", (rows, columns)
        if has_bias:
            yield f"{name}.bias", (rows,)


def _is_harmless(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern, _ in HARMLESS_TENSORS)
