"""What one family of models has of its own: how a configuration is read and a checkpoint named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner_svc.model.families.description import LayerDescription, ModelDescription, QkNorm
from runner_svc.model.families.tensor_names import TensorNames

Config = Mapping[str, Any]
"""A config.json without the keys that are null, and with the family's defaults; keys have Llama's names."""


def one_rope(config: Config) -> Sequence[Config]:
    """Returns the configuration itself, as the only rotary embedding."""
    return (config,)


def no_rope(config: Config) -> Sequence[Config]:
    """Returns no rotary embedding."""
    return ()


def plain_model(config: Config) -> ModelDescription:
    """Returns a model whose embeddings and logits are Llama's."""
    return ModelDescription()


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. The functions raise ValueError for a configuration that they do not support."""

    model_type: str
    layers: Callable[[Config, int], Sequence[LayerDescription]]
    """From a configuration and the number of layers."""
    model: Callable[[Config], ModelDescription] = plain_model
    ropes: Callable[[Config], Sequence[Config]] = one_rope
    """For each rotary embedding, a configuration whose rope_parameters are its own."""
    names: TensorNames = field(default_factory=TensorNames)
    defaults: tuple[tuple[str, Any], ...] = ()
    """Values of keys that a configuration leaves out."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Keys with a name of their own, each with Llama's name of it."""
    unread: tuple[str, ...] = ()
    """Keys of other families that transformers' class for this one leaves aside, wherever they come from."""
    norm_eps: str | float = "rms_norm_eps"
    """The key of the norms' epsilon, or the epsilon."""
    recomputes_cache: bool = False
    """Whether `generate` computes the cache again where longrope's frequencies change.

    Such a model is served up to the positions of pretraining, as through transformers.
    """
    stretches: bool = True
    """Whether linear and dynamic scaling of positions stretch `max_position_embeddings`."""


FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`."""


def layer_kinds(config: Config, num_layers: int, pattern: int) -> Sequence[str]:
    """Returns FULL or SLIDING for each layer, as `layer_types` says; by default each `pattern`-th layer is FULL.

    Raises ValueError for another kind, or another number of layers.
    """
    kinds = config.get("layer_types") or [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {FULL, SLIDING}:
        raise ValueError(f"'layer_types' must be {FULL} or {SLIDING} for each of the {num_layers} layers")
    return list(kinds)


def qk_norm_of(wanted: bool) -> QkNorm:
    """Returns the norm of each head, or none."""
    return QkNorm.HEAD if wanted else QkNorm.NONE


def size(config: Config, key: str) -> int:
    """Returns a positive integer. Raises ValueError where there is none."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"its config.json needs a positive integer {key!r}, it has {value!r}")
    return value


def refuse(config: Config, **values: object) -> None:
    """Raises ValueError for a key, present and not null, with another value than that given here."""
    for key, wanted in values.items():
        if config.get(key, wanted) != wanted:
            raise ValueError(f"{key!r} {config[key]!r} is not supported by this decoder, which needs {wanted!r}")
