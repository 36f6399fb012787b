"""Models of known shapes with random weights, to measure their speed without downloading them.

`python -m bench.common.random_model qwen3-0.6b FOLDER` writes a folder with config.json and a toy tokenizer
("t0 t1 ..."); serve it with `roster-runner --device cuda --weights random --model FOLDER`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 16_384,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}
"""Hugging Face configurations by name."""
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151_936,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
}
"""Those of mixtures of experts."""
LARGE: dict[str, dict[str, Any]] = {
    "llama-3.1-70b": SHAPES["llama-3.1-8b"]
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "intermediate_size": 28_672,
    },
}
"""Those that take several GPUs."""
ALL_SHAPES = SHAPES | MIXTURES | LARGE


def write_folder(shape: str, folder: Path) -> None:
    """Writes a model folder of the shape (a key of `ALL_SHAPES`), without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = ALL_SHAPES[shape]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    vocabulary = {f"t{token}": token for token in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(ALL_SHAPES))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_folder(arguments.shape, arguments.folder)


if __name__ == "__main__":
    main()
