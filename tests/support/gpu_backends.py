"""Tiny models on the available GPU, in sizes that the kernels support. Imports CuPy."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from runner_svc.gpu.backend import CudaBackend
from runner_svc.gpu.drafts.draft_loading import drafting_with, drafting_with_heads, drafting_with_layer
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend
from runner_svc.gpu.loading import GpuOptions, MakeBackend, load_cuda_backend
from runner_svc.gpu.ranked.backend import RankedCudaBackend
from runner_svc.interface.ranks import Communicator
from runner_svc.model.decoder_choice import DecoderSetting
from runner_svc.weights.on_load import NOTHING, OnLoad
from tests.support.host_backend import no_progress
from tests.support.tiny_models import KERNEL_SIZES

BLOCK_SIZE = 16
NUM_SLOTS = 12
FAMILIES = KERNEL_SIZES


def load(
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    num_blocks: int | None = 200,
    fp8_cache: bool = False,
    *,
    block_size: int = BLOCK_SIZE,
    num_slots: int = NUM_SLOTS,
    max_step_tokens: int = 128,
    decoder: DecoderSetting = "auto",
    on_load: OnLoad = NOTHING,
    drafts: DraftOptions | None = None,
    draft_folder: Path | None = None,
    medusa: Path | None = None,
    eagle: Path | None = None,
    deterministic: bool = False,
    random_weights: bool = False,
    ranks: Communicator | None = None,
) -> CudaBackend:
    """Returns the model in `folder`, with a cache full of NaN; with `num_blocks` None, the cache's size is measured.

    `ranks`: it is a part of the model, and exchanges over shared memory. `draft_folder`, `medusa`, `eagle`: a draft
    model, heads, or a layer, which draft as many tokens as `drafts` says.
    """
    options = GpuOptions(
        dtype=dtype,
        random_weights=random_weights,
        num_slots=num_slots,
        block_size=block_size,
        max_step_tokens=max_step_tokens,
        context_length=None,
        num_blocks=num_blocks,
        gpu_memory=0.5,
        fp8_cache=fp8_cache,
        decoder=decoder,
        on_load=on_load,
        deterministic=deterministic,
        one_shot=ranks is not None,
    )
    make: MakeBackend = CudaBackend if drafts is None else partial(DraftingCudaBackend, drafts=drafts)
    if ranks is not None:
        make = RankedCudaBackend
    if draft_folder is not None and drafts is not None:
        make = drafting_with(str(draft_folder), draft_folder, dtype, folder / "unused", no_progress, drafts)
    if medusa is not None and drafts is not None:
        make = drafting_with_heads(medusa, drafts)
    if eagle is not None and drafts is not None:
        make = drafting_with_layer(eagle, drafts)
    backend = load_cuda_backend(str(folder), folder / "unused", options, no_progress, make, ranks)
    if num_blocks is not None:
        backend.cache.data.view(torch.uint8).fill_(0x7F if fp8_cache else 0xFF)  # NaN
    return backend
