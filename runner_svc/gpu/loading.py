"""Loads a model by name and builds its GPU backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from runner_svc.cuda.device import GpuDevice
from runner_svc.gpu.backend import CudaBackend, CudaSizes
from runner_svc.gpu.launchers import CudaLaunchers
from runner_svc.interface.progress import Progress
from runner_svc.model.config import ModelConfig
from runner_svc.model.description import describe_model
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.config_file import read_config
from runner_svc.model.random_weights import random_weights
from runner_svc.model.source import model_folder
from runner_svc.model.weights import load_weights, weights_fingerprint


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Options that the operator sets; None: the default of the model or the GPU."""

    dtype: torch.dtype | None
    random_weights: bool
    num_slots: int
    block_size: int
    max_step_tokens: int
    context_length: int | None
    num_blocks: int | None
    gpu_memory: float
    fp8_cache: bool = False


def load_cuda_backend(name: str, cache_folder: Path, options: GpuOptions, progress: Progress) -> CudaBackend:
    """Loads the model `name` (see `model_folder`) onto the first GPU and captures its graphs.

    Raises ModelNotFound, UnsupportedModel if a GPU can't serve the model, and OutOfMemory.
    """
    folder = model_folder(name, cache_folder, progress)
    raw = read_config(folder)
    config = ModelConfig.from_hugging_face(raw)
    dtype = options.dtype or stored_dtype(raw)
    device = GpuDevice()
    context_length = min(options.context_length or config.context_length, config.context_length)
    if options.random_weights:
        version = f"random-{dtype}"
        weights = random_weights(config, dtype, device.device, progress)
    else:
        version = weights_fingerprint(folder, dtype)
        weights = load_weights(folder, config, dtype, device.device, progress)
    model = describe_model(name, folder, config, version, cache_folder)
    model.context_length = context_length
    sizes = CudaSizes(
        num_slots=options.num_slots,
        block_size=options.block_size,
        max_step_tokens=options.max_step_tokens,
        context_length=context_length,
        num_blocks=options.num_blocks,
        gpu_memory=options.gpu_memory,
        fp8_cache=options.fp8_cache,
    )
    try:
        return CudaBackend(model, config, weights, CudaLaunchers(config, dtype), device, sizes, progress)
    except ValueError as error:  # a size that the kernels do not support
        raise UnsupportedModel(f"{config.architecture} can't be served on a GPU: {error}.") from error


def stored_dtype(config: dict[str, object]) -> torch.dtype:
    """Returns the configuration's type of the weights if the kernels support it, otherwise bfloat16."""
    name = config.get("dtype") or config.get("torch_dtype")
    return torch.float16 if name == "float16" else torch.bfloat16
