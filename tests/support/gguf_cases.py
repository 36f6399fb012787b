"""Changes to tiny GGUF files, and what each must lead to: another model of transformers', or a sentence.

Each case starts with a model of transformers' that has the meaning of the changed file; the file is that model's, and
`change` adds, removes or rewrites keys and tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import transformers
from gguf.constants import GGMLQuantizationType

from runner_svc.backends.byte_tokenizer import END_OF_TEXT_ID, IM_END_ID
from tests.support.gguf_bytes import GgufFile, StoredTensor, Typed, random_blocks
from tests.support.tiny_gguf import ARCHITECTURES, CONTEXT

BORDERS = {"llama": 20, "phi3": 64}
"""Positions of pretraining with longrope: between the sweep's two prompts, and beyond both where a model ends there."""

Change = Callable[[GgufFile], None]
HEAD_DIM = {"qwen3": 32, "gemma": 32, "gemma2": 32, "gemma3": 32}
"""Of the tiny models, where it is not 16."""
MATRIX_TYPES = [
    kind for kind in GGMLQuantizationType if kind.name not in ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0")
]
"""Types that gguf dequantizes."""


@dataclass(frozen=True)
class GgufCase:
    """A change and what it means."""

    architecture: str
    name: str
    change: Change
    overrides: dict[str, Any] = field(default_factory=dict)
    """Of the configuration of the model whose answers are right."""
    refused: str | None = None
    """A pattern of the sentence, where the file is refused."""
    ends: tuple[int, ...] | None = None
    """The tokens that end an answer, where they are not the unchanged file's."""
    is_equal_text: bool = True
    """Whether texts become the tokens that the unchanged file makes of them."""

    def __str__(self) -> str:
        return f"{self.architecture}: {self.name}"


def all_cases() -> list[GgufCase]:
    """Every case of every architecture."""
    return [case for name in ARCHITECTURES for make in _MAKERS for case in make(name)]


def removed_keys(architecture: str) -> Iterator[GgufCase]:
    """Each key is left out."""
    own = {
        "block_count": {},
        "context_length": {},
        "embedding_length": {},
        "feed_forward_length": {},
        "attention.head_count": {},
        "attention.layer_norm_rms_epsilon": {},
        "attention.head_count_kv": {"num_key_value_heads": 4},
        "rope.freq_base": _rope(architecture, rope_type="default", rope_theta=10_000.0),
        "rope.dimension_count": {},
        "vocab_size": {},
    }
    needed = list(own)[:6]
    for key, overrides in own.items():
        refused = r"It has no key '\w+\.[\w.]+', which must be there" if key in needed else None
        yield GgufCase(architecture, f"no {key}", _without(f"{architecture}.{key}"), overrides, refused)
    for key in ("general.type", "general.name"):
        yield GgufCase(architecture, f"no {key}", _without(key))
    yield GgufCase(architecture, "no general.architecture", _without("general.architecture"), refused="It has no key")
    is_bytes = not ARCHITECTURES[architecture].sentence_piece
    absent = r"It has no key|It has neither"
    needed = ["model", "tokens", *(["pre", "merges"] if is_bytes else ["scores"])]
    for name in needed:
        yield GgufCase(architecture, f"no tokenizer {name}", _without(f"tokenizer.ggml.{name}"), refused=absent)
    for name in ["bos_token_id", "padding_token_id", *([] if is_bytes else ["pre", "unknown_token_id"])]:
        yield GgufCase(architecture, f"no {name}", _without(f"tokenizer.ggml.{name}"), is_equal_text=name[0] == "p")
    for name, ends in (("eos_token_id", ()), ("token_type", None), ("add_bos_token", None)):
        case = GgufCase(architecture, f"no {name}", _without(f"tokenizer.ggml.{name}"), is_equal_text=False, ends=ends)
        yield case
    yield GgufCase(architecture, "no chat template", _without("tokenizer.chat_template"))


