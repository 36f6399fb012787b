"""The CUDA backend over a model of transformers, with the host's device and launchers: all but kernels and graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner_svc.gpu.backend import CudaBackend, CudaSizes
from runner_svc.interface.products.skinny_launchers import SkinnyLaunchers
from runner_svc.model.description import describe_model
from runner_svc.model.families.description import NormKind
from runner_svc.model.folder.config_file import read_config
from runner_svc.transformers_decoder.decoder import TransformersDecoder
from runner_svc.transformers_decoder.gpu.cuda_decoder import TransformersCudaDecoder
from runner_svc.transformers_decoder.gpu.gpu_check import check_on_gpu
from runner_svc.transformers_decoder.gpu.swapped_parts import swap_parts
from runner_svc.transformers_decoder.gpu.swapped_rotation import swap_rotation
from runner_svc.transformers_decoder.loading import load_model
from tests.support.host_backend import no_progress
from tests.support.host_device import HostDevice, HostLaunchers
from tests.support.host_layers import HostActivation, HostNorm


class HostStepLaunchers(HostLaunchers):
    """As `runner_svc.gpu.launchers.StepLaunchers`."""

    def skinny(self, matrices: Any) -> list[SkinnyLaunchers]:
        """Returns []."""
        return []


class HostSwaps:
    """Implements `runner_svc.transformers_decoder.gpu.swapped_parts.SwapLaunchers`."""

    def norm(self, size: int, eps: float) -> HostNorm:
        return HostNorm(eps, NormKind.RMS, 1.0)

    def activation(self, size: int, name: str) -> HostActivation:
        return HostActivation(name, True)


class UncapturableDevice(HostDevice):
    """A device on which no forward pass can be captured."""

    def capture(self, function: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


def host_transformers(
    folder: Path,
    *,
    num_blocks: int,
    block_size: int,
    num_slots: int = 6,
    max_step_tokens: int = 64,
    device: HostDevice | None = None,
) -> CudaBackend:
    """Returns the model in `folder` in float32. Raises UnsupportedModel for a model that is not served."""
    device = device or HostDevice()
    model = load_model(folder, read_config(folder), torch.float32)
    swap_parts(model, HostSwaps(), lambda: 0)
    swap_rotation(model, lambda *size: host_rotation, lambda: 0, torch.float32)
    inner = TransformersDecoder(model)
    decoder = TransformersCudaDecoder(inner, max_step_tokens, device.device, torch.float32)
    launchers = HostStepLaunchers(decoder.config)  # type: ignore[arg-type]
    check_on_gpu(decoder, launchers, device)
    return CudaBackend(
        describe_model(str(folder), folder, decoder.config, "host", folder),
        decoder.config,
        lambda: decoder,
        launchers,
        device,
        CudaSizes(num_slots, block_size, max_step_tokens, decoder.config.context_length, num_blocks),
        no_progress,
    )


def host_rotation(
    stream: int, queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor, out_queries: Tensor, out_keys: Tensor
) -> None:
    """Computes what kernels/rotate_halves.cu does."""
    for x, out in ((queries, out_queries), (keys, out_keys)):
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        out.copy_(x * cosines[:, None] + turned * sines[:, None])


def poisoned(cache: Tensor) -> Tensor:
    """Sets a cache to NaN, so that reading an unwritten position shows."""
    return cache.fill_(torch.nan)
