"""The MLP of a layer on a GPU."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from runner_svc.decoder.cuda_experts import CudaExpertMlp, ExpertSpace
from runner_svc.decoder.cuda_linear import CudaLinear
from runner_svc.decoder.fusions import Activating
from runner_svc.decoder.hidden import Hidden
from runner_svc.interface.layer_launchers import DecoderLaunchers
from runner_svc.model.families.description import MlpDescription
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.weights.expert_weights import ExpertWeights
from runner_svc.weights.model_weights import MlpWeights


class MlpSpace(Protocol):
    """What an MLP needs of `runner_svc.decoder.cuda_decoder.Workspace`; rows are the pass's positions."""

    gate_up: Tensor  # [max_tokens, 2 * width], or [max_tokens, width] without a gate
    activated: Tensor  # [max_tokens, width]
    experts: ExpertSpace | None


class CudaMlp(Protocol):
    """An MLP of a layer."""

    def __call__(self, stream: int, normed: Tensor, hidden: Hidden, activating: Activating) -> None:
        """Adds the MLP of `normed` [T, hidden_size] to `hidden`; launches depend on T alone."""


class DenseCudaMlp:
    """One MLP for all positions: gate-up product, activation, down product."""

    def __init__(self, weights: MlpWeights, launchers: DecoderLaunchers, space: MlpSpace) -> None:
        self.gate_up = CudaLinear(weights.gate_up, launchers.linear)
        self.down = CudaLinear(weights.down, launchers.linear)
        self._launchers = launchers
        self._space = space

    def __call__(self, stream: int, normed: Tensor, hidden: Hidden, activating: Activating) -> None:
        """Adds the MLP of `normed` [T, hidden_size] to `hidden`."""
        activated = self._space.activated[: len(normed)]
        if activating is Activating.PRODUCT and self._launchers.gated is not None:
            self._launchers.gated(stream, normed, self.gate_up.matrix, activated)
        else:
            gate_up = self._space.gate_up[: len(normed)]
            self.gate_up.multiply(stream, normed, gate_up)
            self._launchers.activation(stream, gate_up, activated)
        hidden.add(stream, activated, self.down)


def make_cuda_mlp(
    description: MlpDescription | ExpertsConfig,
    weights: MlpWeights | ExpertWeights,
    launchers: DecoderLaunchers,
    space: MlpSpace,
) -> CudaMlp:
    """Returns the MLP of a layer. Raises TypeError for weights or launchers that its description does not fit."""
    if isinstance(description, MlpDescription) and isinstance(weights, MlpWeights):
        return DenseCudaMlp(weights, launchers, space)
    if not isinstance(description, ExpertsConfig) or not isinstance(weights, ExpertWeights):
        raise TypeError("the layer's weights are not of the kind that its description says")
    if launchers.experts is None or space.experts is None:
        raise TypeError("the model has no launchers or no space for experts")
    return CudaExpertMlp(description, weights, launchers.experts, space.experts, launchers.linear)