def changed_keys(architecture: str) -> Iterator[GgufCase]:
    """Sizes that fit and that don't, and values of other types."""
    fits: list[tuple[str, Any, dict[str, Any]]] = [
        ("context_length", 64, {"max_position_embeddings": 64}),
        ("attention.layer_norm_rms_epsilon", 1e-3, {"rms_norm_eps": 1e-3}),
        ("rope.freq_base", 500.0, _rope(architecture, rope_type="default", rope_theta=500.0)),
        ("rope.freq_base", 500, _rope(architecture, rope_type="default", rope_theta=500.0)),
        ("attention.head_count_kv", [2] * _layers(architecture), {}),
        ("attention.head_count", [4] * _layers(architecture), {}),
        ("feed_forward_length", [96] * _layers(architecture), {}),
        ("block_count", Typed(10, _layers(architecture)), {}),
    ]
    for key, value, overrides in fits:
        yield GgufCase(architecture, f"{key} = {value}", _with(f"{architecture}.{key}", value), overrides)
    uneven = [2] * (_layers(architecture) - 1) + [4]
    yield _refused(architecture, "attention.head_count_kv", uneven, r"differs between layers")
    yield _refused(architecture, "feed_forward_length", [96] * (_layers(architecture) - 1) + [64], r"differs between")
    wrong = "Its tensor|It has no tensor|which|but"
    for key, value in (
        ("block_count", _layers(architecture) - 1),
        ("block_count", _layers(architecture) + 1),
        ("block_count", 10**9),
        ("embedding_length", 128),
        ("feed_forward_length", 64),
        ("attention.head_count", 8),
        ("attention.head_count", 3),
        ("attention.head_count_kv", 1),
        ("attention.head_count_kv", 3),
        ("vocab_size", 1000),
        ("rope.dimension_count", 1000),
    ):
        yield _refused(architecture, key, value, wrong)
    for key in ("block_count", "context_length", "attention.head_count", "attention.layer_norm_rms_epsilon"):
        for value in ("2", -1.0, Typed(7, True), []):
            yield _refused(architecture, key, value, "Its .* is .*, where .* is needed")
    for value in (math.inf, math.nan, 0.0, -1.0):
        yield _refused(architecture, "rope.freq_base", value, "where a positive number is needed")


def added_keys(architecture: str) -> Iterator[GgufCase]:
    """Keys with an effect, with none, and unknown ones."""
    for key, without, effect in EFFECTS:
        if key in ARCHITECTURES[architecture].keys or (architecture == "gemma3" and key == "final_logit_softcapping"):
            continue  # it is computed: see `own_keys`
        if without is not None:
            yield GgufCase(architecture, f"{key} = {without}", _with(f"{architecture}.{key}", without))
        if effect is not None:
            yield _refused(architecture, key, effect, f"{key}.* is |{key}' ")
    head = HEAD_DIM.get(architecture, 16)
    for key in ("key_length", "value_length"):
        yield GgufCase(architecture, f"{key} = {head}", _with(f"{architecture}.attention.{key}", head))
    if architecture != "granite":
        for value in (head**-0.5, 0.0):
            yield GgufCase(architecture, f"scale = {value}", _with(f"{architecture}.attention.scale", value))
        yield _refused(architecture, "attention.scale", 0.5, "attention.scale is 0.5")
    yield _refused(architecture, "attention.value_length", 8, "both must be alike")
    for key in HARMLESS_EXAMPLES:
        if architecture == "granite" and key.endswith("finetuned"):
            continue
        yield GgufCase(architecture, f"harmless {key}", _with(key.replace("{arch}", architecture), "x"))
    other = "qwen2" if architecture != "qwen2" else "llama"
    for key in ("foo.bar", "general.foo"):
        yield GgufCase(architecture, f"publisher's {key}", _with(key, 1))
    for key in (f"{architecture}.foo", f"{other}.rope.freq_base", "tokenizer.ggml.foo"):
        yield GgufCase(architecture, f"foreign {key}", _with(key, 1), refused=f"Its key '{key}'")
    for key, value in (("type", "adapter"), ("type", "mmproj"), ("quantization_version", 1)):
        yield GgufCase(architecture, f"general.{key} = {value}", _with(f"general.{key}", value), refused="Its general")
    yield GgufCase(architecture, "an adapter's key", _with("adapter.type", "lora"), refused="adapter.type")
    yield GgufCase(architecture, "quantization_version 2", _with("general.quantization_version", 2))
    yield GgufCase(architecture, "alignment 64", _with("general.alignment", 64))


