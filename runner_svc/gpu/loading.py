"""Loads a model by name and builds its GPU backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import structlog
import torch

from roster_common.setting_sources import UnusableSettings
from runner_svc.catalog.source import model_folder
from runner_svc.cuda.device import GpuDevice
from runner_svc.cuda.fp8.on_load import on_gpu
from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.gpu.backend import CudaBackend, CudaSizes
from runner_svc.gpu.canonical.decoder import CanonicalDecoder
from runner_svc.gpu.canonical.determinism import numerics, refusal
from runner_svc.gpu.launchers import CudaLaunchers
from runner_svc.gpu.ranks.placing import gpu_of, over_peer_memory
from runner_svc.gpu.ranks.refusals import refuse_on_gpus
from runner_svc.gpu.transformers_loading import load_on_gpu
from runner_svc.interface.progress import Progress
from runner_svc.interface.ranks import WHOLE, Communicator, Shard
from runner_svc.interface.served_config import ServedConfig
from runner_svc.model.checkpoint.random_weights import random_weights
from runner_svc.model.checkpoint.weights import load_weights, weight_formats, weights_fingerprint
from runner_svc.model.config import ModelConfig
from runner_svc.model.decoder_choice import DecoderSetting, choose_decoder, not_quantized, refuse_ranks
from runner_svc.model.description import describe_model
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.model.folder.config_file import read_config
from runner_svc.model.rank_parts import local_config
from runner_svc.timings.timings_file import TimingsFile
from runner_svc.timings.timings_key import timings_key
from runner_svc.weights.on_load import NOTHING, OnLoad

log = structlog.get_logger()

_NOT_TIMED = ("dtype", "timings", "one_shot")
"""Options that change no times, or that the key of the timings has anyway."""


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
    shares_cache: bool = False
    decoder: DecoderSetting = "auto"
    timings: Literal["reuse", "measure"] = "reuse"
    on_load: OnLoad = NOTHING
    draft: str = ""
    max_drafts: int = 0
    """What drafts and how many tokens, or nothing: `make` makes it, and times of steps depend on it."""
    deterministic: bool = False
    one_shot: bool = False
    """Whether ranks exchange over memory that they share, and not by NCCL."""

    def sizes(self, context_length: int) -> CudaSizes:
        """Returns the backend's sizes for a model of this context length."""
        return CudaSizes(
            num_slots=self.num_slots,
            block_size=self.block_size,
            max_step_tokens=self.max_step_tokens,
            context_length=min(self.context_length or context_length, context_length),
            num_blocks=self.num_blocks,
            gpu_memory=self.gpu_memory,
            fp8_cache=self.fp8_cache,
            shares_cache=self.shares_cache,
        )


MakeBackend = Callable[..., CudaBackend]
"""Makes the backend, with the arguments of `CudaBackend`."""


def load_cuda_backend(
    name: str,
    cache_folder: Path,
    options: GpuOptions,
    progress: Progress,
    make: MakeBackend = CudaBackend,
    ranks: Communicator | None = None,
) -> CudaBackend:
    """Loads the model `name` (see `model_folder`) onto the first GPU and captures its graphs.

    Another `make` than the default makes a backend that drafts, or that is one of several `ranks`: which compute the
    model together, so that this process loads its part, onto its GPU. Raises ModelNotFound, UnsupportedModel if a GPU
    can't serve the model, OutOfMemory, and UnusableSettings if it can't be `deterministic`, or not by these ranks.
    """
    folder = model_folder(name, cache_folder, progress)
    raw = read_config(folder)
    choice = choose_decoder(raw, options.decoder)
    shard = ranks.shard if ranks is not None else WHOLE
    if choice.config is not None:
        refuse_on_gpus(choice.config, shard, options)
    else:
        refuse_ranks(shard, choice.why_not_own)
    if options.deterministic:
        _refuse_undetermined(local_config(choice.config, shard) if choice.config is not None else None, raw, options)
    architecture = choice.config.architecture if choice.config is not None else str(raw.get("architectures"))
    try:
        if choice.config is not None:
            return _own(name, folder, choice.config, raw, cache_folder, options, progress, make, ranks)
        if make is not CudaBackend:
            raise UnsupportedModel("Drafts need Roster's own decoder: set draft to ''.")
        return _transformers(name, folder, raw, cache_folder, options, progress)
    except ValueError as error:  # a size that the kernels do not support
        if isinstance(error, UnsupportedModel):
            raise
        raise UnsupportedModel(f"{architecture} can't be served on a GPU: {error}.") from error


