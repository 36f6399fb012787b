"""Tiny GGUF files with matrices of many types, as the large ones have."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from runner_svc.gguf.kept_blocks import KEPT_TYPES
from tests.support.gguf_bytes import GgufFile, random_blocks
from tests.support.tiny_gguf import load_back, tiny_gguf, tiny_model

SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


def mixed_gguf(architecture: str, rng: random.Random) -> tuple[GgufFile, Any]:
    """Returns a file with matrices of all kept types, of a table's and plain ones, and the model that it holds."""
    # A file does not hold gemma2's scale of the scores, which is then that of its heads.
    scale = {"query_pre_attn_scalar": SIZES["head_dim"]} if architecture == "gemma2" else {}
    model = tiny_model(architecture, **SIZES, **scale, tie_word_embeddings=rng.random() < 0.5)
    file = tiny_gguf(architecture, model)
    types = [*KEPT_TYPES, "IQ4_NL", "F32"]
    for name, tensor in file.tensors.items():
        if len(tensor.shape) == 2 and name != "token_embd.weight":
            kind = GGMLQuantizationType[types.pop(rng.randrange(len(types))) if types else rng.choice(KEPT_TYPES)]
            if kind.name != "F32":
                file.tensors[name] = random_blocks(np.random.default_rng(rng.randrange(2**32)), kind, tensor.shape)
    load_back(architecture, model, file)
    return file, model