def scaled_rope(architecture: str) -> Iterator[GgufCase]:
    """Each way of scaling."""

    def case(name: str, keys: dict[str, Any], rope: dict[str, Any] | None, refused: str | None = None) -> GgufCase:
        full = {f"{architecture}.rope.{key}": value for key, value in keys.items()}
        parameters = _rope(architecture, **{"rope_theta": 10_000.0, **rope}) if rope else {}
        return GgufCase(architecture, f"rope {name}", lambda file: file.keys.update(full), parameters, refused)

    if architecture == "phi3":
        scaled = "Its RoPE is scaled"
        yield case("linear", {"scaling.type": "linear", "scaling.factor": 4.0}, None, scaled)
        yield case("factor alone", {"scaling.factor": 4.0}, None, scaled)
        yield case("yarn", {"scaling.type": "yarn", "scaling.factor": 4.0}, None, scaled)
        return
    linear = {"rope_type": "linear", "factor": 4.0}
    yield case("linear", {"scaling.type": "linear", "scaling.factor": 4.0}, linear)
    yield case("factor alone", {"scaling.factor": 4.0}, linear)
    yield case("scale_linear", {"scale_linear": 4.0}, linear)
    yield case("none", {"scaling.type": "none", "scaling.factor": 4.0}, None)
    yield case("linear 1", {"scaling.type": "linear", "scaling.factor": 1.0}, None)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    keys = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}
    yield case("yarn", keys, yarn)
    yield case("yarn, trained", {**keys, "scaling.finetuned": True, "scaling.yarn_ext_factor": 1.0}, yarn)
    betas = {"scaling.yarn_beta_fast": 4.0, "scaling.yarn_beta_slow": 0.5}
    yield case("yarn with bounds", {**keys, **betas}, {**yarn, "beta_fast": 4.0, "beta_slow": 0.5})
    without = {"scaling.type": "yarn", "scaling.factor": 4.0}
    yield case("yarn, no original", without, {**yarn, "original_max_position_embeddings": CONTEXT})
    yield case("yarn attn_factor", {**keys, "scaling.attn_factor": 1.2}, None, r"attn_factor is 1\.2")
    yield case("yarn yarn_attn_factor", {**keys, "scaling.yarn_attn_factor": 1.2}, None, "yarn_attn_factor")
    yield case("yarn log multiplier", {**keys, "scaling.yarn_log_multiplier": 0.1}, None, "yarn_log_multiplier")
    yield case("yarn ext_factor", {**keys, "scaling.yarn_ext_factor": 0.5}, None, "yarn_ext_factor")
    yield case("factor below 1", {"scaling.factor": 0.5}, None, "less than 1")
    yield case("unknown", {"scaling.type": "su", "scaling.factor": 2.0}, None, "scaling.type is 'su'")
    yield case("longrope without factors", {"scaling.type": "longrope"}, None, "longrope, but it has no tensor")
    yield case("sections", {"dimension_sections": [8, 8]}, None)
    yield case("base of windows", {"freq_base_swa": 1e4}, None, "freq_base_swa" if architecture == "gemma2" else None)


