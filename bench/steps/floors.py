"""Floor of a step: its matrix products alone."""

from __future__ import annotations

import torch

from bench.common.gpu_timing import graph_microseconds
from bench.steps.backend import DTYPE
from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.gpu.backend import CudaBackend
from runner_svc.model.config import ModelConfig
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.weights.model_weights import LayerWeights, MlpWeights, ModelWeights


def products_ms(
    config: ModelConfig, weights: ModelWeights, layers: list[LayerWeights], positions: int, sampled: int
) -> float:
    """Times, as one CUDA graph, the matrix products of a step with `positions` positions, `sampled` of them sampled.

    Experts are left out, but not their routers.
    """

    def rows(width: int) -> torch.Tensor:
        return torch.randn(positions, width, dtype=DTYPE, device="cuda")

    hidden, attended = rows(config.hidden_size), rows(config.num_heads * config.head_dim)
    activated = rows(config.intermediate_size)

    def launch() -> None:
        for layer in layers:
            torch.mm(hidden, layer.qkv.weight.t())
            torch.mm(attended, layer.output.weight.t())
            if isinstance(layer.mlp, MlpWeights):
                torch.mm(hidden, layer.mlp.gate_up.weight.t())
                torch.mm(activated, layer.mlp.down.weight.t())
            else:
                torch.mm(hidden, layer.mlp.router.weight.t())
        torch.mm(hidden[:sampled], weights.head.weight.t())

    return graph_microseconds([launch]) / 1e3


def read_ms(weights: ModelWeights, layers: list[LayerWeights], tb_s: float) -> float:
    """Returns the milliseconds to read the matrices of the layers, experts left out, and of the head, at `tb_s`."""
    linear = [weights.head, *(each for layer in layers for each in (layer.qkv, layer.output))]
    linear += [
        each for layer in layers if isinstance(layer.mlp, MlpWeights) for each in (layer.mlp.gate_up, layer.mlp.down)
    ]
    return sum(each.matrix.num_bytes for each in linear) / tb_s / 1e9


def active_experts(backend: CudaBackend, rows: int) -> int:
    """Returns the experts that the last layer of the last step, of `rows` rows, had rows for, padding included."""
    decoder = backend._decoder
    assert isinstance(decoder, CudaDecoder), "random weights have no other decoder"
    experts = decoder.workspace.experts
    assert experts is not None, "only a mixture has experts"
    torch.cuda.synchronize()
    return len(experts.plan.experts[:rows].unique())


def experts_ms(config: ModelConfig, active: int, tb_s: float) -> float:
    """Returns the milliseconds to read `active` experts of each layer at `tb_s` TB/s."""
    assert config.experts is not None, "only a mixture has experts"
    layers = sum(isinstance(layer.mlp, ExpertsConfig) for layer in config.layers)
    return layers * active * 3 * config.experts.width * config.hidden_size * DTYPE.itemsize / tb_s / 1e9
