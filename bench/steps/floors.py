"""Floor of a step: its matrix products alone."""

from __future__ import annotations

import torch

from bench.common.gpu_timing import graph_microseconds
from bench.steps.backend import DTYPE
from runner_svc.model.config import ModelConfig
from runner_svc.weights.model_weights import LayerWeights, ModelWeights


def products_ms(
    config: ModelConfig, weights: ModelWeights, layers: list[LayerWeights], positions: int, sampled: int
) -> float:
    """Times, as one CUDA graph, the matrix products of a step with `positions` positions, `sampled` of them sampled."""

    def rows(width: int) -> torch.Tensor:
        return torch.randn(positions, width, dtype=DTYPE, device="cuda")

    hidden, attended = rows(config.hidden_size), rows(config.num_heads * config.head_dim)
    activated = rows(config.intermediate_size)

    def launch() -> None:
        for layer in layers:
            torch.mm(hidden, layer.qkv.weight.t())
            torch.mm(attended, layer.output.weight.t())
            torch.mm(hidden, layer.mlp.gate_up.weight.t())
            torch.mm(activated, layer.mlp.down.weight.t())
        torch.mm(hidden[:sampled], weights.head.t())

    return graph_microseconds([launch]) / 1e3