def factors(architecture: str) -> Iterator[GgufCase]:
    """Tensors that frequencies are divided by."""
    count = HEAD_DIM.get(architecture, 16) // 2
    takes = architecture in ("llama", "qwen2", "qwen3", "smollm3")

    def case(name: str, numbers: list[float], rope: dict[str, Any] | None, refused: str | None) -> GgufCase:
        tensor = StoredTensor.of(np.array(numbers, np.float32))
        parameters = _rope(architecture, **{"rope_theta": 10_000.0, **rope}) if rope and refused is None else {}
        return GgufCase(architecture, f"rope_freqs {name}", _tensor("rope_freqs.weight", tensor), parameters, refused)

    unknown = None if takes else "Its tensor 'rope_freqs.weight' is not known|exclude each other"
    yield case("of ones", [1.0] * count, None, unknown)
    for factor, low, high, original in ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (8.0, 1.0, 4.0, 64)):
        llama3 = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        name = f"of llama3 {factor:g} {original}"
        yield case(name, llama3_factors(factor, low, high, original, count), llama3, unknown)
    for name, numbers in (
        ("too few", [1.0] * (count - 1)),
        ("zero", [0.0] * count),
        ("not a number", [math.nan] * count),
    ):
        yield case(name, numbers, None, "Tensor 'rope_freqs.weight'|Its tensor 'rope_freqs.weight'")
    own = [1.0 + index % 3 for index in range(count)]
    same = {"rope_type": "longrope", "factor": 1.0, "short_factor": own, "long_factor": own}
    yield case("of their own", own, same, unknown)
    if architecture in ("llama", "phi3"):
        for name, has_type in (("longrope", True), ("longrope by tensors", False)):
            yield GgufCase(architecture, name, _long(architecture, count, has_type), _longrope(architecture, count))
        alone = _tensor("rope_factors_long.weight", StoredTensor.of(np.ones(count, np.float32)))
        yield GgufCase(architecture, "long factors alone", alone, {}, "it is not clear what they mean")


def _longrope(architecture: str, count: int) -> dict[str, Any]:
    border = BORDERS[architecture]
    parameters = {f"{kind}_factor": numbers.tolist() for kind, numbers in _long_factors(count).items()}
    scaling = {"rope_type": "longrope", "rope_theta": 10_000.0, "attention_factor": 1.25, "factor": CONTEXT / border}
    beside = {"original_max_position_embeddings": border}
    return {"rope_parameters": {**scaling, **parameters, **beside}, **(beside if architecture == "phi3" else {})}


def _long_factors(count: int) -> dict[str, Any]:
    return {kind: first + np.arange(count, dtype=np.float32) / 4 for kind, first in (("long", 2.0), ("short", 1.0))}


def _long(architecture: str, count: int, has_type: bool) -> Change:
    def change(file: GgufFile) -> None:
        for kind, numbers in _long_factors(count).items():
            file.tensors[f"rope_factors_{kind}.weight"] = StoredTensor.of(numbers)
        file.keys[f"{architecture}.rope.scaling.original_context_length"] = BORDERS[architecture]
        file.keys[f"{architecture}.rope.scaling.attn_factor"] = 1.25
        if has_type:
            file.keys[f"{architecture}.rope.scaling.type"] = "longrope"

    return change


def windows(architecture: str) -> Iterator[GgufCase]:
    """Sliding windows, which transformers' class must have."""
    key = f"{architecture}.attention.sliding_window"
    pattern = "attention.sliding_window_pattern"
    if architecture in ("gemma2", "gemma3"):
        yield _refused(architecture, pattern, [True, False], "sliding_window_pattern")
        yield GgufCase(architecture, "another window", _with(key, 5), {"sliding_window": 5})
        yield GgufCase(architecture, "no window", _with(key, 0), refused="It has no .*sliding_window, which its layers")
        return
    window: dict[str, Any] = {"sliding_window": 9}
    if architecture in ("qwen2", "qwen3"):
        window |= {"use_sliding_window": True, "max_window_layers": 0}
    if architecture == "llama":
        window["config_class"] = transformers.MistralConfig
    yield GgufCase(architecture, "no window", _with(key, 0))
    yield GgufCase(architecture, "a pattern of no windows", _with(f"{architecture}.{pattern}", [True, False]))
    lacks_windows = architecture in ("smollm3", "granite", "olmo2", "gemma")
    refused = "attention.sliding_window is 9, which" if lacks_windows else None
    yield GgufCase(architecture, "window", _with(key, 9), window, refused)
    if architecture == "llama":
        biased = {"attention_bias": True}
        yield GgufCase(architecture, "window and biases", _with(key, 9), biased, "a sliding window and biases")


