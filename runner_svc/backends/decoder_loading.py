"""Loads the decoder of a backend on the CPU: Roster's own, or transformers'."""

from __future__ import annotations

from pathlib import Path

import structlog
import torch

from runner_svc.arithmetic.plain import PLAIN, Arithmetic
from runner_svc.backends.determinism import Determinism
from runner_svc.decoder.cpu_decoder import MAX_PLAIN_WEIGHTS, Decoder
from runner_svc.decoder.served_decoder import ServedDecoder
from runner_svc.interface.progress import Progress
from runner_svc.interface.ranks import WHOLE, Communicator, Shard
from runner_svc.model.checkpoint.weights import load_weights, weight_formats
from runner_svc.model.decoder_choice import DecoderSetting, choose_decoder, not_quantized, refuse_ranks
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.config_file import read_config
from runner_svc.model.rank_parts import local_config
from runner_svc.weights.on_load import NOTHING, OnLoad

log = structlog.get_logger()


def determinism_of(folder: Path, asked: DecoderSetting, block_size: int, on_load: OnLoad, shard: Shard) -> Determinism:
    """Returns that of the model of `folder`, or of a rank's part. Raises UnusableSettings as `Determinism.of`."""
    config = choose_decoder(read_config(folder), asked).config
    formats = weight_formats(config, on_load) if config is not None else ""
    return Determinism.of(folder, local_config(config, shard) if config is not None else None, formats, block_size)


def load_decoder(
    folder: Path,
    asked: DecoderSetting,
    progress: Progress,
    on_load: OnLoad = NOTHING,
    arithmetic: Arithmetic = PLAIN,
    ranks: Communicator | None = None,
) -> ServedDecoder:
    """Loads the model of `folder` into the decoder that `choose_decoder` chooses; see `load_weights`.

    `arithmetic` is what Roster's own decoder computes with, and `ranks` are those that compute the model with this one.

    Raises UnsupportedModel if neither serves it, ModelNotFound if weights are missing.
    """
    raw, shard = read_config(folder), ranks.shard if ranks is not None else WHOLE
    choice = choose_decoder(raw, asked)
    if choice.config is not None:
        config = local_config(choice.config, shard)
        weights = load_weights(folder, choice.config, torch.float32, torch.device("cpu"), progress, on_load, shard)
        formats = weight_formats(choice.config, on_load)
        if formats and config.num_layer_weights > MAX_PLAIN_WEIGHTS:
            held = "FP8 is held and multiplied in bfloat16, int4 is multiplied as it is stored"
            log.info(f"quantized weights on the CPU: {held}", formats=formats)
        return Decoder(config, weights, arithmetic, ranks)
    refuse_ranks(shard, choice.why_not_own)
    if on_load.name:
        raise UnsupportedModel(not_quantized(choice.why_not_own))
    from runner_svc.transformers_decoder.loading import load_transformers_decoder  # transformers takes seconds

    try:
        decoder = load_transformers_decoder(folder, raw, torch.float32, progress)
    except UnsupportedModel as error:
        if choice.has_own_class:
            raise UnsupportedModel(f"{choice.why_not_own} Through transformers: {error}") from error
        raise
    log.info("transformers computes the model", why=choice.why_not_own, architecture=decoder.config.architecture)
    return decoder
