"""The CUDA backend over the host's device and launchers: everything but the kernels, which are in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.drafting.eagle.checkpoint import Target, read_eagle
from runner_svc.drafting.medusa.checkpoint import read_heads
from runner_svc.gpu.backend import CudaBackend, CudaSizes
from runner_svc.gpu.canonical.decoder import CanonicalDecoder
from runner_svc.gpu.drafts.draft_model import DraftParts
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend
from runner_svc.gpu.drafts.eagle_backend import EagleDraftingCudaBackend
from runner_svc.gpu.drafts.medusa_backend import MedusaDraftingCudaBackend
from runner_svc.gpu.drafts.model_backend import ModelDraftingCudaBackend
from runner_svc.gpu.ranked.backend import RankedCudaBackend
from runner_svc.interface.ranks import WHOLE, Communicator
from runner_svc.model.checkpoint.weights import load_weights
from runner_svc.model.config import ModelConfig
from runner_svc.model.description import describe_model
from runner_svc.model.folder.config_file import read_config
from runner_svc.model.rank_parts import local_config
from runner_svc.timings.timings_file import TimingsFile
from runner_svc.weights.on_load import NOTHING, OnLoad
from tests.support.host_canonical import HostCanonical
from tests.support.host_device import HostDevice, HostLaunchers


def no_progress(what: str, share: float) -> None:
    """Ignores progress."""


def host_draft(folder: Path, dtype: torch.dtype = torch.float32) -> DraftParts:
    """Returns the draft model in `folder`."""
    config = ModelConfig.from_hugging_face(read_config(folder))
    weights = load_weights(folder, config, dtype, torch.device("cpu"), no_progress, NOTHING)
    launchers = HostLaunchers(config)
    return DraftParts(
        f"model:{folder}", launchers, lambda most: CudaDecoder(config, weights, launchers.decoder(False), most)
    )


def host_backend(
    folder: Path,
    *,
    num_slots: int,
    block_size: int,
    max_step_tokens: int,
    num_blocks: int | None,
    dtype: torch.dtype = torch.float32,
    fp8_cache: bool = False,
    device: HostDevice | None = None,
    kept_timings: TimingsFile | None = None,
    on_load: OnLoad = NOTHING,
    drafts: DraftOptions | None = None,
    draft_folder: Path | None = None,
    medusa: Path | None = None,
    eagle: Path | None = None,
    canonical: bool = False,
    ranks: Communicator | None = None,
) -> CudaBackend:
    """Returns the model in `folder`; the arguments are those of the backend and its sizes.

    `draft_folder`, `medusa`, `eagle`: a draft model, heads, or a layer, which draft as many tokens as `drafts` says.
    `canonical`: with the decoder of the deterministic mode. `ranks`: with the part of one of them.
    """
    whole, shard = ModelConfig.from_hugging_face(read_config(folder)), ranks.shard if ranks is not None else WHOLE
    weights = load_weights(folder, whole, dtype, torch.device("cpu"), no_progress, on_load, shard)
    config = local_config(whole, shard)
    launchers = HostLaunchers(config)
    make: Callable[..., CudaBackend] = CudaBackend if drafts is None else partial(DraftingCudaBackend, drafts=drafts)
    if draft_folder is not None and drafts is not None:
        make = partial(ModelDraftingCudaBackend, parts=host_draft(draft_folder, dtype), drafts=drafts)
    if eagle is not None and drafts is not None:
        layer = read_eagle(eagle, Target(config.hidden_size, config.vocab_size, config.num_layers))
        own = {"weights": layer, "make_launchers": lambda layer_config, dtype: HostLaunchers(layer_config)}
        make = partial(EagleDraftingCudaBackend, **own, drafts=drafts)
    if medusa is not None and drafts is not None:
        heads = read_heads(medusa, config.hidden_size, config.vocab_size)
        make = partial(MedusaDraftingCudaBackend, heads=heads, drafts=drafts)

    if ranks is not None:
        make = RankedCudaBackend

    def make_decoder() -> CudaDecoder:
        of_layers = launchers.decoder(fp8_cache)
        if canonical:
            return CanonicalDecoder(config, weights, of_layers, HostCanonical(config), max_step_tokens, ranks)
        return CudaDecoder(config, weights, of_layers, max_step_tokens, ranks)

    return make(
        describe_model(str(folder), folder, config, f"host-{dtype}"),
        config,
        make_decoder,
        launchers,
        device or HostDevice(),
        CudaSizes(num_slots, block_size, max_step_tokens, config.context_length, num_blocks, fp8_cache=fp8_cache),
        no_progress,
        kept_timings,
    )