def own_keys(architecture: str) -> Iterator[GgufCase]:
    """Keys that only this architecture has."""
    if architecture == "granite":
        for key, name, default in (
            ("attention.scale", "attention_multiplier", 0.25),
            ("embedding_scale", "embedding_multiplier", 1.0),
            ("residual_scale", "residual_multiplier", 1.0),
        ):
            yield GgufCase(architecture, f"no {key}", _without(f"granite.{key}"), {name: default})
            yield GgufCase(architecture, f"{key} = 0.7", _with(f"granite.{key}", 0.7), {name: 0.7})
        yield GgufCase(architecture, "no logit_scale", _without("granite.logit_scale"), refused="It has no key")
        key = "granite.rope.scaling.finetuned"
        yield GgufCase(architecture, "rotation", _with(key, True))
        yield GgufCase(architecture, "no rotation", _with(key, False), refused="layers don't rotate")
    if architecture == "gemma2":
        for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            yield GgufCase(architecture, f"no {key}", _without(f"gemma2.{key}"), {key: default})
            yield GgufCase(architecture, f"{key} = 10", _with(f"gemma2.{key}", 10.0), {key: 10.0})
            yield _refused(architecture, key, 0.0, "where a positive number is needed")
        key = "gemma2.attention.sliding_window"
        yield GgufCase(architecture, "no sliding_window", _without(key), {"sliding_window": 4096})
    if architecture == "gemma3":
        key = "final_logit_softcapping"
        yield GgufCase(architecture, f"{key} = 10", _with(f"gemma3.{key}", 10.0), {key: 10.0})
        yield GgufCase(
            architecture, "no sliding_window", _without("gemma3.attention.sliding_window"), refused="It has no"
        )


def tokenizer_keys(architecture: str) -> Iterator[GgufCase]:
    """What may be said of a tokenizer."""
    is_bytes = not ARCHITECTURES[architecture].sentence_piece
    eos = IM_END_ID if is_bytes else 2
    extra = END_OF_TEXT_ID if is_bytes else 1
    for name in ("eot", "eom"):
        change = _with(f"tokenizer.ggml.{name}_token_id", extra)
        yield GgufCase(architecture, f"{name}_token_id", change, ends=(eos, extra))
    several = _with("tokenizer.ggml.eos_token_ids", [extra, eos, 7])
    yield GgufCase(architecture, "eos_token_ids", several, ends=(eos, extra, 7), is_equal_text=False)
    yield GgufCase(architecture, "another eos", _with("tokenizer.ggml.eos_token_id", extra), ends=(extra,))
    for name in ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle"):
        yield GgufCase(architecture, f"{name}_token_id", _with(f"tokenizer.ggml.{name}_token_id", 7))
    for name in ("seperator", "cls", "mask"):
        yield GgufCase(architecture, f"{name}_token_id", _with(f"tokenizer.ggml.{name}_token_id", 7))
    for name in ("add_bos_token", "add_eos_token"):
        for value in (True, False):
            change = _with(f"tokenizer.ggml.{name}", value)
            yield GgufCase(architecture, f"{name} {value}", change, is_equal_text=False)
    for name in ("bos", "eos", "padding", "unknown", "eot", "mask", "seperator"):
        refused = r"is token 100000, but it has \d+ tokens"
        yield GgufCase(
            architecture, f"no such {name}", _with(f"tokenizer.ggml.{name}_token_id", 100_000), refused=refused
        )
    for key, value in (("remove_extra_whitespaces", True), ("add_sep_token", True), ("precompiled_charsmap", [1])):
        yield GgufCase(architecture, key, _with(f"tokenizer.ggml.{key}", value), refused=f"tokenizer.ggml.{key}")
    for key in ("remove_extra_whitespaces", "add_sep_token"):
        yield GgufCase(architecture, f"{key} False", _with(f"tokenizer.ggml.{key}", False))
    for key in ("tokenizer.huggingface.json", "tokenizer.rwkv.world"):
        yield GgufCase(architecture, key, _with(key, "{}"), refused=f"Its key '{key}'")
    for value in ("bert", "t5", "rwkv", "no_vocab"):
        refused = "tokenizer.ggml.model is"
        yield GgufCase(architecture, f"tokenizer {value}", _with("tokenizer.ggml.model", value), refused=refused)
    yield GgufCase(architecture, "pre of a stranger", _with("tokenizer.ggml.pre", "foo"), refused="ggml.pre is 'foo'")
    yield GgufCase(architecture, "named templates", _with("tokenizer.chat_template.rag", "{{ 1 }}"))
    yield GgufCase(
        architecture, "add_space_prefix", _with("tokenizer.ggml.add_space_prefix", False), is_equal_text=is_bytes
    )


