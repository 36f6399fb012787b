"""Cases of the sweep of configurations: each key removed, each foreign key added, each value changed to another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import transformers

FAMILIES = ("llama", "mistral", "ministral", "phi3-partial", "qwen2", "qwen2-window", "qwen3", "smollm3")
OTHER_FAMILIES = ("gemma", "gemma2", "gemma3", "granite", "olmo2", "glm", "glm4", "cohere", "cohere2", "gpt2", "opt")
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "glm4-moe", "dots1", "ernie4-5-moe")

# Families of Roster's decoder and others', whose keys a configuration may have by mistake.
FOREIGN_CLASSES = (
    "Llama Mistral Ministral Phi3 Qwen2 Qwen3 SmolLM3 Gemma Gemma2 Gemma3Text Granite Olmo2 Glm4 Cohere Cohere2 "
    "GPT2 OPT Mixtral Qwen3Moe GptOss Glm4Moe Dots1 Ernie4_5_Moe DeepseekV3 Starcoder2 StableLm Phi"
)

_LINEAR = {"rope_type": "linear", "factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0 + index / 8 for index in range(8)],
    "long_factor": [2, *(2.5 + index for index in range(7))],
}
_ROPES: list[Any] = [
    None,
    {},
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    {"type": "linear", "factor": 4.0},
    {**_LINEAR, "rope_theta": 777.0},
    {**_LINEAR, "factor": 2},
    {"rope_type": "linear"},
    {"rope_type": "dynamic", "factor": 2.0},
    _YARN,
    {**_YARN, "rope_theta": 777.0, "beta_fast": 4.0, "beta_slow": 0.5},
    {**_YARN, "attention_factor": 1.3},
    {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    {**_YARN, "truncate": False, "beta_fast": 0},
    {**_YARN, "factor": None},
    {"rope_type": "yarn", "factor": 2.0},
    _LLAMA3,
    {key: value for key, value in _LLAMA3.items() if key != "original_max_position_embeddings"},
    {key: value for key, value in _LLAMA3.items() if key != "low_freq_factor"},
    _LONG,
    {**_LONG, "attention_factor": 1.2, "original_max_position_embeddings": 16},
    {**_LONG, "factor": None, "original_max_position_embeddings": 16},
    {**{key: value for key, value in _LONG.items() if key != "rope_type"}, "type": "su"},
    {"rope_type": "proportional", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]},
    {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
    {"rope_type": "no such type"},
]

_SLIDING, _FULL = "sliding_attention", "full_attention"

VALUES: dict[str, list[Any]] = {
    "hidden_act": [
        *("swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"),
        *("quick_gelu", "relu2", "mish", "laplace", "no such activation"),
    ],
    "rms_norm_eps": [1e-3, 0.0, 1e-12, 1],
    "rope_parameters": _ROPES,
    "rope_scaling": _ROPES,
    "rope_theta": [5.0, 100_000, None],
    "partial_rotary_factor": [0.5, 1.0, None],
    "original_max_position_embeddings": [32, None],
    "max_position_embeddings": [64, 1_000_000],
    "sliding_window": [None, 1, 5, 4096],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 28],
    "layer_types": [
        None,
        [_FULL] * 3,
        [_SLIDING] * 3,
        [_SLIDING, _FULL, _SLIDING],
        [_FULL] * 2,
        ["linear_attention"] * 3,
    ],
    "no_rope_layers": [None, [1, 0, 1, 0], [0, 0, 0, 0, 0], [1]],
    "no_rope_layer_interval": [1, 2, 3],
    "tie_word_embeddings": [True, False],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "head_dim": [16, 32, None],
    "num_key_value_heads": [1, 4, None],
    "num_attention_heads": [2, 8],
    "num_hidden_layers": [2, 4],
    "vocab_size": [258, 300],
    "intermediate_size": [48],
    "eos_token_id": [None, 7, [1, 2], [], 9999, -1],
    "bos_token_id": [1, None],
    "pad_token_id": [0, None],
    "dtype": ["bfloat16", "float16", None],
    "torch_dtype": ["bfloat16", None],
    "attention_dropout": [0.5],
    "initializer_range": [0.5],
    "use_cache": [False],
    "pretraining_tp": [2],
    "quantization_config": [None, {"quant_method": "gptq", "bits": 4}],
    "auto_map": [{"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}],
    "architectures": [None, [], ["LlamaForCausalLM"], ["BertModel"]],
    "model_type": ["llama", "mistral", "qwen3", "bert"],
    "is_encoder_decoder": [False, True],
    "tokenizer_class": ["LlamaTokenizer"],
    "temperature": [0.6],
    "num_experts_per_tok": [1],
    "norm_topk_prob": [True, False],
    "n_group": [1, 2, 5],
    "topk_group": [1, 2],
    "routed_scaling_factor": [0.5],
    "first_k_dense_replace": [0],
    "moe_k": [1, None],
    "moe_norm_min": [0.0, 2.0],
    "moe_layer_end_index": [-1, 1],
    "moe_layer_interval": [2],
    "a key that no class has": [1],
}
"""Other values of a key, tried in every family, whether or not its class has the key."""

TOGETHER: list[dict[str, Any]] = [
    {"use_sliding_window": True, "sliding_window": 5, "layer_types": None},
    {"use_sliding_window": True, "sliding_window": 5, "layer_types": None, "max_window_layers": 1},
    {"use_sliding_window": False, "sliding_window": 5, "layer_types": None, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 5, "layer_types": [_FULL, _SLIDING, _FULL]},
    {"use_sliding_window": True, "sliding_window": 5, "layer_types": None, "no_rope_layers": [0, 1, 0, 1]},
    {"rope_theta": 5.0, "rope_parameters": None},
    {"rope_theta": 5.0, "rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": _YARN, "original_max_position_embeddings": 32},
    {"rope_parameters": _LLAMA3, "original_max_position_embeddings": 32},
    {"rope_parameters": _LONG, "original_max_position_embeddings": 16},
    {"rope_parameters": None, "partial_rotary_factor": 0.5},
    {"rope_parameters": _LINEAR, "partial_rotary_factor": 0.5},
    {"rope_parameters": _LINEAR, "partial_rotary_factor": 1.0},
    {"dtype": "bfloat16", "torch_dtype": "float16"},
]

PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt-oss": {"experts_per_token": 3, "initial_context_length": 64},
    "phi3-partial": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"sliding_window_size": 9},
    "cohere2": {
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": False,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
    },
    "gpt2": {"n_special": 0, "predict_special_tokens": True, "output_past": True, "_num_labels": 1},
}
"""Keys of config.json files as their publishers wrote them (gpt-oss, Phi-4-mini, Gemma 1.1, Gemma 2 9B, Command R7B,
GPT-2 of every size) that transformers' classes do not read, with the values of the tiny models."""

