"""What tells one family of models from another: how a configuration is read and a checkpoint named."""

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
    norm_eps: str = "rms_norm_eps"
    """The key of the norms' epsilon."""
    stretches: bool = True
    """Whether linear and dynamic scaling of positions stretch `max_position_embeddings`."""


def layer_kinds(config: Config, num_layers: int) -> Sequence[str]:
    """Returns `layer_types`: one of sliding_attention and full_attention for each layer.

    Raises ValueError for another kind, or another number of them.
    """
    kinds = config["layer_types"]
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ValueError(f"'layer_types' must name full_attention or sliding_attention for each of {num_layers} layers")
    return list(kinds)


def qk_norm_of(wanted: bool) -> QkNorm:
    """Returns the norm of each head, or none."""
    return QkNorm.HEAD if wanted else QkNorm.NONE