def tensors(architecture: str) -> Iterator[GgufCase]:
    """Each tensor of a layer is missing, of another shape, or there where it is optional."""
    untied = {"tie_word_embeddings": False}
    yield GgufCase(architecture, "a head of its own", lambda file: None, untied)
    missing = "It has no tensor '"
    for name in ["token_embd", "output_norm", *(f"blk.1.{name}" for name in _layer_names(architecture))]:
        change = _without_tensor(f"{name}.weight")
        yield GgufCase(architecture, f"no {name}", change, refused=missing)
        yield GgufCase(architecture, f"{name} cut", _cut(f"{name}.weight"), refused="Its tensor .* is .*, but its keys")
    stray = StoredTensor.of(np.ones(8, np.float32))
    for name in (
        "foo.weight",
        "blk.0.foo.weight",
        "blk.0.attn_rot_embd.weight",
        "blk.7.attn_norm.weight",
        "output.bias",
    ):
        yield GgufCase(architecture, f"stray {name}", _tensor(name, stray), refused=f"Its tensor '{name}' is not known")
    for name in ("blk.0.attn_q.weight.scale", "token_embd.scale", "blk.0.attn_norm.bias"):
        yield GgufCase(architecture, f"stray {name}", _tensor(name, stray), refused=f"Its tensor '{name}' is not known")
    experts = StoredTensor.of(np.ones((2, 64, 64), np.float32))
    yield GgufCase(architecture, "experts", _tensor("blk.0.ffn_gate_exps.weight", experts), refused="ffn_gate_exps")
    yield from _biases(architecture)
    if architecture == "phi3":
        yield GgufCase(architecture, "queries, keys and values apart", _apart)


def types(architecture: str) -> Iterator[GgufCase]:
    """Each type of matrices, and other types of the rest."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} | (
        {"num_attention_heads": 4} if architecture != "phi3" else {}
    )
    if architecture == "phi3":
        del wide["head_dim"]
    if architecture in ("gemma2", "gemma3"):
        wide["query_pre_attn_scalar"] = 64
    for kind in MATRIX_TYPES:
        yield GgufCase(architecture, f"matrices in {kind.name}", _requantized(kind), wide)
    for kind in (GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q8_0):
        yield GgufCase(architecture, f"embeddings in {kind.name}", _embeddings(kind))
    norms = GGMLQuantizationType.F16
    yield GgufCase(architecture, "norms in F16", _norms(norms))
    for kind in GGMLQuantizationType:
        if kind not in MATRIX_TYPES:
            refused = f"Tensor .* is stored as {kind.name}, which can't be read"
            yield GgufCase(architecture, f"matrices in {kind.name}", _relabelled(kind.value), wide, refused)
    yield GgufCase(architecture, "matrices in 99", _relabelled(99), wide, "the unknown type 99")


_MAKERS = (
    removed_keys,
    changed_keys,
    added_keys,
    scaled_rope,
    factors,
    windows,
    own_keys,
    tokenizer_keys,
    tensors,
    types,
)

# Of an architecture's keys: a value without an effect, and one with.
EFFECTS: list[tuple[str, Any, Any]] = [
    ("attention.causal", True, False),
    ("attention.clamp_kqv", 0.0, 8.0),
    ("attention.max_alibi_bias", 0.0, 8.0),
    ("attention.layer_norm_epsilon", None, 1e-5),
    ("attention.q_lora_rank", None, 8),
    ("attn_logit_softcapping", 0.0, 30.0),
    ("final_logit_softcapping", 0.0, 30.0),
    ("logit_scale", 1.0, 0.5),
    ("residual_scale", 1.0, 0.5),
    ("embedding_scale", 1.0, 8.0),
    ("expert_count", 0, 8),
    ("expert_used_count", 0, 2),
    ("expert_feed_forward_length", None, 64),
    ("leading_dense_block_count", 0, 1),
    ("nextn_predict_layers", 0, 1),
    ("pooling_type", 0, 1),
    ("use_parallel_residual", False, True),
    ("ssm.state_size", None, 8),
]
DROPPED = (
    r"general\.(type|quantization_version)|an adapter's key|experts",
    r"rope (linear|factor|yarn|unknown|longrope)|rope_freqs|long factors",
    r"no tokenizer (model|tokens|merges|scores)|tokenizer (bert|t5|rwkv|no_vocab)|tokenizer\.",
    r"no such|pre of a stranger",
    r"remove_extra_whitespaces|add_sep_token|precompiled_charsmap",
    r"stray (output\.bias|.*scale|blk\.0\.attn_norm\.bias)|output bias|mlp bias",
    r"attention\.(scale|value_length) = |rope\.dimension_count = 1000",
)
"""Refused cases in which transformers drops something with an effect, or fails later, in making the tokenizer.

