"""Loads what drafts onto the GPU of its target: a draft model, Medusa's heads or EAGLE's layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roster_protos import plan_pb2
from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.drafting.eagle.checkpoint import Target, read_eagle
from runner_svc.drafting.medusa.checkpoint import read_heads
from runner_svc.gpu.drafts.draft_model import DraftParts
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.eagle_backend import EagleDraftingCudaBackend
from runner_svc.gpu.drafts.medusa_backend import MedusaDraftingCudaBackend
from runner_svc.gpu.drafts.model_backend import ModelDraftingCudaBackend
from runner_svc.gpu.launchers import CudaLaunchers
from runner_svc.gpu.loading import MakeBackend, stored_dtype
from runner_svc.interface.device import Device
from runner_svc.interface.progress import Progress
from runner_svc.model.checkpoint.weights import load_weights
from runner_svc.model.config import ModelConfig
from runner_svc.model.decoder_choice import choose_decoder
from runner_svc.model.description import describe_model
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.config_file import read_config
from runner_svc.model.tokenizer.same_tokens import different_tokens


def drafting_with(
    name: str, folder: Path, dtype: torch.dtype | None, cache_folder: Path, progress: Progress, drafts: DraftOptions
) -> MakeBackend:
    """Returns what makes a backend with the draft model `name`, of `folder`; `dtype` None: that of its checkpoint.

    It raises ModelNotFound and UnsupportedModel as `load_weights`, and UnsupportedModel for a model that Roster's own
    decoder does not compute or whose tokens are not the target's.
    """

    def make(model: plan_pb2.Model, *arguments: Any) -> ModelDraftingCudaBackend:
        _, _, _, device, *_ = arguments
        parts = load_draft(name, folder, dtype, cache_folder, progress, model, device)
        return ModelDraftingCudaBackend(model, *arguments, parts=parts, drafts=drafts)

    return make


def load_draft(
    name: str,
    folder: Path,
    dtype: torch.dtype | None,
    cache_folder: Path,
    progress: Progress,
    target: plan_pb2.Model,
    device: Device,
) -> DraftParts:
    """Loads the draft model of `target`; arguments and errors as of `drafting_with`."""
    raw = read_config(folder)
    config = choose_decoder(raw, "auto").config
    if config is None:
        raise UnsupportedModel("Roster's own decoder does not compute it, which a GPU needs for a draft model.")
    model = describe_model(name, folder, config, "", cache_folder, progress)
    if (difference := different_tokens(model.tokenizer, target.tokenizer)) is not None:
        raise UnsupportedModel(f"{difference}: use a draft model with the tokenizer of the served model.")
    own = dtype or stored_dtype(raw)
    weights = load_weights(folder, config, own, device.device, progress)
    launchers = CudaLaunchers(config, own)

    def make_decoder(most: int) -> CudaDecoder:
        return CudaDecoder(config, weights, launchers.decoder(False), most)

    return DraftParts(f"model:{name}", launchers, make_decoder)


def drafting_with_heads(folder: Path, drafts: DraftOptions) -> MakeBackend:
    """Returns what makes a backend with Medusa's heads of `folder`; it raises as `read_heads`."""

    def make(model: plan_pb2.Model, config: ModelConfig, *arguments: Any) -> MedusaDraftingCudaBackend:
        heads = read_heads(folder, config.hidden_size, config.vocab_size)
        return MedusaDraftingCudaBackend(model, config, *arguments, heads=heads, drafts=drafts)

    return make


def drafting_with_layer(folder: Path, drafts: DraftOptions) -> MakeBackend:
    """Returns what makes a backend with EAGLE's layer of `folder`; it raises as `read_eagle`."""

    def make(model: plan_pb2.Model, config: ModelConfig, *arguments: Any) -> EagleDraftingCudaBackend:
        weights = read_eagle(folder, Target(config.hidden_size, config.vocab_size, config.num_layers))
        return EagleDraftingCudaBackend(
            model, config, *arguments, weights=weights, make_launchers=CudaLaunchers, drafts=drafts
        )

    return make
