"""From a model's folder to a model of transformers on the GPU, its parts swapped for kernels, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from runner_svc.cuda.activation import ActivationMul
from runner_svc.cuda.norm import AddRmsNorm
from runner_svc.cuda.rotate_halves import RotateHalves
from runner_svc.gpu.launchers import StepLaunchers
from runner_svc.interface.device import Device
from runner_svc.interface.progress import Progress
from runner_svc.transformers_decoder.decoder import TransformersDecoder
from runner_svc.transformers_decoder.gpu.cuda_decoder import TransformersCudaDecoder, gpu_config
from runner_svc.transformers_decoder.gpu.gpu_check import check_on_gpu
from runner_svc.transformers_decoder.gpu.swapped_parts import swap_parts
from runner_svc.transformers_decoder.gpu.swapped_rotation import swap_rotation
from runner_svc.transformers_decoder.loading import load_model, random_model

log = structlog.get_logger()


class _Kernels:
    """Implements `runner_svc.transformers_decoder.gpu.swapped_parts.SwapLaunchers`; compiles a kernel once a size."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._norms: dict[tuple[int, float], AddRmsNorm] = {}
        self._activations: dict[tuple[int, str], ActivationMul] = {}

    def norm(self, size: int, eps: float) -> AddRmsNorm:
        if (size, eps) not in self._norms:
            self._norms[size, eps] = AddRmsNorm(size, self._dtype, eps)
        return self._norms[size, eps]

    def activation(self, size: int, name: str) -> ActivationMul:
        if (size, name) not in self._activations:
            self._activations[size, name] = ActivationMul(size, self._dtype, name)
        return self._activations[size, name]


def load_on_gpu(
    folder: Path,
    raw: Mapping[str, Any],
    dtype: torch.dtype,
    device: Device,
    max_tokens: int,
    progress: Progress,
    *,
    random_weights: bool = False,
) -> tuple[TransformersCudaDecoder, StepLaunchers]:
    """Loads the checkpoint in `folder`, whose config.json holds `raw`; with `random_weights`, config.json alone.

    Raises UnsupportedModel for a model that can't be served right, ModelNotFound if weights are missing, ValueError
    for a size that the kernels do not support.
    """
    progress("loading weights", 0.0)
    if random_weights:
        model = random_model(raw, dtype, device.device)
    else:
        model = load_model(folder, raw, dtype).to(device.device)
    progress("loading weights", 1.0)
    with device.stream():
        counts = swap_parts(model, _Kernels(dtype), device.current_stream)
        make = partial(RotateHalves, dtype=dtype)
        counts["rotations"] = swap_rotation(model, make, device.current_stream, dtype)
        log.info("parts of the model are computed by Roster's kernels", **counts)
        decoder = TransformersDecoder(model)
        launchers = StepLaunchers(gpu_config(decoder.config), dtype)
        served = TransformersCudaDecoder(decoder, max_tokens, device.device, dtype)
    progress("comparing with the model's own attention", 0.0)
    check_on_gpu(served, launchers, device)
    progress("comparing with the model's own attention", 1.0)
    return served, launchers
