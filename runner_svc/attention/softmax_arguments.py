"""Arguments of the attention kernels that follow from how a model's layers weigh their scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from runner_svc.interface.attention_layer import AttentionLayer

# Window of a layer that sees all positions.
NO_WINDOW = 2**30


def common_soft_cap(layers: Sequence[AttentionLayer]) -> float | None:
    """Returns a cap if all layers have one, whatever its value, or None. Raises ValueError if only some have a cap."""
    caps = {layer.soft_cap for layer in layers}
    if None in caps and len(caps) > 1:
        raise ValueError("the GPU kernels do not support a soft cap in some of the layers")
    return layers[0].soft_cap


def common_first(layers: Sequence[AttentionLayer]) -> int:
    """Returns the first position that queries of all layers may see. Raises ValueError if layers differ."""
    firsts = {layer.first for layer in layers}
    if len(firsts) > 1:
        raise ValueError("the GPU kernels do not support layers whose first keys differ")
    return firsts.pop()


def sinks_of(layer: AttentionLayer, num_heads: int, device: torch.device) -> Tensor:
    """Returns the layer's sinks in log2 units, float32 [num_heads]; minus infinity for a layer without sinks."""
    if layer.sinks is None:
        return torch.full((num_heads,), -math.inf, device=device)
    return (layer.sinks.to(device=device, dtype=torch.float32) * math.log2(math.e)).contiguous()
