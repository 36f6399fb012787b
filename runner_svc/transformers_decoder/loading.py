"""From a model's folder to transformers' model of it, served; without remote code, and never with weights made up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runner_svc.interface.progress import Progress
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.weights import checkpoint_files
from runner_svc.transformers_decoder.cpu_check import check_on_cpu
from runner_svc.transformers_decoder.decoder import TransformersDecoder
from runner_svc.transformers_decoder.linear_layers import swap_linear_layers, watched_layers
from runner_svc.transformers_decoder.served_classes import served_class
from runner_svc.transformers_decoder.step_attention import NAME, register

_WHAT = "loading weights"
_CHECK = "comparing with the model's own attention"


def load_transformers_decoder(
    folder: Path, raw: Mapping[str, Any], dtype: torch.dtype, progress: Progress
) -> TransformersDecoder:
    """Loads the checkpoint in `folder`, whose config.json holds `raw`, in `dtype` on the CPU.

    Raises UnsupportedModel for a model that can't be served right, ModelNotFound if weights are missing.
    """
    model_class = served_class(raw)
    checkpoint_files(folder)  # refuses pickles and missing shards
    progress(_WHAT, 0.0)
    model = _loaded(model_class, folder, dtype)
    progress(_WHAT, 1.0)
    with watched_layers(model) as linear_layers:
        decoder = TransformersDecoder(model)
    swap_linear_layers(model, linear_layers)
    progress(_CHECK, 0.0)
    check_on_cpu(decoder)
    progress(_CHECK, 1.0)
    return decoder


def _loaded(model_class: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Returns the model in evaluation mode, each of whose parameters comes from the checkpoint."""
    from transformers.utils import logging

    register()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        model, report = model_class.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=NAME,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # which are refused below, by name
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModel(f"transformers can't load {folder} as {model_class.__name__}: {reason}") from error
    for what, remedy in (
        ("missing_keys", "which its config.json asks for"),
        ("unexpected_keys", "which {} does not have"),
        ("mismatched_keys", "in another shape than its config.json says"),
    ):
        names = sorted(str(key[0] if isinstance(key, tuple) else key) for key in report.get(what, ()))
        if names:
            has = "has no tensor" if what == "missing_keys" else "has a tensor"
            why = remedy.format(model_class.__name__)
            raise UnsupportedModel(f"The checkpoint in {folder} {has} {names[0]!r}, {why} ({len(names)} such tensors).")
    return model.eval()
