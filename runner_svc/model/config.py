"""The shape of a decoder-only model, read from its Hugging Face configuration.

One `ModelConfig` covers every supported architecture: sizes, and a description of each layer and of what stands around
the layers (`runner_svc.model.families`), so that the decoder never asks for an architecture's name. This module
works on plain dicts, because importing transformers to parse a small JSON file would add seconds to each start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.ranks import WHOLE, Shard
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families.description import (
    LayerDescription,
    MlpDescription,
    ModelDescription,
    NormKind,
    check_alike,
)
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.model.families.family import Family
from runner_svc.model.families.registry import ARCHITECTURES
from runner_svc.model.families.tensor_names import TensorNames
from runner_svc.model.families.text_part import text_part
from runner_svc.model.folder.config_keys import checked_config
from runner_svc.model.quantization.read import read_quantization
from runner_svc.model.quantization.selection import Quantization
from runner_svc.model.rope_config import RopeConfig, RopeType

if TYPE_CHECKING:  # configurations are read without torch
    from torch import Tensor

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "mish")


_ROWS = 16
"""A rank's part of a vocabulary is a multiple of this."""


class HuggingFaceConfig(Protocol):
    """The part of a transformers `PretrainedConfig` that is used here."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and descriptions of a decoder; immutable."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Of all norms.
    norm_eps: float
    layers: tuple[LayerDescription, ...]
    model: ModelDescription
    # The rotary embeddings that layers name by index.
    ropes: tuple[RopeConfig, ...]
    names: TensorNames
    tied_embeddings: bool
    # Maximum number of positions of one sequence.
    context_length: int
    # Why that is less than the model's.
    why_shorter: str | None
    eos_token_ids: tuple[int, ...]
    # Formats of the checkpoint's matrices; None: all are plain.
    quantization: Quantization | None = None
    # Of each layer, float32 [num_heads]: known only when weights have been read.
    sinks: tuple[Tensor | None, ...] | None = field(default=None, compare=False, repr=False)
    # The rank that this is the part of: `runner_svc.model.rank_parts`.
    shard: Shard = WHOLE
    # Ranks that have the same heads of keys.
    kv_replicas: int = 1

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def vocabulary(self) -> slice:
        """Token ids of the rows that embeddings and head have here: as many on each rank of a group.

        Those of the last ranks may end beyond `vocab_size`, where rows are zeros.
        """
        size = self.shard.size
        each = self.vocab_size if size == 1 else -(-self.vocab_size // (size * _ROWS)) * _ROWS
        return slice(self.shard.rank * each, (self.shard.rank + 1) * each)

    @property
    def norm(self) -> NormKind:
        """Kind of the norms of all layers, and of the last one."""
        return self.layers[0].norm

    @property
    def multiplier(self) -> float:
        """Factor of what attention and MLP of each layer add to the residual stream."""
        return self.layers[0].multiplier

    @property
    def is_plain(self) -> bool:
        """Whether all but attention is Llama's without biases."""
        return self.model.is_plain and all(layer.is_plain for layer in self.layers)

    @property
    def activation(self) -> str:
        """Name of the activation of all MLPs and experts."""
        return self.layers[0].mlp.activation

    @property
    def intermediate_size(self) -> int:
        """Width of the widest MLP, or of an expert where no layer has an MLP."""
        dense = [layer.mlp.width for layer in self.layers if isinstance(layer.mlp, MlpDescription)]
        return max(dense or [layer.mlp.width for layer in self.layers])

    @property
    def experts(self) -> ExpertsConfig | None:
        """The experts of the layers that have some, which are the same in all of these."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsConfig)), None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer, the tokens that a query sees, itself included; None sees all."""
        return tuple(layer.window for layer in self.layers)

    @property
    def num_layer_weights(self) -> int:
        """Number of elements in the matrices of all layers, without embeddings and head."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        mlp = sum(layer.mlp.num_columns for layer in self.layers)
        return (self.num_layers * attention + mlp) * self.hidden_size

    @property
    def decoder(self) -> str:
        """See `ServedConfig`."""
        return "roster"

    @property
    def rope_fingerprint(self) -> str:
        """Type, base and scaling of each rotary embedding, as text to compare."""
        return (
            "; ".join(
                f"{rope.type}, theta {rope.theta:g}, factor {rope.factor:g} of {rope.original_positions} positions"
                + (f", short {rope.short_factors}, long {rope.long_factors}" if rope.short_factors else "")
                for rope in self.ropes
            )
            or "none"
        )

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """Attention of each layer."""
        sinks = self.sinks or (None,) * self.num_layers
        return tuple(
            AttentionLayer(layer.window, layer.scale, layer.soft_cap, sink)
            for layer, sink in zip(self.layers, sinks, strict=True)
        )

    @property
    def prefix_positions(self) -> int | None:
        """Longest prompt whose KV another may share, where frequencies depend on the length of a sequence."""
        return min((rope.original_positions for rope in self.ropes if rope.depends_on_length), default=None)

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any] | HuggingFaceConfig) -> ModelConfig:
        """Reads a configuration: the contents of config.json, or a transformers configuration object.

        Raises UnsupportedModel for an unsupported architecture, RoPE type, activation or quantization, and for a
        configuration that lacks a size.
        """
        raw = text_part(config if isinstance(config, Mapping) else config.to_dict())
        quantization = read_quantization(raw.get("quantization_config"))
        name, raw = checked_config(raw, ARCHITECTURES)
        family = ARCHITECTURES[name]
        raw = _renamed(raw, family)
        num_layers = _size(raw, "num_hidden_layers")
        num_heads = _size(raw, "num_attention_heads")
        num_kv_heads = _size(raw, "num_key_value_heads") if "num_key_value_heads" in raw else num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModel(f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads.")
        hidden_size = _size(raw, "hidden_size")
        head_dim = _size(raw, "head_dim") if "head_dim" in raw else hidden_size // num_heads
        max_positions = _size(raw, "max_position_embeddings")
        try:
            layers, model = tuple(family.layers(raw, num_layers)), family.model(raw)
            check_alike(layers)
            ropes = tuple(RopeConfig.from_hugging_face(each, head_dim, max_positions) for each in family.ropes(raw))
        except (ValueError, KeyError) as error:
            raise error if isinstance(error, UnsupportedModel) else UnsupportedModel(f"{name}: {error}.") from error
        _check_activations(layers)
        context_length, why_shorter = _context_length(family, ropes, max_positions)
        return cls(
            architecture=name,
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=_norm_eps(raw, family.norm_eps),
            layers=layers,
            model=model,
            ropes=ropes,
            names=family.names,
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            context_length=context_length,
            why_shorter=why_shorter,
            eos_token_ids=token_ids(raw.get("eos_token_id")),
            quantization=quantization,
        )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns the token ids of a configuration's field, which has one id, several or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _context_length(family: Family, ropes: Sequence[RopeConfig], max_positions: int) -> tuple[int, str | None]:
    """Returns the most positions of a sequence, and why they are fewer than `max_position_embeddings`."""
    if not ropes or not family.stretches:
        return max_positions, None
    original = ropes[0].original_positions
    if family.recomputes_cache and ropes[0].type is RopeType.LONGROPE and original < max_positions:
        why = "beyond it, all of a sequence's cache would change (longrope)"
        return original, why
    return ropes[0].context_length(max_positions), None


def _renamed(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the configuration under Llama's keys, without nulls, with the family's defaults."""
    own = dict(family.renamed)
    read = {own.get(key, key): value for key, value in raw.items() if key not in family.unread}
    given = {**dict(family.defaults), **read}
    return {key: value for key, value in given.items() if value is not None}


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{key!r} in the model's config.json must be a positive integer, but is {value!r}.")
    return value


def _norm_eps(raw: Mapping[str, Any], key: str | float) -> float:
    return float(raw.get(key, 1e-6)) if isinstance(key, str) else key


def _check_activations(layers: tuple[LayerDescription, ...]) -> None:
    for activation in {layer.mlp.activation for layer in layers}:
        if activation not in ACTIVATIONS:
            raise UnsupportedModel(f"Activation {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}.")
