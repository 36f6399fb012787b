"""Tiny random models as GGUF files of each architecture, made from transformers' models as llama.cpp's converter does.

The mapping of names and the order of rows are written down here once more, apart from the product's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import TokenType
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from runner_svc.backends.byte_tokenizer import (
    CHAT_TEMPLATE,
    END_OF_TEXT_ID,
    IM_END_ID,
    IM_START_ID,
    NUM_TOKENS,
    SPECIAL_TOKENS,
    byte_alphabet,
)
from tests.support.gguf_bytes import GgufFile, StoredTensor
from tests.support.tiny_models import randomize

# The first is of two digits: the model's own pre-tokenizer, which splits numbers into digits, never uses it.
MERGES = ("4 2", "t h")
VOCAB_SIZE = NUM_TOKENS + len(MERGES)
CONTEXT = 128


@dataclass(frozen=True)
class Tiny:
    """An architecture of GGUF files, and transformers' model of it."""

    config_class: Callable[..., Any]
    overrides: dict[str, Any] = field(default_factory=dict)
    are_pairs: bool = False
    """Whether rows of queries and keys lie as pairs."""
    pre: str = "smollm"
    sentence_piece: bool = False
    names: dict[str, str] = field(default_factory=dict)
    """Of tensors, where other architectures have others."""
    norm_added: float = 0.0
    """To the weights of norms."""
    keys: dict[str, str] = field(default_factory=dict)
    """Further keys of the file, and what the configuration calls them."""


_POST_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}

ARCHITECTURES = {
    "llama": Tiny(transformers.LlamaConfig, are_pairs=True),
    "qwen2": Tiny(transformers.Qwen2Config, pre="qwen2"),
    "qwen3": Tiny(transformers.Qwen3Config, {"head_dim": 32}, pre="qwen2"),
    "phi3": Tiny(transformers.Phi3Config, sentence_piece=True),
    "smollm3": Tiny(transformers.SmolLM3Config, {"num_hidden_layers": 4}, are_pairs=True),
    "granite": Tiny(
        transformers.GraniteConfig,
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        are_pairs=True,
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "olmo2": Tiny(transformers.Olmo2Config, pre="dbrx", names=_POST_NORMS),
    "gemma": Tiny(transformers.GemmaConfig, {"head_dim": 32}, sentence_piece=True, norm_added=1.0),
    "gemma2": Tiny(
        transformers.Gemma2Config,
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9, "attn_logit_softcapping": 20.0},
        sentence_piece=True,
        names={**_POST_NORMS, "pre_feedforward_layernorm": "ffn_norm"},
        norm_added=1.0,
        keys={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3": Tiny(
        transformers.Gemma3TextConfig,
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9, "num_hidden_layers": 6},
        sentence_piece=True,
        names={**_POST_NORMS, "pre_feedforward_layernorm": "ffn_norm"},
        norm_added=1.0,
        keys={"attention.sliding_window": "sliding_window"},
    ),
}
"""By `general.architecture`."""

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_model(architecture: str, seed: int = 0, **overrides: Any) -> Any:
    """A random model of transformers' in float32; `overrides` of its configuration, and of its `config_class`."""
    tiny = ARCHITECTURES[architecture]
    vocab = len(sentence_piece_tokens()) if tiny.sentence_piece else VOCAB_SIZE
    config_class = overrides.pop("config_class", tiny.config_class)
    config = config_class(**copy.deepcopy({"vocab_size": vocab, **SIZES, **tiny.overrides, **overrides}))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomize(model)
    return model.eval()


def tiny_gguf(architecture: str, model: Any) -> GgufFile:
    """The model as a file in float32."""
    tiny, config = ARCHITECTURES[architecture], model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": config.vocab_size,
        **{key: getattr(config, name) for key, name in tiny.keys.items()},
    }
    if head_dim * config.num_attention_heads != config.hidden_size:
        own |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    keys = {"general.architecture": architecture, "general.type": "model", "general.name": "tiny"}
    keys |= {f"{architecture}.{key}": value for key, value in own.items()}
    keys |= sentence_piece_keys() if tiny.sentence_piece else byte_level_keys(tiny.pre)
    file = GgufFile(keys)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers = _rows(name, tensor.numpy(), config, tiny)
        numbers = numbers + tiny.norm_added if name.endswith("norm.weight") else numbers
        file.tensors[gguf_name(name, tiny)] = StoredTensor.of(numbers)
    return file


def gguf_name(name: str, tiny: Tiny) -> str:
    """What a tensor of transformers' is called in a file."""
    names = {**_NAMES, **tiny.names}
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{names[stem]}.{kind}"
    _, _, layer, stem = stem.split(".", 3)
    return f"blk.{layer}.{names[stem]}.{kind}"


def _rows(name: str, numbers: np.ndarray, config: Any, tiny: Tiny, back: bool = False) -> np.ndarray:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if not tiny.are_pairs or heads is None:
        return numbers
    pair = (numbers.shape[0] // heads // 2, 2) if back else (2, numbers.shape[0] // heads // 2)
    halves = numbers.reshape(heads, *pair, *numbers.shape[1:])
    return halves.swapaxes(1, 2).reshape(numbers.shape)


def load_back(architecture: str, model: Any, file: GgufFile) -> None:
    """Gives the model the file's numbers, as gguf dequantizes them; biases that the file lacks become zero."""
    tiny = ARCHITECTURES[architecture]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = file.tensors.get(gguf_name(name, tiny))
            if tensor is not None:
                kind = GGMLQuantizationType(tensor.type)
                blocks = np.frombuffer(tensor.content, np.uint8).reshape(*tensor.shape[:-1], -1)
                numbers = dequantize(blocks, kind).reshape(tensor.shape)
                halves = _rows(name, numbers, model.config, tiny, back=True)
                halves = halves - np.float32(tiny.norm_added) if name.endswith("norm.weight") else halves
                parameter.copy_(torch.from_numpy(halves.astype(np.float32)))
            elif name.endswith(".bias"):
                parameter.zero_()


def byte_level_keys(pre: str, specials: Mapping[int, str] = SPECIAL_TOKENS) -> dict[str, Any]:
    """A byte-level vocabulary, as SmolLM's; `specials`: names of its special tokens."""
    tokens = [*byte_alphabet(), *specials.values(), *(merge.replace(" ", "") for merge in MERGES)]
    kinds = [TokenType.CONTROL if token in specials else TokenType.NORMAL for token in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": IM_START_ID,
        "tokenizer.ggml.eos_token_id": IM_END_ID,
        "tokenizer.ggml.padding_token_id": END_OF_TEXT_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def sentence_piece_tokens() -> list[str]:
    """<unk>, <s>, </s>, the bytes, letters, some words, and a user's own."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!?0123456789ABCDEFGHIJ"]
    words = ["▁t", "he", "▁the", "▁the▁", "▁▁", "in", "▁in", "ing", "er", "on", "<|user|>", "<think>"]
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]


def sentence_piece_keys() -> dict[str, Any]:
    """A SentencePiece vocabulary, as Llama 2's and Phi-3's."""
    tokens = sentence_piece_tokens()
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 261), 3, 4]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_tiny_gguf(path: Path, seed: int = 0, specials: Mapping[int, str] = SPECIAL_TOKENS) -> Path:
    """Writes a tiny Llama with a byte-level BPE vocabulary to `path`; returns it. `specials`: their other names."""
    file = tiny_gguf("llama", tiny_model("llama", seed))
    file.keys |= byte_level_keys("smollm", specials)
    return file.write(path)
