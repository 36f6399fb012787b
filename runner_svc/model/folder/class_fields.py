"""What transformers' configuration classes declare: type and default of each key, by architecture.

The rows are printed by `python -m tests.support.class_fields ARCHITECTURE`, and a test compares them with the installed
transformers. They are kept here because importing transformers costs seconds at each start. A line without a type is
an attribute of the class: the `model_type` of config.json, and the RoPE base of a configuration that has none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Field:
    """A key that a class declares."""

    kinds: tuple[str, ...]
    """Types that a value may have: int, float, bool, str, null, dict, list[int], list[str]; an int is not a float."""
    default: Any


@dataclass(frozen=True, slots=True)
class ClassFields:
    """One configuration class."""

    model_type: str
    default_theta: float
    fields: dict[str, Field]


TRANSFORMERS = "5.24"
"""The version that the rows were read from."""

DECLARED = {
    "LlamaForCausalLM": """
model_type: llama
default_theta: 10000.0
attention_bias: bool = false
attention_dropout: float | int | null = 0.0
bos_token_id: int | null = 1
eos_token_id: int | list[int] | null = 2
head_dim: int | null = null
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 11008
max_position_embeddings: int = 2048
mlp_bias: bool = false
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int | null = null
pad_token_id: int | null = null
pretraining_tp: int | null = 1
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 32000
""",
    "MistralForCausalLM": """
model_type: mistral
default_theta: 10000.0
attention_dropout: float | int = 0.0
bos_token_id: int | null = 1
eos_token_id: int | list[int] | null = 2
head_dim: int | null = null
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 14336
max_position_embeddings: int = 131072
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int = 8
pad_token_id: int | null = null
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
sliding_window: int | null = 4096
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 32000
""",
    "MinistralForCausalLM": """
model_type: ministral
default_theta: 10000.0
attention_dropout: float | int = 0.0
bos_token_id: int | null = 1
eos_token_id: int | list[int] | null = 2
head_dim: int | null = null
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 14336
layer_types: list[str] | null = null
max_position_embeddings: int = 131072
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int = 8
pad_token_id: int | null = null
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
sliding_window: int | null = 4096
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 32000
""",
    "Phi3ForCausalLM": """
model_type: phi3
default_theta: 10000.0
attention_dropout: float | int = 0.0
bos_token_id: int | null = 1
embd_pdrop: float | int = 0.0
eos_token_id: int | list[int] | null = 32000
hidden_act: str = "silu"
hidden_size: int = 3072
initializer_range: float = 0.02
intermediate_size: int = 8192
max_position_embeddings: int = 4096
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int | null = null
original_max_position_embeddings: int = 4096
pad_token_id: int | null = 32000
resid_pdrop: float | int = 0.0
rms_norm_eps: float = 1e-05
rope_parameters: dict | null = null
sliding_window: int | null = null
tie_word_embeddings: bool = false
use_cache: bool = true
vocab_size: int = 32064
""",
    "Qwen2ForCausalLM": """
model_type: qwen2
default_theta: 10000.0
attention_dropout: float | int = 0.0
bos_token_id: int | null = null
eos_token_id: int | list[int] | null = null
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 22016
layer_types: list[str] | null = null
max_position_embeddings: int = 32768
max_window_layers: int = 28
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int | null = 32
pad_token_id: int | null = null
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
sliding_window: int | null = 4096
tie_word_embeddings: bool = false
use_cache: bool = true
use_sliding_window: bool = false
vocab_size: int = 151936
""",
    "Qwen3ForCausalLM": """
model_type: qwen3
default_theta: 10000.0
attention_bias: bool = false
attention_dropout: float | int = 0.0
bos_token_id: int | null = null
eos_token_id: int | list[int] | null = null
head_dim: int = 128
hidden_act: str = "silu"
hidden_size: int = 4096
initializer_range: float = 0.02
intermediate_size: int = 22016
layer_types: list[str] | null = null
max_position_embeddings: int = 32768
max_window_layers: int = 28
num_attention_heads: int = 32
num_hidden_layers: int = 32
num_key_value_heads: int | null = 32
pad_token_id: int | null = null
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
sliding_window: int | null = 4096
tie_word_embeddings: bool = false
use_cache: bool = true
use_sliding_window: bool = false
vocab_size: int = 151936
""",
    "SmolLM3ForCausalLM": """
model_type: smollm3
default_theta: 2000000.0
attention_bias: bool = false
attention_dropout: float | int = 0.0
bos_token_id: int | null = 128000
eos_token_id: int | list[int] | null = 128001
hidden_act: str = "silu"
hidden_size: int = 2048
initializer_range: float = 0.02
intermediate_size: int = 11008
layer_types: list[str] | null = null
max_position_embeddings: int = 32768
mlp_bias: bool = false
no_rope_layer_interval: int = 4
no_rope_layers: list[int] | null = null
num_attention_heads: int = 16
num_hidden_layers: int = 36
num_key_value_heads: int | null = 4
pad_token_id: int | null = 128004
rms_norm_eps: float = 1e-06
rope_parameters: dict | null = null
sliding_window: int | null = null
tie_word_embeddings: bool = true
use_cache: bool = true
use_sliding_window: bool = false
vocab_size: int = 128256
""",
}
"""The rows by the name in a configuration's `architectures`."""

BASE_FIELDS = {
    "architectures": Field(("list[str]", "null"), None),
    "chunk_size_feed_forward": Field(("int",), 0),
    "dtype": Field(("str", "null"), None),
    "id2label": Field(("dict", "null"), None),
    "is_encoder_decoder": Field(("bool",), False),
    "label2id": Field(("dict", "null"), None),
    "output_hidden_states": Field(("bool", "null"), False),
    "problem_type": Field(("str", "null"), None),
    "return_dict": Field(("bool", "null"), True),
    "transformers_version": Field(("str", "null"), None),
}
"""What all classes declare."""


@cache
def class_fields(architecture: str) -> ClassFields:
    """Returns the class of an architecture of `DECLARED`."""
    lines = dict(line.split(": ", 1) for line in DECLARED[architecture].strip().splitlines())
    model_type, theta = lines.pop("model_type"), float(lines.pop("default_theta"))
    fields = {}
    for key, line in lines.items():
        kinds, default = line.split(" = ", 1)
        fields[key] = Field(tuple(kinds.split(" | ")), json.loads(default))
    return ClassFields(model_type, theta, fields)
