"""Why a model can't be served, by what describes it alone: without its weights, torch or transformers.

A model that Roster's own decoder lacks may be served through transformers. Whether it is depends on a check at start;
here it is what that check said of a small model of its class.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import ModelNotFound, UnsupportedModel

CLASSES_FILE = Path(__file__).with_name("transformers_classes.json")
"""By class of transformers: null if it is served, else why not. `python -m tests.support.classes_page` writes it."""

# Modules that may be absent from a build: the rules for folders and for GGUF files, and the choice of a decoder.
_PACKAGE = __package__.partition(".")[0]
_RULES = f"{_PACKAGE}.model.checkpoint.servable"
_GGUF_RULES = f"{_PACKAGE}.model.gguf_servable"
_DECODER_CHOICE = f"{_PACKAGE}.model.decoder_choice"


def obstacle(folder: Path) -> str | None:
    """Returns why the model in a folder with config.json can't be served; None when it can."""
    own = _own_obstacle(folder, has_weights=False)
    if own is None:
        return _own_obstacle(folder, has_weights=True)
    known, why = _through_transformers(folder)
    return (why or None) if known else own


def obstacle_before_weights(folder: Path) -> str | None:
    """Returns why no decoder can serve a model, so that its weights need not be downloaded; None when one may."""
    try:
        config = _config(folder)
    except (OSError, ValueError) as error:
        return f"config.json can't be read: {error}."
    if not (config.get("architectures") or config.get("model_type")):
        return "config.json names neither architectures nor a model_type."
    if _own_obstacle(folder, has_weights=False) is None:
        return None
    return _through_transformers(folder)[1] or None


def gguf_obstacle(file: Path) -> str | None:
    """Returns why a GGUF model can't be served, by the headers of its files; None when it can."""
    if not _exists(_GGUF_RULES):
        return None
    found: str | None = importlib.import_module(_GGUF_RULES).why_not(file)
    return found


def _own_obstacle(folder: Path, *, has_weights: bool) -> str | None:
    """Returns why Roster's own decoder can't serve the model."""
    if _exists(_RULES):
        found: str | None = importlib.import_module(_RULES).why_not(folder, has_weights=has_weights)
        return found
    try:
        ModelConfig.from_hugging_face(_config(folder))
    except (UnsupportedModel, ModelNotFound) as error:
        return str(error)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"config.json can't be read: {error}."
    return None


def _through_transformers(folder: Path) -> tuple[bool, str]:
    """Returns whether it is known what transformers does, and why it can't serve the model; "" if it can."""
    if not _exists(_DECODER_CHOICE):
        return False, ""
    try:
        config = _config(folder)
    except (OSError, ValueError) as error:
        return True, f"config.json can't be read: {error}."
    if config.get("auto_map"):
        return True, "Its config.json has an 'auto_map': the model is code of its own, which is never run."
    if config.get("quantization_config"):
        return True, "It is quantized; use a checkpoint in float32, float16 or bfloat16, or a GGUF file."
    for name in config.get("architectures") or ():
        if name in _classes():
            why = _classes()[name]
            return True, f"{name} is not served: {why}" if why else ""
    return False, ""


def _config(folder: Path) -> Mapping[str, Any]:
    """Reads config.json. Raises OSError or ValueError."""
    config = json.loads((folder / "config.json").read_text("utf-8-sig"))
    if not isinstance(config, dict):
        raise ValueError("it is not a JSON object")
    return config


@cache
def _classes() -> dict[str, str | None]:
    classes: dict[str, str | None] = json.loads(CLASSES_FILE.read_text("utf-8"))
    return classes


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its folder
        return False
