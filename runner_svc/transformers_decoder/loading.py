"""From a model's folder to transformers' model of it, served; without remote code, and never with weights made up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import safe_open

from runner_svc.interface.progress import Progress
from runner_svc.model.checkpoint.weights import checkpoint_files
from runner_svc.model.errors import UnsupportedModel
from runner_svc.transformers_decoder.cpu_check import check_on_cpu
from runner_svc.transformers_decoder.decoder import TransformersDecoder
from runner_svc.transformers_decoder.linear_layers import swap_linear_layers, watched_layers
from runner_svc.transformers_decoder.served_classes import served_class, undeclared_keys
from runner_svc.transformers_decoder.step_attention import NAME, register

MOST_MISSING = 1.25
"""Weights of the model by weights of its checkpoint, at most, for it to be loaded at all."""
_WHAT = "loading weights"
_CHECK = "comparing with the model's own attention"

log = structlog.get_logger()


def load_transformers_decoder(
    folder: Path, raw: Mapping[str, Any], dtype: torch.dtype, progress: Progress
) -> TransformersDecoder:
    """Loads the checkpoint in `folder`, whose config.json holds `raw`, in `dtype` on the CPU.

    Raises UnsupportedModel for a model that can't be served right, ModelNotFound if weights are missing.
    """
    progress(_WHAT, 0.0)
    model = load_model(folder, raw, dtype)
    progress(_WHAT, 1.0)
    with watched_layers(model) as linear_layers:
        decoder = TransformersDecoder(model)
    swap_linear_layers(model, linear_layers)
    progress(_CHECK, 0.0)
    check_on_cpu(decoder)
    progress(_CHECK, 1.0)
    return decoder


def load_model(folder: Path, raw: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Returns transformers' model on the CPU, in evaluation mode, each of whose parameters comes from the checkpoint.

    Raises UnsupportedModel and ModelNotFound as `load_transformers_decoder`.
    """
    model_class = served_class(raw)
    stored = _stored_elements(folder)
    with _refused(model_class, folder):
        _compare_sizes(model_class, folder, stored)
        model, report = _loaded(model_class, folder, dtype)
    _refuse_unlike_tensors(model_class, folder, report)
    if keys := undeclared_keys(raw, model.config):
        log.warning("transformers' class does not know keys of config.json: they may have no effect", keys=keys)
    return model


def random_model(raw: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a model of the configuration with random weights, made on `device`. Raises UnsupportedModel."""
    register()
    model_class = served_class(raw)
    config = model_class.config_class.from_dict(dict(raw))
    with device:
        model = model_class._from_config(config, attn_implementation=NAME, dtype=dtype)
    return model.to(device).eval()


def _stored_elements(folder: Path) -> int:
    """Returns the number of elements in the folder's files. Raises ModelNotFound for pickles and missing shards."""
    elements = 0
    for path in checkpoint_files(folder):
        with safe_open(path, framework="pt") as file:
            elements += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return elements


@contextmanager
def _refused(model_class: Any, folder: Path) -> Iterator[None]:
    """Turns what transformers raises for a folder into UnsupportedModel."""
    try:
        yield
    except UnsupportedModel:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModel(f"transformers can't load {folder} as {model_class.__name__}: {reason}") from error


def _compare_sizes(model_class: Any, folder: Path, stored: int) -> None:
    """Refuses the configuration of a much larger model, whose weights transformers would make up in memory first."""
    config = model_class.config_class.from_pretrained(str(folder), local_files_only=True)
    with torch.device("meta"):
        wanted = sum(parameter.numel() for parameter in model_class(config).parameters())
    if wanted > MOST_MISSING * stored:
        raise UnsupportedModel(
            f"The config.json in {folder} describes a model of {wanted:,} weights, its checkpoint has {stored:,}."
        )


def _loaded(model_class: Any, folder: Path, dtype: torch.dtype) -> tuple[Any, Mapping[str, Any]]:
    """Returns the model in evaluation mode, and a report of the tensors that were not used as they are."""
    from transformers.utils import logging

    register()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model, report = model_class.from_pretrained(
        str(folder),
        dtype=dtype,
        attn_implementation=NAME,
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # which are refused by name
        output_loading_info=True,
    )
    return model.eval(), report


def _refuse_unlike_tensors(model_class: Any, folder: Path, report: Mapping[str, Any]) -> None:
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