WRONG: list[Any] = [None, "x", -1, 0, 0.5, -0.5, [], [1], ["x"], {}, {"x": 1}, True, 10**40, 1e300]
"""Values of types and ranges that few keys have."""

TOO_LARGE_FOR_A_TEST = ("hidden_size", "intermediate_size", "vocab_size")
"""Keys whose class's defaults ask transformers for gigabytes, of tensors that the folder does not have."""


@dataclass(frozen=True)
class Case:
    """A change of a family's configuration."""

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    removed: str | None = None

    def __str__(self) -> str:
        what = f"without {self.removed}" if self.removed else ", ".join(f"{k}={v!r}" for k, v in self.changes.items())
        return f"{self.family}: {what}"


def cases(family: str, raw: dict[str, Any]) -> Iterator[Case]:
    """Yields the cases of a family with this configuration; each is valid for some class."""
    for key in raw:
        yield Case(family, removed=key)
    for key, value in foreign_keys().items():
        if key not in raw and key not in VALUES:
            yield Case(family, {key: value})
    for key, values in VALUES.items():
        for value in values:
            if key not in raw or raw[key] != value:
                yield Case(family, {key: value})
    for changes in TOGETHER:
        yield Case(family, changes)
    for key, value in (PUBLISHED.get(family) or {}).items():
        yield from (Case(family, {key: each}) for each in (value, None, 5, "another value"))


def wrong_cases(family: str, raw: dict[str, Any]) -> Iterator[Case]:
    """Yields each key with values of each type, most of which its class refuses."""
    for key in {**raw, **VALUES}:
        for value in WRONG:
            yield Case(family, {key: value})


def foreign_keys() -> dict[str, Any]:
    """Returns the keys of all classes, each with a default that is not null where a class has one."""
    of_all = {declared.name for declared in dataclasses.fields(transformers.PreTrainedConfig)}
    found: dict[str, Any] = {}
    for name in FOREIGN_CLASSES.split():
        for declared in dataclasses.fields(getattr(transformers, f"{name}Config")):
            value = None if declared.default is dataclasses.MISSING else declared.default
            if declared.name in of_all:
                continue
            if found.get(declared.name) is None and isinstance(value, str | int | float | bool | None):
                found[declared.name] = value
    return {key: 2 if value is None else value for key, value in found.items()}