Its logits, equal to those of the unchanged file, are then wrong.
"""

REVIEWED = {
    r"no context_length": "the longest text would be a guess",
    r"no attention.layer_norm_rms_epsilon": "transformers' default is another number than that of most models",
    r"no tokenizer pre": "the rule that splits a text would be a guess, and most models have another than GPT-2's",
    r"foreign ": "an unknown key of the architecture or the tokenizer may have an effect",
    r"stray ": "an unknown tensor may have an effect",
    r"sliding_window_pattern": "which layers have windows would be a guess",
}
"""Refused cases that transformers answers like the unchanged file, and why they are refused."""

HARMLESS_EXAMPLES = (
    "general.author",
    "general.license",
    "general.license.link",
    "general.base_model.0.repo_url",
    "general.source.huggingface.repository",
    "general.tags",
    "general.file_type",
    "general.sampling.top_k",
    "quantize.imatrix.file",
    "mradermacher.quantize_version",
    "{arch}.tensor_data_layout",
    "{arch}.rope.scaling.finetuned",
    "tokenizer.ggml.token_type_count",
)
"""Keys that change no answer."""


def llama3_factors(
    factor: float, low: float, high: float, original: int, count: int, theta: float = 10_000.0
) -> list[float]:
    """What llama.cpp's converter writes into `rope_freqs.weight` for heads of 2 * count."""
    found = []
    for index in range(count):
        wavelength = 2 * math.pi * theta ** (index / count)
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def _layers(architecture: str) -> int:
    return int(ARCHITECTURES[architecture].overrides.get("num_hidden_layers", 2))


def _layer_names(architecture: str) -> list[str]:
    attention = ["attn_qkv"] if architecture == "phi3" else ["attn_q", "attn_k", "attn_v"]
    norms = ["attn_q_norm", "attn_k_norm"] if architecture in ("qwen3", "gemma3", "olmo2") else []
    around = ["attn_norm", "ffn_norm"] if architecture != "olmo2" else []
    if architecture in ("gemma2", "gemma3", "olmo2"):
        around += ["post_attention_norm", "post_ffw_norm"]
    mlp = ["ffn_up", "ffn_down"] if architecture == "phi3" else ["ffn_gate", "ffn_up", "ffn_down"]
    return [*around, *attention, *norms, "attn_output", *mlp]


