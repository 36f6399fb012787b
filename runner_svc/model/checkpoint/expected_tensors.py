"""Which tensors a checkpoint of a configuration has, and their shapes; needs no torch.

Every tensor of a checkpoint is read, is harmless, or the model is refused by the tensor's name.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import islice

from runner_svc.model.checkpoint.expected_experts import expected_experts
from runner_svc.model.checkpoint.kv_scale_tensors import kv_scale_tensors
from runner_svc.model.checkpoint.quantized_matrices import Quantized, quantized_matrices, with_formats
from runner_svc.model.config import ModelConfig
from runner_svc.model.families.description import LayerDescription, MlpDescription, NormKind, QkNorm
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.folder.safetensors_header import CODE_BYTES, ELEMENT_BYTES, StoredTensor
from runner_svc.model.quantization.stored_format import ExpectedTensor

Shape = tuple[int, ...]

HARMLESS_TENSORS: tuple[tuple[str, str], ...] = (
    (r"(.*\.)?rotary_emb\.(original_)?inv_freq", "The frequencies of RoPE are computed from config.json."),
    (r"(.*\.)?rotary_emb\.(cos|sin)_cached", "Angles of RoPE are computed from config.json."),
    (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias", "GPT-2's masks are causal."),
)
"""Patterns of names that transformers does not read either, each with the reason."""
QUANTIZED = ("qweight", "weight_packed", "blocks")
"""Names below a module of matrices that are quantized and have no tensor "weight"."""


def check_tensors(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, Quantized]:
    """Returns the quantized matrices by module.

    Raises UnsupportedModel unless the tensors are those of the configuration, in dtypes that can be read.
    """
    base = config.names.start(tensors.__contains__)
    # A configuration may ask for billions. As each is there, but for a tied end, some of these are missing then.
    most = len(tensors) + 2
    shapes = dict(islice(expected_tensors(config, base, tensors), most))
    if config.tied_embeddings:  # either of the two may be left out
        ends = f"{base}{config.names.embeddings}.weight", f"{config.names.head}.weight"
        for absent, other in (ends, ends[::-1]):
            if absent not in tensors and other in tensors:
                del shapes[absent]
    matrices = quantized_matrices(shapes, config, base, tensors)
    expected = with_formats(shapes, matrices, tensors) | kv_scale_tensors(config, base, tensors)
    for each in expected.values():
        _check_tensor(each, tensors)
    unread = (*config.names.other_parts, *_predictors(config, base, tensors))
    for name in tensors:
        if name not in expected and not name.startswith(unread) and not _is_harmless(name):
            raise UnsupportedModel(
                f"The checkpoint has a tensor {name!r}, which {config.architecture} with its config.json lacks: "
                "correct config.json, or delete the tensor."
            )
    return matrices


def _check_tensor(expected: ExpectedTensor, tensors: Mapping[str, StoredTensor]) -> None:
    name = expected.name
    if name not in tensors:
        raise UnsupportedModel(
            f"The checkpoint has no tensor {name!r}, which its config.json requires{_instead(expected, tensors)}."
        )
    if tensors[name].shape not in expected.shapes:
        shapes = " or ".join(map(str, expected.shapes))
        raise UnsupportedModel(
            f"The checkpoint's tensor {name!r} is {tensors[name].shape}, its config.json says {shapes}."
        )
    if tensors[name].dtype not in expected.dtypes:
        is_unsaid = tensors[name].dtype in CODE_BYTES and expected.dtypes == tuple(ELEMENT_BYTES)
        unsaid = ", as its config.json does not say that it is quantized" if is_unsaid else ""
        raise UnsupportedModel(
            f"The checkpoint's tensor {name!r} has dtype {tensors[name].dtype}, which is not supported; supported: "
            f"{', '.join(expected.dtypes)}{unsaid}."
        )


def _instead(expected: ExpectedTensor, tensors: Container[str]) -> str:
    """Returns what the checkpoint has in place of a plain matrix, as the end of a sentence."""
    module = expected.name.removesuffix(".weight")
    found = next((name for name in QUANTIZED if f"{module}.{name}" in tensors), None)
    if found is None or expected.dtypes != tuple(ELEMENT_BYTES):
        return ""
    return (
        f"; it has {module}.{found}: that the matrix is quantized has to be said by 'quantization_config' in "
        "config.json, whatever other files say"
    )


def expected_tensors(config: ModelConfig, base: str, tensors: Container[str]) -> Iterator[tuple[str, Shape]]:
    """Yields name and shape of each tensor, the head included. `base`: see `TensorNames.start`.

    Where a checkpoint may have one of several layouts, `tensors`, those that it has, decide.
    """
    names, table = config.names, (config.vocab_size, config.hidden_size)
    yield f"{base}{names.embeddings}.weight", table
    yield f"{names.head}.weight", table
    if (offset := config.model.position_offset) is not None:
        yield f"{base}{names.positions}.weight", (offset + config.context_length, config.hidden_size)
    yield from _norm(f"{base}{names.norm}", config)
    for index, layer in enumerate(config.layers):
        prefix = f"{base}{names.layers}.{index}"
        yield from _norms(prefix, layer, config)
        yield from _products(prefix, layer, config)
        if layer.sinks:
            yield f"{prefix}.{names.sinks}", (config.num_heads,)
        if isinstance(layer.mlp, ExpertsConfig):
            yield from expected_experts(prefix, layer.mlp, config.hidden_size, names.experts, tensors)


def _norm(module: str, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{module}.weight", (config.hidden_size,)
    if config.norm is NormKind.LAYER and config.names.norm_bias:
        yield f"{module}.bias", (config.hidden_size,)


def _norms(prefix: str, layer: LayerDescription, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    names, head_dim = config.names, config.head_dim
    for module, is_there in (
        (names.attention_norm, layer.pre_norms),
        (names.attention_post_norm, layer.post_norms),
        (names.mlp_norm, layer.pre_norms and not layer.parallel),
        (names.mlp_post_norm, layer.post_norms),
    ):
        if is_there:
            yield from _norm(f"{prefix}.{module}", config)
    for module, heads in ((names.q_norm, config.num_heads), (names.k_norm, config.num_kv_heads)):
        shapes = {
            QkNorm.HEAD: (head_dim,),
            QkNorm.PROJECTION: (heads * head_dim,),
            QkNorm.LAYER_HEAD: (heads, head_dim),
        }
        if layer.qk_norm in shapes:
            yield f"{prefix}.{module}.weight", shapes[layer.qk_norm]


def _products(prefix: str, layer: LayerDescription, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    names, hidden = config.names, config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = [
        *_parts(names.qkv, (heads, kv_heads, kv_heads), hidden, layer.qkv_bias),
        (names.output, hidden, heads, layer.output_bias),
    ]
    if isinstance(layer.mlp, MlpDescription):
        products += [
            *_parts(names.gate_up, (layer.mlp.width,) * (1 + layer.mlp.gated), hidden, layer.mlp.bias),
            (names.down, hidden, layer.mlp.width, layer.mlp.bias),
        ]
    for module, rows, columns, has_bias in products:
        yield f"{prefix}.{module}.weight", (columns, rows) if names.transposed else (rows, columns)
        if has_bias:
            yield f"{prefix}.{module}.bias", (rows,)


def _parts(
    modules: Sequence[str], rows: Sequence[int], columns: int, has_bias: bool
) -> list[tuple[str, int, int, bool]]:
    """Returns the products that a checkpoint keeps apart, or the one that it has merged."""
    kept = rows if len(modules) == len(rows) else [sum(rows)]
    return [(module, count, columns, has_bias) for module, count in zip(modules, kept, strict=True)]


def _predictors(config: ModelConfig, base: str, tensors: Container[str]) -> tuple[str, ...]:
    """Returns what the names of tensors begin with that belong to a layer behind the last one, if that predicts."""
    layer, product = f"{base}{config.names.layers}.{config.num_layers}.", config.names.predictor
    names = ("weight", *QUANTIZED)
    return (layer,) if product is not None and any(f"{layer}{product}.{name}" in tensors for name in names) else ()


def _is_harmless(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern, _ in HARMLESS_TENSORS)