def _own(
    name: str,
    folder: Path,
    config: ModelConfig,
    raw: Mapping[str, Any],
    cache_folder: Path,
    options: GpuOptions,
    progress: Progress,
    make: MakeBackend,
    ranks: Communicator | None,
) -> CudaBackend:
    shard = ranks.shard if ranks is not None else WHOLE
    device, dtype, sizes = gpu_of(shard), options.dtype or stored_dtype(raw), options.sizes(config.context_length)
    if ranks is not None:
        ranks = over_peer_memory(ranks, device, dtype) if options.one_shot else ranks
    model = _described(name, folder, config, dtype, cache_folder, options, progress)
    model.weight_formats = weight_formats(config, options.on_load)
    on_load = on_gpu(options.on_load)
    if options.random_weights:
        weights = random_weights(config, dtype, device.device, progress, on_load=on_load, shard=shard)
    else:
        check_experts(config, dtype, device.memory)
        weights = load_weights(folder, config, dtype, device.device, progress, on_load, shard)
    config = local_config(config, shard)
    launchers = CudaLaunchers(config, dtype, canonical=options.deterministic)
    products = b""

    def make_decoder() -> CudaDecoder:
        nonlocal products
        of_layers, most = launchers.decoder(sizes.fp8_cache), sizes.max_step_tokens
        if not options.deterministic:
            made = CudaDecoder(config, weights, of_layers, most, ranks)
            _say_plain(launchers, model)
            return made
        decoder = CanonicalDecoder(config, weights, of_layers, launchers.canonical(most), most, ranks)
        products = decoder.check(most)
        return decoder

    timings = _kept_timings(cache_folder, raw, dtype, options, shard)
    backend = make(model, config, make_decoder, launchers, device, sizes, progress, timings)
    if isinstance(decoder := backend.decoder, CanonicalDecoder):
        cache, is_random = backend.cache, options.random_weights
        model.numerics = numerics(
            folder, config, decoder, products, cache.data.dtype, cache.scales, random_weights=is_random
        )
    return backend


def _say_plain(launchers: CudaLaunchers, model: Any) -> None:
    """Logs the formats that this GPU has no kernels for, and adds them to `model`, a Hello's description."""
    if plain := launchers.preparing.sentence:
        model.weight_formats += f"; {plain}"
        log.warning("matrices became plain numbers, as this GPU has no kernels for their format", formats=plain)


def _refuse_undetermined(config: ModelConfig | None, raw: Mapping[str, Any], options: GpuOptions) -> None:
    formats = weight_formats(config, options.on_load) if config is not None else ""
    dtype = options.dtype or stored_dtype(raw)
    if reason := refusal(config, formats, dtype, options.block_size, options.draft):
        raise UnusableSettings(f"deterministic is true, but {reason}, or set deterministic to false")


def check_experts(config: ModelConfig, dtype: torch.dtype, memory: int) -> None:
    """Raises UnsupportedModel for quantized experts that take more than `memory` bytes as plain numbers in `dtype`."""
    if config.quantization is None or config.experts is None:
        return
    experts = [layer.mlp for layer in config.layers if isinstance(layer.mlp, ExpertsConfig)]
    count = sum(3 * each.num_experts * each.width * config.hidden_size for each in experts)
    if count * dtype.itemsize > memory:
        raise UnsupportedModel(
            f"The model is quantized ({config.quantization.method}), and a GPU computes experts in "
            f"{str(dtype).removeprefix('torch.')} so far, which take {count * dtype.itemsize / 2**30:.0f} GiB of its "
            f"{memory / 2**30:.0f}: use a GPU with more memory, or set device to 'cpu'."
        )


def _transformers(
    name: str, folder: Path, raw: Mapping[str, Any], cache_folder: Path, options: GpuOptions, progress: Progress
) -> CudaBackend:
    if options.fp8_cache:
        raise UnsupportedModel("A KV cache in FP8 needs Roster's own decoder: set kv_cache_dtype to 'auto'.")
    if options.on_load.name:
        raise UnsupportedModel(not_quantized(""))
    device, dtype = GpuDevice(), options.dtype or stored_dtype(raw)
    decoder, launchers = load_on_gpu(
        folder, raw, dtype, device, options.max_step_tokens, progress, random_weights=options.random_weights
    )
    config = decoder.config
    return CudaBackend(
        _described(name, folder, config, dtype, cache_folder, options, progress),
        config,
        lambda: decoder,
        launchers,
        device,
        options.sizes(config.context_length),
        progress,
        _kept_timings(cache_folder, raw, dtype, options),
    )


def _described(
    name: str,
    folder: Path,
    config: ServedConfig,
    dtype: torch.dtype,
    cache_folder: Path,
    options: GpuOptions,
    progress: Progress,
) -> Any:
    version = " ".join(filter(None, ("random", str(dtype), options.on_load.name))).replace(" ", "-", 1)
    if not options.random_weights:
        version = weights_fingerprint(folder, dtype, options.on_load)
    model = describe_model(name, folder, config, version, cache_folder, progress)
    model.context_length = options.sizes(config.context_length).context_length
    return model


def _kept_timings(
    cache_folder: Path, raw: Mapping[str, Any], dtype: torch.dtype, options: GpuOptions, shard: Shard = WHOLE
) -> TimingsFile:
    given = {name: value for name, value in asdict(options).items() if name not in _NOT_TIMED}
    if shard.size > 1:
        given["ranks"] = shard.size
    return TimingsFile(cache_folder, timings_key(raw, dtype, given), reuse=options.timings == "reuse")


def stored_dtype(config: Mapping[str, object]) -> torch.dtype:
    """Returns the configuration's type of the weights if the kernels support it, otherwise bfloat16."""
    name = config.get("dtype") or config.get("torch_dtype")
    return torch.float16 if name == "float16" else torch.bfloat16