def _biases(architecture: str) -> Iterator[GgufCase]:
    bias = StoredTensor.of(np.ones(64, np.float32))
    mlp = StoredTensor.of(np.ones(96, np.float32))
    if architecture in ("llama", "smollm3", "qwen3", "granite", "olmo2"):
        all_there = {"attention_bias": True}
        yield GgufCase(architecture, "attention biases", lambda file: None, all_there)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            change = _zeroed(f"{name}.bias")
            yield GgufCase(architecture, f"attention biases but {name}'s", change, all_there)
    else:
        refused = r"Its tensor 'blk.0.attn_output.bias' is not known"
        yield GgufCase(architecture, "output bias", _tensor("blk.0.attn_output.bias", bias), refused=refused)
    if architecture in ("llama", "smollm3", "granite"):
        yield GgufCase(architecture, "mlp biases", lambda file: None, {"mlp_bias": True})
        yield GgufCase(architecture, "mlp biases but gate's", _zeroed("ffn_gate.bias"), {"mlp_bias": True})
    else:
        refused = r"Its tensor 'blk.0.ffn_down.bias' is not known"
        yield GgufCase(architecture, "mlp bias", _tensor("blk.0.ffn_down.bias", mlp), refused=refused)
    if architecture == "qwen2":
        yield GgufCase(architecture, "no biases", _zeroed(".bias"))


def _rope(architecture: str, **parameters: Any) -> dict[str, Any]:
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": 10_000.0}
        return {"rope_parameters": {"full_attention": parameters, "sliding_attention": local}}
    return {"rope_parameters": parameters}


def _with(key: str, value: Any) -> Change:
    return lambda file: file.keys.__setitem__(key, value)


def _without(key: str) -> Change:
    return lambda file: file.keys.pop(key) and None


def _refused(architecture: str, key: str, value: Any, sentence: str) -> GgufCase:
    change = _with(f"{architecture}.{key}", value)
    return GgufCase(architecture, f"{key} = {value}", change, refused=sentence)


def _tensor(name: str, tensor: StoredTensor) -> Change:
    return lambda file: file.tensors.__setitem__(name, tensor)


def _without_tensor(name: str) -> Change:
    return lambda file: file.tensors.pop(name) and None


def _cut(name: str) -> Change:
    def change(file: GgufFile) -> None:
        shape = file.tensors[name].shape
        file.tensors[name] = StoredTensor.of(np.ones((shape[0] - 1, *shape[1:]), np.float32))

    return change


def _zeroed(end: str) -> Change:
    """Removes tensors, whose numbers then count as zero; `run` sets the model's to zero as well."""

    def change(file: GgufFile) -> None:
        for name in [name for name in file.tensors if name.endswith(end)]:
            del file.tensors[name]

    return change


def _apart(file: GgufFile) -> None:
    for name in [name for name in file.tensors if name.endswith("attn_qkv.weight")]:
        numbers = np.frombuffer(file.tensors.pop(name).content, np.float32).reshape(128, 64)
        for part, rows in (("q", slice(0, 64)), ("k", slice(64, 96)), ("v", slice(96, 128))):
            file.tensors[name.replace("attn_qkv", f"attn_{part}")] = StoredTensor.of(numbers[rows])


def _requantized(kind: GGMLQuantizationType) -> Change:
    def change(file: GgufFile) -> None:
        rng = np.random.default_rng(kind.value)
        for name, tensor in file.tensors.items():
            if name.startswith("blk.") and len(tensor.shape) == 2:
                plain = kind.name in ("F32", "F16", "BF16")
                numbers = np.frombuffer(tensor.content, np.float32).reshape(tensor.shape)
                file.tensors[name] = StoredTensor.of(numbers, kind) if plain else random_blocks(rng, kind, tensor.shape)

    return change


def _embeddings(kind: GGMLQuantizationType) -> Change:
    def change(file: GgufFile) -> None:
        tensor = file.tensors["token_embd.weight"]
        numbers = np.frombuffer(tensor.content, np.float32).reshape(tensor.shape)
        file.tensors["token_embd.weight"] = StoredTensor.of(numbers, kind)

    return change


def _norms(kind: GGMLQuantizationType) -> Change:
    def change(file: GgufFile) -> None:
        for name, tensor in file.tensors.items():
            if name.endswith("norm.weight"):
                file.tensors[name] = StoredTensor.of(np.frombuffer(tensor.content, np.float32), kind)

    return change


def _relabelled(code: int) -> Change:
    def change(file: GgufFile) -> None:
        name = "blk.0.attn_output.weight"
        file.tensors[name] = StoredTensor(file.tensors[name].shape, code, bytes(8 * 256 * 256))

    return change
