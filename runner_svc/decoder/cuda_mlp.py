"""The MLP of a layer on a GPU."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from runner_svc.decoder.cuda_experts import CudaExpertMlp, ExpertSpace
from runner_svc.decoder.cuda_linear import CudaLinear
from runner_svc.decoder.fusions import Activating
from runner_svc.decoder.hidden import Hidden
from runner_svc.interface.layer_launchers import DecoderLaunchers
from runner_svc.interface.products.linear_launchers import LinearLauncher, Rows
from runner_svc.model.families.description import MlpDescription
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.weights.activation_rounding import Rounding
from runner_svc.weights.expert_weights import ExpertWeights
from runner_svc.weights.model_weights import MlpWeights


class MlpSpace(Protocol):
    """What an MLP needs of `runner_svc.decoder.cuda_decoder.Workspace`; rows are the pass's positions."""

    gate_up: Tensor  # [max_tokens, 2 * width], or [max_tokens, width] without a gate
    activated: Tensor  # [max_tokens, width]
    experts: ExpertSpace | None


class CudaMlp(Protocol):
    """An MLP of a layer."""

    def takes(self, rows: int) -> Rounding | None:
        """Returns the rounding of that number of rows that it is best given quantized; None: it takes numbers."""

    def __call__(self, stream: int, normed: Any, hidden: Hidden, activating: Activating) -> None:
        """Adds the MLP of `normed` [T, hidden_size], rows as `takes` says, to `hidden`; launches depend on T alone."""


class DenseCudaMlp:
    """One MLP for all positions: gate-up product, activation, down product."""

    def __init__(
        self, weights: MlpWeights, launchers: DecoderLaunchers, space: MlpSpace, down: LinearLauncher | None = None
    ) -> None:
        """`down` launches the second product, by default as the first."""
        self.gate_up = CudaLinear(weights.gate_up, launchers.linear)
        self.down = CudaLinear(weights.down, down or launchers.linear)
        self._launchers = launchers
        self._space = space

    def takes(self, rows: int) -> Rounding | None:
        """Returns what its first product takes."""
        return self.gate_up.takes(rows)

    def __call__(self, stream: int, normed: Rows, hidden: Hidden, activating: Activating) -> None:
        """Adds the MLP of `normed` [T, hidden_size] to `hidden`."""
        activated = self._space.activated[: len(normed)]
        if activating is Activating.PRODUCT and self._launchers.gated is not None:
            rows = self._launchers.gated(stream, normed, self.gate_up.matrix, activated, self.down.takes(len(normed)))
            hidden.add(stream, rows, self.down)
            return
        gate_up = self._space.gate_up[: len(normed)]
        self.gate_up.multiply(stream, normed, gate_up)
        self._launchers.activation(stream, gate_up, activated)
        hidden.add(stream, activated, self.down)


def make_cuda_mlp(
    description: MlpDescription | ExpertsConfig,
    weights: MlpWeights | ExpertWeights,
    launchers: DecoderLaunchers,
    space: MlpSpace,
    down: LinearLauncher | None = None,
) -> CudaMlp:
    """Returns the MLP of a layer; `down` is as in `DenseCudaMlp`.

    Raises TypeError for weights or launchers that its description does not fit.
    """
    if isinstance(description, MlpDescription) and isinstance(weights, MlpWeights):
        return DenseCudaMlp(weights, launchers, space, down)
    if not isinstance(description, ExpertsConfig) or not isinstance(weights, ExpertWeights):
        raise TypeError("the layer's weights are not of the kind that its description says")
    if launchers.experts is None or space.experts is None:
        raise TypeError("the model has no launchers or no space for experts")
    return CudaExpertMlp(description, weights, launchers.experts, space.experts, launchers.linear)
