"""Writes a tiny random Llama as a GGUF file, with SmolLM's kind of tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

from runner_svc.backends.byte_tokenizer import (
    CHAT_TEMPLATE,
    END_OF_TEXT_ID,
    IM_END_ID,
    IM_START_ID,
    NUM_TOKENS,
    SPECIAL_TOKENS,
    byte_alphabet,
)

HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 32, 64, 2, 4, 2
# The first merges two digits: the model's own pre-tokenizer splits numbers into digits and never uses it. There are two
# merges because transformers 5.17 treats a list of one as its element.
MERGES = ("4 2", "t h")
VOCAB_SIZE = NUM_TOKENS + len(MERGES)


def write_tiny_gguf(path: Path, seed: int = 0, specials: Mapping[int, str] = SPECIAL_TOKENS) -> Path:
    """Writes float32 tensors and a byte-level BPE vocabulary to `path`; returns it. `specials`: special tokens."""
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_feed_forward_length(INTERMEDIATE_SIZE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN_SIZE // NUM_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB_SIZE)
    _add_tokenizer(writer, specials)
    _add_tensors(writer, np.random.default_rng(seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, specials: Mapping[int, str]) -> None:
    tokens = [*byte_alphabet(), *specials.values(), *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in specials else TokenType.NORMAL for token in range(len(tokens))]
    )
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(IM_START_ID)
    writer.add_eos_token_id(IM_END_ID)
    writer.add_pad_token_id(END_OF_TEXT_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensors(writer: GGUFWriter, rng: np.random.Generator) -> None:
    def add(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, np.float32))

    kv_size = HIDDEN_SIZE // NUM_HEADS * NUM_KV_HEADS
    add("token_embd", VOCAB_SIZE, HIDDEN_SIZE)
    add("output_norm", HIDDEN_SIZE)
    for layer in range(NUM_LAYERS):
        add(f"blk.{layer}.attn_norm", HIDDEN_SIZE)
        add(f"blk.{layer}.attn_q", HIDDEN_SIZE, HIDDEN_SIZE)
        add(f"blk.{layer}.attn_k", kv_size, HIDDEN_SIZE)
        add(f"blk.{layer}.attn_v", kv_size, HIDDEN_SIZE)
        add(f"blk.{layer}.attn_output", HIDDEN_SIZE, HIDDEN_SIZE)
        add(f"blk.{layer}.ffn_norm", HIDDEN_SIZE)
        add(f"blk.{layer}.ffn_gate", INTERMEDIATE_SIZE, HIDDEN_SIZE)
        add(f"blk.{layer}.ffn_up", INTERMEDIATE_SIZE, HIDDEN_SIZE)
        add(f"blk.{layer}.ffn_down", HIDDEN_SIZE, INTERMEDIATE_SIZE)
