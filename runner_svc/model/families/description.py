"""What a decoder has to know of a model beyond its sizes: of each layer, and of what stands around the layers.

The decoders, on the CPU and on a GPU, read these and never ask for an architecture's name. A family
(`runner_svc.model.families.family`) fills them in from a configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from runner_svc.model.families.experts_config import ExpertsConfig


class NormKind(StrEnum):
    """How a norm scales a row x of the residual stream."""

    RMS = "rms"
    """x / rms(x) * weight; weights are [width]."""
    RMS_PLUS_ONE = "rms plus one"
    """x / rms(x) * (1 + weight); weights are [width]."""
    LAYER = "layer"
    """(x - mean(x)) / std(x) * weight + bias; weights are [2, width], the weight and then the bias."""


class QkNorm(StrEnum):
    """What queries and keys are normalised over before they rotate."""

    NONE = "none"
    HEAD = "head"
    """Each head, as the layer's norm kind says (an RMS norm); weights are [head_dim], the same for all heads."""
    PROJECTION = "projection"
    """All heads together, an RMS norm; weights are [heads * head_dim]."""
    LAYER_HEAD = "layer norm of a head"
    """Each head, a layer norm without bias; weights are [heads * head_dim]."""


@dataclass(frozen=True, slots=True)
class MlpDescription:
    """A dense MLP: activation(gate) * up, then down; or activation(up), then down."""

    width: int
    activation: str
    gated: bool = True
    bias: bool = False

    @property
    def num_columns(self) -> int:
        """Columns of the hidden size's width in all matrices."""
        return (2 + self.gated) * self.width


@dataclass(frozen=True, slots=True)
class LayerDescription:
    """One layer; the defaults are Llama's.

    hidden += multiplier * post_norm(attention(pre_norm(hidden))), then the same with the MLP. In a `parallel` layer the
    MLP reads what attention reads, and both are added to the layer's input.
    """

    mlp: MlpDescription | ExpertsConfig
    norm: NormKind = NormKind.RMS
    # Whether attention and MLP read normalised rows, and whether what they give is normalised before it is added.
    pre_norms: bool = True
    post_norms: bool = False
    parallel: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    # Index of the rotary embedding in the model's; None: queries and keys do not rotate.
    rope: int | None = 0
    # Of attention; as in `runner_svc.interface.attention_layer.AttentionLayer`.
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    # Whether each head has a logit of its own in the softmax, which no value belongs to.
    sinks: bool = False
    # Factor of what attention and MLP add to the residual stream.
    multiplier: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether norms, biases and additions are Llama's, which is what products of few rows have fused in.

        Experts may be of any kind, but there must be none that computes every row, and no router in float32.
        """
        return (
            self.norm is NormKind.RMS
            and self.pre_norms
            and not (self.post_norms or self.parallel or self.qkv_bias or self.output_bias)
            and self.multiplier == 1.0
            and self._has_plain_mlp
        )

    @property
    def _has_plain_mlp(self) -> bool:
        if isinstance(self.mlp, ExpertsConfig):
            return self.mlp.shared_width is None and not self.mlp.router.is_exact
        return self.mlp.gated and not self.mlp.bias


def check_alike(layers: Sequence[LayerDescription]) -> None:
    """Raises ValueError for layers that differ in what the kernels of a model share."""
    if len({(layer.norm, layer.multiplier, layer.qk_norm, layer.post_norms) for layer in layers}) > 1:
        raise ValueError("layers that differ in their norms or in the factor of what they add are not supported")


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What stands around the layers; the defaults are Llama's."""

    # Factor of the token embeddings.
    embedding_scale: float = 1.0
    # Row of the table of learned positions that position 0 has; None: there is no table.
    position_offset: int | None = None
    # Logits x become x * scale, then cap * tanh(x / cap).
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether embeddings and logits are Llama's."""
        return self == ModelDescription()
